# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Requests and replies of chat APIs, in a form that all endpoints share."""

from __future__ import annotations

import hashlib
import json
import logging
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ...episodes.images import MAX_PIXELS, ImageError, decode_image
from ...episodes.records import EndOfEpisode, PromptError, Turn, TurnLimitError
from ...episodes.tools import MALFORMED
from ...prompts.views import join_contents
from ...system.hints import did_you_mean
from ...system.redaction import for_log, printable


logger = logging.getLogger(__name__)

_LOGGED: deque[str] = deque(maxlen=1000)  # ids of the latest errors
_DEEPEST = 64  # largest depth of the values of a request
_COLDEST = 1e-4  # lower temperatures are greedy decoding
_MOST_ANSWERS = 16  # largest number of answers to a request
# Fields that are read in both forms of OpenAI's API
_READ = {
    *("model", "tools", "tool_choice", "stop", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "seed", "row", "show_turns"),
}
# Fields that are ignored without a warning: they do not affect what a model generates, or request the default
_ASIDE = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
    *("parallel_tool_calls", "reasoning", "reasoning_effort", "verbosity", "include", "truncation", "max_tool_calls"),
    *("context_management", "prompt_cache_retention", "client_metadata", "moderation", "access_programs"),
    *("background_options",),
}
_LOGPROBS = "Log-probabilities are recorded with each turn, but not sent to the client."
_POLICY = "Agents sample from their policies. Remove this field."
_TEXTS = "Agents generate text only. Remove this field."
_KEPT = "The server stores no prompts or conversations. Send the whole conversation as `messages` or `input`."
# Largest number of messages of a request, and of the warnings about what requests have
_MOST_MESSAGES, _MOST_WARNINGS = 4096, 100
_WARNED: set[str] = set()
# Fields that would change the answer: the values that have no effect, and what to do
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "logprobs": ((False,), _LOGPROBS),
    "top_logprobs": ((0,), _LOGPROBS),
    "logit_bias": (({},), _POLICY),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ((0, 0.0), _POLICY)),
    "repetition_penalty": ((1, 1.0), _POLICY),
    "functions": (([],), "Use `tools`."),
    "function_call": (("none", "auto"), "Use `tools`."),
    "modalities": ((["text"],), _TEXTS),
    **dict.fromkeys(("audio", "image"), ((), _TEXTS)),
    **dict.fromkeys(("prediction", "web_search_options"), ((), "Remove this field.")),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), ((), _KEPT)),
    "background": ((False,), "Remove this field and wait for the answer."),
}


class RequestError(ValueError):
    """A request that cannot be answered: why, and what to change."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        field: str | None = None,
        code: str | None = None,  # OpenAI's
        details: Mapping[str, Any] | None = None,  # Anthropic's
    ):
        super().__init__(printable(message))
        self.status, self.field, self.code, self.details = status, field, code, details


def warn_of_request(text: str) -> None:
    """Log a warning about what clients send, once. Clients cannot fill a disk with different ones."""
    if text not in _WARNED and len(_WARNED) < _MOST_WARNINGS:
        _WARNED.add(text)
        logger.warning(printable(text))


def to_request_error(error: BaseException) -> RequestError:
    """Convert an error to the error that the client receives."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RequestError):
            return cause
        if isinstance(cause, (PromptError, EndOfEpisode, ImageError)):
            code = "context_length_exceeded" if cause.is_too_long else None
            return RequestError(for_log(str(cause)), field="messages", code=code)
        if isinstance(cause, (TemplateError, TurnLimitError)):
            return RequestError(for_log(str(cause)))
        cause = cause.__cause__
    # Other messages may contain addresses or the output of a program, so the client only gets the id of the log entry
    text = for_log("".join(traceback.format_exception(error)))
    identity = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
    if identity not in _LOGGED:  # so that a client that retries forever does not fill the disk
        logger.error(f"Error {identity}: {text}")
    _LOGGED.append(identity)
    return RequestError(f"The server failed. See error {identity} in the server log.", 500, code="internal_error")


