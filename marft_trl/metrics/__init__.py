# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Metrics of a team's answers, which need no network: exact match, accuracy of several samples, intervals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .intervals import Interval, interval, paired_difference
from .samples import avg_at_k, maj_at_k, pass_at_k


if TYPE_CHECKING:
    import evaluate


def team_exact_match() -> evaluate.EvaluationModule:
    """The metric of `team_exact_match.py`: exact match of the team's answers with a bootstrap interval."""
    import evaluate  # when it is used: it takes half a second

    return evaluate.load(str(Path(__file__).with_name("team_exact_match.py")))


__all__ = [
    "Interval",
    "avg_at_k",
    "interval",
    "maj_at_k",
    "paired_difference",
    "pass_at_k",
    "team_exact_match",
]
