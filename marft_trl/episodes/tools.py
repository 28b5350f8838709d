# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Tool calls: the call, its limits and its result. This module does not depend on a model."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..system.event_loop import Lane, give_up, in_thread, one_at_a_time
from .images import is_image, may_have_images, split_parts


@dataclass(frozen=True)
class ToolCall:
    """A tool call requested by an agent."""

    name: str
    arguments: Any = field(default_factory=dict)  # by name, as the model wrote them, so perhaps not a mapping
    problem: str | None = None  # "malformed" if the model began a call that cannot be parsed


MALFORMED = ToolCall("unknown", {}, problem="malformed")  # stands for a call that cannot be parsed


@dataclass(frozen=True)
class ToolResult:
    name: str
    text: str  # result or error message that is shown to the agent
    problem: str | None = None  # "malformed", "unknown", "arguments", "error", "timeout" or "too_many"
    elements: list[Any] | None = None  # of a list, which is no text to a chat template
    images: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ToolLimits:
    calls: int = 16  # before an agent's final turn, over all rounds together; the first beyond it gets an error
    rounds: int | None = None  # number of times that an agent continues after results
    output: int = 4096  # characters of a result that are shown to the agent
    seconds: float = 30.0  # wall-clock time of one call


# Consecutive timeouts of each function. After `MAX_STRIKES` it is not called any more: other processes wait meanwhile
_STRIKES: weakref.WeakKeyDictionary[Callable, int] = weakref.WeakKeyDictionary()
MAX_STRIKES = 3


async def call_tool(
    functions: Sequence[Callable], call: ToolCall, limits: ToolLimits, environment_tools: Sequence[Callable] = ()
) -> ToolResult:
    """
    Call one of the functions. A failure is returned as a text for the model, in TRL's form `{'error': '...'}`. After
    `limits.seconds`, an asynchronous function is cancelled, and a synchronous one is left behind in its thread.
    """
    known = {tool_name(function): function for function in functions}
    if call.problem is not None:
        text = "The call could not be read. Write it as the instructions show, with its arguments as valid JSON."
        return _failure(call.name, call.problem, text)
    if call.name not in known:
        return _failure(call.name, "unknown", f"Tool {call.name} not found. There is {', '.join(known) or 'none'}.")
    function = known[call.name]
    if (problem := _misfit(function, call.arguments)) is not None:
        return _failure(call.name, "arguments", problem)
    key = unbound(function)
    if _STRIKES.get(key, 0) >= MAX_STRIKES:
        return _failure(call.name, "timeout", f"Tool {call.name} is out of order. Go on without it.")
    lane: Lane = "environments" if call.name in map(tool_name, environment_tools) else "tools"
    value, error = await _call_function(function, call.arguments, limits.seconds, lane)
    _STRIKES[key] = _STRIKES.get(key, 0) + 1 if isinstance(error, _GaveUp) else 0
    if isinstance(error, _GaveUp):
        return _failure(call.name, "timeout", f"Tool {call.name} did not answer within {limits.seconds:g} seconds.")
    if error is not None:
        return _failure(call.name, "error", _shorten(_said_by(error), limits.output))
    text, elements, images = value
    text, is_whole = _shorten(as_plain(text), limits.output), elements is not None and len(text) <= limits.output
    return ToolResult(call.name, text, elements=elements if is_whole else None, images=images)


class _GaveUp(Exception):
    """The call exceeded our time limit. Not a `TimeoutError`, since a tool may raise one itself."""


def _as_result(value: Any) -> tuple[str, list[Any] | None, tuple[Any, ...]]:
    """A returned value as a text, as plain JSON data if it is a list with elements, and the images in it."""
    if isinstance(value, Mapping) and any(map(is_image, value.values())):
        raise TypeError("a tool returns an image, or a list of texts and images, not a mapping with an image")
    if not isinstance(value, str) and may_have_images(value):
        text, images = split_parts(value)
        return text, None, images
    if isinstance(value, list) and value:
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            return str(value), json.loads(as_plain(json.dumps(value, allow_nan=False, ensure_ascii=False))), ()
    return str(value), None, ()


async def _call_function(
    function: Callable, arguments: dict, seconds: float, lane: Lane
) -> tuple[tuple[str, list[Any] | None, tuple[Any, ...]], BaseException | None]:
    """Call a function and return its result, and the exception that it raised or `None`."""

    async def awaited(value: Any) -> tuple[Any, BaseException | None]:
        try:
            return _as_result(await value), None
        except BaseException as error:  # also SystemExit: a tool does not end the training
            return ("", None, ()), error

    def called() -> Any:
        value = function(**arguments)
        return value if inspect.isawaitable(value) else _as_result(value)

    if inspect.iscoroutinefunction(function):
        return await _within(awaited(function(**arguments)), seconds)
    async with one_at_a_time():
        value, error = await _within(in_thread(called, lane), seconds)
        if isinstance(error, _GaveUp):
            give_up(lane)
    if error is None and inspect.isawaitable(value):  # an asynchronous function behind a decorator
        return await _within(awaited(value), seconds)
    return value, error


async def _within(outcome: Any, seconds: float) -> Any:
    """Wait at most `seconds` for an outcome. After that, cancel it and return `_GaveUp` as the error."""
    task = asyncio.ensure_future(outcome)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()  # also reached if the episode ends while it waits
    return task.result() if done else (("", None, ()), _GaveUp())


def _said_by(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return as_plain(text if text and isinstance(error, Exception) else f"{type(error).__name__}: {text}".rstrip(": "))


def as_plain(text: str) -> str:
    """Replace lone surrogates, which JSON can contain but UTF-8 cannot encode, by question marks."""
    return text.encode("utf-8", "replace").decode()


async def call_tools(
    functions: Sequence[Callable],
    calls: Sequence[ToolCall],
    limits: ToolLimits,
    left: int,
    environment_tools: Sequence[Callable] = (),
) -> list[ToolResult]:
    """Run calls and return the results in order. The first call beyond `left` gets an error; others are ignored."""
    # All methods of an environment, tools or not, run in the same thread
    results = await asyncio.gather(*[call_tool(functions, call, limits, environment_tools) for call in calls[:left]])
    refused = [
        _failure(call.name, "too_many", f"No more than {limits.calls} calls are allowed. Answer with what you have.")
        for call in calls[left : left + 1]  # one error message is enough for any number of calls
    ]
    return [*results, *refused]


def tool_name(function: Callable | Mapping[str, Any]) -> str:
    """Return the name by which agents call a function, which may be given as its JSON schema."""
    if isinstance(function, Mapping):
        return str(function["function"]["name"])
    return getattr(function, "__name__", type(function).__name__)


def unbound(function: Callable) -> Callable:
    """Return a method without its object. All episodes share the tools, but each has its own environment."""
    return getattr(function, "__func__", function)


def _failure(name: str, problem: str, text: str) -> ToolResult:
    return ToolResult(name, str({"error": text}), problem)


def _misfit(function: Callable, arguments: Any) -> str | None:
    if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
        return "The arguments have to be an object with the parameters' names."
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return f"{tool_name(function)}: {error}"
    return None


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} more characters are left out)"
