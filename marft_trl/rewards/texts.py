# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Text of completions, for reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def last_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion. Of a list of messages, it is the content of the last one."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
