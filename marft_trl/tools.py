# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Functions that agents call: one call, its limits, and what comes of it. Nothing here knows a model."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .event_loop import Lane, give_up, in_thread, one_at_a_time


@dataclass(frozen=True)
class ToolCall:
    """
    What an agent asks for.

    Args:
        name (`str`): name of the function.
        arguments (`dict`): its arguments by name. A model may have written something else than a mapping.
        problem (`str`, *optional*): `"malformed"` where the model began a call that cannot be read.
    """

    name: str
    arguments: Any = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """
    What came of a call.

    Args:
        name (`str`): name of the function.
        text (`str`): what the agent is shown.
        problem (`str`, *optional*): why the call failed: `"malformed"`, `"unknown"`, `"arguments"`, `"error"`,
            `"timeout"` or `"too_many"`.
    """

    name: str
    text: str
    problem: str | None = None


@dataclass(frozen=True)
class ToolLimits:
    """
    What tools may cost.

    Args:
        calls (`int`): calls that one turn of an agent may make, all rounds together; further ones get an error.
        rounds (`int`, *optional*): how often an agent may go on after results; bounded by `calls` alone unless given.
        output (`int`): characters of a result that the agent is shown.
        seconds (`float`): wall-clock time of one call.
    """

    calls: int = 16
    rounds: int | None = None
    output: int = 4096
    seconds: float = 30.0


# How often in a row a function did not answer in time. After a few times it is not called any more: each call costs
# its whole time, and other processes wait.
_STRIKES: weakref.WeakKeyDictionary[Callable, int] = weakref.WeakKeyDictionary()
MAX_STRIKES = 3


async def call_tool(
    functions: Sequence[Callable], call: ToolCall, limits: ToolLimits, of_environment: Sequence[Callable] = ()
) -> ToolResult:
    """
    Call one of the functions. Whatever goes wrong becomes a text for the model, in TRL's form `{'error': '...'}`.

    A function that hangs is given up after `limits.seconds`: an asynchronous one is cancelled; the thread of another
    one goes on, since Python cannot end it, and the next call gets a new thread. A function that has not answered
    three times in a row is not called any more.
    """
    known = {tool_name(function): function for function in functions}
    if call.problem is not None:
        return _failure(
            call.name,
            call.problem,
            "The call could not be read. Write it as the instructions show, with its arguments as valid JSON.",
        )
    if call.name not in known:
        return _failure(call.name, "unknown", f"Tool {call.name} not found. There is {', '.join(known) or 'none'}.")
    function = known[call.name]
    problem = _misfit(function, call.arguments)
    if problem is not None:
        return _failure(call.name, "arguments", problem)
    key = getattr(function, "__func__", function)
    if _STRIKES.get(key, 0) >= MAX_STRIKES:
        return _failure(call.name, "timeout", f"Tool {call.name} is out of order. Go on without it.")
    lane: Lane = "environments" if call.name in map(tool_name, of_environment) else "tools"
    text, error = await _outcome_of(function, call.arguments, limits.seconds, lane)
    _STRIKES[key] = _STRIKES.get(key, 0) + 1 if isinstance(error, _GaveUp) else 0
    if isinstance(error, _GaveUp):
        return _failure(call.name, "timeout", f"Tool {call.name} did not answer within {limits.seconds:g} seconds.")
    if error is not None:
        return _failure(call.name, "error", _shorten(_said_by(error), limits.output))
    return ToolResult(call.name, _shorten(as_plain(text), limits.output))


class _GaveUp(Exception):
    """Our own limit has passed; a tool may raise a `TimeoutError` of its own."""


async def _outcome_of(
    function: Callable, arguments: dict, seconds: float, lane: Lane
) -> tuple[str, BaseException | None]:
    """What a function returns, as a text, or what it raises, whatever that is."""

    async def awaited(value: Any) -> tuple[str, BaseException | None]:
        try:
            return str(await value), None
        except asyncio.CancelledError as error:
            return "", error
        except BaseException as error:  # also SystemExit: a tool does not end the training
            return "", error

    if inspect.iscoroutinefunction(function):
        return await _within(awaited(function(**arguments)), seconds)
    async with one_at_a_time():
        job = in_thread(lambda: _text_unless_awaitable(function(**arguments)), lane)
        value, error = await _within(job, seconds)
        if isinstance(error, _GaveUp):
            give_up(lane)
    if error is None and inspect.isawaitable(value):  # an asynchronous function behind a decorator
        return await _within(awaited(value), seconds)
    return value, error


async def _within(outcome: Any, seconds: float) -> Any:
    """Wait for an outcome, at most so long; then it is given up, and an outcome of ours takes its place."""
    task = asyncio.ensure_future(outcome)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()  # also where the episode ends
    return task.result() if done else ("", _GaveUp())


def _text_unless_awaitable(value: Any) -> Any:
    return value if inspect.isawaitable(value) else str(value)


def _said_by(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return as_plain(text if text and isinstance(error, Exception) else f"{type(error).__name__}: {text}".rstrip(": "))


def as_plain(text: str) -> str:
    """A text that can be encoded: half characters, which JSON can spell, become question marks."""
    return text.encode("utf-8", "replace").decode()


async def call_tools(
    functions: Sequence[Callable],
    calls: Sequence[ToolCall],
    limits: ToolLimits,
    left: int,
    of_environment: Sequence[Callable] = (),
) -> list[ToolResult]:
    """
    The results of several calls, in order; beyond the first `left` of them an error each.

    Args:
        functions (`Sequence[Callable]`): what may be called.
        calls (`Sequence[ToolCall]`): what is asked for.
        limits ([`ToolLimits`]): what a call may cost.
        left (`int`): how many calls are left.
        of_environment (`Sequence[Callable]`, *optional*): those of the functions that are methods of an environment,
            which share a thread with its other methods.
    """
    results = await asyncio.gather(*[call_tool(functions, call, limits, of_environment) for call in calls[:left]])
    refused = [
        _failure(call.name, "too_many", f"No more than {limits.calls} calls are allowed. Answer with what you have.")
        for call in calls[left : left + 1]  # one says it all, however many a model wrote
    ]
    return [*results, *refused]


def tool_name(function: Callable) -> str:
    """The name under which agents call a function."""
    return getattr(function, "__name__", type(function).__name__)


def _failure(name: str, problem: str, text: str) -> ToolResult:
    return ToolResult(name, str({"error": text}), problem)


def _misfit(function: Callable, arguments: Any) -> str | None:
    """Why a function cannot be called with these arguments."""
    if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
        return "The arguments have to be an object with the parameters' names."
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return f"{tool_name(function)}: {error}"
    return None


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} more characters are left out)"
