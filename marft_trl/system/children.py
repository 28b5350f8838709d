# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Processes that are told to end when the one that started them is."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import IO, Any

from .keeper import keep, let_go


class Children:
    """
    Starts processes. If the block is left by an exception, by Ctrl+C or by SIGTERM, those that still run are sent
    SIGTERM, at which a trainer saves a checkpoint, and are waited for. They are also sent SIGTERM if this process is
    killed. Without this, they would go on alone and keep their folders from the next call.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._has_ended = False
        self._before: Any = None

    def __enter__(self) -> Children:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._terminated)
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        if kind is not None:
            self.end()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, log: IO[str] | None = None
    ) -> int:
        """
        Run a command to its end. Threads may call it.

        Args:
            command (`Sequence[str]`): program and arguments.
            environment (`Mapping[str, str]`, *optional*): variables in place of those of this process.
            log (file, *optional*): where its output goes.

        Returns: the exit status, negative for a signal.

        Raises:
            RuntimeError: the block has been left.
        """
        stderr = None if log is None else subprocess.STDOUT
        with self._lock:
            if self._has_ended:
                raise RuntimeError("Nothing is started any more: the run was told to end.")
            # By its key until its number is known: this process may be killed in between
            key = f"child-{uuid.uuid4().hex}"
            keep(key, gently=True)
            variables = {**(os.environ if environment is None else environment), "MARFT_CHILD": key}
            process = subprocess.Popen(list(command), stdout=log, stderr=stderr, env=variables)  # noqa: S603
            self._running.add(process)
            keep(key, process.pid, gently=True)
        try:
            return process.wait()
        finally:
            with self._lock:
                if process.returncode is not None:
                    self._running.discard(process)
                    let_go(key)

    def end(self) -> None:
        """Start nothing any more, end what runs, and wait for it."""
        with self._lock:
            self._has_ended = True
            running = list(self._running)
        for process in running:
            process.terminate()
        for process in running:
            process.wait()

    @staticmethod
    def _terminated(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)
