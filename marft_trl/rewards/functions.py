# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Ready-made reward functions, of answers and of single turns. Those of turns are made from an outcome reward."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..episodes.records import Turn
from .answers import AnswerComparer, boxed


_LANGUAGES = ("python", "python3", "py")
_COMPARER = AnswerComparer()
Reward = Callable[..., Sequence["float | None"]]
_STEP = re.compile(r"^[ \t]{0,20}(?:\d{1,3}[.):]|[Ss]tep \d{1,3}|[-*\u2022][ \t])", re.MULTILINE)


def in_background(reward: Callable[..., Sequence[float | None]]) -> Callable[..., Awaitable[Sequence[float | None]]]:
    """
    Make a reward function asynchronous. It runs in a thread, and TRL runs it concurrently with other asynchronous
    reward functions: `reward_funcs=[in_background(code_reward), in_background(math_reward)]`.
    """

    @functools.wraps(reward)
    async def later(**kwargs):
        return await asyncio.to_thread(reward, **kwargs)

    return later


def environment_reward(earned: Sequence[float], **kwargs) -> list[float]:
    """
    Sum of the rewards that the turns of each episode earned (`episode.observe(..., reward=...)`, `episode.earn`).

    If the workflow earns rewards, the trainer adds this function to `reward_funcs`. To set its weight in
    `reward_weights`, add it to `reward_funcs` yourself.
    """
    return list(earned)


def last_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion. Of a list of messages, it is the content of the last one."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def last_python_block(text: str) -> str | None:
    """Content of the last closed Python code block in Markdown, or `None`. Linear time."""
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


def math_reward(completions: Sequence[Any], solution: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """
    Reward of 1 if the answer of a completion equals the solution, else 0; `None` if the solution cannot be parsed. The
    answer is the content of the last `\\boxed{}`, or else the last number. If a solution is a longer text, its answer
    is found in the same way.

    Requires `math-verify` (`pip install math-verify`). A separate process compares, with limits of time and
    memory; an answer that exceeds them scores 0. Equal answers to the same solution are compared once.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("`math_reward` needs math-verify, which is not installed. Run `pip install math-verify`.")
    known = [index for index, right in enumerate(solution) if right is not None]
    pairs = [(last_text(completions[index]), str(solution[index])) for index in known]
    scores = dict(zip(known, _COMPARER.scores(pairs), strict=True))
    return [scores.get(index) for index in range(len(completions))]


def get_planner_reward(outcome: Reward, steps: int = 2) -> Reward:
    """
    Make a reward function for planners: half of the reward for the plan, half for the episode's outcome. A plan of at
    least `steps` steps (numbered or bulleted lines) gets its full half. Plans with fewer steps get a part of it.

    Args:
        outcome (`Callable`): reward function with TRL's signature. It scores the team's answer.
        steps (`int`, *optional*, defaults to `2`): number of steps for the full reward. MARFT v2 uses 2 for
            mathematics and 3 for code.
    """

    def planner_reward(turn: Sequence[Turn], **columns: Any) -> list[float | None]:
        plans = [min(len(_STEP.findall(item.text)) / steps, 1.0) for item in turn]
        ends = _outcomes(outcome, _answers(columns, "planner"), columns)
        return [None if end is None else 0.5 * plan + 0.5 * end for plan, end in zip(plans, ends, strict=True)]

    return _with_outcome(planner_reward, outcome)


def get_outcome_reward(outcome: Reward) -> Reward:
    """
    Make a reward function that returns the episode's outcome, e.g. for reflectors, whose turns cannot be scored.
    Metrics and transcripts show it under the name of `outcome`.
    """

    def outcome_reward(**columns: Any) -> list[float | None]:
        return list(_outcomes(outcome, _answers(columns, "outcome"), columns))

    from trl.trainer.utils import get_callable_name  # when it is used: workflows load no model library

    outcome_reward.__name__ = get_callable_name(outcome)
    return _with_outcome(outcome_reward, outcome)


def get_solver_reward(outcome: Reward, floor: float = 0.1) -> Reward:
    """Make a reward function for solvers: the outcome, at least `floor`, for turns with `\\boxed{}`, else 0."""
    return _if_formed("solver_reward", outcome, floor, boxed)


def get_coder_reward(outcome: Reward, floor: float = 0.1) -> Reward:
    """Make a reward function for coders: the outcome, at least `floor`, for turns with a Python block, else 0."""
    return _if_formed("coder_reward", outcome, floor, last_python_block)


def get_verifier_reward(outcome: Reward) -> Reward:
    """Make a reward function for verifiers: the outcome of the episode, or of a candidate by itself."""

    def verifier_reward(turn: Sequence[Turn], **columns: Any) -> list[float | None]:
        return list(_outcomes(outcome, _answers_or_own(turn, columns), columns))

    return _with_outcome(verifier_reward, outcome)


def _with_outcome(reward: Reward, outcome: Reward) -> Reward:
    """Return the reward function with the function that it calls, whose columns the trainer looks for."""
    reward.__dict__["_marft_outcome"] = (reward, outcome)  # a wrapper, which has the same attributes, is another one
    return reward


def _if_formed(name: str, outcome: Reward, floor: float, find: Callable[[str], str | None]) -> Reward:
    def reward(turn: Sequence[Turn], **columns: Any) -> list[float | None]:
        ends, forms = _outcomes(outcome, _answers_or_own(turn, columns), columns), [find(item.text) for item in turn]
        pairs = zip(ends, forms, strict=True)
        return [None if end is None else 0.0 if form is None else max(end, floor) for end, form in pairs]

    reward.__name__ = reward.__qualname__ = name
    return _with_outcome(reward, outcome)


def _answers_or_own(turn: Sequence[Turn], columns: dict[str, Any]) -> list[Turn]:
    """The team's answers. A candidate, whose episode has no answer yet, takes the place of the answer."""
    return [own if answer is None else answer for own, answer in zip(turn, columns["answer_turn"], strict=True)]


def _answers(columns: dict[str, Any], whose: str) -> list[Turn]:
    answers = [column for column in columns["answer_turn"] if column is not None]
    if len(answers) < len(columns["answer_turn"]):
        raise ValueError(
            f"The {whose} reward needs the answer of the episode, which does not exist yet for a candidate turn. With "
            "`advantage='turn'`, set `own_reward_weight=0`, or use a reward function that scores only the turn."
        )
    return answers


def _outcomes(outcome: Reward, turns: Sequence[Turn], columns: dict[str, Any]) -> Sequence[float | None]:
    ids = [list(turn.completion_ids) for turn in turns]
    return outcome(**{**columns, "completions": [turn.text for turn in turns], "completion_ids": ids})
