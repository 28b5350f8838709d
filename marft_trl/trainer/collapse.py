# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Runs that fall from their best: said loudly, and undone for the agents that have fallen."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from ..configs import MARFTConfig
from ..rollout.rollouts import Rollout
from ..run_metrics import Metrics
from ..weights.best import BestAdapters
from ..weights.policies import Policies


logger = get_logger(__name__)


class Collapse(TrainerCallback):
    """
    Watches the mean reward of the last `collapse_window` generation batches. It has collapsed when it is below its
    best by more than `collapse_drop` of the largest size that it has had.

    With `on_collapse="restore"`, adapters that have fallen go back to their weights at the best mean, or, in a run
    with evaluations, at the best evaluation, which says more than a few batches. Which ones have fallen is found by
    trial: the team acts on the prompts of the batch as it is, and with each adapter restored alone. The one that helps
    most is restored. If it brings back less than half of what was lost, all adapters are restored.

    Args:
        best ([`BestAdapters`]): adapters at the best mean or evaluation.
        policies ([`Policies`]): the adapters.
        act (`Callable`): `act(rows)` runs the team on dataset rows and returns the mean reward over all processes.
        forget (`Callable`): called before adapters are restored: what is kept of the last step is no longer true.
        args ([`MARFTConfig`]): `on_collapse`, `collapse_drop`, `collapse_window`.
        metrics ([`Metrics`]): get how far the mean is below its best, and what was restored.
    """

    def __init__(
        self,
        best: BestAdapters,
        policies: Policies,
        act: Callable[[Sequence[dict[str, Any]]], float],
        forget: Callable[[], None],
        args: MARFTConfig,
        metrics: Metrics,
    ):
        self._best, self._policies, self._act, self._forget = best, policies, act, forget
        self._args, self._metrics = args, metrics
        self._rewards: deque[float] = deque(maxlen=args.collapse_window)
        self._highest, self._largest = -math.inf, 0.0
        self._best_evaluation: float | None = None  # from then on, copies are those of the best evaluation
        self._was_said = self._has_restored = False
        self._last_rows: Sequence[dict[str, Any]] = ()

    @property
    def restores(self) -> bool:
        """`True` if adapters are restored."""
        return self._args.on_collapse == "restore"

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        highest = None if self._highest == -math.inf else self._highest
        return {
            "rewards": list(self._rewards),
            "highest": highest,
            "largest": self._largest,
            "was_said": self._was_said,
            "has_restored": self._has_restored,
            "best_evaluation": self._best_evaluation,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._rewards = deque(state["rewards"], maxlen=self._args.collapse_window)
        self._highest = -math.inf if state["highest"] is None else state["highest"]
        self._largest, self._was_said = state["largest"], state["was_said"]
        self._has_restored, self._best_evaluation = state["has_restored"], state["best_evaluation"]

    def is_undone(self, rollout: Rollout, rows: Sequence[dict[str, Any]]) -> bool:
        """
        Take note of a rollout, before anything is learned from it. Returns whether adapters were restored, so that
        its episodes are not those of the present policies.

        Args:
            rollout ([`Rollout`]): episodes with rewards, of the present weights.
            rows (`Sequence[dict]`): their dataset rows.
        """
        reward = torch.nanmean((rollout.drawn or rollout).rewards).item()
        if self._args.on_collapse == "ignore" or math.isnan(reward):
            return False
        self._rewards.append(reward)
        self._last_rows = rows
        if len(self._rewards) < self._args.collapse_window:
            return False
        mean = sum(self._rewards) / len(self._rewards)
        self._largest = max(self._largest, abs(mean))
        if mean >= self._highest:
            self._highest = mean
            if self.restores and self._best_evaluation is None:
                self._best.take()
        self._metrics.add("collapse/below_best", self._highest - mean)
        if self._highest - mean <= self._args.collapse_drop * self._largest:
            return False
        if self.restores:
            self._restore(rows, mean)
            return True
        self._say(mean)
        return False

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        reward = (metrics or {}).get("eval_reward", math.nan)
        if not self.restores or math.isnan(reward):
            return
        if self._best_evaluation is None or reward >= self._best_evaluation:
            self._best_evaluation = reward
            self._best.take()

    def on_step_end(self, args, state, control, **kwargs):
        # What has fallen since the window was last full is not left behind, nor saved as the result. A run that was
        # restored once is not stable: it ends with its best adapters, unless the last ones are
        if state.global_step < state.max_steps or not self.restores or self._highest == -math.inf:
            return
        mean = sum(self._rewards) / len(self._rewards) if self._rewards else -math.inf
        by_evaluation = self._best_evaluation is not None
        if self._has_restored and (by_evaluation or mean < self._highest):
            self._go_back(self._best.adapters)
            best, what = (self._best_evaluation, "evaluation") if by_evaluation else (self._highest, "mean reward")
            logger.warning(
                f"The team has collapsed in this run, so it ends with its adapters of the best {what}, {best:.4g}."
            )
        elif self._rewards and self._highest - mean > self._args.collapse_drop * self._largest:
            self._restore(self._last_rows, mean)

    def _say(self, mean: float) -> None:
        if self._was_said:
            return
        self._was_said = True
        logger.warning(
            f"THE TEAM HAS COLLAPSED: the mean reward of the last {self._args.collapse_window} generation batches is "
            f"{mean:.4g}, and its best was {self._highest:.4g}. Lower the learning rate, go on from an earlier "
            "checkpoint, or set `on_collapse='restore'`, which takes adapters back to their best."
        )

    def _restore(self, rows: Sequence[dict[str, Any]], mean: float) -> None:
        names, why = self._fallen(rows)
        self._go_back(names)
        self._rewards.clear()
        self._metrics.add("collapse/restored", float(len(names)))
        shown = "; ".join(
            f"{name!r} (agents {', '.join(map(repr, self._policies.agents_of(name)))})" for name in names
        )
        logger.warning(
            f"THE TEAM HAS COLLAPSED: the mean reward of the last generation batches is {mean:.4g}, and its best was "
            f"{self._highest:.4g}. RESTORED to their best, with the state of their optimizer: {shown}.{why} Training "
            "goes on; a lower learning rate avoids this."
        )

    def _go_back(self, names: Sequence[str]) -> None:
        self._forget()
        self._has_restored = True
        for name in names:
            self._best.restore(name)

    def _fallen(self, rows: Sequence[dict[str, Any]]) -> tuple[list[str], str]:
        """The adapters to restore, and how they were found."""
        names = self._best.adapters
        if len(names) < 2:
            return names, ""
        present, alone = self._act(rows), {}
        for name in names:
            with self._policies.with_weights(name, self._best.weights(name)):
                alone[name] = self._act(rows)
        helper = max(alone, key=lambda name: alone[name] if alone[name] == alone[name] else -math.inf)
        tried = ", ".join(f"{name!r} {reward:.4g}" for name, reward in alone.items())
        why = f" On the same prompts the team earned {present:.4g} as it was, and with one of them restored: {tried}."
        if alone[helper] - present >= (self._highest - present) / 2:
            return [helper], why
        return names, why