def check_fields(
    body: Mapping[str, Any],
    read: Collection[str],
    ignored: Collection[str],
    refused: Mapping[str, tuple[tuple[Any, ...], str]],  # values without an effect, and why others are refused
) -> None:
    """Raise a [`RequestError`] for fields that would change the answer. Unknown ones are ignored with a warning."""
    for name, value in body.items():
        if value is None or name in read or name in ignored:
            continue
        if name not in refused:
            hint = did_you_mean(name, read)
            warn_of_request(f"A client sends the unknown field `{name[:80]}`, which is ignored.{hint}")
            continue
        nothing, why = refused[name]
        if not any(value == item and type(value) is type(item) for item in nothing):
            raise RequestError(f"`{name}` is not supported. {why}", field=name, code="unsupported_parameter")


def read_object(body: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=refuse)
        _check_value(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON in UTF-8: {str(error)[:200]}.") from error
    if not isinstance(value, dict):
        raise RequestError(f"The body must be a JSON object, got {type(value).__name__}.")
    return value


def _check_value(value: Any, deepest: int = _DEEPEST) -> None:
    """Raise a `ValueError` for what is not JSON in UTF-8, and if a value is nested too deeply to be walked through."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    level = [value]
    for _ in range(deepest):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [entry for some in inner for entry in some]
    if level:
        raise ValueError(f"values are nested more than {deepest} levels deep")


def read_model(body: Mapping[str, Any], models: Sequence[str] | None) -> str:
    """Read the requested model. `models`: known names; `None` accepts any name."""
    model = body.get("model")
    if models is None:
        return read_name(model, "model")
    if not isinstance(model, str) or model not in models:
        known = ", ".join(map(repr, models))
        hint = did_you_mean(model, models) if isinstance(model, str) else ""
        shown = json.dumps(model)[:80]
        raise RequestError(f"`model` must be one of {known}, got {shown}.{hint}", 404, "model", "model_not_found")
    return model


def read_sampling(body: Mapping[str, Any]) -> dict[str, float]:
    ranges: dict[str, tuple[float, float, str]] = {
        "temperature": (0.0, 2.0, "from 0 to 2"),
        "top_p": (0.0, 1.0, "above 0 and at most 1"),
        "min_p": (0.0, 1.0, "from 0 to 1"),
    }
    found: dict[str, float] = {}
    for name, (low, high, text) in ranges.items():
        value = body.get(name)
        if value is None:
            continue
        if type(value) not in (int, float) or not low <= value <= high or (name == "top_p" and value == 0):
            raise RequestError(f"`{name}` must be a number {text}, got {json.dumps(value)[:80]}.", field=name)
        # A temperature close to 0 would overflow, so it is read as greedy decoding
        found[name] = 0.0 if name == "temperature" and value < _COLDEST else float(value)
    if (top_k := read_integer(body, "top_k", -1, 2**31)) is not None:
        found["top_k"] = max(top_k, 0)
    return found


def read_integer(body: Mapping[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"`{name}` must be an integer {limits}, got {json.dumps(value)[:80]}.", field=name)
    return value


def read_max_tokens(body: Mapping[str, Any]) -> int | None:
    lengths = [read_integer(body, name, 1) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    return min((length for length in lengths if length is not None), default=None)


def read_row(body: Mapping[str, Any]) -> dict[str, Any]:
    row = body.get("row") or {}
    if not isinstance(row, dict) or "prompt" in row:
        raise RequestError("`row` must be an object with further dataset columns, without `prompt`.", field="row")
    return row


def read_stops(body: Mapping[str, Any], name: str = "stop", most: int = 4) -> tuple[str, ...]:
    """Read stop strings. OpenAI's API takes up to four."""
    value = body.get(name)
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or len(texts) > most or not all(isinstance(t, str) and t for t in texts):
        raise RequestError(f"`{name}` must be a string or a list of up to {most} strings, none empty.", field=name)
    return tuple(texts)


def read_flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"`{name}` must be true or false, got {json.dumps(value)[:80]}.", field=name)
    return value


class ImageReader:
    """Reads the images of a request, which have up to `_left` pixels together."""

    _left = 2 * MAX_PIXELS

    def read(self, data: Any, where: str) -> dict[str, Any]:
        """The part of a message for an image in base64. Raises a [`RequestError`] for anything else."""
        try:
            image = decode_image(data, min(MAX_PIXELS, self._left))
        except ImageError as error:
            raise RequestError(f"`{where}`: {error}", field=where, code="invalid_image") from error
        self._left -= image.width * image.height
        return {"type": "image", "image": image}


