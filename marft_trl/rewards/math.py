# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Reward for a mathematical answer, compared with `math_verify`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from .answers import AnswerComparer, boxed, math_answer
from .texts import last_text


__all__ = ["boxed", "math_answer", "math_reward"]

_COMPARER = AnswerComparer()


def math_reward(completions: Sequence[Any], solution: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """
    Reward of 1 if the answer of a completion equals the solution, else 0; `None` if the solution cannot be parsed. The
    answer is the content of the last `\\boxed{}`, or else the last number. If a solution is a longer text, its answer
    is found in the same way.

    Requires `math-verify` (`pip install "marft-trl[math]"`). A separate process compares, with limits of time and
    memory; an answer that exceeds them scores 0. Equal answers to the same solution are compared once.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(
            '`math_reward` needs math-verify, which is not installed. Run `pip install "marft-trl[math]"`.'
        )
    scores: list[float | None] = [None] * len(completions)
    known = [index for index, right in enumerate(solution) if right is not None]
    pairs = [(last_text(completions[index]), str(solution[index])) for index in known]
    found = _COMPARER.scores(pairs)
    for index, score in zip(known, found, strict=True):
        scores[index] = score
    return scores
