# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
The data of learning (training rows, slices of a generation batch, and micro-batches, all frozen), and the levels of
optimisation, whose units have a policy ratio, an advantage and a value: each token (MARFT-T), or each turn as one
action (MARFT-A). To add a level, write a subclass of [`TokenLevel`] and give it a name in `LEVELS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from ..episodes.records import SampledBy
from ..seams.trl import OLD_LOGPS
from . import functional


@dataclass(frozen=True, eq=False)
class Row:
    """
    A turn as a training row, with `P` prompt tokens and `L` completion tokens. Later results are filled in by steps
    that return new rows: output steps of [`BatchMaker`], advantages, and [`~SequentialFactors.after_update`].
    """

    agent: str
    adapter: str
    prompt_ids: torch.Tensor  # (P,), the observation
    completion_ids: torch.Tensor  # (L,), as sampled
    advantage: float | torch.Tensor = 0.0  # of the turn, or (L,) of each token
    counts: bool = True  # the tokens count in the loss; those of a masked truncated turn do not, but the row does
    old_per_token_logps: torch.Tensor | None = None  # (L,), under the policy that sampled the turn
    ref_per_token_logps: torch.Tensor | None = None  # (L,), under the agent's reference
    episode: int = 0  # position on this process
    is_trained: bool = True  # the agent learns from the turn; only the critic learns from turns of frozen agents
    words: int = 1  # separated by white space, at least 1
    # Of the advantage: the clipped product of the ratios of agents of the joint action that were updated before
    factor: float = 1.0
    log_factor: float = 0.0  # logarithm of this product, before clipping
    joint_action: int = 0  # index in the episode, see [`~Episode.joint_actions`]
    number: int = 0  # position in the generation batch on this process
    critic: str | None = None  # part of the critic (and its adapter) that values the turn
    critic_prompt_ids: torch.Tensor | None = None  # (C,), read instead of the observation
    old_values: torch.Tensor | None = None  # (V,), when sampled. `V` is 1 at action level, else `max(L, 1)`
    value_targets: torch.Tensor | None = None  # (V,), NaN if unknown
    old_outputs: torch.Tensor | None = None  # (V,), outputs of the head for normalized values ([`ValueScale`])
    last_value: float = 0.0  # value of the next observation if a horizon cut the episode here
    features: torch.Tensor | None = None  # (V, H), inputs of the frozen critic: hidden states of the base
    sampled_by: SampledBy | None = None  # the server that sampled the turn
    sampling_logps: torch.Tensor | None = None  # (L,), on this server
    sampling_weights: torch.Tensor | None = None  # (L,), see [`~functional.sampling_weights`]
    images: tuple[Any, ...] = ()  # of Pillow, in the order of their places in the prompt

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
    The rows of `per_device_train_batch_size` episodes on this process, and counts over all processes by adapter. With
    `weights`, the first three counts are by agent.
    """

    rows: list[Row]
    rows_per_slice: dict[str, float] = field(default_factory=dict)  # rows, summed over processes, mean over slices
    # Loss tokens, summed over processes, mean over slices
    tokens_per_slice: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # loss tokens in this slice, summed over processes
    adapters: frozenset[str] = frozenset()  # with a non-empty row, or (critic) a value target, on any process
    # Of each part of the critic, summed over processes, mean over slices
    value_targets: dict[str, float] = field(default_factory=dict)
    # Of agents in the losses of their adapters; empty unless agents have equal weight
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One or more rows of one agent, or of one part of the critic, that go through the model together."""

    agent: str  # or the part of the critic
    rows: list[Row]
    num_tokens: float = 0.0  # computed tokens, plus a fraction for each repeated token

    @property
    def adapter(self) -> str:
        return self.rows[0].adapter

    @property
    def num_loss_tokens(self) -> int:
        return sum(row.num_loss_tokens for row in self.rows)

    @property
    def has_images(self) -> bool:
        """`True` if all rows have images; otherwise, none has."""
        return bool(self.rows[0].images)


class SeenByLoss(NamedTuple):
    """Inputs of the loss of a micro-batch of `B` rows, whose longest turn has `T` tokens."""

    entropies: torch.Tensor  # (B, T), whose mean over counted tokens is the entropy bonus
    # (B, T), instead of the `old_per_token_logps` of the rows. At action level, they give every token the log-ratio of
    # its turn, with the gradient
    old_logps: torch.Tensor | None
    log_ratios: torch.Tensor  # (N,), those that count for the divergence of an update


@dataclass(frozen=True)
class Discounts:
    """Discounts and decays of GAE, each in `[0, 1]`."""

    gamma: float | Sequence[float]  # per joint step, or of each joint step
    gae_lambda: float  # per joint step
    token_gamma: float = 1.0  # per token inside a turn
    token_gae_lambda: float = 1.0  # per token inside a turn


class TokenLevel:
    """One ratio, one advantage and one value per token. Subclasses change what they belong to."""

    settings: ClassVar[frozenset[str]] = frozenset({"token_gamma", "token_gae_lambda"})  # that only this level reads
    loss_type: ClassVar[str] = "dapo"  # by default
    ratio: ClassVar[str | None] = None  # `importance_sampling_level`; `None` for that of the training arguments
    reads_completions: ClassVar[bool] = True  # whether the critic reads the tokens of a turn, not only the observation

    @classmethod
    def from_args(cls, args: Any) -> TokenLevel:
        return cls()

    def num_values(self, num_tokens: int) -> int:
        """Number of values of a turn of so many tokens, at least 1."""
        return max(num_tokens, 1)

    def weight(self, batch: MicroBatch) -> int:
        """Weight of a micro-batch's metrics among those of its agent."""
        return batch.num_loss_tokens

    def entropy_weight(self, token_share: float, row_share: float) -> float:
        """Factor of `entropy_coef` for a mean over rows, given a micro-batch's share of tokens and rows."""
        return token_share / row_share

    def divisors(self, rows: Sequence[Row]) -> torch.Tensor:
        """Numbers by which the log-ratios of turns, summed over tokens, are divided, `(B,)`."""
        return torch.ones(len(rows))

    def seen_by_loss(
        self, logps: torch.Tensor, entropies: torch.Tensor, inputs: Mapping[str, torch.Tensor], rows: Sequence[Row]
    ) -> SeenByLoss:
        """Prepare log-probabilities and entropies `(B, T)` of the policy. `inputs` are the tensors of [`collate`]."""
        old = inputs.get(OLD_LOGPS, logps.detach())
        return SeenByLoss(entropies, None, (logps - old)[inputs["completion_mask"].bool()])

    def estimate(
        self,
        rewards: torch.Tensor,
        values: Sequence[torch.Tensor],
        steps: torch.Tensor,
        discounts: Discounts,
        last_value: float,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """
        Advantages and value targets of the `K` turns of an episode by GAE, as a tensor `(V,)` for each turn, from
        rewards `(K,)`, the values `(V,)` of each turn, joint steps `(K,)` and the value after the last joint step.
        """
        lengths = [len(value) for value in values]
        padded = torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)
        factors = discounts.gamma, discounts.gae_lambda, discounts.token_gamma, discounts.token_gae_lambda
        pair = functional.token_gae(rewards, padded, torch.tensor(lengths), steps, *factors, last_value)
        advantages, targets = ([row[:size].clone() for row, size in zip(item, lengths, strict=True)] for item in pair)
        return advantages, targets

    def advantage(self, values: torch.Tensor, num_tokens: int) -> float | torch.Tensor:
        """The advantage of a row from its `(V,)` advantages: a number, or one per token `(L,)`."""
        return values[:num_tokens].clone()


@dataclass(frozen=True)
class ActionLevel(TokenLevel):
    """One ratio, one advantage and one value per turn."""

    logprob: str = "sum"  # of a turn: the "sum" over tokens, or the sum per "token" or per "word"

    settings: ClassVar[frozenset[str]] = frozenset({"action_logprob"})
    loss_type: ClassVar[str] = "grpo"  # every turn counts once
    ratio: ClassVar[str | None] = "sequence"
    reads_completions: ClassVar[bool] = False

    @classmethod
    def from_args(cls, args: Any) -> ActionLevel:
        return cls(args.action_logprob)

    def num_values(self, num_tokens: int) -> int:
        return 1

    def weight(self, batch: MicroBatch) -> int:
        return sum(row.num_loss_tokens > 0 for row in batch.rows)

    def entropy_weight(self, token_share: float, row_share: float) -> float:
        return 1.0

    def divisors(self, rows: Sequence[Row]) -> torch.Tensor:
        counts = [{"sum": 1, "token": len(row.completion_ids), "word": row.words}[self.logprob] for row in rows]
        return torch.tensor([max(count, 1) for count in counts], dtype=torch.float32)

    def seen_by_loss(
        self, logps: torch.Tensor, entropies: torch.Tensor, inputs: Mapping[str, torch.Tensor], rows: Sequence[Row]
    ) -> SeenByLoss:
        mask, old = inputs["completion_mask"], inputs.get(OLD_LOGPS, logps.detach())
        divisors = self.divisors(rows).to(logps.device)
        ratios = functional.action_log_ratios(logps - old, mask, divisors).clamp(-20, 20)
        # TRL takes the mean entropy over tokens: with these shares it is the mean over turns of their mean
        shares = mask.sum() / (mask.sum(dim=1, keepdim=True).clamp(min=1) * len(mask))
        # TRL takes the mean log-ratio over a turn's tokens: with these old log-probabilities each is the turn's
        return SeenByLoss(entropies * shares, logps - ratios.unsqueeze(1), ratios[mask.bool().any(dim=1)])

    def estimate(self, rewards, values, steps, discounts, last_value):
        factors = discounts.gamma, discounts.gae_lambda, last_value
        advantages, targets = functional.gae(rewards, torch.cat(list(values)), steps, *factors)
        return list(advantages.split(1)), list(targets.split(1))

    def advantage(self, values: torch.Tensor, num_tokens: int) -> float | torch.Tensor:
        return values[0].item()


Level = TokenLevel  # the type of any level
LEVELS: dict[str, type[Level]] = {"token": TokenLevel, "action": ActionLevel}


def make_level(args: Any) -> Level:
    return LEVELS[args.level].from_args(args)
