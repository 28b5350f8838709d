# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Chat completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from .asked import (
    Asked,
    Said,
    call_of,
    check_format,
    check_nothing,
    others_of,
    schema_of,
    stops_of,
    tools_of,
    with_names,
)
from .fields import RequestError, flag, model_of, object_of, read_object, sampling_of, text_of, whole


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ONE = "A turn is one answer. Ask again for another one."
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), _ONE),
    "logprobs": ((False,), "Those of a turn are of the policy as it is, and are recorded with it."),
    "top_logprobs": ((0,), "Those of a turn are of the policy as it is, and are recorded with it."),
    "functions": (([],), "Use `tools`."),
    "function_call": (("none", "auto"), "Use `tools`."),
    "modalities": ((["text"],), "Agents write texts."),
    "audio": ((), "Agents write texts."),
    "prediction": ((), "Leave it out."),
    "web_search_options": ((), "Leave it out."),
}
_READ = {
    *("model", "messages", "tools", "tool_choice", "stop", "stream", "stream_options", "response_format"),
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens"),
}
# Fields that say nothing about what the model writes
_ASIDE = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"),
    "prompt_cache_retention",
}


def read(body: bytes, models: Sequence[str]) -> Asked:
    """
    Read the body of a request.

    Args:
        body (`bytes`): JSON.
        models (`Sequence[str]`): names that may be asked for.

    Raises:
        RequestError: the message names the field, what it got and what it needs.
    """
    return asked_of(read_object(body), models)


def asked_of(given: Mapping[str, Any], models: Sequence[str]) -> Asked:
    """The same for a body that is read already."""
    model = model_of(given, models)
    check_nothing(given, _REFUSED)
    check_format(given.get("response_format"), "response_format")
    options = object_of(given.get("stream_options") or {}, "stream_options")
    lengths = [whole(given, name, 1) for name in ("max_tokens", "max_completion_tokens")]
    return Asked(
        model=model,
        messages=_messages(given.get("messages")),
        tools=_tools(given),
        stop=stops_of(given.get("stop")),
        stream=flag(given, "stream", False),
        with_usage=flag(options, "include_usage", False),
        sampling=sampling_of(given),
        max_tokens=min((length for length in lengths if length is not None), default=None),
        others=others_of(given, {*_READ, *_ASIDE, *_REFUSED}),
    )


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        form = '[{"role": "user", "content": "..."}]'
        raise RequestError(f"`messages` must be a list of messages such as `{form}`.", field="messages")
    messages = [_message(one, f"messages[{number}]") for number, one in enumerate(given)]
    return with_names(messages, "messages")


def _message(message: Any, where: str) -> dict[str, Any]:
    role = object_of(message, where).get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(map(repr, _ROLES))
        raise RequestError(f"`{where}.role` must be one of {known}, got {str(role)[:80]!r}.", field=f"{where}.role")
    calls, content = message.get("tool_calls"), message.get("content")
    if calls and (role != "assistant" or not isinstance(calls, list)):
        raise RequestError(f"`{where}.tool_calls` must be a list, in a message of an assistant.", field=where)
    if content is None and role == "assistant":
        content = ""
    shown: dict[str, Any] = {
        "role": _ROLES[role],
        "content": text_of(content, f"{where}.content", ("text", "refusal")),
    }
    if calls:
        shown["tool_calls"] = [_call(one, f"{where}.tool_calls[{number}]") for number, one in enumerate(calls)]
    if role == "tool":
        shown["tool_call_id"] = message.get("tool_call_id")
    return shown


def _call(call: Any, where: str) -> dict[str, Any]:
    function = object_of(object_of(call, where).get("function"), f"{where}.function")
    return call_of(call.get("id"), function.get("name"), function.get("arguments"), where)


def _tools(given: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = given.get("tools") or []
    if not isinstance(tools, list):
        raise RequestError("`tools` must be a list.", field="tools")
    schemas = []
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if object_of(tool, where).get("type") != "function":
            raise RequestError(f"`{where}.type` must be 'function'.", field=where)
        schemas.append(schema_of(tool.get("function"), f"{where}.function"))
    return tools_of(schemas, given.get("tool_choice"))


# ---- Answers ----


def models(names: Sequence[str]) -> dict[str, Any]:
    """The names that may be asked for, as a list of models."""
    return {"object": "list", "data": [model(name) for name in names]}


def model(name: str) -> dict[str, Any]:
    """A name that may be asked for, as a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "marft_trl"}


def answer(identity: str, asked: Asked, said: Said) -> dict[str, Any]:
    """The answer to a request."""
    message: dict[str, Any] = {"role": "assistant", "content": said.text or None if said.calls else said.text}
    message["refusal"] = None
    if said.calls:
        message["tool_calls"] = _said_calls(said)
    choice = {"index": 0, "message": message, "finish_reason": _reason(said), "logprobs": None}
    return {**_head(identity, asked, "chat.completion"), "choices": [choice], "usage": _usage(said)}


def events(identity: str, asked: Asked, said: Said) -> list[dict[str, Any]]:
    """The parts of a streamed answer."""
    head = _head(identity, asked, "chat.completion.chunk")

    def part(delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}

    parts = [part({"role": "assistant", "content": ""})]
    parts += [part({"content": said.text})] if said.text else []
    parts += [part({"tool_calls": [{"index": i, **one}]}) for i, one in enumerate(_said_calls(said))]
    parts.append(part({}, _reason(said)))
    return [*parts, {**head, "choices": [], "usage": _usage(said)}] if asked.with_usage else parts


def _head(identity: str, asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{identity}", "object": kind, "created": int(time.time()), "model": asked.model}


def _said_calls(said: Said) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.calls
    ]


def _reason(said: Said) -> str:
    return "tool_calls" if said.calls else "length" if said.is_cut else "stop"


def _usage(said: Said) -> dict[str, int]:
    return {
        "prompt_tokens": said.read,
        "completion_tokens": said.written,
        "total_tokens": said.read + said.written,
    }
