# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Attributes that an object has for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def swapped(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: an object has other attributes. Those that its class had before are its class's again after."""
    own = {name: owner.__dict__[name] for name in attributes if name in owner.__dict__}
    owner.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del owner.__dict__[name]
        owner.__dict__.update(own)


@contextlib.contextmanager
def swapped_in_module(module: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: a module has other values for names that it has."""
    own = {name: vars(module)[name] for name in attributes}
    vars(module).update(attributes)
    try:
        yield
    finally:
        vars(module).update(own)
