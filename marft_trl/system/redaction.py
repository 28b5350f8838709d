# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Secrets and local paths, which are removed before anything is saved, logged, uploaded or told to others."""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


is_published: contextvars.ContextVar[bool] = contextvars.ContextVar("is_published", default=False)
# Ends of keys that hold secrets, in lower case and without separators.
_SECRET_KEY = re.compile(
    "(token|apikeys?|secrets?|password|passwd|passphrase|credentials?|accesskey|secretkey|privatekey|authorization)$"
)
# Ends of keys that hold tokens of a text, with the separators
_TEXT_KEY = re.compile(
    "(^|_)(pad|eos|bos|unk|sep|cls|mask|image|video|audio|stop|new|prefix|suffix|special)_?token$", re.I
)
# User and password in a URL, and secrets that show by their form
_CREDENTIALS = re.compile(r"(?<=://)(?:[^\s/@:]{1,256}@|(?![^\s/@:]{0,256}:\d+(?:/|$))[^\s/@:]{0,256}:\S{0,256}@)")
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[\w-]{16,}|[rs]k_(?:live|test)_\w{16,}|gh[oprsu]_\w{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|AIza[\w-]{30,}|A[KS]IA[A-Z0-9]{12,}|npm_\w{30,}|pypi-[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,})|(?<=Bearer )(?=\S*\d)\S{6,}|(?<=Basic )(?=[A-Za-z+/]*[\d=])[\w+/]{8,}={0,2}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_VARIABLE = re.compile("(KEY|PASS|AUTH)$")  # environment variables that hold secrets, besides those with a secret key
_SHORTEST = 8  # secrets that are shorter are taken for words where they are looked for in a text
_QUERY = re.compile(r"(?i)(?<=[?&])([\w-]*(?:token|key|secret|password|sig|signature))=[^&\s'\"]*")
# Keys in running text, such as `x-api-key: ...`: long, with a digit, and no code
_NAMED = re.compile(
    r"(?i)\b((?:x-)?api[_-]?key|access[_-]?key|(?:access|auth)[_-]?token)(['\"]?\s{0,4}[:=]\s{0,4}['\"]?)"
    r"(?=[\w+/=-]{0,200}\d)[\w+/=-]{16,}(?![\w.(])"
)


@contextlib.contextmanager
def published() -> Iterator[None]:
    """Pickle arguments without paths of this machine within the context, for files that are uploaded."""
    token = is_published.set(True)
    try:
        yield
    finally:
        is_published.reset(token)


def without_secrets(value: Any) -> Any:
    """
    Return a setting without secrets: mapping entries with a secret key, at any depth, users and passwords in URLs, and
    texts that have the form of a token. Other objects are returned as they are.
    """
    if isinstance(value, str):
        return _NAMED.sub(r"\1\2", _QUERY.sub(r"\1=", _FORMS.sub("", _CREDENTIALS.sub("", value))))
    if isinstance(value, Mapping):
        kept = {key: without_secrets(item) for key, item in value.items() if not _is_secret(key, item)}
        return kept if type(value) is dict or kept != dict(value) else value
    return _map_items(without_secrets, value)


def without_paths(value: Any) -> Any:
    """Return a setting in which only the last part is left of each absolute path of this machine."""
    if isinstance(value, os.PathLike):
        return Path(without_paths(os.fspath(value)))
    if isinstance(value, str):
        path = value.removeprefix("file://")
        is_path = os.path.isabs(path) and (path != value or os.path.lexists(path) or path.count("/") > 1)
        return os.path.basename(os.path.normpath(path)) if is_path else value
    if type(value) is dict:
        return {key: without_paths(item) for key, item in value.items()}
    return _map_items(without_paths, value)


def printable(text: str) -> str:
    """Replace characters that would move the cursor, color the terminal or reverse the direction of writing."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def for_log(text: str, *known: str | None) -> str:
    """
    Return a foreign text, such as a remote's error or a program's output, for logs and terminals: without control
    characters, secrets, and values of secret environment variables and of `known` secrets.
    """
    variables = [value for name, value in os.environ.items() if _VARIABLE.search(name) or _is_secret(name, value)]
    secrets = {secret for secret in (*known, *variables) if secret and len(secret) >= _SHORTEST}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return printable(without_secrets(text).replace("\r\n", "\n"))


def _map_items(change: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(map(change, value)) if type(value) in (list, tuple, set, frozenset) else value


def _is_secret(key: Any, value: Any) -> bool:
    if not isinstance(key, str) or isinstance(value, (bool, int, float, type(None))):
        return False
    return _SECRET_KEY.search(re.sub("[^a-z0-9]", "", key.lower())) is not None and _TEXT_KEY.search(key) is None
