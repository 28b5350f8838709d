# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Coroutines from code that is not asynchronous, also where a loop runs already, as in a notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar


Result = TypeVar("Result")

# Each thread keeps its loop: clients and locks that an asynchronous tool has made stay good from batch to batch, and
# nothing waits for threads that a tool has left behind, as `asyncio.run` does in the end.
_OWN = threading.local()
_BESIDE = ThreadPoolExecutor(1, thread_name_prefix="marft-loop")


def run_coroutine(function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
    """Run a coroutine function to its end and return its result, in another thread if a loop runs in this one."""
    if _a_loop_runs():
        return _BESIDE.submit(_run, function, arguments).result()
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
