# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Extract mathematical answers from texts and compare them with `math_verify`.

As a script, it reads pairs as a JSON list from the standard input and prints one score per line. To start quickly, it
imports nothing from the package.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence


# The last number of a text is its answer if there is no box. The number of digits is bounded to keep the time linear.
_NUMBER = re.compile(r"(?<![\d.,])-?\d{1,40}(?:,\d{3})*(?:\.\d{1,40})?(?![\d])")
# Time limit to parse or to compare an answer such as "9^9^9^9". It uses a signal, which only the main thread gets.
_SECONDS = 5
_STARTUP_SECONDS = 60


def boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}`, with balanced braces; `None` if it is missing or not closed. Linear time."""
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
    """Answer of a text: the content of the last `\\boxed{}`, or else the last number, or else `None`."""
    inside = boxed(text)
    if inside is not None:
        return inside
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def compare(text: str, solution: str) -> float | None:
    """
    Score 1 if the answer of a text equals the solution, else 0; `None` if the solution cannot be parsed. Call it only
    in the main thread.
    """
    gold = _parse(boxed(solution) or solution) or _parse(math_answer(solution) or "")
    if not gold:
        return None
    answer = math_answer(text)
    if answer is None or len(answer) > 1000:
        return 0.0
    from math_verify import verify

    return float(verify(gold, _parse(answer), timeout_seconds=_SECONDS))


def _parse(text: str) -> list:
    from math_verify import parse

    return parse(f"${text}$", parsing_timeout=_SECONDS)


def compare_elsewhere(pairs: Sequence[tuple[str, str]]) -> list[float | None]:
    """
    Run [`compare`] on each pair in another process, for threads other than the main one. A pair that exceeds the time
    limit scores 0.
    """
    scores: list[float | None] = []
    program = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    while len(scores) < len(pairs):
        rest = pairs[len(scores) :]
        process = subprocess.Popen(  # noqa: S603  # our own program; what models wrote is data on its input
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            output, _ = process.communicate(json.dumps(rest), timeout=_STARTUP_SECONDS + 4 * _SECONDS * len(rest))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        done = [json.loads(line) for line in output.splitlines()]
        if not done and process.returncode > 0:
            raise RuntimeError(f"The process that compares answers failed with exit code {process.returncode}.")
        scores += done if len(done) == len(rest) else [*done, 0.0]
    return scores


if __name__ == "__main__":
    for pair in json.load(sys.stdin):
        print(json.dumps(compare(*pair)), flush=True)
