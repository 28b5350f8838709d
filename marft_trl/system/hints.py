# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Help with names that are nearly right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`" Did you mean 'solver'?"`, to be put behind an error message; empty where no known name is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
