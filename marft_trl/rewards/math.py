# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Reward of a mathematical answer, compared by `math_verify`."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from .texts import last_text


# The last of these is a plain answer. Digits are bounded, so that a long run of them costs linear time.
_NUMBER = re.compile(r"(?<![\d.,])-?\d{1,40}(?:,\d{3})*(?:\.\d{1,40})?(?![\d])")


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, braces inside it balanced; `None` without or unclosed. Linear."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : end]
    return None


def math_answer(text: str) -> str | None:
    """What a text answers: the content of its last box, else its last number, else `None`."""
    inside = boxed(text)
    if inside is not None:
        return inside
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def math_reward(completions: Sequence[Any], solution: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """
    1 where the answer of a completion equals the solution, else 0; `None` where the solution cannot be read. The
    answer is the content of the last `\\boxed{}`, else the last number; so is that of a solution that says more.

    Needs `math-verify` (`pip install "marft-trl[math]"`).
    """
    return [
        None if right is None else _score(last_text(one), str(right))
        for one, right in zip(completions, solution, strict=True)
    ]


def _score(text: str, solution: str) -> float | None:
    gold = _parse(boxed(solution) or solution) or _parse(math_answer(solution) or "")
    if not gold:
        return None
    answer = math_answer(text)
    if answer is None or len(answer) > 1000:
        return 0.0
    from math_verify import verify

    return float(verify(gold, _parse(answer), timeout_seconds=_seconds()))


def _parse(text: str) -> list:
    try:
        from math_verify import parse
    except ImportError as error:
        raise ImportError(
            '`math_reward` needs math-verify, which is not installed. Run `pip install "marft-trl[math]"`.'
        ) from error
    return parse(f"${text}$", parsing_timeout=_seconds())


def _seconds() -> int | None:
    """A time limit for what a model wrote ("9^9^9^9"). It works by a signal, which the main thread alone can get."""
    return 5 if threading.current_thread() is threading.main_thread() else None
