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
from typing import cast


GRACE = 20.0  # seconds that interrupted code has to come to an end, before the process is ended
_PATIENCE = 3  # interruptions of code that goes on after each, before the process is ended
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between two attempts to end a thread: the first, and at most
EXIT_CODE = 124  # exit code of a process that was ended because code could not be interrupted
ON_EXIT: list[Callable[[str], None]] = []  # called with the message before the process is ended
_SIGNAL: int | None = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))
_INTERNAL = (os.sep + "marft_trl" + os.sep, os.sep + "asyncio" + os.sep, os.sep + "threading.py")


class TookTooLong(TimeoutError):
    """Raised in code that has exceeded its time limit."""


class TimeLimit:
    """A time limit of the code inside [`time_limit`], which runs in a thread with this identifier."""

    def __init__(self, seconds: float, message: Callable[[str], str], thread: int):
        self._seconds, self._message, self.thread = seconds, message, thread
        self._deadline = time.monotonic() + seconds
        self._is_paused = 0
        self._is_done = threading.Event()
        self._lock = threading.Lock()
        self._was_reached = threading.Event()  # by the interruption
        self._interruptions = 0
        self.is_ending = False
        self.error: TookTooLong | None = None

    def restart(self) -> None:
        self._deadline = time.monotonic() + self._seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock within the context, for code that is not the user's or that has its own limit."""
        self._is_paused += 1
        try:
            yield
        finally:
            self._is_paused -= 1
            self.restart()

    def left(self) -> float:
        if self._is_paused:
            self.restart()
        return self._deadline - time.monotonic()

    def interruption(self) -> TookTooLong | None:
        """The error to raise in the code now, if any. Each interruption is raised once."""
        if self.is_ending or self._was_reached.is_set() or self.left() > 0:
            return None
        self.error = self.error or TookTooLong(self._message(_where(self.thread)))
        self._was_reached.set()
        return self.error

    def watch(self) -> None:
        """Wait for the end of the code, and interrupt it when its time is over. Runs in its own thread."""
        while not self._is_done.wait(max(self.left(), 0.01)):
            if self.left() <= 0 and not self._was_interrupted():
                _end_process(f"{self.error} It could not be interrupted, so the process exits.")

    def _was_interrupted(self) -> bool:
        """Interrupt the code. Code that goes on is interrupted again after the same time, three times in all."""
        self._interruptions += 1
        with self._lock:
            if self.is_ending:
                return True
            self.error = self.error or TookTooLong(self._message(_where(self.thread)))
            if self.thread == threading.main_thread().ident and _SIGNAL is not None:
                if not self._was_reached.is_set():  # by the system's timer
                    signal.pthread_kill(self.thread, _SIGNAL)
            else:  # reaches code in Python alone, at its next bytecode
                raise_in(self.thread, TookTooLong)
                self._was_reached.set()
        end = time.monotonic() + GRACE
        while time.monotonic() < end and not self._is_done.wait(0.05):
            if self._was_reached.is_set() and self._interruptions <= _PATIENCE:
                self.restart()
                self._was_reached.clear()
                return True
        return self._is_done.is_set()

    def end(self) -> None:
        self.is_ending = True
        with self._lock:
            self._is_done.set()
        if self.error is not None and self.thread != threading.main_thread().ident:
            raise_in(self.thread, None)  # what was to be raised and has not been yet


def _end_process(message: str) -> None:
    """Print the reason, report it to the other processes, and exit without any cleanup, which might hang as well."""
    try:
        with contextlib.suppress(Exception):
            os.write(2, f"\n{message}\n".encode())
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        for say in ON_EXIT:
            words = threading.Thread(target=say, args=(message,), daemon=True)
            words.start()
            words.join(5.0)
    finally:
        os._exit(EXIT_CODE)


_ACTIVE: list[TimeLimit] = []


def progress() -> None:
    """Restart all limits: a function of a user was called, or has returned."""
    for limit in list(_ACTIVE):
        limit.restart()


@contextlib.contextmanager
def time_limit(seconds: float | None, message: Callable[[str], str]) -> Iterator[TimeLimit | None]:
    """
    Interrupt code that runs longer than `seconds` (`None` for no limit), and raise a [`TookTooLong`] even if the code
    has caught the interruption. `message(where)` makes the error message from the function that was running.

    Code that cannot be interrupted, because it neither returns to the interpreter nor waits for the system, ends the
    process with code 124 and a traceback of all threads. A limit around another one does not count its time.
    """
    if seconds is None:
        yield None
        return
    limit = TimeLimit(seconds, message, threading.get_ident())
    with contextlib.ExitStack() as outer:
        for other in [item for item in _ACTIVE if item.thread == limit.thread]:
            outer.enter_context(other.paused())
        _ACTIVE.append(limit)
        uninstall = _install()
        threading.Thread(target=limit.watch, name="marft-watch", daemon=True).start()
        try:
            yield limit
        except TookTooLong:
            if limit.error is None:  # that of an outer limit
                raise
        finally:
            try:
                limit.end()
            except TookTooLong:  # in the very moment at which the code ended
                limit.end()
            finally:
                _ACTIVE.remove(limit)
                uninstall()
    if limit.error is not None:
        raise limit.error


def _install() -> Callable[[], None]:
    """Install the signal handlers that interrupt the main thread. Return a function that restores the former ones."""
    if threading.current_thread() is not threading.main_thread() or _SIGNAL is None:
        return lambda: None
    signal.signal(_SIGNAL, _on_signal)  # stays: a signal may arrive when the limit is over, and does nothing then
    before = signal.getsignal(signal.SIGALRM)
    is_ours = before == _on_signal
    if not is_ours and any(signal.getitimer(signal.ITIMER_REAL)):
        return lambda: None  # the timer is somebody else's
    # The system's timer also reaches code that keeps the interpreter to itself, such as a regular expression
    signal.signal(signal.SIGALRM, _on_signal)
    _set_timer()

    def uninstall() -> None:
        if signal.getsignal(signal.SIGALRM) != _on_signal:  # the user's code has taken it
            return
        _set_timer()
        if not is_ours:
            signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)

    return uninstall


def _set_timer() -> None:
    """Set the system's timer to the next end of a limit of the main thread."""
    left = [item.left() for item in _ACTIVE if item.thread == threading.main_thread().ident and not item.is_ending]
    signal.setitimer(signal.ITIMER_REAL, max(min(left), 0.01) if left else 0)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGALRM:
        _set_timer()
    for limit in list(_ACTIVE):
        if limit.thread == threading.main_thread().ident and (error := limit.interruption()) is not None:
            raise TookTooLong(str(error))


def raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next bytecode; `None` takes back one that has not been raised yet."""
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def end_thread(thread: threading.Thread) -> None:
    """
    Raise `SystemExit` in a thread until it ends, at growing intervals: the code may catch it, and Python drops an
    exception that reaches a finalizer or a weak reference's callback.
    """

    def insist() -> None:
        seconds = _FIRST_PAUSE
        while thread.is_alive():
            raise_in(cast(int, thread.ident), SystemExit)  # not an `Exception`, which functions catch
            thread.join(seconds)
            seconds = min(2 * seconds, _LONGEST_PAUSE)

    threading.Thread(target=insist, name="marft-end", daemon=True).start()


def _where(thread: int) -> str:
    """The innermost function of a thread that is not part of this package."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and any(part in frame.f_code.co_filename for part in _INTERNAL):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
