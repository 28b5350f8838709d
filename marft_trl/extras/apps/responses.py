# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Responses, OpenAI's newer form of the API."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import chat
from .messages import encoded as encoded  # in the same form
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


_TEXTS = ("input_text", "output_text", "text", "refusal")


class ResponseStore:
    """
    The latest responses, which later requests continue (`previous_response_id`) or refer to (`item_reference`). Beyond
    `max_bytes`, the oldest are dropped. `as_shown` changes texts of responses into those that agents are shown.
    """

    def __init__(self, max_bytes: int, as_shown: Callable[[str], str] = str):
        self._max_bytes, self._bytes, self._as_shown = max_bytes, 0, as_shown
        # Id: the response before it, its items without those of earlier responses, and their size
        self._responses: dict[str, tuple[str | None, list[dict[str, Any]], int]] = {}
        self._items: dict[str, dict[str, Any]] = {}

    def add(self, previous: str | None, items: list[dict[str, Any]], response: Mapping[str, Any]) -> None:
        text = self._as_shown(json.dumps([items, response["output"]]))
        size, (items, output) = len(text), json.loads(text)
        self._responses[response["id"]] = previous, [*items, *output], size
        self._items |= {item["id"]: item for item in output}
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, dropped, size = self._responses.pop(next(iter(self._responses)))
            self._bytes -= size
            for item in dropped:
                self._items.pop(item.get("id", ""), None)

    def items(self, identity: str | None) -> list[dict[str, Any]]:
        """Return the items of a response and of all before it."""
        parts: list[list[dict[str, Any]]] = []
        while identity is not None:
            if not isinstance(identity, str) or identity not in self._responses:
                text = f"`previous_response_id` {str(identity)[:80]!r} is not among the latest responses."
                names = "previous_response_id", "previous_response_not_found"
                raise RequestError(f"{text} Send the whole conversation, with `store` false.", 404, *names)
            identity, part, _ = self._responses[identity]
            parts.insert(0, part)
        return [item for part in parts for item in part]

    def resolve(self, item: Any, where: str) -> Any:
        """Return an item of the input, or the stored one that it refers to."""
        if not isinstance(item, dict) or item.get("type", "item_reference") != "item_reference" or "role" in item:
            return item
        if not isinstance(item.get("id"), str) or item["id"] not in self._items:
            text = f"`{where}` refers to the item {str(item.get('id'))[:80]!r}, which is not of the latest responses."
            raise RequestError(f"{text} Send the item itself, with `store` false.", 404, where)
        return self._items[item["id"]]


def read(body: bytes, models: Sequence[str] | None, stored: ResponseStore) -> ChatRequest:
    """Read a request, like `read` of `chat.py`. `stored` has earlier responses."""
    fields = read_object(body)
    previous, items = fields.get("previous_response_id"), _items(fields, stored)
    own = ("input", "instructions", "text", "previous_response_id")
    earlier = stored.items(previous)
    chat_request = ChatRequest.from_body(fields, models, own, lambda body: _messages(body, [*earlier, *items]))
    if chat_request.count > 1:
        raise RequestError(f"`n` must be 1, got {chat_request.count}. Send one request per answer.", field="n")
    if fields.get("store") is False:
        return chat_request
    return replace(chat_request, on_response=functools.partial(stored.add, previous, items))


def _items(body: Mapping[str, Any], stored: ResponseStore) -> list[dict[str, Any]]:
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise RequestError("`input` must be a string or a list of items.", field="input")
    check_number_of_messages(items, "input")
    return [check_object(stored.resolve(item, where := f"input[{i}]"), where) for i, item in enumerate(items)]


