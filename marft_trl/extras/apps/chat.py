# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Chat completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from .requests import Asked, RequestError, Said, call_of, object_of, read_object, text_of, with_names


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read(body: bytes, models: Sequence[str]) -> Asked:
    """
    Read the body of a request.

    Args:
        body (`bytes`): JSON.
        models (`Sequence[str]`): names that may be asked for.

    Raises:
        RequestError: the message names the field, what it got and what it needs.
    """

    def function(tool: dict[str, Any], where: str) -> tuple[Any, str]:
        return tool.get("function"), f"{where}.function"

    return Asked.of(read_object(body), models, ("messages", "response_format"), _messages, function)


def _messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = request.get("messages")
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
