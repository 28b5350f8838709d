# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Time limits for users' code that runs in this process, also for code that blocks the interpreter's main thread."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


# Seconds that interrupted code has to come to an end, before the process is ended
GRACE = 20.0
# Exit code of a process that was ended because code could not be interrupted
EXIT_CODE = 124
# Called with the message before the process is ended
LAST_WORDS: list[Callable[[str], None]] = []
_SIGNAL: int | None = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))
_INTERNAL = (os.sep + "marft_trl" + os.sep, os.sep + "asyncio" + os.sep, os.sep + "threading.py")


class TookTooLong(TimeoutError):
    """Raised in code that has exceeded its time limit."""


class TimeLimit:
    """
    A time limit of the code inside [`time_limit`].

    Args:
        seconds (`float`): the limit.
        message (`Callable`): `message(where)` makes the error message; `where` names the function that was running.
        thread (`int`): identifier of the thread that runs the code.
    """

    def __init__(self, seconds: float, message: Callable[[str], str], thread: int):
        self._seconds, self._message, self._thread = seconds, message, thread
        self._deadline = time.monotonic() + seconds
        self._is_paused = 0
        self._is_done = threading.Event()
        self.error: TookTooLong | None = None

    def restart(self) -> None:
        """Begin the limit anew: the code has made progress."""
        self._deadline = time.monotonic() + self._seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager for code that is not the user's. Its time does not count."""
        self._is_paused += 1
        try:
            yield
        finally:
            self._is_paused -= 1
            self.restart()

    def watch(self) -> None:
        """Wait for the end of the code, and interrupt it when its time is over. Runs in a thread of its own."""
        while not self._is_done.wait(max(self._deadline - time.monotonic(), 0.01)):
            if self._is_paused:
                self.restart()
            elif time.monotonic() >= self._deadline:
                self._interrupt()
                return

    def end(self) -> None:
        """The code has ended."""
        self._is_done.set()

    def _interrupt(self) -> None:
        self.error = TookTooLong(self._message(_where(self._thread)))
        if self._thread == threading.main_thread().ident and _SIGNAL is not None and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(self._thread, _SIGNAL)
        else:  # reaches code in Python alone, at its next bytecode
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(TookTooLong))
        if self._is_done.wait(GRACE):
            return
        message = f"{self.error} It could not be interrupted, so the process ends."
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        os.write(2, f"\n{message}\n".encode())
        for say in LAST_WORDS:
            with contextlib.suppress(Exception):
                say(message)
        os._exit(EXIT_CODE)


_ACTIVE: list[TimeLimit] = []


@contextlib.contextmanager
def time_limit(seconds: float | None, message: Callable[[str], str]) -> Iterator[TimeLimit | None]:
    """
    Context manager: code that runs longer is interrupted. Code that cannot be interrupted, because it neither returns
    to the interpreter nor waits for the system, ends the process with code 124 and a traceback of all threads.

    Args:
        seconds (`float`, *optional*): the limit; `None` for none.
        message (`Callable`): `message(where)` makes the error message from the function that was running.

    Raises:
        TookTooLong: the limit was exceeded, also if the code has caught the interruption.
    """
    if seconds is None:
        yield None
        return
    limit = TimeLimit(seconds, message, threading.get_ident())
    before = _install()
    _ACTIVE.append(limit)
    threading.Thread(target=limit.watch, name="marft-watch", daemon=True).start()
    try:
        yield limit
    except TookTooLong:
        if limit.error is None:  # that of an outer limit
            raise
    finally:
        limit.end()
        _ACTIVE.remove(limit)
        _uninstall(before)
    if limit.error is not None:
        raise limit.error


def _install() -> Any:
    is_main = threading.current_thread() is threading.main_thread()
    return signal.signal(_SIGNAL, _on_signal) if is_main and _SIGNAL is not None else None


def _uninstall(before: Any) -> None:
    if before is not None and _SIGNAL is not None:
        signal.signal(_SIGNAL, before)


def _on_signal(number: int, frame: FrameType | None) -> None:
    expired = next((limit for limit in _ACTIVE if limit.error is not None), None)
    if expired is not None:
        raise TookTooLong(str(expired.error))


def _where(thread: int) -> str:
    """The innermost function of a thread that is not part of this package."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and any(part in frame.f_code.co_filename for part in _INTERNAL):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
