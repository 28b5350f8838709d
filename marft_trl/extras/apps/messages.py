# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Messages, Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...prompts.views import join_contents
from .requests import (
    ChatReply,
    ChatRequest,
    ImageReader,
    ReplyCall,
    RequestError,
    check_fields,
    check_number_of_messages,
    check_object,
    is_hosted,
    read_call,
    read_flag,
    read_format,
    read_max_tokens,
    read_model,
    read_object,
    read_row,
    read_sampling,
    read_stops,
    read_tools,
    warn_of_request,
)


_READ = {
    *("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k"),
    *("tools", "tool_choice", "row"),
}
# Fields that do not change what a model writes here
_IGNORED = {
    *("metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics", "betas", "thinking"),
    *("fallbacks", "fallback_credit_token", "billing_policy", "user_profile_id", "workspace_id"),
}
_POLICY = "Agents sample from their policies. Leave it out."
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "output_config": (({},), _POLICY),
    "compaction": (({},), "Send the messages that the agent should see."),
    "thread": ((), "The server keeps no conversations. Send the whole conversation."),
    "mcp_servers": (([],), "Only the client's own tools can be called."),
    "container": ((), "Only the client's own tools can be called."),
    "context_management": (({}, {"edits": []}), "Send the messages that the agent should see."),
}
_NO_EFFECT = {"output_config": {"effort", "format", "task_budget"}}  # fields that do not change what a model writes
# By which the client's tool runner knows that it has to send whole conversations
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": []}
_SKIPPED = ("thinking", "redacted_thinking")  # types of blocks
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def read(body: bytes, models: Sequence[str] | None, stored: Any = None) -> ChatRequest:
    """Read a request. A [`RequestError`] names the field, its value and what is accepted."""
    fields = read_object(body)
    try:
        check_fields(_without_hints(fields), {*_READ, "output_format"}, _IGNORED, _REFUSED)
    except RequestError as error:
        error.details = _NO_THREADS if error.field == "thread" else None
        raise
    output_config = fields.get("output_config")
    output_format = output_config.get("format") if isinstance(output_config, dict) else None
    output_format = fields.get("output_format") if output_format is None else output_format
    if b'"cache_control"' in body:
        warn_of_request("A client sends `cache_control`, which has no effect: no prompts are kept between requests.")
    return ChatRequest(
        model=read_model(fields, models),
        messages=_messages(fields),
        tools=_tools(fields),
        schema=read_format(output_format, "output_config.format"),
        stop=read_stops(fields, "stop_sequences", most=64),
        stream=read_flag(fields, "stream", False),
        sampling=read_sampling(fields),
        max_tokens=read_max_tokens(fields),
        row=read_row(fields),
    )


