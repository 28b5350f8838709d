# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Reward of a program: the share of the tests of a row that it passes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, InvalidOperation
from typing import Any

from .jail import Limits, run_python
from .texts import last_text


_LANGUAGES = ("python", "python3", "py")
# Tests a program may hang in before the rest of them count as failed
_MOST_TIMEOUTS = 2
# Programs whose pass rates are kept
_MOST_KNOWN = 4096


def last_python_block(text: str) -> str | None:
    """The content of the last closed Markdown code block in Python, or `None`. Linear in the text."""
    found: str | None = None
    block: list[str] | None = None
    for line in text.split("\n"):
        mark = line.strip()
        if block is None:
            if mark.startswith("```") and mark[3:].strip().lower() in _LANGUAGES:
                block = []
        elif mark == "```":
            found, block = "\n".join(block), None
        else:
            block.append(line)
    return found


def get_code_reward(
    seconds: float = 10.0, memory: int = 1 << 30, workers: int = 4, strict: bool = True
) -> Callable[..., list[float | None]]:
    """
    Make a reward function that runs the last Python block of a completion against the tests of its row, each test in a
    process of its own behind a fence ([`run_python`]).

    The column `tests` has `inputs` and `outputs`, lists of one length, and optionally `function`, as a mapping or as
    JSON: without `function`, inputs are texts for the standard input and outputs what has to be printed; with it,
    inputs are lists of arguments and outputs what the function (or that method of a class `Solution`) has to return;
    with `wrapped`, what is returned may stand in a list of its own there, as in TACO.

    Args:
        seconds (`float`, *optional*, defaults to `10.0`): wall-clock time of a test; of all together for a function.
            A program that hangs in two tests is not run on the others, which count as failed.
        memory (`int`, *optional*): bytes that a program may use.
        workers (`int`, *optional*, defaults to `4`): programs that run at once.
        strict (`bool`, *optional*, defaults to `True`): whether to refuse to run where the machine cannot fence in.

    Returns: `code_reward(completions, tests, **kwargs)`: passed tests over all tests, 0 without a Python block, `None`
        for a row without tests.
    """
    limits = Limits(seconds=seconds, memory=memory, strict=strict)
    known: dict[tuple, float | None] = {}  # several reward functions may ask for the same

    def code_reward(completions: Sequence[Any], tests: Sequence[Any], **kwargs: Any) -> list[float | None]:
        programs = [last_python_block(last_text(completion)) for completion in completions]
        texts = [its if isinstance(its, str) else json.dumps(its) for its in tests]
        jobs = list(zip(programs, texts, strict=True))
        fresh = [job for job in dict.fromkeys(jobs) if job not in known]
        with ThreadPoolExecutor(workers) as pool:
            rates = pool.map(lambda job: pass_rate(job[0], json.loads(job[1]), limits), fresh)
            known.update(zip(fresh, rates, strict=True))
        answers = [known[job] for job in jobs]
        for job in list(known)[:-_MOST_KNOWN]:
            del known[job]
        return answers

    return code_reward


def code_reward(completions: Sequence[Any], tests: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """[`get_code_reward`] with its defaults."""
    return _DEFAULT(completions, tests)


_DEFAULT = get_code_reward()


def pass_rate(program: str | None, tests: Any, limits: Limits | None = None) -> float | None:
    """
    Share of the tests that a program passes, see [`get_code_reward`].

    Raises:
        ValueError: the tests are not of that form.
    """
    if tests is None:
        return None
    inputs, outputs, function, wrapped = _tests(tests)
    if not inputs:
        return None
    if program is None:
        return 0.0
    if function is not None:
        returned = run_python(program, function=function, arguments=inputs, limits=limits).returned
        right = [
            "value" in one and (_same(one["value"], output) or (wrapped and _same([one["value"]], output)))
            for one, output in zip(returned, outputs, strict=False)
        ]
    else:
        right, hung = [], 0
        for text, output in zip(inputs, outputs, strict=True):
            outcome = run_python(program, stdin=text, limits=limits)
            right.append(outcome.status == "ok" and same_output(outcome.stdout, output))
            hung += outcome.status == "timeout"
            if hung >= _MOST_TIMEOUTS:
                break
    return sum(right) / len(inputs)


def _tests(tests: Any) -> tuple[Sequence[Any], Sequence[Any], str | None, bool]:
    data = json.loads(tests) if isinstance(tests, str) else tests
    if not isinstance(data, Mapping) or not {"inputs", "outputs"} <= set(data):
        raise ValueError(f"`tests` of a row needs `inputs` and `outputs`, got {str(data)[:200]!r}.")
    inputs, outputs = data["inputs"], data["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError(f"`tests` of a row has {len(inputs)} inputs and {len(outputs)} outputs; they have to match.")
    return inputs, outputs, data.get("function"), bool(data.get("wrapped"))


def same_output(printed: str, expected: str) -> bool:
    """Whether a program printed what it should, but for blanks at line ends and the form of numbers."""
    got, wanted = ([line.split() for line in text.strip().splitlines()] for text in (printed, expected))
    return len(got) == len(wanted) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(got, wanted, strict=True)
    )


def _same_word(got: str, wanted: str) -> bool:
    if got == wanted:
        return True
    try:
        return Decimal(got) == Decimal(wanted)
    except InvalidOperation:
        return False


def _same(got: Any, wanted: Any) -> bool:
    if isinstance(got, (list, tuple)) and isinstance(wanted, (list, tuple)):
        return len(got) == len(wanted) and all(map(_same, got, wanted))
    if isinstance(got, float) or isinstance(wanted, float):
        numbers = all(isinstance(one, (int, float)) for one in (got, wanted))
        try:
            return numbers and abs(got - wanted) <= 1e-9 * max(1.0, abs(wanted))
        except OverflowError:  # an integer beyond all floats
            return False
    return type(got) is type(wanted) and got == wanted
