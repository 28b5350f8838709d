# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Reward for a program: the share of the row's tests that it passes."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from typing import Any

from ...rewards.functions import last_python_block, last_text
from .jail import Limits, run_python


# Number of tests that may time out before the remaining ones count as failed
_MOST_TIMEOUTS = 2
# A number as programs print it. Texts such as "007" are not: they may be names, codes or digits of another base.
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,99})(\.[0-9]{1,100})?(e[+-]?[0-9]{1,4})?", re.IGNORECASE)
# Maximum number of cached pass rates
_MOST_KNOWN = 4096


def get_code_reward(
    seconds: float = 10.0, memory: int = 1 << 30, workers: int = 4, strict: bool = True, total_seconds: float = 60.0
) -> Callable[..., list[float | None]]:
    """
    Make a reward function that runs the last Python block of a completion on the tests of its row, in sandboxed
    processes ([`run_python`]).

    The column `tests` holds a mapping, or a mapping as JSON, with these keys:

    - `inputs` and `outputs`: lists of the same length. Without `function`, they hold texts for the standard input and
      the expected standard output. With `function`, they hold lists of arguments and the expected return values.
    - `function`, optional: name of the function, or of the method of a class `Solution`, to call.
    - `wrapped`, optional: if true, an expected return value may be wrapped in a list with one item, as in TACO.

    Args:
        seconds (`float`, *optional*, defaults to `10.0`): wall-clock time limit per test; with `function`, for all
            tests together. If a program times out in two tests, the remaining ones count as failed.
        memory (`int`, *optional*, defaults to `1 << 30`): memory limit of a program in bytes.
        workers (`int`, *optional*, defaults to `4`): number of programs that run at the same time.
        strict (`bool`, *optional*, defaults to `True`): raise an error if the machine cannot sandbox programs.
        total_seconds (`float`, *optional*, defaults to `60.0`): wall-clock time limit of a program for all of its
            tests. Tests for which no time is left count as failed.

    Returns: `code_reward(completions, tests, **kwargs)`, the share of passed tests. It is 0 without a Python block and
        `None` for a row without tests.
    """
    limits = Limits(seconds=seconds, memory=memory, strict=strict)
    known: dict[tuple, float | None] = {}  # a cache, because several reward functions may score the same programs
    lock = threading.Lock()  # and may do so at the same time

    def code_reward(completions: Sequence[Any], tests: Sequence[Any], **kwargs: Any) -> list[float | None]:
        programs = [last_python_block(last_text(completion)) for completion in completions]
        texts = [test if isinstance(test, str) else json.dumps(test) for test in tests]
        jobs = list(zip(programs, texts, strict=True))
        with lock, ThreadPoolExecutor(workers) as pool:
            fresh = [job for job in dict.fromkeys(jobs) if job not in known]
            rates = pool.map(lambda job: pass_rate(job[0], job[1], limits, total_seconds), fresh)
            known.update(zip(fresh, rates, strict=True))
            answers = [known[job] for job in jobs]
            for job in list(known)[:-_MOST_KNOWN]:
                del known[job]
        return answers

    return code_reward


def code_reward(completions: Sequence[Any], tests: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """The reward function of [`get_code_reward`] with default settings."""
    return _DEFAULT(completions, tests)


_DEFAULT = get_code_reward()


def pass_rate(
    program: str | None, tests: Any, limits: Limits | None = None, total_seconds: float = 60.0
) -> float | None:
    """Return the share of tests that a program passes; `None` without tests. See [`get_code_reward`]."""
    limits = limits or Limits()
    if tests is None or tests == "null":
        return None
    inputs, outputs, function, wrapped = _tests(tests)
    if not inputs:
        return None
    if program is None:
        return 0.0
    if function is not None:
        limits = _with_room(limits, outputs)
        returned = run_python(program, function=function, arguments=inputs, limits=limits).returned
        right = [
            "value" in item and (_equals(item["value"], output) or (wrapped and _equals([item["value"]], output)))
            for item, output in zip(returned, outputs, strict=False)
        ]
    else:
        right, hung, end = [], 0, time.monotonic() + total_seconds
        for text, output in zip(inputs, outputs, strict=True):
            left = end - time.monotonic()
            if hung >= _MOST_TIMEOUTS or left <= 0:
                break
            test_limits = replace(_with_room(limits, output), seconds=min(limits.seconds, left))
            outcome = run_python(program, stdin=text, limits=test_limits)
            right.append(outcome.status == "ok" and same_output(outcome.stdout, output))
            hung += outcome.status == "timeout"
    return sum(right) / len(inputs)


def _tests(tests: Any) -> tuple[Sequence[Any], Sequence[Any], str | None, bool]:
    try:
        data = json.loads(tests) if isinstance(tests, str) else tests
    except (RecursionError, ValueError) as error:
        raise ValueError(f"`tests` of a row must be valid JSON ({error}), got {tests[:200]!r}.") from error
    if not isinstance(data, Mapping) or not {"inputs", "outputs"} <= set(data):
        raise ValueError(f"`tests` of a row must have `inputs` and `outputs`, got {str(data)[:200]!r}.")
    inputs, outputs, function = data["inputs"], data["outputs"], data.get("function")
    if not isinstance(function, str | None):
        raise ValueError(f"`function` in `tests` of a row must be a string, got {str(function)[:200]!r}.")
    kinds, what = ((str,), "strings") if function is None else ((list, tuple), "lists of arguments")
    _check_items("inputs", inputs, kinds, what)
    _check_items("outputs", outputs, (str,) if function is None else (object,), "strings")
    if len(inputs) != len(outputs):
        raise ValueError(
            f"`tests` of a row must have as many inputs as outputs, got {len(inputs)} and {len(outputs)}."
        )
    return inputs, outputs, function, bool(data.get("wrapped"))


def _check_items(name: str, items: Any, kinds: tuple[type, ...], what: str) -> None:
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, kinds) for item in items):
        raise ValueError(f"`{name}` in `tests` of a row must be a list of {what}, got {str(items)[:200]!r}.")


def _with_room(limits: Limits, expected: Any) -> Limits:
    """Raise the output limit so that a program can write the expected output."""
    return replace(limits, output=max(limits.output, 2 * len(json.dumps(expected, default=str)) + (1 << 16)))


def same_output(printed: str, expected: str) -> bool:
    """Compare outputs by words. Numbers are equal in any format, such as "2", "2.0" and "2e0"; "007" is no number."""
    got, wanted = ([line.split() for line in text.strip().splitlines()] for text in (printed, expected))
    return len(got) == len(wanted) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(got, wanted, strict=True)
    )


def _same_word(got: str, wanted: str) -> bool:
    return got == wanted or (all(map(_DECIMAL.fullmatch, (got, wanted))) and Decimal(got) == Decimal(wanted))


def _equals(got: Any, wanted: Any) -> bool:
    try:
        return _same(got, wanted)
    except RecursionError:  # nested more deeply than anything that is wanted
        return False


def _same(got: Any, wanted: Any) -> bool:
    if isinstance(got, (list, tuple)) and isinstance(wanted, (list, tuple)):
        return len(got) == len(wanted) and all(map(_same, got, wanted))
    if isinstance(got, dict) and isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(_same(got[key], value) for key, value in wanted.items())
    if isinstance(got, float) or isinstance(wanted, float):
        if not all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in (got, wanted)):
            return False
        try:
            return got == wanted or abs(got - wanted) <= 1e-9 * (abs(wanted) or 1.0) < math.inf
        except OverflowError:  # an integer too large for a float
            return False
    return type(got) is type(wanted) and got == wanted
