# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Whether the mean reward of a run has fallen from its best, by more than luck."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch


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
