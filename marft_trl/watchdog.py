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
        self._seconds, self._message, self.thread = seconds, message, thread
        self._deadline = time.monotonic() + seconds
        self._is_paused = 0
        self._is_done = threading.Event()
        self._lock = threading.Lock()
        self.is_ending = False
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

    def expire(self) -> float:
        """Seconds that are left. If there are none, `error` is set."""
        if self._is_paused:
            self.restart()
        left = self._deadline - time.monotonic()
        if left <= 0 and self.error is None:
            self.error = TookTooLong(self._message(_where(self.thread)))
        return left

    def watch(self) -> None:
        """Wait for the end of the code, and interrupt it when its time is over. Runs in a thread of its own."""
        while not self._is_done.wait(max(self._deadline - time.monotonic(), 0.01)):
            if self.expire() <= 0:
                self._interrupt()
                return

    def end(self) -> None:
        """The code has ended."""
        self.is_ending = True
        with self._lock:
            self._is_done.set()
        if self.error is not None and self.thread != threading.main_thread().ident:
            _raise_in(self.thread, None)  # what was to be raised and has not been yet

    def _interrupt(self) -> None:
        with self._lock:
            if self.is_ending:
                return
            if self.thread == threading.main_thread().ident and _SIGNAL is not None:
                signal.pthread_kill(self.thread, _SIGNAL)
            else:  # reaches code in Python alone, at its next bytecode
                _raise_in(self.thread, TookTooLong)
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
    _ACTIVE.append(limit)
    uninstall = _install(seconds)
    threading.Thread(target=limit.watch, name="marft-watch", daemon=True).start()
    try:
        yield limit
    except TookTooLong:
        if limit.error is None:  # that of an outer limit
            raise
    finally:
        try:
            limit.end()
        finally:
            _ACTIVE.remove(limit)
            uninstall()
    if limit.error is not None:
        raise limit.error


def _install(seconds: float) -> Callable[[], None]:
    """Take the signals that interrupt the main thread. Returns what gives them back."""
    if threading.current_thread() is not threading.main_thread() or _SIGNAL is None:
        return lambda: None
    signal.signal(_SIGNAL, _on_signal)  # stays: a signal may arrive when the limit is over, and does nothing then
    has_timer, before = not any(signal.getitimer(signal.ITIMER_REAL)), signal.getsignal(signal.SIGALRM)
    if has_timer:
        # The system's timer also reaches code that keeps the interpreter to itself, such as a regular expression
        signal.signal(signal.SIGALRM, _on_alarm)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def uninstall() -> None:
        if has_timer and signal.getsignal(signal.SIGALRM) == _on_alarm:  # else the user's code has taken it
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)

    return uninstall


def _on_alarm(number: int, frame: FrameType | None) -> None:
    thread = threading.main_thread().ident
    left = min((limit.expire() for limit in _ACTIVE if limit.thread == thread), default=None)
    if left is not None and left > 0:
        signal.setitimer(signal.ITIMER_REAL, left)
    _on_signal(number, frame)


def _on_signal(number: int, frame: FrameType | None) -> None:
    expired = next((limit for limit in _ACTIVE if limit.error is not None and not limit.is_ending), None)
    if expired is not None:
        raise TookTooLong(str(expired.error))


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _where(thread: int) -> str:
    """The innermost function of a thread that is not part of this package."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and any(part in frame.f_code.co_filename for part in _INTERNAL):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
