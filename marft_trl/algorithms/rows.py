# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The data of learning: training rows, slices of a generation batch, and micro-batches. Frozen."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..episodes.records import SampledBy


@dataclass(frozen=True, eq=False)
class Row:
    """
    A turn as a training row, with `P` prompt tokens and `L` completion tokens.

    A row is made once from a turn. Later results are filled in by steps that return new rows: the output steps of
    [`BatchMaker`] ([`~LogProbs.with_old`], [`~SamplingCorrection.corrected`], [`~LogProbs.with_reference`],
    [`~CriticLearner.with_values`]), the advantages, and in sequential updates [`~SequentialFactors.after_update`].

    Args:
        agent: Name of the agent that acted.
        adapter: Name of the adapter that the agent acted with.
        prompt_ids (`torch.Tensor` of shape `(P,)`): Token ids of the observation.
        completion_ids (`torch.Tensor` of shape `(L,)`): Token ids of the turn, as they were sampled.
        advantage (`float` or `torch.Tensor` of shape `(L,)`): Advantage of the turn, or of each of its tokens.
        counts: `True` if the tokens of the turn count in the loss. Those of a truncated turn do not count if
            `mask_truncated_completions` is set, but the turn still counts as a row.
        old_per_token_logps (`torch.Tensor` of shape `(L,)`, *optional*): Log-probabilities under the policy that
            sampled the turn.
        ref_per_token_logps (`torch.Tensor` of shape `(L,)`, *optional*): Log-probabilities under the agent's
            reference.
        episode: Position of the turn's episode on this process.
        is_trained: `True` if the agent learns from the turn. Only the critic learns from the turns of frozen agents.
        words: Number of words of the turn, separated by white space; at least 1.
        factor: Factor of the advantage in the loss: the clipped product of the policy ratios of the agents that acted
            in the same joint action and were updated before.
        log_factor: Logarithm of this product, before clipping.
        joint_action: Index of the joint action in the episode, see [`~Episode.joint_actions`].
        number: Position among the rows of its generation batch on this process.
        critic: Name of the part of the critic (and of its adapter) that values the turn.
        critic_prompt_ids (`torch.Tensor` of shape `(C,)`, *optional*): Token ids that the critic reads instead of the
            observation.
        old_values, value_targets (`torch.Tensor` of shape `(V,)`, *optional*): Values at the time of sampling, and
            value targets (NaN if unknown). `V` is 1 at action level and `max(L, 1)` at token level.
        old_outputs (`torch.Tensor` of shape `(V,)`, *optional*): What the critic's head put out for the values, where
            these are normalized ([`ValueScale`]).
        last_value: Value of what is seen next, where a horizon cut the episode after the turn; 0 where the episode is
            over.
        features (`torch.Tensor` of shape `(V, H)`, *optional*): Inputs of the frozen critic: hidden states of the
            base.
        sampled_by: The server that sampled the turn.
        sampling_logps (`torch.Tensor` of shape `(L,)`, *optional*): Log-probabilities on this server.
        sampling_weights (`torch.Tensor` of shape `(L,)`, *optional*): Importance weights of the tokens, see
            [`~functional.sampling_weights`].
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
    joint_action: int = 0
    number: int = 0
    critic: str | None = None
    critic_prompt_ids: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    value_targets: torch.Tensor | None = None
    old_outputs: torch.Tensor | None = None
    last_value: float = 0.0
    features: torch.Tensor | None = None
    sampled_by: SampledBy | None = None
    sampling_logps: torch.Tensor | None = None
    sampling_weights: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def num_value_targets(self) -> int:
        """Number of positions that the critic learns from: 0 for an unscored turn and for a turn without tokens."""
        if self.value_targets is None or not len(self.completion_ids) or self.value_targets.isnan().any():
            return 0
        return len(self.value_targets)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.completion_ids) if self.counts else 0


@dataclass(frozen=True, eq=False)
class Slice:
    """
    The rows of `per_device_train_batch_size` episodes on this process, and counts over all processes by adapter.

    Args:
        rows_per_slice: rows of each adapter per slice, added over processes, mean over slices.
        tokens_per_slice: loss tokens of each adapter per slice, likewise.
        tokens: loss tokens of each adapter in this slice, added over processes.
        weights: weights of agents in the losses of their adapters, if agents have equal weight; the three counts above
            are then those of agents. Empty if turns are counted, whosever they are.
        adapters: adapters that have a non-empty row, and parts of the critic that have a value target, in this slice
            on any process.
        value_targets: positions that each part of the critic learns from per slice, added over processes, mean over
            slices.
    """

    rows: list[Row]
    rows_per_slice: dict[str, float] = field(default_factory=dict)
    tokens_per_slice: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()
    value_targets: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """
    Rows that go through the model together. They belong to one agent or to one part of the critic.

    Args:
        agent: name of the agent, or of the part of the critic.
        rows: at least one row.
        num_tokens: number of tokens to compute, plus a fraction for each repeated token.
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
