# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Coroutines from code that is not asynchronous, also where a loop runs already, as in a notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar


Result = TypeVar("Result")


def run_coroutine(function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
    """Run a coroutine function to its end and return its result, in a thread of its own if a loop runs in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(function(*arguments))
    outcome: dict[str, Any] = {}

    def target() -> None:
        try:
            outcome["result"] = asyncio.run(function(*arguments))
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=target, name="marft-loop")
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]
