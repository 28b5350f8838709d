# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The course of a run: where it begins, how signals end it, and what is saved when it fails."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import SaveStrategy

from ..config.marft_config import MARFTConfig
from ..seams.libraries import get_logger
from ..system.processes import Processes, exiting_forked_children
from .checkpoints import Checkpoints
from .run_folder import CheckpointError


logger = get_logger(__name__)

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name))
# Seconds of a step from which on the time between SIGTERM and SIGKILL of launchers is too short for it
_SHORT = 20.0


class RunInterrupted(SystemExit):
    """
    Raised by `train()` after a signal, when the step has been finished and a checkpoint saved. If it is not caught,
    the process exits with `128 + signal`: 143 after SIGTERM, 129 after SIGHUP, 130 after SIGINT.

    Args:
        message (`str`): what was saved, and how to go on.
    """

    def __init__(self, number: int, message: str):
        super().__init__(128 + number)
        self.signal = signal.Signals(number)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Signals:
    """Notes signals that ask a process to end, instead of ending it. A second SIGINT (Ctrl+C) ends it at once."""

    def __init__(self, saves: bool) -> None:
        self._saves = saves
        self.received = 0  # number of the first signal; 0 for none
        self.step_seconds = 0.0  # of the longest step so far
        self._before: dict[int, Any] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Record signals within the context, if this is the main thread: in others, Python cannot."""
        self.received = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under `nohup`
                self._before[number] = signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number
        name = signal.Signals(number).name
        then = "saving a checkpoint and exiting" if self._saves else "exiting; nothing is saved (`save_strategy='no'`)"
        # torchrun (PyTorch 2.13) sends SIGTERM to its processes and SIGKILL so many seconds later
        is_short = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ and self.step_seconds > _SHORT
        hint = (
            f" A step takes up to {self.step_seconds:.0f} s, and torchrun kills its processes 30 s after SIGTERM, "
            f"unless it was started with `--shutdown-timeout {max(120, 2 * round(self.step_seconds))}`."
        )
        os.write(2, f"\n{name}: finishing the step, then {then}.{hint if is_short else ''}\n".encode())
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


class Run(TrainerCallback):
    """The course of a run. `try_out` raises for what could not be saved; `clean_up` is called when training ends."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        args: MARFTConfig,
        processes: Processes,
        save: Callable[[], None],
        checkpoint_size: int,
        try_out: Callable[[], None],
        clean_up: Callable[[], None],
    ):
        self._checkpoints, self._args, self._processes, self._save = checkpoints, args, processes, save
        self._checkpoint_size, self._try_out, self._clean_up = checkpoint_size, try_out, clean_up
        self._saves = args.save_strategy != SaveStrategy.NO
        self._signals = Signals(self._saves)
        self._stopped_by, self._resumes = 0, False
        self._began: float | None = None  # when the present step began

    @contextlib.contextmanager
    def training(self, resume_from_checkpoint: str | bool | Path | None) -> Iterator[str | None]:
        """Train within the context. Yields the checkpoint to resume from."""
        self._stopped_by, self._resumes = 0, bool(resume_from_checkpoint)
        folder = self._checkpoints.folder
        with contextlib.ExitStack() as stack:
            stack.callback(self._clean_up)
            stack.enter_context(self._processes.reporting_failures())
            with self._processes.failing_together():
                if self._args.should_save:
                    stack.enter_context(folder.held())
                    folder.check_space(self._checkpoint_size)
                    self._check_can_save()
            self._check_shared()
            checkpoint = self._checkpoints.choose(resume_from_checkpoint)
            stack.enter_context(self._signals.watched())
            try:
                with exiting_forked_children():
                    yield checkpoint
                # For a signal after the last step, for example while a checkpoint was pushed
                if received := self._agreed_signal():
                    raise RunInterrupted(received, f"Received {signal.Signals(received).name} after the last step.")
            except Exception as error:
                if self._processes.is_shared(error):
                    self._save_after(error)
                raise

    def _check_can_save(self) -> None:
        try:
            self._try_out()
        except Exception as error:
            if not self._saves:
                logger.warning(f"`save_model()` will fail: {type(error).__name__}: {error}")
                return
            raise CheckpointError(
                f"The run was not started, because it could not be saved: {type(error).__name__}: {error}. Fix what "
                "this error names; the workflow's `describe()`, adapter configs and training arguments must be "
                "serializable."
            ) from error

    def _check_shared(self) -> None:
        """Check that all nodes share the output folder: a checkpoint has parts of all processes."""
        folder, processes = self._checkpoints.folder, self._processes
        if processes.count == 1 or not self._saves:
            return
        with folder.marked() if processes.is_main else contextlib.nullcontext() as mark:
            name = processes.broadcast(mark)
            with processes.failing_together():
                folder.check_mark(name)

    def _agreed_signal(self) -> int:
        received = torch.tensor([self._signals.received], dtype=torch.float64)
        return int(self._processes.max(received).item())

    def _save_after(self, error: Exception) -> None:
        """Save the last complete step after a failure in the next one. The failure stays the error of the run."""
        if not self._saves or isinstance(error, CheckpointError):
            return
        try:
            is_saved = self._checkpoints.save_recorded_step(self._save)
        except Exception as problem:
            logger.warning(f"Could not save a checkpoint after the failure: {problem}")
            return
        if is_saved and self._processes.is_main:
            where = self._checkpoints.folder.newest_complete()
            note = f"The last complete step is saved in {where}; `train(resume_from_checkpoint=True)` resumes from it."
            logger.warning(note)
            error.add_note(note)

    # ---- Called by the Trainer ----

    def is_over(self, state: TrainerState) -> bool:
        if state.global_step >= state.max_steps:
            logger.info(f"All {state.max_steps} steps are already done; there is nothing to train.")
        return state.global_step >= state.max_steps

    def on_train_begin(self, args, state, control, **kwargs):
        self._checkpoints.restore_log_window()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._checkpoints.discard_recorded_step()

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if self._began is not None:
            self._signals.step_seconds = max(self._signals.step_seconds, time.monotonic() - self._began)
        if self._saves:
            self._checkpoints.record_step()  # an evaluation, which comes next, may fail
        self._stopped_by = self._agreed_signal()
        if self._stopped_by:
            control.should_save = self._saves
            control.should_training_stop = True

    def after_step(self) -> None:
        """The step is complete, with logs, evaluation and checkpoint. Raises `RunInterrupted` after a signal."""
        if self._stopped_by:
            name = signal.Signals(self._stopped_by).name
            if self._saves and not self._checkpoints.has_current_checkpoint():
                self._save()  # an evaluation has decided against it
            newest = self._checkpoints.folder.newest_complete() if self._args.should_save else None
            way = "Run the same command again" if self._resumes else "Call `train(resume_from_checkpoint=True)`"
            next_start = f"It is saved in {newest}. {way} to resume from it."
            if newest is None:
                next_start = (
                    "Nothing was saved (`save_strategy='no'`), so the next run starts at step 1. Set "
                    "`save_strategy='steps'` to be able to resume."
                )
            message = f"Training was stopped by {name} after step {self._checkpoints.step}. {next_start}"
            if self._processes.is_main:
                logger.warning(message)
            raise RunInterrupted(self._stopped_by, message)
        if self._saves:
            self._checkpoints.record_step()
