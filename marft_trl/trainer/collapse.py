# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Runs that fall from their best: said loudly, and undone for the agents that have fallen."""

from __future__ import annotations

import contextlib
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from ..configs import MARFTConfig
from ..processes import Processes
from ..rollout.rollouts import Rollout
from ..run_metrics import Metrics
from ..weights.best import BestAdapters
from ..weights.policies import Policies


logger = get_logger(__name__)

# Differences of successive batches that are remembered
_REMEMBERED = 256
# Standard errors of a mean that luck may explain, the best of many windows included: if nobody looks closer, and if a
# trial follows
_ERRORS, _ERRORS_BEFORE_TRIAL = 5.0, 3.0
# Probability that a trial finds adapters better that are not, whatever the number of adapters
_WRONG_TRIALS = 0.01


class _Trial(NamedTuple):
    """
    What was found by acting with the best adapters.

    Args:
        names (`list[str]`): adapters to restore; empty if it is not certain that this helps.
        gain (`float`): largest gain over the present adapters, per episode.
        whole (`float`): gain of all adapters at their best.
        shown (`str`): the rewards, for messages.
    """

    names: list[str]
    gain: float
    whole: float
    shown: str


class Collapse(TrainerCallback):
    """
    Watches the mean reward of the last `collapse_window` generation batches, and evaluations. The team has collapsed
    when one of them is below its best by more than `collapse_drop` of the largest size that it has had, and by more
    than luck explains: five standard errors. The error of a batch is estimated from the differences of successive
    batches, the largest quarter of which is left out: it may be the fall. That of an evaluation is the standard error
    of its episodes.

    With `on_collapse="restore"`, three standard errors are enough for a trial: the team acts on the prompts of the
    batch as it is, with each adapter at its best, and with all of them. If that certainly earns more, the adapter that
    helps most goes back to its best; if it brings back less than half of what all of them do, all go back. If it earns
    no more, nothing has fallen, and the present adapters are the best from then on. Otherwise, the next full window
    may be tried again. The best weights are those at the best mean or, in a run with evaluations, at the best
    evaluation, which says more than a few batches.

    Args:
        best ([`BestAdapters`]): adapters at the best mean or evaluation.
        policies ([`Policies`]): the adapters.
        act (`Callable`): `act(rows)` runs the team on dataset rows and returns the rewards of all processes' episodes.
        forget (`Callable`): `forget(adapters, step)`: called when adapters are back at what they were after a step:
            what is kept of later steps is no longer true.
        error_of_evaluation (`Callable`): standard error of the reward of the last evaluation.
        step (`Callable`): number of optimizer steps so far.
        args ([`MARFTConfig`]): `on_collapse`, `collapse_drop`, `collapse_window`.
        metrics ([`Metrics`]): get how far the mean is below its best, and what was restored.
        processes ([`Processes`]): all processes restore, or none.
    """

    def __init__(
        self,
        best: BestAdapters,
        policies: Policies,
        act: Callable[[Sequence[dict[str, Any]]], torch.Tensor],
        forget: Callable[[Sequence[str], int], None],
        error_of_evaluation: Callable[[], float],
        step: Callable[[], int],
        args: MARFTConfig,
        metrics: Metrics,
        processes: Processes,
    ):
        self._best, self._policies, self._act, self._forget = best, policies, act, forget
        self._error_of_evaluation, self._step = error_of_evaluation, step
        self._args, self._metrics, self._processes = args, metrics, processes
        self._rewards: deque[float] = deque(maxlen=args.collapse_window)
        self._highest, self._largest, self._best_step = -math.inf, 0.0, 0
        # From the first one on, copies are those of the best evaluation; with its standard error
        self._best_evaluation: tuple[float, float] | None = None
        self._fallen_evaluation: float | None = None  # below the best; a trial is due
        self._was_said = self._has_restored = self._is_training = False
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)  # differences of successive batches
        self._last_rows: Sequence[dict[str, Any]] = ()

    @property
    def restores(self) -> bool:
        """`True` if adapters are restored."""
        return self._args.on_collapse == "restore"

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {
            "rewards": list(self._rewards),
            "highest": None if self._highest == -math.inf else self._highest,
            "largest": self._largest,
            "best_step": self._best_step,
            "was_said": self._was_said,
            "has_restored": self._has_restored,
            "best_evaluation": self._best_evaluation,
            "fallen_evaluation": self._fallen_evaluation,
            "steps": list(self._steps),
            "last_rows": _plain(self._last_rows) if self.restores else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._rewards = deque(state["rewards"], maxlen=self._args.collapse_window)
        self._highest = -math.inf if state["highest"] is None else state["highest"]
        self._largest, self._best_step = state["largest"], state.get("best_step", 0)
        self._was_said, self._has_restored = state["was_said"], state["has_restored"]
        best = state["best_evaluation"]
        self._best_evaluation = (best[0], best[1]) if isinstance(best, list) else None
        self._fallen_evaluation = state.get("fallen_evaluation")
        self._steps = deque(state.get("steps", ()), maxlen=_REMEMBERED)
        self._last_rows = state.get("last_rows", [])

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
        if self._rewards:
            self._steps.append(abs(reward - self._rewards[-1]))
        self._rewards.append(reward)
        self._last_rows = rows
        if self.restores and not self._best.adapters:  # of a run that has only warned so far
            self._highest, self._best_evaluation = -math.inf, None
        if len(self._rewards) == self._args.collapse_window:
            self._see(self._mean())
        if not self._is_suspicious():
            return False
        if self.restores:
            # Gradients of the present weights are not applied to others: wait for the next optimizer step. A process
            # whose rows had no signal has none
            return not any(self._processes.gather([self._policies.have_gradients])) and self._restore(rows)
        self._say()
        return False

    def _mean(self) -> float:
        return sum(self._rewards) / len(self._rewards) if self._rewards else -math.inf

    def _see(self, mean: float) -> None:
        """Take note of the mean of a full window."""
        self._largest = max(self._largest, abs(mean))
        if mean >= self._highest:
            self._highest = mean
            if self._best_evaluation is None:
                self._take()
        self._metrics.add("collapse/below_best", self._highest - mean)

    def _is_suspicious(self) -> bool:
        if self._fallen_evaluation is not None:
            return True
        return len(self._rewards) == self._args.collapse_window and self._has_fallen(self._mean())

    def _has_fallen(self, mean: float) -> bool:
        """Whether a mean is so far below the best that neither the setting nor luck explains it."""
        errors = _ERRORS_BEFORE_TRIAL if self.restores else _ERRORS
        luck = errors * _deviation(self._steps) / math.sqrt(self._args.collapse_window)
        return self._highest - mean > max(self._args.collapse_drop * self._largest, luck)

    def on_train_begin(self, args, state, control, **kwargs):
        self._is_training = True

    def on_train_end(self, args, state, control, **kwargs):
        self._is_training = False

    def _take(self) -> None:
        if self.restores:
            self._best.take()
            self._best_step = self._step()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        reward, error = (metrics or {}).get("eval_reward", math.nan), self._error_of_evaluation()
        is_watched = self._args.on_collapse != "ignore" and self._is_training and state.global_step > 0
        if not is_watched or math.isnan(reward):
            return
        best, its_error = self._best_evaluation or (-math.inf, 0.0)
        if reward >= best:
            self._best_evaluation, self._fallen_evaluation = (reward, error), None
            self._take()
            return
        errors = _ERRORS_BEFORE_TRIAL if self.restores else _ERRORS
        luck = errors * math.hypot(error, its_error)
        is_below = best - reward > self._args.collapse_drop * abs(best)
        has_fallen = is_below and best - reward > luck
        if self.restores and state.global_step >= state.max_steps and (is_below or self._has_restored):
            # No batch follows, so nothing is lost by going back; all were evaluated on the same questions
            self._end_with_best(f"evaluation, {best:.4g}, as the last one is {reward:.4g}")
        elif has_fallen:
            self._fallen_evaluation = reward
            if not self.restores:
                self._say()

    def on_step_end(self, args, state, control, **kwargs):
        # What has fallen since the window was last full is not left behind, nor saved as the result. A run that was
        # restored once is not stable: it ends with its best adapters, unless the last ones earn as much
        if state.global_step < state.max_steps or not self.restores or not self._best.adapters:
            return
        if control.should_evaluate and self._best_evaluation is not None:
            return  # the evaluation tells
        if self._has_restored:
            trial = self._try(self._last_rows)
            if trial.whole > 0:
                self._end_with_best(f"{'evaluation' if self._best_evaluation else 'mean reward'}. {trial.shown}")
        elif self._fallen_evaluation is not None or (self._rewards and self._has_fallen(self._mean())):
            self._restore(self._last_rows)

    def _end_with_best(self, what: str) -> None:
        self._go_back(self._best.adapters)
        logger.warning(f"The team has fallen in this run, so it ends with its adapters of the best {what}")

    def _found(self) -> str:
        """What was found, for messages."""
        if self._fallen_evaluation is not None:
            best = self._best_evaluation[0] if self._best_evaluation is not None else math.nan
            return f"`eval_reward` is {self._fallen_evaluation:.4g}, and its best was {best:.4g}"
        count, mean = len(self._rewards), self._mean()
        batches = f"the last {count} generation batches"
        return f"the mean reward of {batches} is {mean:.4g}, and its best was {self._highest:.4g}"

    def _say(self) -> None:
        if self._was_said:
            return
        self._was_said = True
        logger.warning(
            f"THE TEAM HAS COLLAPSED: {self._found()}. Lower the learning rate, go on from an earlier checkpoint, or "
            "set `on_collapse='restore'`, which takes adapters back to their best."
        )

    def _restore(self, rows: Sequence[dict[str, Any]]) -> bool:
        found, trial, evaluation = self._found(), self._try(rows), self._fallen_evaluation
        self._rewards.clear()
        self._fallen_evaluation = None
        if not trial.names:
            logger.warning(f"It seems that the team has collapsed: {found}. {trial.shown} Nothing is restored.")
            if trial.gain <= 0:  # the present adapters are the best
                self._highest = -math.inf
                if evaluation is not None:
                    self._best_evaluation = (evaluation, self._error_of_evaluation())
                self._take()
            return False
        self._go_back(trial.names)
        self._metrics.add("collapse/restored", float(len(trial.names)))
        shown = "; ".join(
            f"{name!r} (agents {', '.join(map(repr, self._policies.agents_of(name)))})" for name in trial.names
        )
        logger.warning(
            f"THE TEAM HAS COLLAPSED: {found}. RESTORED to their best, with the state of their optimizer: {shown}. "
            f"{trial.shown} Training goes on; a lower learning rate avoids this."
        )
        return True

    def _go_back(self, names: Sequence[str]) -> None:
        self._has_restored = True
        for name in names:
            self._best.restore(name)
        self._forget(names, self._best_step)

    def _try(self, rows: Sequence[dict[str, Any]]) -> _Trial:
        """Act with the best adapters, one of them and all of them, and with the present ones."""
        names = self._best.adapters
        if not any(self._processes.gather([len(rows)])):  # of a resumed run whose rows are not JSON
            return _Trial(names, math.inf, math.inf, "Nothing was tried, because no rows are at hand.")
        present = self._act(rows)
        restored = {name: self._with([name], rows) for name in names}
        everything = self._with(names, rows) if len(names) > 1 else restored[names[0]]
        gains, whole = (
            {name: _gain(rewards, present) for name, rewards in restored.items()},
            _gain(everything, present),
        )
        tried = ", ".join(f"{name!r} {torch.nanmean(rewards).item():.4g}" for name, rewards in restored.items())
        shown = (
            f"On the same prompts the team earned {torch.nanmean(present).item():.4g} as it was, with one adapter at "
            f"its best: {tried}; with all of them: {torch.nanmean(everything).item():.4g}."
        )
        helper = max(gains, key=lambda name: gains[name][0])
        # Each adapter and all of them were tried, so the luckiest of them has to be certain
        tries = len(names) + 1 if len(names) > 1 else 1
        errors = NormalDist().inv_cdf(1 - _WRONG_TRIALS / tries)
        chosen: list[str] = []
        if _is_certain(gains[helper], errors) and gains[helper][0] >= whole[0] / 2:
            chosen = [helper]
        elif _is_certain(whole, errors):
            chosen = names
        elif _is_certain(gains[helper], errors):
            chosen = [helper]
        return _Trial(chosen, max(gains[helper][0], whole[0]), whole[0], shown)

    def _with(self, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> torch.Tensor:
        """Rewards on dataset rows while some adapters have their best weights."""
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(self._policies.with_weights(name, self._best.weights(name)))
            return self._act(rows)


def _gain(restored: torch.Tensor, present: torch.Tensor) -> tuple[float, float]:
    """Mean difference of episodes on the same prompts, and its standard error; no gain where none can be compared."""
    differences = (restored - present)[~(restored - present).isnan()].double()
    if not len(differences):
        return -math.inf, 0.0
    return differences.mean().item(), differences.std(correction=0).item() / math.sqrt(len(differences))


def _is_certain(gain: tuple[float, float], errors: float) -> bool:
    return gain[0] > 0 and gain[0] >= errors * gain[1]


def _plain(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dataset rows for a checkpoint; none where they are not JSON."""
    try:
        return json.loads(json.dumps(list(rows)))
    except (TypeError, ValueError):
        return []


def _deviation(steps: Sequence[float]) -> float:
    """Standard deviation of differences, from the smaller three quarters of them, as if they were normal."""
    kept = sorted(steps)[: math.ceil(0.75 * len(steps))]
    return math.sqrt(sum(step**2 for step in kept) / len(kept) / 0.369) if kept else 0.0