def _read_image_part(part: Any, where: str, images: ImageReader) -> dict[str, Any] | None:
    """A part of OpenAI's APIs with an image, or `None`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("image_url", "input_image"):
        return None
    url = part.get("image_url")
    if url is None:
        raise RequestError(f"`{where}` must have an `image_url` with the data; files are not kept here.", field=where)
    return images.read(url.get("url") if isinstance(url, dict) else url, where)


def read_content(content: Any, where: str, kinds: Sequence[str] = ("text",), images: ImageReader | None = None) -> Any:
    """Read a content: a string, or parts of these kinds. Returns the text, or with `images` texts and images."""
    if isinstance(content, list) and images is not None:
        pictures = [_read_image_part(part, f"{where}[{number}]", images) for number, part in enumerate(content)]
        if any(pictures):
            pairs = zip(content, pictures, strict=True)
            return [picture or {"type": "text", "text": read_content([part], where, kinds)} for part, picture in pairs]
    if isinstance(content, list):
        parts = [item.get("text") for item in content if isinstance(item, dict) and item.get("type") in kinds]
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) < len(content):
            raise RequestError(f"`{where}` may only have parts of type 'text', or images of users.", field=where)
        content = "".join(texts)
    if not isinstance(content, str):
        raise RequestError(f"`{where}` must be a string.", field=where)
    return content


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # as in chat templates


def read_role(message: Mapping[str, Any], where: str, roles: Mapping[str, str]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        known = ", ".join(map(repr, roles))
        raise RequestError(f"`{where}.role` must be one of {known}, got {str(role)[:80]!r}.", field=f"{where}.role")
    return roles[role]


def check_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"`{where}` must be an object, got {json.dumps(value)[:80]}.", field=where)
    return value


def is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 128


def read_name(value: Any, where: str) -> str:
    if not is_name(value):
        raise RequestError(f"`{where}` must be 1 to 128 characters, got {json.dumps(value)[:80]}.", field=where)
    return value


class ReplyCall(NamedTuple):
    id: str
    name: str
    arguments: str


def check_number_of_messages(messages: Sequence[Any], where: str) -> None:
    """Raise a [`RequestError`] for more messages than a conversation has, before any is read."""
    if len(messages) > _MOST_MESSAGES:
        raise RequestError(f"`{where}` may have {_MOST_MESSAGES:,} entries, got {len(messages):,}.", field=where)


def read_format(value: Any, where: str) -> dict[str, Any] | None:
    """Read the format of an answer: the JSON schema, or `None` for texts. It is a hint where nothing can force it."""
    if value is None or (kind := check_object(value, where).get("type")) == "text":
        return None
    if kind not in ("json_schema", "json_object"):
        warn_of_request(f"A client sends `{where}` of the type {str(kind)[:40]!r}, which is ignored.")
        return None
    warn_of_request(
        f"A client sends `{where}` of the type {str(kind)[:40]!r}, which is a hint: agents are shown the format, and "
        "only a team that is served from vLLM decodes under it. In training, turns are samples of the policy."
    )
    if kind == "json_schema":
        inner = value.get("json_schema") if isinstance(value.get("json_schema"), Mapping) else value
        return dict(check_object(inner.get("schema") or {}, f"{where}.schema"))
    return {"type": "object"}


def with_format(messages: Sequence[dict[str, Any]], schema: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Add the schema of the answer to the first system or user message, which later requests repeat."""
    shown = list(messages)
    place = next((i for i, message in enumerate(shown) if message["role"] in ("system", "user")), None)
    if schema is not None and place is not None:
        text = f"Answer with JSON that fits this schema: {json.dumps(schema)}"
        shown[place] = {**shown[place], "content": join_contents(shown[place]["content"], text)}
    return shown


