# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A step that does not fit into the memory of the device is taken once more, in smaller micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache

from ..config.team_setup import RunContext
from ..rules.rows import Row
from ..seams.logs import get_logger
from ..system.randomness import RandomStates
from .adapter_updates import AdapterUpdates
from .memory import MemoryPlan, readable, size_of
from .micro_batcher import MicroBatcher


logger = get_logger(__name__)

# Bytes of gradients that are copied before each micro-step but the first, so that it can be taken again
_MOST_COPIED = 2**30
# Returns a function that takes back what was noted since
Snapshot = Callable[[], Callable[[], None]]


class OutOfMemory:
    """
    Takes a micro-step of training again that has failed for lack of memory: from its start, with the same random
    numbers and gradients, in micro-batches of half the size.

    Args:
        run ([`RunContext`]): processes and state of the run.
        batcher ([`MicroBatcher`]): its limit is halved, and stays so.
        updates ([`AdapterUpdates`]): what is trained.
        randomness ([`RandomStates`]): of training.

    Attributes:
        plan (`Callable`, *optional*): `plan()` returns the [`MemoryPlan`] that a second failure is shown beside.
        release (`Callable`, *optional*): `release()` gives back what generation keeps for its next call.
    """

    def __init__(self, run: RunContext, batcher: MicroBatcher, updates: AdapterUpdates, randomness: RandomStates):
        self._state, self._processes = run.state, run.processes
        self._batcher, self._updates, self._randomness = batcher, updates, randomness
        self.plan: Callable[[], MemoryPlan] | None = None
        self.release: Callable[[], None] | None = None

    def guard(
        self, work: Callable[[], torch.Tensor], rows: Sequence[Row], notes: Sequence[Snapshot], alone: bool
    ) -> torch.Tensor:
        """
        Run the forward and backward passes of a micro-step.

        Args:
            work (`Callable`): `work()` runs them, and returns the loss.
            rows (`Sequence[Row]`): the rows that they are about.
            notes (`Sequence[Snapshot]`): of what they write down.
            alone (`bool`): whether other processes take no part in them, so that this one can begin anew.

        Raises:
            RuntimeError: memory is still too small, or the step cannot be taken again, with the plan beside what was
                measured.
        """
        why_not = None if alone else "other processes take part in its passes"
        states, undo, problem = self._randomness.capture(), [snapshot() for snapshot in notes], ""
        gradients: list[tuple[Any, torch.Tensor | None]] = []
        try:
            if alone:
                gradients, why_not = self._gradients()
            return work()
        except torch.OutOfMemoryError as error:
            problem = _first_line(error)
        # Here, and not where it was caught: until then the error holds the tensors of the passes
        if self.release is not None:
            self.release()
        if why_not is None and not self._smaller(rows, problem):
            why_not = "a single row is too long, with gradient checkpointing as it is set"
        elif why_not is None:
            clear_device_cache(garbage_collection=True)
            self._randomness.restore(states)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for take_back in undo:
                take_back()
            try:
                return work()
            except torch.OutOfMemoryError as error:
                problem = _first_line(error)
        raise RuntimeError(self._described(problem, why_not))

    def _gradients(self) -> tuple[list[tuple[Any, torch.Tensor | None]], str | None]:
        """Copies of what earlier micro-steps have added to gradients, and why there are none, if so."""
        trained = [one for its in self._updates.trained_parameters().values() for one in its.values()]
        if size_of([one.grad for one in trained if one.grad is not None]) > _MOST_COPIED:
            return [], "the gradients of the micro-steps before it are too large for a copy"
        return [(one, None if one.grad is None else one.grad.detach().clone()) for one in trained], None

    def _smaller(self, rows: Sequence[Row], problem: str) -> bool:
        """Halve micro-batches, or checkpoint gradients where a single row is too long; `False` if neither is left."""
        change = self._batcher.shrink(rows)
        if change is not None:
            logger.warning(
                f"Step {self._state.optimizer_step + 1} ran out of memory ({problem}). It is taken again from its "
                f"start, and from now on {change}. To set the limit yourself: `max_tokens_per_micro_batch`.",
                main_process_only=False,
            )
        return change is not None

    def _described(self, problem: str, why_not: str | None) -> str:
        device, lines = self._processes.device, []
        if self.plan is not None:
            with contextlib.suppress(Exception):  # it measures a pass, for which there may be no memory left
                lines = ["What was planned for turns of maximum length:", str(self.plan())]
        if device.type == "cuda":
            most, whole = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
            lines.append(f"Measured: {readable(most)} at once, of {readable(whole)}.")
        what = "again, in smaller micro-batches too" if why_not is None else f"and cannot be taken again: {why_not}"
        return "\n".join(
            [
                f"Step {self._state.optimizer_step + 1} ran out of memory {what} ({problem}). Set "
                "`max_tokens_per_micro_batch` lower, `gradient_checkpointing=True`, shorter turns "
                "(`max_completion_length`), or load the base in 4 bit.",
                *lines,
            ]
        )


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].split(". ")[0].rstrip(".")
