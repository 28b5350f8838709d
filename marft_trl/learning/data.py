# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The data of learning: training rows, slices of a generation batch, and micro-batches. Frozen."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, eq=False)
class Row:
    """
    A turn as a training row. `P` prompt tokens, `L` completion tokens.

    A row is made once from a turn. What is found out about it later is filled in by steps that return new rows, in
    this order: [`~LogProbs.with_old`], [`~LogProbs.with_reference`], [`~CriticLearner.with_values`], the advantages,
    and in sequential updates [`~SequentialFactors.after_update`].

    Args:
        agent (`str`):
            Who spoke.
        adapter (`str`):
            The adapter it acted with.
        prompt_ids (`torch.Tensor` of shape `(P,)`):
            The observation.
        completion_ids (`torch.Tensor` of shape `(L,)`):
            The tokens as sampled.
        advantage (`float` or `torch.Tensor` of shape `(L,)`):
            Advantage of the turn, or of each of its tokens.
        counts (`bool`):
            Whether its tokens count in the loss. A truncated turn does not under `mask_truncated_completions`; it
            still counts as a row.
        old_per_token_logps (`torch.Tensor` of shape `(L,)`, *optional*):
            Log-probabilities under the policy that sampled.
        ref_per_token_logps (`torch.Tensor` of shape `(L,)`, *optional*):
            Log-probabilities under the agent's reference.
        episode (`int`):
            Position of its episode on this process.
        is_trained (`bool`):
            Whether the agent learns from it. The turns of frozen agents are rows for the critic alone.
        words (`int`):
            Words of the turn, separated by white space; at least 1.
        factor (`float`):
            What the advantage is multiplied by in the loss: the clipped product of the ratios of agents that were
            updated before, in the same joint action.
        log_factor (`float`):
            Logarithm of that product, before clipping.
        round (`int`):
            Index of the joint action in the episode, see [`~Episode.rounds`].
        number (`int`):
            Position among the rows of its generation batch on this process.
        critic (`str`, *optional*):
            The adapter, or part, of the critic that values the turn.
        old_values, value_targets (`torch.Tensor` of shape `(V,)`, *optional*):
            Values when the turn was sampled and what they should have been (NaN: unknown): `V = 1` at action level,
            `V = max(L, 1)` at token level.
        features (`torch.Tensor` of shape `(V, H)`, *optional*):
            What a frozen critic values: hidden states of the base.
    """

    agent: str
    adapter: str
    prompt_ids: torch.Tensor
    completion_ids: torch.Tensor
    advantage: float | torch.Tensor = 0.0
    counts: bool = True
    old_per_token_logps: torch.Tensor | None = None
    ref_per_token_logps: torch.Tensor | None = None
    episode: int = 0
    is_trained: bool = True
    words: int = 1
    factor: float = 1.0
    log_factor: float = 0.0
    round: int = 0
    number: int = 0
    critic: str | None = None
    old_values: torch.Tensor | None = None
    value_targets: torch.Tensor | None = None
    features: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def num_value_targets(self) -> int:
        """Positions that the critic learns from; none for a turn that nothing scored or that has no token."""
        if self.value_targets is None or not len(self.completion_ids) or self.value_targets.isnan().any():
            return 0
        return len(self.value_targets)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.completion_ids) if self.counts else 0


@dataclass(frozen=True, eq=False)
class Slice:
    """
    The rows of `per_device_train_batch_size` episodes on this process, and what all processes hold, by adapter.

    Args:
        rows (`list[Row]`): rows of this process.
        rows_per_slice (`dict[str, float]`): rows of an adapter in an average slice of all processes.
        tokens_per_slice (`dict[str, float]`): loss tokens of an adapter in an average slice of all processes.
        tokens (`dict[str, int]`): loss tokens of an adapter in this slice, over all processes.
        adapters (`frozenset[str]`): adapters that have a row with a token in this slice on any process.
        value_targets (`dict[str, float]`): positions that each part of the critic learns from in an average slice of
            all processes.
    """

    rows: list[Row]
    rows_per_slice: dict[str, float] = field(default_factory=dict)
    tokens_per_slice: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()
    value_targets: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """
    Rows that go through the model together: of one agent, or of one part of the critic.

    Args:
        agent (`str`): whose rows.
        rows (`list[Row]`): at least one row, none without completion tokens.
        num_tokens (`float`): tokens that are computed, those that are repeated counted in part.
    """

    agent: str
    rows: list[Row]
    num_tokens: float = 0.0

    @property
    def adapter(self) -> str:
        return self.rows[0].adapter

    @property
    def num_loss_tokens(self) -> int:
        return sum(row.num_loss_tokens for row in self.rows)
