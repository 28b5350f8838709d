# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What a program asks a model for, and what the model said, whatever form they are written in."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..episodes.records import Turn
from ..episodes.tools import MALFORMED
from .fields import RequestError, check_depth, name_of, object_of


# Largest number of stop texts, as OpenAI has it
_MOST_STOPS = 4
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
        others (`tuple[str, ...]`): names of fields that are not obeyed.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False
    sampling: dict[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    others: tuple[str, ...] = ()


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
        calls = () if MALFORMED in turn.tool_calls else turn.tool_calls
        text = (turn.without_calls or "") if calls else turn.text
        for one in stop:
            text = text.partition(one)[0]
        ids = [
            SaidCall(f"call_{mark}{turn.index}_{i}", one.name, _as_json(one.arguments)) for i, one in enumerate(calls)
        ]
        return cls(text, tuple(ids), turn.truncated, len(turn.prompt_ids), len(turn.completion_ids))


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def stops_of(value: Any) -> tuple[str, ...]:
    """The field `stop`."""
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or len(texts) > _MOST_STOPS or not all(isinstance(t, str) and t for t in texts):
        raise RequestError(f"`stop` must be a text or a list of up to {_MOST_STOPS} texts.", field="stop")
    return tuple(texts)


def check_nothing(given: Mapping[str, Any], refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """
    Args:
        given (`Mapping[str, Any]`): a request.
        refused (`Mapping[str, tuple]`): for fields that cannot be obeyed, the values that ask for nothing, and why.

    Raises:
        RequestError: a field asks for something that cannot be had.
    """
    for name, (nothing, why) in refused.items():
        value = given.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in nothing):
            raise RequestError(f"`{name}` is not supported. {why}", field=name, code="unsupported_parameter")


def others_of(given: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Names of fields that are set and not known, in order."""
    return tuple(sorted(name[:80] for name, value in given.items() if name not in known and value is not None))


def check_format(value: Any, where: str) -> None:
    """Raise unless a format asks for nothing but text."""
    if value is not None and object_of(value, where).get("type") != "text":
        raise RequestError(f"`{where}` is not supported. {_REFUSED_FORMAT}", field=where, code="unsupported_parameter")


def schema_of(tool: Any, where: str) -> dict[str, Any]:
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


def tools_of(tools: Sequence[dict[str, Any]], choice: Any) -> tuple[dict[str, Any], ...]:
    """
    The functions that a model may call.

    Args:
        tools (`Sequence[dict]`): their schemas.
        choice (`Any`): the field `tool_choice`.
    """
    if choice not in (None, "auto", "none"):
        raise RequestError(
            f"`tool_choice` must be 'auto' or 'none', got {json.dumps(choice)[:80]}. A call that is forced would be "
            "sampled from another policy.",
            field="tool_choice",
            code="unsupported_parameter",
        )
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("Two `tools` have the same name.", field="tools")
    return () if choice == "none" else tuple(tools)


def call_of(identity: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """A call within a message, as chat templates take it."""
    try:
        known = json.loads(arguments) if isinstance(arguments, str) else arguments
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
