# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What a program asks a model for, and what the model said, whatever form they are written in."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..episodes.records import Turn
from ..episodes.tools import MALFORMED
from .fields import (
    RequestError,
    check_depth,
    check_known,
    count_of,
    flag,
    length_of,
    model_of,
    name_of,
    object_of,
    row_of,
    sampling_of,
    stops_of,
    whole,
)


_REFUSED_FORMAT = "Constrained decoding would sample from another policy. Ask for the form in a message, and parse."


class SaidCall(NamedTuple):
    """
    A call of a function.

    Args:
        id (`str`): id that its result refers to.
        name (`str`): name of the function.
        arguments (`str`): its arguments, as JSON.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Asked:
    """
    A request for one message of a model.

    Args:
        model (`str`): name of the model.
        messages (`list[dict]`): the conversation as chat templates take it. Calls have mappings as `arguments`, and
            results the `name` of their function.
        tools (`tuple[dict, ...]`): JSON schemas of functions, as chat templates take them.
        stop (`tuple[str, ...]`): texts that end the message.
        stream (`bool`): whether the answer is to be a stream.
        with_usage (`bool`): whether a stream ends with the numbers of tokens.
        sampling (`dict`): sampling settings.
        max_tokens (`int`, *optional*): largest number of tokens.
        count (`int`): number of answers.
        seed (`int`, *optional*): seed of sampling.
        row (`dict`): further columns of a dataset row.
        show_turns (`bool`): whether the answer has the turns of teammates.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False
    sampling: dict[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    count: int = 1
    seed: int | None = None
    row: dict[str, Any] = field(default_factory=dict)
    show_turns: bool = True

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        models: Sequence[str],
        own: Collection[str],
        messages: Callable[[Mapping[str, Any]], list[dict[str, Any]]],
        tool: Callable[[dict[str, Any], str], tuple[Any, str]],
    ) -> Asked:
        """
        Read a request. The forms of the API differ in how messages and tools are written, and in nothing else.

        Args:
            given (`Mapping[str, Any]`): the request.
            models (`Sequence[str]`): names that may be asked for.
            own (`Collection[str]`): names of fields that this form alone has.
            messages (`Callable`): reads the messages.
            tool (`Callable`): finds the function of a tool, and the name of its field.
        """
        model = model_of(given, models)
        check_known(given, own)
        _check_format(given.get("response_format"), "response_format")
        _check_format(object_of(given.get("text") or {}, "text").get("format"), "text.format")
        is_stream = flag(given, "stream", False)
        return cls(
            model=model,
            messages=messages(given),
            tools=_tools(given, tool),
            stop=stops_of(given),
            stream=is_stream,
            with_usage=flag(object_of(given.get("stream_options") or {}, "stream_options"), "include_usage", False),
            sampling=sampling_of(given),
            max_tokens=length_of(given),
            count=count_of(given, is_stream),
            seed=whole(given, "seed", -(2**63), 2**63 - 1),
            row=row_of(given),
            show_turns=flag(given, "show_turns", True),
        )

    def check_turn(self) -> None:
        """
        Raises:
            RequestError: it is more than one turn of an agent, or less.
        """
        if self.count > 1:
            raise RequestError("`n` must be 1: a turn is one answer. Ask again for another one.", field="n")
        if self.row:
            raise RequestError("`row` is not read here: an agent is asked on the messages.", field="row")


@dataclass(frozen=True)
class Said:
    """
    A message of a model.

    Args:
        text (`str`): its text, without calls.
        calls (`tuple[SaidCall, ...]`): calls of functions.
        is_cut (`bool`): whether it ended at its largest length.
        read (`int`): number of tokens of the conversation.
        written (`int`): number of tokens of the message.
    """

    text: str
    calls: tuple[SaidCall, ...] = ()
    is_cut: bool = False
    read: int = 0
    written: int = 0

    @classmethod
    def of(cls, turn: Turn, stop: Sequence[str] = (), mark: str = "") -> Said:
        """
        A turn as a message.

        Args:
            turn ([`Turn`]): the turn.
            stop (`Sequence[str]`, *optional*): texts that have ended it, which are not shown.
            mark (`str`, *optional*): what tells its calls from those of other episodes in the same conversation.
        """
        calls = _calls_of(turn)
        text = (turn.without_calls or "") if calls else turn.text if turn.tagged is None else turn.tagged
        for one in stop:
            text = text.partition(one)[0]
        ids = [SaidCall(f"call_{mark}{turn.index}_{i}", *call) for i, call in enumerate(calls)]
        return cls(text, tuple(ids), turn.truncated, len(turn.prompt_ids), len(turn.completion_ids))


