# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Replace attributes of an object within a context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def swapped(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of an object or a module, and restore its own or those of its class afterwards."""
    own = {name: owner.__dict__[name] for name in attributes if name in owner.__dict__}
    owner.__dict__.update(attributes)
    try:
        yield
    finally:
        owner.__dict__.update(own)
        for name in attributes.keys() - own.keys():
            del owner.__dict__[name]


@contextlib.contextmanager
def swapped_in_module(module: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: replace names that a module has."""
    own = {name: vars(module)[name] for name in attributes}
    vars(module).update(attributes)
    try:
        yield
    finally:
        vars(module).update(own)
