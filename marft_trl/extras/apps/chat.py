# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Chat completions."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .requests import (
    ROLES,
    ChatReply,
    ChatRequest,
    ImageReader,
    RequestError,
    check_number_of_messages,
    check_object,
    read_call,
    read_content,
    read_object,
    read_role,
    with_names,
)


def read(body: bytes, models: Sequence[str] | None, stored: Any = None) -> ChatRequest:
    """Read a request. A [`RequestError`] names the field, its value and what is accepted."""
    own = ("messages", "response_format")
    return ChatRequest.from_body(read_object(body), models, own, _messages, nested_functions=True)


def _messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = request.get("messages")
    if not isinstance(items, list) or not items:
        form = '[{"role": "user", "content": "..."}]'
        raise RequestError(f"`messages` must be a list of messages such as `{form}`.", field="messages")
    check_number_of_messages(items, "messages")
    images = ImageReader()
    return with_names([_message(item, f"messages[{number}]", images) for number, item in enumerate(items)], "messages")


def _message(message: Any, where: str, images: ImageReader) -> dict[str, Any]:
    role = read_role(check_object(message, where), where, {**ROLES, "tool": "tool"})
    calls, content = message.get("tool_calls"), message.get("content")
    if calls and (role != "assistant" or not isinstance(calls, list)):
        raise RequestError(f"`{where}.tool_calls` must be a list in an assistant message.", field=where)
    if content is None and role == "assistant":
        content = ""
    may_have = images if role in ("user", "tool") else None
    text = read_content(content, f"{where}.content", ("text", "refusal"), may_have)
    shown: dict[str, Any] = {"role": role, "content": text}
    if calls:
        shown["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    if role == "tool":
        shown["tool_call_id"] = message.get("tool_call_id")
    return shown


def _call(call: Any, where: str) -> dict[str, Any]:
    function = check_object(check_object(call, where).get("function"), f"{where}.function")
    return read_call(call.get("id"), function.get("name"), function.get("arguments"), where)


def model(name: str) -> dict[str, Any]:
    """A model, with the fields of OpenAI's and of Anthropic's API."""
    fields = {"id": name, "object": "model", "created": 0, "owned_by": "marft_trl"}
    return {**fields, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def answer(identity: str, chat_request: ChatRequest, messages: Sequence[ChatReply]) -> dict[str, Any]:
    choices = []
    for index, reply in enumerate(messages):
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None if reply.calls else reply.text}
        message["refusal"] = None
        if reply.thoughts:
            message["reasoning_content"] = reply.thoughts
        if reply.calls:
            message["tool_calls"] = _format_tool_calls(reply)
        choices.append({"index": index, "message": message, "finish_reason": _reason(reply), "logprobs": None})
    shown = {"marft": [reply.turns for reply in messages]} if messages[0].turns is not None else {}
    return {**_head(identity, chat_request, "chat.completion"), "choices": choices, "usage": _usage(messages), **shown}


class ChatStream:
    """The parts of a streamed answer."""

    def __init__(self, identity: str, chat_request: ChatRequest):
        self._head, self._with_usage = _head(identity, chat_request, "chat.completion.chunk"), chat_request.with_usage
        self._has_text = False

    def begin(self) -> list[dict[str, Any]]:
        return [self._part({"role": "assistant", "content": ""})]

    def delta(self, text: str, is_answer: bool = True, agent: str = "", turn: int = 0) -> list[dict[str, Any]]:
        """Return the chunks of new text of the answer, or of turns of teammates before it."""
        self._has_text |= is_answer
        origin = {"agent": agent, "turn": turn} if agent else {}
        return [self._part({"content" if is_answer else "reasoning_content": text, **origin})]

    def end(self, reply: ChatReply) -> list[dict[str, Any]]:
        """Return the last chunks, with the text if none of it was sent."""
        parts = self.delta(reply.text) if reply.text and not self._has_text else []
        calls = enumerate(_format_tool_calls(reply))
        parts += [self._part({"tool_calls": [{"index": index, **call}]}) for index, call in calls]
        shown = {"marft": [reply.turns]} if reply.turns is not None else {}
        parts.append({**self._part({}, _reason(reply)), **shown})
        return [*parts, {**self._head, "choices": [], "usage": _usage([reply])}] if self._with_usage else parts

    def _part(self, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}


END = b"data: [DONE]\n\n"
stream = ChatStream


def encoded(event: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, default=str).encode() + b"\n\n"


def error_body(error: RequestError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code}}


failed = error_body  # the part of a stream that failed


def _head(identity: str, chat_request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{identity}", "object": kind, "created": int(time.time()), "model": chat_request.model}


def _format_tool_calls(reply: ChatReply) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]


def _reason(reply: ChatReply) -> str:
    return "tool_calls" if reply.calls else "length" if reply.is_truncated else "stop"


def _usage(messages: Sequence[ChatReply]) -> dict[str, Any]:
    read, written = sum(reply.read for reply in messages), sum(reply.written for reply in messages)
    agents: dict[str, Counter[str]] = {}
    for reply in messages:
        for agent, counts in reply.agents.items():
            agents.setdefault(agent, Counter()).update(counts)
    by_agent = {"agents": {agent: dict(counts) for agent, counts in agents.items()}} if agents else {}
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written, **by_agent}
