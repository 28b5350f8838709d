# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Run coroutines from synchronous code, also if an event loop is already running, as in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar


Result = TypeVar("Result")

# Each thread keeps its event loop, so that clients and locks of an asynchronous tool stay valid from batch to batch.
# Unlike `asyncio.run`, this does not wait for threads that a tool has left behind. If a loop is already running, the
# coroutine runs in another thread with its own loop, so runs can be nested.
_OWN = threading.local()
# Synchronous functions of users run one at a time, so they do not need to be thread-safe. All functions of a lane run
# in the same thread, so they can share objects that are bound to a thread, such as a database connection. A function
# that hangs in one lane does not block the other lane.
Lane = Literal["tools", "environments"]
_ONE_AT_A_TIME: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
_GRACE = 5.0  # seconds
_MOST_THREADS = 1024  # of `asyncio.to_thread` and others at a time, started when needed
_UNSET = object()
_WORKERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Lane, _LoopThread]] = weakref.WeakKeyDictionary()


def run_coroutine(function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
    """Run a coroutine function and return its result. If this thread already runs a loop, use another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        if not hasattr(_OWN, "beside"):
            _OWN.beside = ThreadPoolExecutor(1, thread_name_prefix="marft-loop")
        return _OWN.beside.submit(_run, function, arguments).result()
    return _run(function, arguments)


def finished(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("The coroutine must finish without waiting, but it awaited something.")


def _run(function: Callable[..., Coroutine[Any, Any, Result]], arguments: tuple) -> Result:
    loop = getattr(_OWN, "loop", None)
    if loop is None or loop.is_closed():
        loop = _OWN.loop = asyncio.new_event_loop()
        # Episodes wait for one another, so none may wait for a thread that another one holds
        loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="marft-thread"))
    main = loop.create_task(function(*arguments))
    try:
        return loop.run_until_complete(main)
    except (asyncio.CancelledError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "Event loop stopped" not in str(error):
            raise
        did = "stopped the event loop" if isinstance(error, RuntimeError) else "cancelled tasks that it did not start"
        raise RuntimeError(
            f"A workflow, a tool or an asynchronous reward function has {did}. The trainer's own tasks run in the "
            "same loop, and `asyncio.all_tasks()` includes them. Cancel only your own tasks, and end by returning."
        ) from error
    finally:
        # Tasks that were started but never awaited would continue in the next run
        rest = asyncio.all_tasks(loop)
        for task in rest:
            task.cancel()
        if rest:
            loop.run_until_complete(asyncio.wait(rest, timeout=1.0))


@contextlib.asynccontextmanager
async def one_at_a_time() -> AsyncIterator[None]:
    """
    Wait until no function runs in a thread, then allow [`in_thread`] within the context. An abandoned function gets a
    few seconds to finish; then its lane gets a new thread, and the old one, which Python cannot stop, keeps running.
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
    """Run a function in a lane, in the caller's context, which it may change. Return its result and its exception."""
    loop = asyncio.get_running_loop()
    workers = _WORKERS.setdefault(loop, {})
    if lane not in workers:
        workers[lane] = _LoopThread()
        weakref.finalize(loop, workers[lane].end)
    context, step_context = contextvars.copy_context(), _STEP_CONTEXT.get()
    running = workers[lane].run(loop, functools.partial(context.run, _run_in_step_context, function, step_context))
    if step_context is not None:
        _IN_THREAD[loop] = workers[lane].finished
    outcome = await running
    for variable, value in context.items():
        if variable.get(_UNSET) is not value:
            variable.set(value)
    return outcome


def _run_in_step_context(function: Callable[[], Any], step_context: StepContext | None) -> Any:
    with contextlib.nullcontext() if step_context is None else step_context():
        return function()


def give_up(lane: Lane) -> None:
    """Abandon the function that is running in a lane: the next function gets a new thread."""
    _IN_THREAD.pop(asyncio.get_running_loop(), None)
    if (worker := _WORKERS.get(asyncio.get_running_loop(), {}).pop(lane, None)) is not None:
        worker.end()


# Context manager around each piece of users' code that does not wait: a step of a coroutine, a function in a thread
StepContext = Callable[[], contextlib.AbstractContextManager[None]]
_STEP_CONTEXT: contextvars.ContextVar[StepContext | None] = contextvars.ContextVar("marft_step_context", default=None)
# Resolved when the function returns that runs in a thread
_IN_THREAD: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[None]] = weakref.WeakKeyDictionary()


class StepWrapper(Coroutine[Any, Any, Any]):
    """
    A coroutine with a context manager, made by `step_context()`, around each of its steps and of the tasks that it
    starts. No step is taken while a function of a user runs in a thread, so that what surrounds them cannot mix.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], step_context: StepContext):
        self._coroutine, self._step_context = coroutine, step_context
        self._steps = self._run()

    def send(self, value: Any) -> Any:
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        try:
            return self._steps.throw(*error)
        except BaseException:
            self._coroutine.close()  # it may not have begun
            raise

    def close(self) -> None:
        self._steps.close()
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._run()

    def _run(self) -> Generator[Any, Any, Any]:
        loop, value, error = asyncio.get_running_loop(), None, None
        _STEP_CONTEXT.set(self._step_context)
        while True:
            while error is None and (running := _IN_THREAD.get(loop)) is not None and not running.done():
                try:
                    yield from asyncio.wait({running}).__await__()
                except BaseException as caught:  # a cancellation is the coroutine's
                    error = caught
            try:
                with self._step_context():
                    awaited = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            value, error = None, None
            try:
                value = yield awaited
            except BaseException as caught:
                error = caught


# Gets the tasks that code starts, and what they run, where it is set
STARTED: contextvars.ContextVar[list[tuple[asyncio.Task, str]] | None]
STARTED = contextvars.ContextVar("marft_started", default=None)


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task:
    """Task factory: tasks that users' code starts are surrounded like the code that started them, and noted."""
    step_context, started = _STEP_CONTEXT.get(), STARTED.get()
    wrapped = coroutine if step_context is None else StepWrapper(coroutine, step_context)
    task = asyncio.Task(wrapped, loop=loop, **options)
    if started is not None:
        started.append((task, getattr(coroutine, "__qualname__", type(coroutine).__name__)))
    return task


class _LoopThread:
    """Daemon thread. Unlike threads of `asyncio.to_thread`, it does not block the exit of Python if it hangs."""

    finished: asyncio.Future[None]  # of the latest function

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="marft-worker", daemon=True).start()

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # release the objects that the function references

    def run(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[], Any]
    ) -> asyncio.Future[tuple[Any, BaseException | None]]:
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        finished = self.finished = loop.create_future()

        def report(result: Any, error: BaseException | None) -> None:
            finished.set_result(None)
            if not outcome.done():  # it is done if the caller was cancelled
                outcome.set_result((result, error))

        def job() -> None:
            result, error = None, None
            try:
                result = function()
            except BaseException as caught:  # also SystemExit: the caller decides what to do
                error = caught
            if not loop.is_closed():
                loop.call_soon_threadsafe(report, result, error)

        loop.call_soon(self._jobs.put, job)  # when the step that asks for it has ended
        return outcome
