# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What a run reports to its user: metrics, evaluations, transcripts, plans, model cards."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .evaluation import scores
    from .metrics import Interval, avg_at_k, interval, maj_at_k, paired_difference, pass_at_k, team_exact_match
    from .reporter import save_learning_curve
    from .transcripts import format_turns

_MODULES = {"format_turns": "transcripts", "save_learning_curve": "reporter", "scores": "evaluation"}
__all__ = [
    "Interval",
    "avg_at_k",
    "format_turns",
    "interval",
    "maj_at_k",
    "paired_difference",
    "pass_at_k",
    "save_learning_curve",
    "scores",
    "team_exact_match",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: intervals need no model library."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES.get(name, 'metrics')}", __name__), name)
    globals()[name] = value
    return value
