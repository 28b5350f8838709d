# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Metrics of the `evaluate` package that load without a network."""

from __future__ import annotations

from pathlib import Path

import evaluate


def team_exact_match() -> evaluate.EvaluationModule:
    """The metric of `team_exact_match.py`: exact match of the team's answers with a bootstrap interval."""
    return evaluate.load(str(Path(__file__).with_name("team_exact_match.py")))


__all__ = ["team_exact_match"]