def _messages(body: Mapping[str, Any], items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    check_number_of_messages(items, "input")
    messages: list[dict[str, Any]] = []
    images = ImageReader()
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": read_content(body["instructions"], "instructions")})
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type", "message")
        if kind == "message":
            role = read_role(item, where, ROLES)
            may_have = images if role == "user" else None
            text = read_content(item.get("content"), f"{where}.content", _TEXTS, may_have)
            messages.append({"role": role, "content": text})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            name = item.get("name")
            name = f"{item['namespace']}__{name}" if item.get("namespace") else name
            call = read_call(item.get("call_id"), name, item.get("arguments"), where)
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = read_content(item.get("output"), f"{where}.output", _TEXTS, images)
            messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
        elif kind != "reasoning":  # of other models
            raise RequestError(f"`{where}.type` {str(kind)[:80]!r} is not supported.", field=f"{where}.type")
    if not messages:
        raise RequestError("`input` must contain at least one message.", field="input")
    return with_names(messages, "input")


def answer(identity: str, chat_request: ChatRequest, messages: Sequence[ChatReply]) -> dict[str, Any]:
    """Return the answer. A truncated one is `completed` as well: clients raise an error for an incomplete response."""
    (reply,) = messages
    response = _response(identity, chat_request, "completed", _output(identity, chat_request, reply), reply)
    chat_request.on_response(response)
    return response


class ResponseStream:
    """The events of an answer that grows."""

    def __init__(self, identity: str, chat_request: ChatRequest):
        self._identity, self._chat_request, self._count, self._has_text = identity, chat_request, 0, False
        self._place = {"item_id": f"msg_{identity}", "output_index": 0, "content_index": 0}

    def begin(self) -> list[dict[str, Any]]:
        begun = _response(self._identity, self._chat_request, "in_progress", [])
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def delta(self, text: str, is_answer: bool = True, agent: str = "", turn: int = 0) -> list[dict[str, Any]]:
        """Return the events of new text. Turns of teammates before the answer have no events."""
        found: list[dict[str, Any]] = []
        if not is_answer:
            return found
        if not self._has_text:
            self._has_text = True
            item = {**_message_item(self._identity, ""), "status": "in_progress", "content": []}
            found.append(self._event("response.output_item.added", output_index=0, item=item))
            found.append(self._event("response.content_part.added", **self._place, part=_part("")))
        if text:
            found.append(self._event("response.output_text.delta", **self._place, delta=text, logprobs=[]))
        return found

    def end(self, reply: ChatReply) -> list[dict[str, Any]]:
        """Return the last events, with the text if none of it was sent."""
        found = self.delta(reply.text) if not self._has_text and (reply.text or not reply.calls) else []
        for index, item in enumerate(_output(self._identity, self._chat_request, reply)):
            if item["type"] == "message":
                found.append(self._event("response.output_text.done", **self._place, text=reply.text, logprobs=[]))
                found.append(self._event("response.content_part.done", **self._place, part=_part(reply.text)))
            else:
                begun = {**item, "status": "in_progress", "arguments": ""}
                place = {"item_id": item["id"], "output_index": index}
                found.append(self._event("response.output_item.added", output_index=index, item=begun))
                found.append(self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]))
                done = {"name": item["name"], "arguments": item["arguments"]}
                found.append(self._event("response.function_call_arguments.done", **place, **done))
            found.append(self._event("response.output_item.done", output_index=index, item=item))
        response = answer(self._identity, self._chat_request, [reply])
        return [*found, self._event("response.completed", response=response)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}


END = b""
stream = ResponseStream
error_body = chat.error_body


def failed(error: RequestError) -> dict[str, Any]:
    """Return the event of a stream that failed."""
    return {"type": "error", "code": error.code, "message": str(error), "param": error.field}


def _response(
    identity: str, chat_request: ChatRequest, status: str, output: list[dict[str, Any]], reply: ChatReply | None = None
) -> dict[str, Any]:
    return {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": chat_request.model,
        "output": output,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if reply is not None and reply.is_truncated else None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": chat_request.sampling.get("temperature"),
        "top_p": chat_request.sampling.get("top_p"),
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in chat_request.tools],
        "usage": _usage(reply) if reply is not None else None,
    }


def _output(identity: str, chat_request: ChatRequest, reply: ChatReply) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for number, call in enumerate(reply.calls):
        head = {"type": "function_call", "id": f"fc_{identity}_{number}", "call_id": call.id}
        namespace, name = chat_request.namespaces.get(call.name, (None, call.name))
        named = {"name": name} if namespace is None else {"namespace": namespace, "name": name}
        calls.append({**head, **named, "arguments": call.arguments, "status": "completed"})
    return [_message_item(identity, reply.text), *calls] if reply.text or not calls else calls


def _message_item(identity: str, text: str) -> dict[str, Any]:
    head = {"type": "message", "id": f"msg_{identity}", "role": "assistant", "status": "completed"}
    return {**head, "content": [_part(text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(reply: ChatReply) -> dict[str, Any]:
    return {
        "input_tokens": reply.read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": reply.written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.read + reply.written,
    }
