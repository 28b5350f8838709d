# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Secrets and local paths in settings, which are removed before the settings are saved, logged or uploaded."""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
from collections.abc import Iterator
from typing import Any


is_published: contextvars.ContextVar[bool] = contextvars.ContextVar("is_published", default=False)
# Keys of nested settings that hold secrets, in lower case and without separators. `from_pretrained` takes `token`.
_KEYS = frozenset(
    {
        *("token", "useauthtoken", "hubtoken", "hftoken", "accesstoken", "authtoken", "apitoken"),
        *("apikey", "secret", "secretkey", "clientsecret", "privatekey", "accesskey", "secretaccesskey"),
        *("password", "passwd", "credentials", "authorization"),
    }
)
# User and password in a URL
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")


@contextlib.contextmanager
def published() -> Iterator[None]:
    """Context manager: arguments are pickled without paths of this machine, for files that are uploaded."""
    token = is_published.set(True)
    try:
        yield
    finally:
        is_published.reset(token)


def without_secrets(value: Any) -> Any:
    """
    Return a setting without secrets: entries of mappings whose key names one, at any depth, and users and passwords
    in URLs. Other objects are returned as they are.
    """
    if isinstance(value, str):
        return _CREDENTIALS.sub("", value)
    return _mapped(without_secrets, value)


def without_paths(value: Any) -> Any:
    """Return a setting in which only the last part of each absolute path is left."""
    if isinstance(value, str):
        return os.path.basename(os.path.normpath(value)) if os.path.isabs(value) else value
    return _mapped(without_paths, value)


def _mapped(change: Any, value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if type(value) is dict:
        return {key: change(its) for key, its in value.items() if not _is_secret(key)}
    return value


def _is_secret(key: Any) -> bool:
    return isinstance(key, str) and re.sub(r"[^a-z0-9]", "", key.lower()) in _KEYS
