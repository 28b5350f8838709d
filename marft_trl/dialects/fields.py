# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Fields of requests: each is read and checked, and an error names it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..system.hints import did_you_mean


# Largest depth of the values of a request
_DEEPEST = 64
# Temperatures below it are greedy decoding
_COLDEST = 1e-4


class RequestError(ValueError):
    """
    A request that cannot be answered.

    Args:
        message (`str`): why, and what to change.
        status (`int`, *optional*, defaults to `400`): HTTP status.
        field (`str`, *optional*): the field of the request.
        code (`str`, *optional*): OpenAI's code of the error.
    """

    def __init__(self, message: str, status: int = 400, field: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.field, self.code = status, field, code

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        given = json.loads(body.decode("utf-8"), parse_constant=refuse)
        json.dumps(given, ensure_ascii=False).encode("utf-8")  # no halves of characters
        check_depth(given)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON in UTF-8: {str(error)[:200]}.") from error
    if not isinstance(given, dict):
        raise RequestError(f"The body must be a JSON object, got {type(given).__name__}.")
    return given


def check_depth(value: Any) -> None:
    """Raise unless a value is nested as deep as programs nest them, and no deeper: later code goes through it."""
    level = [value]
    for _ in range(_DEEPEST):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [one for some in inner for one in some]
    if level:
        raise ValueError(f"values are nested more than {_DEEPEST} deep")


def model_of(given: Mapping[str, Any], models: Sequence[str]) -> str:
    """The model that is asked for."""
    model = given.get("model")
    if not isinstance(model, str) or model not in models:
        known = ", ".join(map(repr, models))
        hint = did_you_mean(model, models) if isinstance(model, str) else ""
        shown = json.dumps(model)[:80]
        raise RequestError(f"`model` must be one of {known}, got {shown}.{hint}", 404, "model", "model_not_found")
    return model


def sampling_of(given: Mapping[str, Any]) -> dict[str, float]:
    """The sampling settings of a request."""
    ranges: dict[str, tuple[float, float, str]] = {
        "temperature": (0.0, 2.0, "from 0 to 2"),
        "top_p": (0.0, 1.0, "above 0 and at most 1"),
        "min_p": (0.0, 1.0, "from 0 to 1"),
    }
    found: dict[str, float] = {}
    for name, (low, high, text) in ranges.items():
        value = given.get(name)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or not math.isfinite(value) or (name == "top_p" and value == 0):
            raise RequestError(f"`{name}` must be a number {text}, got {json.dumps(value)[:80]}.", field=name)
        # What is nearly 0 is meant as 0, and would overflow
        found[name] = 0.0 if name == "temperature" and value < _COLDEST else float(value)
    if (top_k := whole(given, "top_k", -1, 2**31)) is not None:
        found["top_k"] = max(top_k, 0)
    return found


def whole(given: Mapping[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    """An integer, if it is given."""
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"`{name}` must be an integer {limits}, got {json.dumps(value)[:80]}.", field=name)
    return value


def flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    """Whether something is the case."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"`{name}` must be true or false, got {json.dumps(value)[:80]}.", field=name)
    return value


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """
    The text of a content: a string, or a list of parts.

    Args:
        content (`Any`): the content.
        where (`str`): its field.
        kinds (`Sequence[str]`, *optional*): types of parts that have a text.
    """
    if isinstance(content, list):
        texts = [one.get("text") if isinstance(one, dict) and one.get("type") in kinds else None for one in content]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"`{where}` may have parts of type 'text' alone.", field=where)
        content = "".join(texts)  # type: ignore[arg-type]
    if not isinstance(content, str):
        raise RequestError(f"`{where}` must be a text.", field=where)
    return content


def object_of(value: Any, where: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise RequestError(f"`{where}` must be an object, got {json.dumps(value)[:80]}.", field=where)
    return value


def name_of(value: Any, where: str) -> str:
    """A name that is not empty."""
    if not isinstance(value, str) or not value or len(value) > 128:
        raise RequestError(f"`{where}` must be a name, got {json.dumps(value)[:80]}.", field=where)
    return value