def _calls_of(turn: Turn) -> list[tuple[str, str]]:
    """Names and arguments of the calls in a turn. If one of them has no object as arguments, the turn is a text."""
    calls = [(call.name, _as_json(call.arguments)) for call in turn.tool_calls]
    found = [(name, arguments) for name, arguments in calls if arguments is not None]
    return found if len(found) == len(calls) and MALFORMED not in turn.tool_calls else []


def _as_json(arguments: Any) -> str | None:
    """Arguments as JSON, which models also write as a text; `None` if they are no object."""
    if isinstance(arguments, str):
        text = arguments.strip() or "{}"
        try:
            return text if isinstance(json.loads(text), dict) else None
        except (ValueError, RecursionError):
            return None
    return json.dumps(arguments) if isinstance(arguments, Mapping) else None


def _check_format(value: Any, where: str) -> None:
    """Raise unless a format asks for nothing but text."""
    if value is not None and object_of(value, where).get("type") != "text":
        raise RequestError(f"`{where}` is not supported. {_REFUSED_FORMAT}", field=where, code="unsupported_parameter")


def _tools(
    given: Mapping[str, Any], function_of: Callable[[dict[str, Any], str], tuple[Any, str]]
) -> tuple[dict[str, Any], ...]:
    """The functions that a model may call."""
    tools, choice = given.get("tools") or [], given.get("tool_choice")
    if not isinstance(tools, list):
        raise RequestError("`tools` must be a list.", field="tools")
    schemas = []
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if object_of(tool, where).get("type") != "function":
            raise RequestError(f"`{where}.type` must be 'function'.", field=where)
        schemas.append(_schema(*function_of(tool, where)))
    if choice not in (None, "auto", "none"):
        raise RequestError(
            f"`tool_choice` must be 'auto' or 'none', got {json.dumps(choice)[:80]}. A call that is forced would be "
            "sampled from another policy.",
            field="tool_choice",
            code="unsupported_parameter",
        )
    names = [tool["function"]["name"] for tool in schemas]
    if len(set(names)) < len(names):
        raise RequestError("Two `tools` have the same name.", field="tools")
    return () if choice == "none" else tuple(schemas)


def _schema(tool: Any, where: str) -> dict[str, Any]:
    """
    The schema of a function: its name, and what of description and parameters there is.

    Args:
        tool (`Any`): an object with a `name`.
        where (`str`): its field.
    """
    function = {key: value for key, value in object_of(tool, where).items() if key not in ("type", "strict")}
    name_of(function.get("name"), f"{where}.name")
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"`{where}.description` must be a text.", field=f"{where}.description")
    parameters = object_of(function.get("parameters") or {}, f"{where}.parameters")
    schema = {**function, "description": function.get("description") or "", "parameters": parameters}
    schema["parameters"] = parameters if "type" in parameters else {"type": "object", "properties": {}, **parameters}
    return {"type": "function", "function": schema}


def call_of(identity: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """A call within a message, as chat templates take it."""
    try:
        known = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        json.dumps(known, ensure_ascii=False).encode("utf-8")  # no halves of characters
        check_depth(known)
    except (ValueError, RecursionError):  # what a model wrote need not be JSON
        known = str(arguments)
    function = {"name": name_of(name, f"{where}.name"), "arguments": known}
    return {"id": name_of(identity, f"{where}.id"), "type": "function", "function": function}


def with_names(messages: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """
    Messages whose results have the names of their functions.

    Raises:
        RequestError: a result belongs to no call before it.
    """
    names: dict[str, str] = {}
    found = []
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool":
            identity = message.get("tool_call_id")
            if not isinstance(identity, str) or identity not in names:
                raise RequestError(
                    f"`{where}[{number}]` is the result of the call {json.dumps(identity)[:80]}, and no message "
                    "before it has made that call.",
                    field=f"{where}[{number}]",
                )
            message = {**message, "name": names[identity]}
        found.append(message)
    return found