@dataclass(frozen=True)
class ChatRequest:
    model: str
    messages: list[dict[str, Any]]  # for chat templates: calls have mappings as `arguments`, results have a `name`
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas
    schema: dict[str, Any] | None = None  # of the answer
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False  # whether a stream ends with the numbers of tokens
    sampling: dict[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    count: int = 1  # number of answers
    seed: int | None = None
    row: dict[str, Any] = field(default_factory=dict)  # further dataset columns
    show_turns: bool = True  # whether the answer has the turns of teammates
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # (namespace, name) of functions in one
    on_response: Callable[[dict[str, Any]], None] = lambda response: None  # keeps a response for later requests

    @classmethod
    def from_body(
        cls,
        body: Mapping[str, Any],
        models: Sequence[str] | None,
        own: Collection[str],
        messages: Callable[[Mapping[str, Any]], list[dict[str, Any]]],
        nested_functions: bool = False,
    ) -> ChatRequest:
        """Read a request of OpenAI's API, whose forms differ in their fields (`own`), messages and tools."""

        def read_function(tool: dict[str, Any], where: str) -> tuple[Any, str] | None:
            if is_hosted(kind := tool.get("type"), _HOSTED):
                return None
            if kind != "function":
                raise RequestError(f"`{where}.type` must be 'function', got {str(kind)[:80]!r}.", field=where)
            return (tool.get("function"), f"{where}.function") if nested_functions else (tool, where)

        model = read_model(body, models)
        check_fields(body, {*_READ, *own}, _ASIDE, _REFUSED)
        text_format = check_object(body.get("text") or {}, "text").get("format")
        schema = read_format(body.get("response_format"), "response_format")
        schema = read_format(text_format, "text.format") if schema is None else schema
        is_stream, count = read_flag(body, "stream", False), read_integer(body, "n", 1, _MOST_ANSWERS) or 1
        if is_stream and count > 1:
            raise RequestError("`n` must be 1 if `stream` is true. Remove `stream` to get several answers.", field="n")
        options = check_object(body.get("stream_options") or {}, "stream_options")
        tools, namespaces = _without_namespaces(body.get("tools") or [])
        return cls(
            model=model,
            messages=messages(body),
            tools=read_tools(tools, read_function, body.get("tool_choice")),
            namespaces=namespaces,
            schema=schema,
            stop=read_stops(body),
            stream=is_stream,
            with_usage=read_flag(options, "include_usage", False),
            sampling=read_sampling(body),
            max_tokens=read_max_tokens(body),
            count=count,
            seed=read_integer(body, "seed", -(2**63), 2**63 - 1),
            row=read_row(body),
            show_turns=read_flag(body, "show_turns", True),
        )

    def check_turn(self) -> None:
        """Raise a [`RequestError`] if the request is not for exactly one turn of an agent."""
        if self.count > 1:
            raise RequestError(f"`n` must be 1 for an agent, got {self.count}. Send a request per answer.", field="n")
        if self.row:
            raise RequestError("`row` is not supported for an agent, which only sees messages.", field="row")


@dataclass(frozen=True)
class ChatReply:
    text: str
    calls: tuple[ReplyCall, ...] = ()
    is_truncated: bool = False
    read: int = 0  # prompt tokens
    written: int = 0  # completion tokens
    thoughts: str = ""  # turns of teammates before the message
    turns: dict[str, Any] | None = None
    agents: dict[str, dict[str, int]] = field(default_factory=dict)  # numbers of tokens by agent
    stopped_by: str | None = None

    @classmethod
    def from_turn(cls, turn: Turn, stop: Sequence[str] = (), mark: str = "") -> ChatReply:
        """Make a reply of a turn, up to the stop string. `mark` makes ids of calls unique in a conversation."""
        calls = _read_calls(turn)
        text = (turn.without_calls or "") if calls else turn.text if turn.tagged is None else turn.tagged
        ended_by = min((item for item in stop if item in text), key=text.index, default=None)
        if ended_by is not None:
            text = text.partition(ended_by)[0]
        ids = [ReplyCall(f"call_{mark}{turn.index}_{i}", *call) for i, call in enumerate(calls)]
        counts = len(turn.prompt_ids), len(turn.completion_ids)
        return cls(text, tuple(ids), turn.truncated, *counts, stopped_by=ended_by)


def _read_calls(turn: Turn) -> list[tuple[str, str]]:
    """
    Return names and arguments of the calls. A turn with a call that has no valid name or arguments is a text, because
    clients send calls back, and no later request may be refused for what an agent wrote.
    """
    calls = [(call.name, _as_json(call.arguments, call.name)) for call in turn.tool_calls]
    found = [(name, arguments) for name, arguments in calls if is_name(name) and arguments is not None]
    return found if len(found) == len(calls) and MALFORMED not in turn.tool_calls else []


def _as_json(arguments: Any, name: Any) -> str | None:
    """
    Return arguments as JSON, which models also write as a text. `None` if they are not an object, or if a later
    request could not have them or the name of the function: NaN, halves of characters, deep nesting.
    """
    try:
        text = (arguments.strip() or "{}") if isinstance(arguments, str) else json.dumps(arguments)
        value = json.loads(text)
        _check_value([name, value], _DEEPEST // 2)  # a request has it within a message
    except (TypeError, ValueError, RecursionError):
        return None
    return text if isinstance(value, dict) else None


# Tools that OpenAI runs itself. The client does not miss their calls
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")


def is_hosted(kind: Any, hosted: Sequence[str]) -> bool:
    """Whether the provider of the API runs a tool of this type. Agents cannot call it, which one warning says."""
    if not isinstance(kind, str) or not kind.startswith(tuple(hosted)):
        return False
    warn_of_request(f"A client sends the tool {kind[:80]!r}, which is ignored: nothing here runs it.")
    return True


def _without_namespaces(tools: Any) -> tuple[Any, dict[str, tuple[str, str]]]:
    """Return tools with the functions of namespaces under `namespace__name`, and these names."""
    if not isinstance(tools, list):
        return tools, {}
    found: list[Any] = []
    names: dict[str, tuple[str, str]] = {}
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            found.append(tool)
            continue
        where = f"tools[{number}]"
        namespace, inner = read_name(tool.get("name"), f"{where}.name"), tool.get("tools")
        for function in inner if isinstance(inner, list) else []:
            name = read_name(check_object(function, f"{where}.tools").get("name"), f"{where}.tools.name")
            names[f"{namespace}__{name}"] = (namespace, name)
            found.append({**function, "name": f"{namespace}__{name}"})
    return found, names


def read_tools(
    tools: Any, read_function: Callable[[dict[str, Any], str], tuple[Any, str] | None], choice: Any
) -> tuple[dict[str, Any], ...]:
    """Read the functions that a model may call. `read_function` returns a tool's function and field, or `None`."""
    if not isinstance(tools, list):
        raise RequestError("`tools` must be a list.", field="tools")
    functions = [read_function(check_object(tool, where := f"tools[{i}]"), where) for i, tool in enumerate(tools)]
    schemas = tuple(_schema(*function) for function in functions if function is not None)
    if choice not in (None, "auto", "none"):
        warn_of_request(
            f"A client sends `tool_choice` {json.dumps(choice)[:80]}, which is a hint: turns are samples of the "
            "policy, which need not call a function."
        )
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise RequestError("`tools` must have different names.", field="tools")
    return () if choice == "none" else schemas


def _schema(tool: Any, where: str) -> dict[str, Any]:
    function = {key: value for key, value in check_object(tool, where).items() if key not in ("type", "strict")}
    read_name(function.get("name"), f"{where}.name")
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"`{where}.description` must be a string.", field=f"{where}.description")
    parameters = check_object(function.get("parameters") or {}, f"{where}.parameters")
    schema = {**function, "description": function.get("description") or "", "parameters": parameters}
    schema["parameters"] = parameters if "type" in parameters else {"type": "object", "properties": {}, **parameters}
    return {"type": "function", "function": schema}


def read_call(identity: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Return a call within a message in the format of chat templates."""
    try:
        value = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        _check_value(value)
    except (ValueError, RecursionError):  # what a model wrote need not be JSON
        value = str(arguments)
    function = {"name": read_name(name, f"{where}.name"), "arguments": value}
    return {"id": read_name(identity, f"{where}.id"), "type": "function", "function": function}


def with_names(messages: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Add the names of functions to results. Raises a [`RequestError`] for a result without an earlier call."""
    names: dict[str, str] = {}
    found = []
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool":
            identity = message.get("tool_call_id")
            if not isinstance(identity, str) or identity not in names:
                place, call_id = f"{where}[{number}]", json.dumps(identity)[:80]
                text = f"`{place}` is the result of the call {call_id}, but no earlier message makes that call."
                raise RequestError(text, field=place)
            message = {**message, "name": names[identity]}
        found.append(message)
    return found
