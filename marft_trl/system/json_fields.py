# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""JSON data of strangers: it holds the fields that this package writes, with their types, and no others."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from .hints import brief, did_you_mean


def check_fields(data: Any, kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
    """
    Return JSON data as a dictionary. `kinds` has the types of its fields, such as `list[str] | None`; messages begin
    with `where`. Raises `ValueError` if the data is no object or has a field that is not listed or of another type.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be a JSON object, got {brief(repr(data), 80)}.")
    for name, value in data.items():
        if name not in kinds:
            hint = did_you_mean(name, kinds) or f" Its fields are {', '.join(kinds) or 'none'}."
            raise ValueError(f"{where} has the unknown field {brief(repr(name), 80)}.{hint}")
        if not has_type(value, kinds[name]):
            kind = kinds[name]
            needed = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
            raise ValueError(f"{where} has {brief(repr(value), 80)} as {name!r}, which must be of type `{needed}`.")
    return dict(data)


def has_type(value: Any, kind: Any) -> bool:
    """Whether JSON data has a type, such as `dict[str, list[str]]`. Numbers are finite, and no truth values."""
    parameters = typing.get_args(kind)
    if kind is Any:
        return True
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(has_type(value, parameter) for parameter in parameters)
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(has_type(element, parameters[0]) for element in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, Mapping) and all(
            isinstance(name, str) and has_type(element, parameters[1]) for name, element in value.items()
        )
    if kind in (int, float):
        numbers = (int, float) if kind is float else int
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        return is_number and (isinstance(value, int) or math.isfinite(value))
    return isinstance(value, kind)
