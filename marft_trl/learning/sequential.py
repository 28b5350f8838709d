# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Sequential updates: the factors of agents that were updated before, as in HAPPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import functional
from ..config.team_setup import RunContext, TeamSetup
from ..rules.rows import Row, Slice
from ..seams.logs import get_logger
from .log_probs import LogProbs


logger = get_logger(__name__)

# Share of joint actions, by effective sample size, below which factors of sequential updates are warned of
_LOWEST_EFFECTIVE_SHARE = 0.5


def after_update(factors: SequentialFactors | None, slices: Sequence[Slice], adapter: str | None) -> list[Slice]:
    """As [`SequentialFactors.after_update`], where updates are sequential; else the slices as they are."""
    return list(slices) if factors is None else factors.after_update(slices, adapter)


class SequentialFactors:
    """
    Multiplies advantages by the policy ratios of agents that were updated before, in the same joint action.

    Args:
        team ([`TeamSetup`]): the team as it is trained.
        run ([`RunContext`]): the run that trains it.
        log_probs ([`LogProbs`]): scores the turns of an updated agent again.

    Source: HAPPO (2109.11251), the factor `M`.
    """

    def __init__(self, team: TeamSetup, run: RunContext, log_probs: LogProbs):
        self._log_probs, self._level, self._clip = log_probs, team.level, run.args.sequential_clip
        self._metrics, self._processes = run.metrics, run.processes
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {"warned": self._warned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._warned = state["warned"]

    def after_update(self, slices: Sequence[Slice], adapter: str | None) -> list[Slice]:
        """
        The slices with factors that count the ratios of an adapter.

        Args:
            slices (`Sequence[Slice]`): slices of the present generation batch.
            adapter (`str`, *optional*): the adapter that was just updated; `None` if none was, which changes nothing.
        """
        if adapter is None:
            return list(slices)
        rows = [row for slice_ in slices for row in slice_.rows]
        keys = dict.fromkeys((row.episode, row.joint_action) for row in rows)
        actions = {key: index for index, key in enumerate(keys)}
        updated = [row for row in rows if row.adapter == adapter and row.is_trained and len(row.completion_ids)]
        more = self._log_factors(updated, actions)
        log_factors = torch.zeros(len(actions), dtype=torch.float64)
        for row in rows:
            log_factors[actions[row.episode, row.joint_action]] = (
                row.log_factor + more[actions[row.episode, row.joint_action]].item()
            )
        factors = functional.clipped_factors(log_factors.float(), self._clip)
        self._log(adapter, factors, functional.clipped_factors(log_factors.float(), None))
        places = {key: (log_factors[index].item(), factors[index].item()) for key, index in actions.items()}
        return [
            replace(slice_, rows=[_with(row, *places[row.episode, row.joint_action]) for row in slice_.rows])
            for slice_ in slices
        ]

    def _log_factors(self, updated: Sequence[Row], actions: dict[tuple[int, int], int]) -> torch.Tensor:
        """Logarithm of the ratios of an updated adapter's turns, by joint action `(J,)`."""
        if not updated:
            return torch.zeros(len(actions))
        with self._log_probs.scoring():
            new = self._log_probs.of_policy(updated)
        pairs = [(row.old_per_token_logps, its) for row, its in zip(updated, new, strict=True)]
        sums = torch.stack([(its - then).sum() for then, its in pairs if then is not None])
        places = torch.tensor([actions[row.episode, row.joint_action] for row in updated])
        return functional.sequential_log_factors(sums / self._level.divisors(updated), places, len(actions))

    def _log(self, adapter: str, factors: torch.Tensor, unclipped: torch.Tensor) -> None:
        """
        Metrics of the factors of joint actions `(J,)` after an adapter's update, and a warning where they vary much
        before they are clipped.
        """
        pair = [its.double() for its in (factors, unclipped)]
        sums = torch.stack([torch.stack([torch.tensor(len(its)).double(), its.sum(), (its**2).sum()]) for its in pair])
        totals = self._processes.sum(sums)
        count, total, squares = totals[0].tolist()
        mean, share = total / max(count, 1), functional.effective_share(totals[1])
        self._metrics.add("sequential_factor/mean", mean)
        self._metrics.add("sequential_factor/std", max(squares / max(count, 1) - mean**2, 0.0) ** 0.5)
        self._metrics.add("sequential_factor/effective_share", share)
        if share < _LOWEST_EFFECTIVE_SHARE and not self._warned:
            self._warned = True
            logger.warning(
                f"The factors of `update_order='sequential'` have an effective sample size of {share:.0%} behind the "
                f"adapter {adapter!r}, so the next agents would learn from a few episodes. Lower the learning rate or "
                "`num_iterations`, set a smaller `sequential_clip`, or set `level='action'` with "
                "`action_logprob='token'`, whose ratios do not grow with length."
            )


def _with(row: Row, log_factor: float, factor: float) -> Row:
    return replace(row, log_factor=log_factor, factor=factor)
