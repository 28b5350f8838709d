# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Runs that fall from their best: said loudly, and undone for the agents that have fallen."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import TrainerCallback

from ..adapters.copies import PastCopies
from ..adapters.policies import Policies
from ..config.team_setup import RunContext
from ..rollout.rollouts import Rollout
from ..seams.libraries import get_logger
from .checkpoints import BestAdapters


logger = get_logger(__name__)

# Differences of successive batches that are remembered
_REMEMBERED = 256


class Falls:
    """
    Compares the mean reward of the last generation batches with the best that it has been.

    It has fallen when it is below the best by more than a share of the largest size that it has had, and by more than
    luck explains: some standard errors of the difference. The error of a window is the larger of two, because each is
    too small somewhere: from the spread between the prompts of its batches, which knows rare outcomes and heavy tails;
    and from the differences of successive batches, which knows what the prompts of a batch have in common. The largest
    quarter of the differences is left out: it may be the fall.

    Args:
        window (`int`): number of batches.
        drop (`float`): share of the largest absolute mean.
        errors (`float`): number of standard errors.
    """

    def __init__(self, window: int, drop: float, errors: float):
        self._window, self._drop, self._errors = window, drop, errors
        self._means: deque[float] = deque(maxlen=window)
        self._variances: deque[float] = deque(maxlen=window)  # squared errors of these means
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)  # differences of successive means
        self.best, self._variance_of_best, self._largest = -math.inf, 0.0, 0.0
        self.low = 0  # batches in a row after which the mean had fallen

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {
            "rewards": list(self._means),
            "variances": list(self._variances),
            "highest": None if self.best == -math.inf else self.best,
            "variance_of_best": self._variance_of_best,
            "largest": self._largest,
            "low": self.low,
            "steps": list(self._steps),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._means = deque(state["rewards"], maxlen=self._window)
        self._variances = deque(state.get("variances", [0.0] * len(self._means)), maxlen=self._window)
        self.best = -math.inf if state["highest"] is None else state["highest"]
        self._variance_of_best, self._largest = state.get("variance_of_best", 0.0), state["largest"]
        self.low = state.get("low", 0)
        self._steps = deque(state.get("steps", ()), maxlen=_REMEMBERED)

    @property
    def mean(self) -> float:
        """Mean of the batches in the window."""
        return sum(self._means) / len(self._means) if self._means else -math.inf

    @property
    def is_full(self) -> bool:
        """Whether the window has as many batches as it can have."""
        return len(self._means) == self._window

    @property
    def has_lasted(self) -> bool:
        """Whether three windows in a row have fallen that have no batch in common."""
        return self.low > 2 * self._window

    def see(self, rewards: torch.Tensor, group: int) -> bool:
        """
        Take in a batch. Returns whether the mean is the best so far.

        Args:
            rewards (`torch.Tensor` of shape `(E,)`): of its episodes; NaN where nothing scored one.
            group (`int`): number of successive episodes that have one prompt.
        """
        mean, variance = _mean_and_variance(rewards.double(), group)
        if self._means:
            self._steps.append(abs(mean - self._means[-1]))
        self._means.append(mean)
        self._variances.append(variance)
        if not self.is_full:
            return False
        self._largest = max(self._largest, abs(self.mean))
        is_best = self.mean >= self.best
        if is_best:
            self.best, self._variance_of_best = self.mean, self._variance()
        self.low = self.low + 1 if self.has_fallen() else 0
        return is_best

    def has_fallen(self) -> bool:
        """Whether the mean is so far below the best that neither the setting nor luck explains it."""
        if not self._means:
            return False
        usual = _deviation(self._steps) ** 2 / 2  # of a batch
        now = max(self._variance(), usual / len(self._means))
        luck = self._errors * math.sqrt(now + max(self._variance_of_best, usual / self._window))
        return self.best - self.mean > max(self._drop * self._largest, luck)

    def begin_anew(self, from_here: bool = False) -> None:
        """Empty the window; with `from_here`, forget the best too."""
        self._means.clear()
        self._variances.clear()
        self.low = 0
        if from_here:
            self.best = -math.inf

    def _variance(self) -> float:
        """Squared error of the mean of the window, from the spread within its batches."""
        return sum(self._variances) / len(self._variances) ** 2 if self._variances else 0.0


def _mean_and_variance(rewards: torch.Tensor, group: int) -> tuple[float, float]:
    """Mean of a batch and its squared error: of the means of its prompts, or of its episodes if it has one prompt."""
    mean = torch.nanmean(rewards).item()
    units = rewards.view(-1, group).nanmean(dim=1) if group < len(rewards) and len(rewards) % group == 0 else rewards
    units = units[~units.isnan()]
    return mean, (units.var().item() / len(units) if len(units) > 1 else 0.0)


def _deviation(steps: Sequence[float]) -> float:
    """Standard deviation of differences, from the smaller three quarters of them, as if they were normal."""
    kept = sorted(steps)[: math.ceil(0.75 * len(steps))]
    return math.sqrt(sum(step**2 for step in kept) / len(kept) / 0.369) if kept else 0.0


# Generation batches whose mean reward is watched, and how far it may fall, as a share of its largest absolute value
WINDOW, DROP = 8, 0.1
# Standard errors of a mean that luck may explain, the best of many windows included: if nobody looks closer, and if a
# trial follows
_ERRORS, _ERRORS_BEFORE_TRIAL = 5.0, 3.0
# Probability that a trial finds adapters better that are not, whatever the number of adapters
_WRONG_TRIALS = 0.01
# Draws of Student's distribution, for its quantiles
_DRAWS = 10**6


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
    Watches the mean reward of the last [`WINDOW`] generation batches ([`Falls`]), and evaluations of the
    trainer's own set. The team has collapsed when an evaluation is below the best one by more than [`DROP`] of
    it, and by more than luck explains: five standard errors of its episodes. Where only the batches have fallen, their
    rows may have become harder, so the warning is calm, and comes once three windows in a row agree.

    Args:
        run ([`RunContext`]): the run that trains it.
        error_of_evaluation (`Callable`): standard error of the reward of the last evaluation.
    """

    errors = _ERRORS

    def __init__(self, run: RunContext, error_of_evaluation: Callable[[], float]):
        self._metrics, self._processes, self._settings, self._state = (
            run.metrics,
            run.processes,
            run.settings,
            run.state,
        )
        self._error_of_evaluation = error_of_evaluation
        self._falls = Falls(WINDOW, DROP, self.errors)
        # From the first one on, an evaluation says what the best is; with its standard error
        self._best_evaluation: tuple[float, float] | None = None
        self._fallen_evaluation: float | None = None  # below the best
        self._was_said = self._is_training = self._is_of_another_set = False

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {
            **self._falls.state_dict(),
            "was_said": self._was_said,
            "best_evaluation": self._best_evaluation,
            "fallen_evaluation": self._fallen_evaluation,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._falls.load_state_dict(state)
        self._was_said, best = state["was_said"], state["best_evaluation"]
        self._best_evaluation = (best[0], best[1]) if isinstance(best, (list, tuple)) else None
        self._fallen_evaluation = state.get("fallen_evaluation")

    def is_undone(self, rollout: Rollout, rows: Sequence[dict[str, Any]]) -> bool:
        """
        Take note of a rollout, before anything is learned from it. Returns whether adapters were restored, so that
        its episodes are not those of the present policies.

        Args:
            rollout ([`Rollout`]): episodes with rewards, of the present weights.
            rows (`Sequence[dict]`): their dataset rows.
        """
        rewards = (rollout.drawn or rollout).rewards
        if rewards.isnan().all():
            return False
        self._begin(rows)
        is_best = self._falls.see(rewards, self._settings.group_size(training=True))
        if is_best and self._best_evaluation is None:
            self._take()
        if self._falls.is_full:
            self._metrics.add("collapse/below_best", self._falls.best - self._falls.mean)
        if self._fallen_evaluation is None and not self._falls.low:
            return False
        return self._undo(rows)

    @contextlib.contextmanager
    def looking_away(self, if_: bool) -> Iterator[None]:
        """Context manager: if the condition holds, evaluations do not count: of another set, or sampled otherwise."""
        kept, self._is_of_another_set = self._is_of_another_set, if_
        try:
            yield
        finally:
            self._is_of_another_set = kept

    # ---- What a watch that restores does in other ways ----

    def _begin(self, rows: Sequence[dict[str, Any]]) -> None:
        """A batch with rewards has come."""

    def _take(self) -> None:
        """The team is at its best."""

    def _undo(self, rows: Sequence[dict[str, Any]]) -> bool:
        """The team may have fallen."""
        self._say()
        return False

    def _note_dip(self, reward: float, is_last: bool) -> None:
        """An evaluation is a little below the best."""

    def _note_fall(self, reward: float, error: float, has_fallen: bool, is_last: bool) -> None:
        """An evaluation is below the best; `has_fallen`: by more than luck, `is_last`: no batch follows."""
        if has_fallen:
            self._fallen_evaluation = reward
            self._say()

    # ---- Called by the Trainer ----

    def on_train_begin(self, args, state, control, **kwargs):
        self._is_training = True

    def on_train_end(self, args, state, control, **kwargs):
        self._is_training = False

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        reward, error = (metrics or {}).get("eval_reward", math.nan), self._error_of_evaluation()
        is_watched = self._is_training and state.global_step > 0 and not self._is_of_another_set
        if not is_watched or math.isnan(reward):
            return
        best, its_error = self._best_evaluation or (-math.inf, 0.0)
        if reward >= best:
            self._best_evaluation, self._fallen_evaluation = (reward, error), None
            self._take()
            return
        luck = self.errors * math.hypot(error, its_error)
        if best - reward > DROP * abs(best):
            self._note_fall(reward, error, best - reward > luck, state.global_step >= state.max_steps)
        else:
            self._note_dip(reward, state.global_step >= state.max_steps)

    def _found(self) -> str:
        """What was found, for messages."""
        if self._fallen_evaluation is not None:
            best = self._best_evaluation[0] if self._best_evaluation is not None else math.nan
            return f"`eval_reward` is {self._fallen_evaluation:.4g}, and its best was {best:.4g}"
        batches = f"the last {WINDOW} generation batches"
        return f"the mean reward of {batches} is {self._falls.mean:.4g}, and its best was {self._falls.best:.4g}"

    def _say(self) -> None:
        if self._was_said or not (self._falls.has_lasted or self._fallen_evaluation is not None):
            return
        self._was_said = True
        cure = (
            "lower the learning rate, go on from an earlier checkpoint, or set `on_collapse='restore'`, which takes "
            "adapters back to their best."
        )
        if self._fallen_evaluation is not None:
            logger.warning(f"THE TEAM HAS COLLAPSED: {self._found()}. {cure[0].upper()}{cure[1:]}")
        else:
            found = self._found()
            logger.warning(
                f"{found[0].upper()}{found[1:]}. Either the rows have become harder, or the team has fallen: "
                f"evaluations during training (`eval_strategy`) tell. If it has fallen, {cure}"
            )


class Restoring(Collapse):
    """
    Takes adapters that have fallen back to their best (`on_collapse="restore"`).

    Three standard errors are enough for a trial: the team acts on the prompts of the batch as it is, with each adapter
    at its best, and with all of them. If that certainly earns more, the adapter that helps most goes back to its best;
    if it brings back less than half of what all of them do, all go back. If it earns no more, nothing has fallen, and
    the present adapters are the best from then on. Otherwise, the next full window may be tried again. The best
    weights are those at the best mean or, in a run with evaluations, at the best evaluation, which says more than a
    few batches.

    Args:
        run ([`RunContext`]): the run that trains it.
        error_of_evaluation (`Callable`): standard error of the reward of the last evaluation.
        policies ([`Policies`]): the adapters.
        best ([`BestAdapters`]): adapters at the best mean or evaluation.
        act (`Callable`): `act(rows)` runs the team on dataset rows and returns the rewards of all processes' episodes.
        copies ([`PastCopies`], *optional*): past copies; those of later steps are forgotten.
    """

    errors = _ERRORS_BEFORE_TRIAL

    def __init__(
        self,
        run: RunContext,
        error_of_evaluation: Callable[[], float],
        policies: Policies,
        best: BestAdapters,
        act: Callable[[Sequence[dict[str, Any]]], torch.Tensor],
        copies: PastCopies | None = None,
    ):
        super().__init__(run, error_of_evaluation)
        self._policies, self._best, self._act, self._copies = policies, best, act, copies
        self._best_step, self._error_of_fallen, self._has_restored = 0, 0.0, False
        self._last_rows: Sequence[dict[str, Any]] = ()

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "best_step": self._best_step,
            "has_restored": self._has_restored,
            "error_of_fallen": self._error_of_fallen,
            "last_rows": _plain(self._last_rows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._best_step, self._has_restored = state.get("best_step", 0), state.get("has_restored", False)
        self._error_of_fallen, self._last_rows = state.get("error_of_fallen", 0.0), state.get("last_rows", [])

    def _begin(self, rows: Sequence[dict[str, Any]]) -> None:
        self._last_rows = rows
        if not self._best.adapters:  # of a run that has only warned so far
            self._falls.best, self._best_evaluation = -math.inf, None

    def _take(self) -> None:
        self._best.take()
        self._best_step = self._state.optimizer_step

    def _undo(self, rows: Sequence[dict[str, Any]]) -> bool:
        # Gradients of the present weights are not applied to others: wait for the next optimizer step. A process whose
        # rows had no signal has none
        return not any(self._processes.gather([self._policies.have_gradients])) and self._restore(rows)

    def _note_fall(self, reward: float, error: float, has_fallen: bool, is_last: bool) -> None:
        if is_last:  # no batch follows, so nothing is lost by going back; all were evaluated on the same questions
            self._end_with_best_evaluation(reward)
        elif has_fallen:
            self._fallen_evaluation, self._error_of_fallen = reward, error

    def _note_dip(self, reward: float, is_last: bool) -> None:
        if is_last and self._has_restored:
            self._end_with_best_evaluation(reward)

    def on_step_end(self, args, state, control, **kwargs):
        # What has fallen since the window was last full is not left behind, nor saved as the result. A run that was
        # restored once is not stable: it ends with its best adapters, unless the last ones earn as much
        if state.global_step < state.max_steps or not self._best.adapters:
            return
        if control.should_evaluate and self._best_evaluation is not None:
            return  # the evaluation tells
        if self._has_restored:
            trial = self._try(self._last_rows)
            if trial.whole > 0:
                self._end_with_best(f"{'evaluation' if self._best_evaluation else 'mean reward'}. {trial.shown}")
        elif self._fallen_evaluation is not None or self._falls.has_fallen():
            self._restore(self._last_rows)

    def _end_with_best_evaluation(self, reward: float) -> None:
        best = self._best_evaluation[0] if self._best_evaluation is not None else math.nan
        self._end_with_best(f"evaluation, {best:.4g}, as the last one is {reward:.4g}")

    def _end_with_best(self, what: str) -> None:
        self._go_back(self._best.adapters)
        logger.warning(f"The team has fallen in this run, so it ends with its adapters of the best {what}")

    def _restore(self, rows: Sequence[dict[str, Any]]) -> bool:
        found, trial, evaluation = self._found(), self._try(rows), self._fallen_evaluation
        self._falls.begin_anew()
        self._fallen_evaluation = None
        if not trial.names:
            logger.warning(f"It seems that the team has collapsed: {found}. {trial.shown} Nothing is restored.")
            if trial.gain <= 0:  # the present adapters are the best
                self._falls.begin_anew(from_here=True)
                if evaluation is not None:
                    self._best_evaluation = (evaluation, self._error_of_fallen)
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
        if self._copies is not None:  # what is kept of later steps is no longer true
            self._copies.forget_after(self._best_step, names)

    def _try(self, rows: Sequence[dict[str, Any]]) -> _Trial:
        """Act with the best adapters, one of them and all of them, and with the present ones."""
        names = self._best.adapters
        if not any(self._processes.gather([len(rows)])):  # of a resumed run whose rows are not JSON
            return _Trial(names, math.inf, math.inf, "Nothing was tried, because no rows are at hand.")
        present = self._act(rows)
        restored = {name: self._with([name], rows) for name in names}
        everything = self._with(names, rows) if len(names) > 1 else restored[names[0]]
        gains, whole = (
            {name: _Gain.of(rewards, present) for name, rewards in restored.items()},
            _Gain.of(everything, present),
        )
        tried = ", ".join(f"{name!r} {torch.nanmean(rewards).item():.4g}" for name, rewards in restored.items())
        shown = (
            f"On the same prompts the team earned {torch.nanmean(present).item():.4g} as it was, with one adapter at "
            f"its best: {tried}; with all of them: {torch.nanmean(everything).item():.4g}."
        )
        helper = max(gains, key=lambda name: gains[name].mean)
        # Each adapter and all of them were tried, so the luckiest of them has to be certain
        tries = len(names) + 1 if len(names) > 1 else 1
        chance = _WRONG_TRIALS / tries
        chosen: list[str] = []
        if gains[helper].is_certain(chance) and gains[helper].mean >= whole.mean / 2:
            chosen = [helper]
        elif whole.is_certain(chance):
            chosen = names
        elif gains[helper].is_certain(chance):
            chosen = [helper]
        return _Trial(chosen, max(gains[helper].mean, whole.mean), whole.mean, shown)

    def _with(self, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> torch.Tensor:
        """Rewards on dataset rows while some adapters have their best weights."""
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(self._policies.with_weights(name, self._best.weights(name)))
            return self._act(rows)


class _Gain(NamedTuple):
    """Mean difference of episodes on the same prompts, its standard error, and how many could be compared."""

    mean: float
    error: float
    episodes: int

    @classmethod
    def of(cls, restored: torch.Tensor, present: torch.Tensor) -> _Gain:
        """No gain where none can be compared."""
        differences = (restored - present)[~(restored - present).isnan()].double()
        count = len(differences)
        if not count:
            return cls(-math.inf, 0.0, 0)
        error = differences.std().item() / math.sqrt(count) if count > 1 else math.inf
        return cls(differences.mean().item(), error, count)

    def is_certain(self, chance: float) -> bool:
        """Whether equally good adapters would gain as much with less than this probability (Student's test)."""
        if self.mean <= 0 or self.episodes < 2:
            return False
        if self.error == 0:
            return True
        return self.mean / self.error >= _students_quantile(1 - chance, self.episodes - 1)


@functools.cache
def _students_quantile(probability: float, freedom: int) -> float:
    return float(np.quantile(np.random.default_rng(0).standard_t(freedom, size=_DRAWS), probability))


def _plain(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dataset rows for a checkpoint; none where they are not JSON."""
    try:
        return json.loads(json.dumps(list(rows)))
    except (TypeError, ValueError):
        return []
