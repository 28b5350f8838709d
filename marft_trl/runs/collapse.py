# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Teams whose evaluations fall from their best: one warning, or back to the best adapters."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from ..adapters.policies import Policies
from ..config.team_setup import RunContext
from ..seams.libraries import get_logger
from ..seams.swapping import swapped
from .checkpoints import BestAdapters


logger = get_logger(__name__)

# How far `eval_reward` may be below its best: a share of the best, and standard errors of the difference
DROP, ERRORS = 0.1, 5.0


class Collapse(TrainerCallback):
    """
    Compares `eval_reward` of the trainer's own set with its best. The team has collapsed when it is below the best by
    more than [`DROP`] of it and by more than [`ERRORS`] standard errors. That logs one warning. With `adapters`, all
    are restored as they were at the best evaluation, before the next episodes or after the last evaluation.
    """

    def __init__(
        self,
        run: RunContext,
        error_of_evaluation: Callable[[], float],
        policies: Policies,
        adapters: BestAdapters | None = None,
    ):
        self._metrics, self._error_of_evaluation = run.metrics, error_of_evaluation
        self._processes, self._state = run.processes, run.state
        self._policies, self._adapters = policies, adapters
        self._best: tuple[float, float] | None = None  # `eval_reward` and its standard error
        self._best_step, self._found = 0, ""  # `_found`: why adapters are restored before the next episodes
        self._was_logged = self._is_training = self._is_ignored = False

    def state_dict(self) -> dict[str, Any]:
        restoring = {"best_step": self._best_step, "found": self._found} if self._adapters is not None else {}
        return {"was_said": self._was_logged, "best_evaluation": self._best, **restoring}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a [`state_dict`], also of version 0.3."""
        best = state["best_evaluation"]
        self._was_logged, self._best = state["was_said"], (best[0], best[1]) if best is not None else None
        if self._adapters is not None:
            self._best_step, self._found = state.get("best_step", 0), state.get("found", "")
            if not self._adapters.adapters:  # of a run that has only warned so far
                self._best = None

    def undo(self) -> None:
        """Called before episodes are sampled for training."""
        # Gradients of the present weights on any process are not applied to others: the optimizer step comes first
        if self._found and not any(self._processes.gather([self._policies.has_pending_gradients])):
            self._restore()

    def ignoring_evaluations(self, if_: bool) -> contextlib.AbstractContextManager[None]:
        """Ignore evaluations within the context if the condition holds: of another set, or sampled otherwise."""
        return swapped(self, {"_is_ignored": if_})

    def on_train_begin(self, args, state, control, **kwargs):
        self._is_training = True

    def on_train_end(self, args, state, control, **kwargs):
        self._is_training = False

    def on_step_end(self, args, state, control, **kwargs):
        # A callback ends the run here, so no episodes follow. One that a signal ends keeps this for its checkpoint
        if self._found and control.should_training_stop and not control.should_evaluate:
            self._restore()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        reward, error = (metrics or {}).get("eval_reward", math.nan), self._error_of_evaluation()
        if not self._is_training or self._is_ignored or state.global_step == 0 or math.isnan(reward):
            return
        best, best_error = self._best or (-math.inf, 0.0)
        if reward >= best:
            self._best = reward, error
            if self._adapters is not None:
                self._adapters.capture()
                self._best_step, self._found = self._state.optimizer_step, ""
        elif best - reward > max(DROP * abs(best), ERRORS * math.hypot(error, best_error)):
            found = f"`eval_reward` is {reward:.4g}, but the best was {best:.4g}"
            if self._adapters is not None:
                self._found = found
                if state.global_step >= state.max_steps:
                    self._restore()
            elif not self._was_logged:
                self._was_logged = True
                logger.warning(
                    f"THE TEAM HAS COLLAPSED: {found}. Lower the learning rate, resume from an earlier checkpoint, or "
                    "set `on_collapse='restore'`, which restores the adapters of the best evaluation."
                )

    def _restore(self) -> None:
        if self._adapters is None:
            return
        for name in self._adapters.adapters:
            self._adapters.restore(name)
        self._metrics.add("collapse/restored", 1.0)
        logger.warning(
            f"THE TEAM HAS COLLAPSED: {self._found}. All adapters and their optimizer state are RESTORED to step "
            f"{self._best_step}. Lower the learning rate to avoid this."
        )
        self._found = ""
