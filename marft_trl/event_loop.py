# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Coroutines from code that is not asynchronous, also where a loop runs already, as in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar


Result = TypeVar("Result")

# Each thread keeps its loop: clients and locks that an asynchronous tool has made stay good from batch to batch, and
# nothing waits for threads that a tool has left behind, as `asyncio.run` does in the end. Where a loop runs already,
# another thread is used, which has one of its own in its turn: runs may be nested.
_OWN = threading.local()
# Functions of users that are not asynchronous run one at a time, as if called in a loop, so they need not be
# thread-safe. Each lane of them keeps to one thread, so those of a lane may share what belongs to a thread, such as a
# database connection; what hangs in one lane costs the other nothing.
Lane = Literal["tools", "environments"]
_ONE_AT_A_TIME: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
_GRACE = 5.0  # seconds
_UNSET = object()
_WORKERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Lane, _Worker]] = weakref.WeakKeyDictionary()


def run_coroutine(function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
    """Run a coroutine function to its end and return its result, in another thread if a loop runs in this one."""
    if _a_loop_runs():
        if not hasattr(_OWN, "beside"):
            _OWN.beside = ThreadPoolExecutor(1, thread_name_prefix="marft-loop")
        return _OWN.beside.submit(_run, function, arguments).result()
    return _run(function, arguments)


def _a_loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(function: Callable[..., Coroutine[Any, Any, Result]], arguments: tuple) -> Result:
    loop = getattr(_OWN, "loop", None)
    if loop is None or loop.is_closed():
        loop = _OWN.loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(function(*arguments))
    finally:
        _cancel_the_rest(loop)


def _cancel_the_rest(loop: asyncio.AbstractEventLoop) -> None:
    """End what was started and not waited for, so that it does not go on in the next run."""
    rest = asyncio.all_tasks(loop)
    for task in rest:
        task.cancel()
    if rest:
        loop.run_until_complete(asyncio.wait(rest, timeout=1.0))


@contextlib.asynccontextmanager
async def one_at_a_time() -> AsyncIterator[None]:
    """
    Wait until no function runs in a thread; within, [`in_thread`] may be used. A function that nobody waits for any
    more has a little time to come to its end; then it is left to itself, since Python cannot end a thread, and its
    lane gets a new one.
    """
    loop = asyncio.get_running_loop()
    async with _ONE_AT_A_TIME.setdefault(loop, asyncio.Lock()):
        for lane, worker in list(_WORKERS.get(loop, {}).items()):
            if not worker.finished.done():
                await asyncio.wait({worker.finished}, timeout=_GRACE)
            if not worker.finished.done():
                give_up(lane)
        yield


async def in_thread(function: Callable[[], Any], lane: Lane) -> tuple[Any, BaseException | None]:
    """
    Run a function beside the loop, in the thread of its lane: what it returns, and what it raises or `None`. It sees
    the context variables of whoever waits for it, and those that it sets stay set.
    """
    loop = asyncio.get_running_loop()
    workers = _WORKERS.setdefault(loop, {})
    if lane not in workers:
        workers[lane] = _Worker()
        weakref.finalize(loop, workers[lane].end)
    context = contextvars.copy_context()
    outcome = await workers[lane].run(loop, functools.partial(context.run, function))
    for variable, value in context.items():
        if variable.get(_UNSET) is not value:
            variable.set(value)
    return outcome


def give_up(lane: Lane) -> None:
    """Leave the function that runs in a lane to itself: the next one gets a new thread."""
    worker = _WORKERS.get(asyncio.get_running_loop(), {}).pop(lane, None)
    if worker is not None:
        worker.end()


class _Worker:
    """A thread that nothing waits for in the end; `asyncio.to_thread` waits for threads that hang."""

    finished: asyncio.Future[None]  # of the latest function

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="marft-worker", daemon=True).start()

    def end(self) -> None:
        """Let the thread end after what it does."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds what the function holds

    def run(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[], Any]
    ) -> asyncio.Future[tuple[Any, BaseException | None]]:
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        finished = self.finished = loop.create_future()

        def report(result: Any, error: BaseException | None) -> None:
            finished.set_result(None)
            if not outcome.done():  # else nobody waits any more
                outcome.set_result((result, error))

        def job() -> None:
            result, error = None, None
            try:
                result = function()
            except BaseException as caught:  # also SystemExit: whoever waits decides
                error = caught
            if not loop.is_closed():
                loop.call_soon_threadsafe(report, result, error)

        self._jobs.put(job)
        return outcome