def _without_hints(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without values that have no effect: hints, nulls, and edits of thoughts."""
    found = dict(fields)
    for name in ("output_config", "context_management"):
        if isinstance(value := fields.get(name), dict):
            hints = _NO_EFFECT.get(name, ())
            found[name] = {key: entry for key, entry in value.items() if entry is not None and key not in hints}
            if isinstance(edits := found[name].get("edits"), list):
                found[name]["edits"] = [edit for edit in edits if not _clears_thoughts(edit)]
    return found


def _clears_thoughts(edit: Any) -> bool:
    return isinstance(edit, dict) and str(edit.get("type")).startswith("clear_thinking_")


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = fields.get("messages")
    if not isinstance(items, list) or not items:
        form = '[{"role": "user", "content": "..."}]'
        raise RequestError(f"`messages` must be a list of messages such as `{form}`.", field="messages")
    check_number_of_messages(items, "messages")
    found: list[dict[str, Any]] = []
    if fields.get("system"):
        found.append({"role": "system", "content": _read_texts(fields["system"], "system")})
    functions: dict[str, str] = {}  # names by the ids of calls
    images = ImageReader()
    for number, item in enumerate(items):
        where = f"messages[{number}]"
        role = check_object(item, where).get("role")
        blocks = _read_blocks(item.get("content"), f"{where}.content")
        if role == "assistant":
            found.append(_assistant_message(blocks, f"{where}.content", functions))
        elif role in ("user", "system"):
            found += _other_messages(role, blocks, f"{where}.content", functions, images)
        else:
            raise RequestError(
                f"`{where}.role` must be 'user' or 'assistant', got {str(role)[:80]!r}.", field=f"{where}.role"
            )
    if not blocks or role == "assistant":
        text = f"`{where}` must have content and not be of the role 'assistant': agents do not continue a message."
        raise RequestError(text, field=where)
    return _merge_turns(found)


def _read_blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"`{where}` must be a text or a list of blocks.", field=where)
    return [check_object(block, f"{where}[{number}]") for number, block in enumerate(content)]


def _read_texts(content: Any, where: str, images: ImageReader | None = None) -> Any:
    """Return a content that has text blocks, and blocks with images if there are `images`."""
    blocks = _read_blocks("" if content is None else content, where)
    return join_contents(*(_read_block(block, f"{where}[{number}]", images) for number, block in enumerate(blocks)))


def _read_block(block: Mapping[str, Any], where: str, images: ImageReader | None) -> Any:
    if block.get("type") != "image" or images is None:
        return _read_text(block, where)
    source = check_object(block.get("source"), f"{where}.source")
    if source.get("type") != "base64":
        raise RequestError(f"`{where}.source` must be of type 'base64': remote images are never fetched.", field=where)
    return [images.read(source.get("data"), f"{where}.source.data")]


def _read_text(block: Mapping[str, Any], where: str) -> str:
    kind, text = block.get("type"), block.get("text")
    if kind == "tool_reference":
        return f"The tool {block.get('tool_name')} is available."
    if kind != "text":
        problem = f"`{where}` is a block of type {str(kind)[:80]!r}, which is not supported here: agents read texts."
        raise RequestError(problem, field=where, code="unsupported_parameter")
    if not isinstance(text, str):
        raise RequestError(f"`{where}.text` must be a text.", field=f"{where}.text")
    return text


def _assistant_message(blocks: Sequence[Mapping[str, Any]], where: str, functions: dict[str, str]) -> dict[str, Any]:
    texts, calls = [], []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if block.get("type") == "tool_use":
            call = read_call(block.get("id"), block.get("name"), check_object(block.get("input"), place), place)
            functions[call["id"]] = call["function"]["name"]
            calls.append(call)
        elif block.get("type") not in _SKIPPED:
            texts.append(_read_text(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(texts)}
    return {**message, "tool_calls": calls} if calls else message


def _other_messages(
    role: str, blocks: Sequence[Mapping[str, Any]], where: str, functions: Mapping[str, str], images: ImageReader
) -> list[dict[str, Any]]:
    """Return the texts and images of a message, and results of calls as separate messages."""
    found: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if block.get("type") != "tool_result":
            found.append({"role": role, "content": _read_block(block, place, images if role == "user" else None)})
            continue
        call = block.get("tool_use_id")
        if not isinstance(call, str) or call not in functions:
            text = f"`{place}` is the result of the call {json.dumps(call)[:80]}, which no earlier message makes."
            raise RequestError(text, field=f"{place}.tool_use_id")
        result = _read_texts(block.get("content"), f"{place}.content", images)
        found.append({"role": "tool", "content": result, "tool_call_id": call, "name": functions[call]})
    return found


def _merge_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Join consecutive messages of the user, as in Anthropic's API, and calls with the text of the assistant before them.
    Other messages of the assistant stay apart, so that its turns are found in them.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found and found[-1]["role"] == message["role"] else {}
        if last and message["role"] == "user":
            message = {"role": "user", "content": join_contents(found.pop()["content"], message["content"])}
        elif last and message["role"] == "assistant" and not message["content"] and "tool_calls" not in last:
            message = {**message, "content": found.pop()["content"]}
        found.append(message)
    return found


# Tools that Anthropic runs itself. The client does not miss their calls
_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "mcp_toolset", "advisor_")


def _tools(fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    def read_function(tool: dict[str, Any], where: str) -> tuple[Any, str] | None:
        kind = tool.get("type") or "custom"
        if is_hosted(kind, _HOSTED):
            return None
        if kind != "custom":
            text = f"`{where}.type` is {str(kind)[:80]!r}, whose schema is not known here. Send an `input_schema`."
            raise RequestError(text, field=f"{where}.type", code="unsupported_parameter")
        schema = check_object(tool.get("input_schema") or {}, f"{where}.input_schema")
        return {**{name: tool[name] for name in ("name", "description") if name in tool}, "parameters": schema}, where

    def is_hidden(tool: Any) -> bool:
        """Whether a tool is deferred, and no result of a search refers to it yet."""
        is_deferred = isinstance(tool, dict) and tool.get("defer_loading") is True
        return is_deferred and str(tool.get("name")) not in references

    references, tools = set(_referenced(fields.get("messages"))), fields.get("tools") or []
    tools = [tool for tool in tools if not is_hidden(tool)] if isinstance(tools, list) else tools
    choice = check_object(fields.get("tool_choice") or {"type": "auto"}, "tool_choice").get("type")
    return read_tools(tools, read_function, choice)


def _referenced(value: Any) -> list[str]:
    """Names in `tool_reference` blocks, at any depth."""
    if isinstance(value, list):
        return [name for entry in value for name in _referenced(entry)]
    if not isinstance(value, dict):
        return []
    own = [str(value.get("tool_name"))] if value.get("type") == "tool_reference" else []
    return own + _referenced(value.get("content"))


def answer(identity: str, chat_request: ChatRequest, messages: Sequence[ChatReply]) -> dict[str, Any]:
    (reply,) = messages
    content: list[dict[str, Any]] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    content += [_tool_use(call, json.loads(call.arguments)) for call in reply.calls]
    return {**_message(identity, chat_request), "content": content, **_ending(reply), "usage": _usage(reply)}


class MessageStream:
    """The events of an answer that grows."""

    def __init__(self, identity: str, chat_request: ChatRequest):
        self._identity, self._chat_request, self._has_text = identity, chat_request, False

    def begin(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": _message(self._identity, self._chat_request)}]

    def delta(self, text: str, is_answer: bool = True, agent: str = "", turn: int = 0) -> list[dict[str, Any]]:
        """Return the events of new text. Turns of teammates before the answer have no events."""
        if not is_answer:
            return []
        block = {"type": "text", "text": ""}
        begun = [] if self._has_text else [{"type": "content_block_start", "index": 0, "content_block": block}]
        self._has_text = True
        return [*begun, {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}]

    def end(self, reply: ChatReply) -> list[dict[str, Any]]:
        """Return the last events, with the text if none of it was sent."""
        found = self.delta(reply.text) if not self._has_text and (reply.text or not reply.calls) else []
        found += [{"type": "content_block_stop", "index": 0}] if self._has_text else []
        for number, call in enumerate(reply.calls):
            index, delta = number + self._has_text, {"type": "input_json_delta", "partial_json": call.arguments}
            found += [
                {"type": "content_block_start", "index": index, "content_block": _tool_use(call, {})},
                {"type": "content_block_delta", "index": index, "delta": delta},
                {"type": "content_block_stop", "index": index},
            ]
        ending = {"type": "message_delta", "delta": _ending(reply), "usage": _usage(reply)}
        return [*found, ending, {"type": "message_stop"}]


END = b""
stream = MessageStream


def encoded(event: Mapping[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event, default=str)}\n\n".encode()


def error_body(error: RequestError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"details": error.details} if error.details is not None else {}
    return {"type": "error", "error": {"type": kind, "message": str(error), **details}}


failed = error_body  # the event of a stream that failed


def _message(identity: str, chat_request: ChatRequest) -> dict[str, Any]:
    head = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "model": chat_request.model}
    return {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(ChatReply(""))}


def _tool_use(call: ReplyCall, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _ending(reply: ChatReply) -> dict[str, Any]:
    if reply.stopped_by is not None and not (reply.calls or reply.is_truncated):
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    reason = "tool_use" if reply.calls else "max_tokens" if reply.is_truncated else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(reply: ChatReply) -> dict[str, int]:
    return {"input_tokens": reply.read, "output_tokens": reply.written}
