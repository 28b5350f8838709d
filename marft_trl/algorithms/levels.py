# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
The levels of optimisation: units that have a policy ratio, an advantage and a value. Each token (MARFT-T), or each
turn as one action (MARFT-A).

To add a level, write a class with the attributes and methods of [`Level`] and give it a name in `LEVELS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from ..seams.trl import OLD_LOGPS
from . import functional
from .rows import MicroBatch, Row


class SeenByLoss(NamedTuple):
    """
    Inputs of the loss of a micro-batch of `B` rows. `T` tokens of the longest turn.

    Args:
        entropies (`torch.Tensor` of shape `(B, T)`): entropies whose mean over counted tokens is the entropy bonus.
        old_logps (`torch.Tensor` of shape `(B, T)`, *optional*): log-probabilities that TRL's loss takes for those of
            the policy that sampled, instead of those of the rows. At action level they make the log-ratio of every
            token that of its turn, and carry its gradient.
        log_ratios (`torch.Tensor` of shape `(N,)`): the log-ratios that count, for the divergence of an update.
    """

    entropies: torch.Tensor
    old_logps: torch.Tensor | None
    log_ratios: torch.Tensor


@dataclass(frozen=True)
class Discounts:
    """
    Discounts and decays of GAE, each in `[0, 1]`.

    Args:
        gamma: per joint step, or of each joint step.
        gae_lambda: per joint step.
        token_gamma, token_gae_lambda: per token inside a turn.
    """

    gamma: float | Sequence[float]
    gae_lambda: float
    token_gamma: float = 1.0
    token_gae_lambda: float = 1.0


class Level(Protocol):
    """
    What a policy ratio, an advantage and a value belong to, and the arithmetic that depends on it.

    Attributes:
        settings: fields of the training arguments that only this level reads.
        loss_type: loss type if the training arguments name none.
        ratio: `"sequence"` if a turn has one policy ratio: TRL's `importance_sampling_level`. `None` for that of the
            training arguments.
        reads_completions: whether the critic reads the tokens of a turn, and not the observation alone.
    """

    settings: ClassVar[frozenset[str]]
    loss_type: ClassVar[str]
    ratio: ClassVar[str | None]
    reads_completions: ClassVar[bool]

    @classmethod
    def from_args(cls, args: Any) -> Level:
        """The level under training arguments."""

    def num_values(self, num_tokens: int) -> int:
        """Number of values of a turn of so many tokens, at least 1."""

    def weight(self, batch: MicroBatch) -> int:
        """Weight of a micro-batch's metrics among those of its agent."""

    def entropy_weight(self, token_share: float, row_share: float) -> float:
        """
        Factor of `entropy_coef` for a loss that is a mean over rows.

        Args:
            token_share, row_share: the micro-batch's share of the tokens and of the rows of its adapter.
        """

    def divisors(self, rows: Sequence[Row]) -> torch.Tensor:
        """Numbers by which the log-ratios of turns, summed over tokens, are divided, `(B,)`."""

    def seen_by_loss(
        self, logps: torch.Tensor, entropies: torch.Tensor, inputs: Mapping[str, torch.Tensor], rows: Sequence[Row]
    ) -> SeenByLoss:
        """
        Args:
            logps, entropies (`torch.Tensor` of shape `(B, T)`): of the policy.
            inputs: tensors of the rows, see [`collate`].
            rows: the rows.
        """

    def estimate(
        self,
        rewards: torch.Tensor,
        values: Sequence[torch.Tensor],
        steps: torch.Tensor,
        discounts: Discounts,
        last_value: float,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """
        Advantages and value targets of the `K` turns of an episode by GAE, a tensor `(V,)` for each turn.

        Args:
            rewards (`torch.Tensor` of shape `(K,)`): reward after each turn.
            values: values `(V,)` of each turn.
            steps (`torch.Tensor` of shape `(K,)`): joint step of each turn.
            discounts: discounts and decays.
            last_value: value of what comes after the last joint step.
        """

    def advantage(self, values: torch.Tensor, num_tokens: int) -> float | torch.Tensor:
        """The advantage of a row from its `(V,)` advantages: a number, or one per token `(L,)`."""


class TokenLevel:
    """One ratio, one advantage and one value per token."""

    settings: ClassVar[frozenset[str]] = frozenset({"token_gamma", "token_gae_lambda"})
    loss_type: ClassVar[str] = "dapo"
    ratio: ClassVar[str | None] = None
    reads_completions: ClassVar[bool] = True

    @classmethod
    def from_args(cls, args: Any) -> TokenLevel:
        """The level under training arguments."""
        return cls()

    def num_values(self, num_tokens: int) -> int:
        return max(num_tokens, 1)

    def weight(self, batch: MicroBatch) -> int:
        return batch.num_loss_tokens

    def entropy_weight(self, token_share: float, row_share: float) -> float:
        return token_share / row_share

    def divisors(self, rows: Sequence[Row]) -> torch.Tensor:
        return torch.ones(len(rows))

    def seen_by_loss(
        self, logps: torch.Tensor, entropies: torch.Tensor, inputs: Mapping[str, torch.Tensor], rows: Sequence[Row]
    ) -> SeenByLoss:
        old = inputs.get(OLD_LOGPS, logps.detach())
        return SeenByLoss(entropies, None, (logps - old)[inputs["completion_mask"].bool()])

    def estimate(self, rewards, values, steps, discounts, last_value):
        lengths = torch.tensor([len(value) for value in values])
        padded = torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)
        factors = discounts.gamma, discounts.gae_lambda, discounts.token_gamma, discounts.token_gae_lambda
        pair = functional.token_gae(rewards, padded, lengths, steps, *factors, last_value)
        advantages, targets = (
            [row[:length].clone() for row, length in zip(tensor, lengths.tolist(), strict=True)] for tensor in pair
        )
        return advantages, targets

    def advantage(self, values: torch.Tensor, num_tokens: int) -> float | torch.Tensor:
        return values[:num_tokens].clone()


@dataclass(frozen=True)
class ActionLevel:
    """
    One ratio, one advantage and one value per turn.

    Args:
        logprob: log-probability of a turn: the `"sum"` over its tokens, or the sum divided by the number of its tokens
            (`"token"`) or words (`"word"`).
    """

    logprob: str = "sum"

    settings: ClassVar[frozenset[str]] = frozenset({"action_logprob"})
    loss_type: ClassVar[str] = "grpo"  # every turn counts once
    ratio: ClassVar[str | None] = "sequence"
    reads_completions: ClassVar[bool] = False

    @classmethod
    def from_args(cls, args: Any) -> ActionLevel:
        """The level under training arguments."""
        return cls(args.action_logprob)

    def num_values(self, num_tokens: int) -> int:
        return 1

    def weight(self, batch: MicroBatch) -> int:
        return sum(row.num_loss_tokens > 0 for row in batch.rows)

    def entropy_weight(self, token_share: float, row_share: float) -> float:
        return 1.0

    def divisors(self, rows: Sequence[Row]) -> torch.Tensor:
        of: dict[str, Callable[[Row], int]] = {
            "sum": lambda row: 1,
            "token": lambda row: len(row.completion_ids),
            "word": lambda row: row.words,
        }
        return torch.tensor([max(of[self.logprob](row), 1) for row in rows], dtype=torch.float32)

    def seen_by_loss(
        self, logps: torch.Tensor, entropies: torch.Tensor, inputs: Mapping[str, torch.Tensor], rows: Sequence[Row]
    ) -> SeenByLoss:
        mask, old = inputs["completion_mask"], inputs.get(OLD_LOGPS, logps.detach())
        divisors = self.divisors(rows).to(logps.device)
        ratios = functional.action_log_ratios(logps - old, mask, divisors).clamp(-20, 20)
        # TRL takes the mean entropy over tokens: with these shares it is the mean over turns of their mean
        shares = mask.sum() / (mask.sum(dim=1, keepdim=True).clamp(min=1) * len(mask))
        # TRL takes the mean log-ratio over a turn's tokens: with these old log-probabilities each of them is the
        # turn's
        return SeenByLoss(entropies * shares, logps - ratios.unsqueeze(1), ratios[mask.bool().any(dim=1)])

    def estimate(self, rewards, values, steps, discounts, last_value):
        factors = discounts.gamma, discounts.gae_lambda, last_value
        advantages, targets = functional.gae(rewards, torch.cat(list(values)), steps, *factors)
        return list(advantages.split(1)), list(targets.split(1))

    def advantage(self, values: torch.Tensor, num_tokens: int) -> float | torch.Tensor:
        return values[0].item()


LEVELS: dict[str, type[Level]] = {"token": TokenLevel, "action": ActionLevel}


def make_level(args: Any) -> Level:
    """The level that training arguments ask for."""
    return LEVELS[args.level].from_args(args)
