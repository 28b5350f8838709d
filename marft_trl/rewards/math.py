# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Reward of a mathematical answer, compared by `math_verify`."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from typing import Any

from .answers import boxed, compare, compare_elsewhere, math_answer
from .texts import last_text


__all__ = ["boxed", "math_answer", "math_reward"]


def math_reward(completions: Sequence[Any], solution: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """
    1 where the answer of a completion equals the solution, else 0; `None` where the solution cannot be read. The
    answer is the content of the last `\\boxed{}`, else the last number; so is that of a solution that says more.

    Needs `math-verify` (`pip install "marft-trl[math]"`). Outside of the main thread a process of its own compares,
    since what a model wrote is given its time limit by a signal.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(
            '`math_reward` needs math-verify, which is not installed. Run `pip install "marft-trl[math]"`.'
        )
    scores: list[float | None] = [None] * len(completions)
    known = [index for index, right in enumerate(solution) if right is not None]
    pairs = [(last_text(completions[index]), str(solution[index])) for index in known]
    in_main = threading.current_thread() is threading.main_thread()
    found = [compare(*pair) for pair in pairs] if in_main else compare_elsewhere(pairs)
    for index, score in zip(known, found, strict=True):
        scores[index] = score
    return scores
