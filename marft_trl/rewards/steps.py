# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Reward functions of single turns, for `AgentSpec(reward_funcs=...)` with `credit="per_step"`. They are those of MARFT
v2 for planners, solvers, coders and verifiers. Each is made from an outcome reward, such as
`math_reward` or `code_reward`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from trl.trainer.utils import get_callable_name

from ..episodes.records import Turn
from .code import last_python_block
from .math import boxed


Reward = Callable[..., Sequence["float | None"]]
_STEP = re.compile(r"^[ \t]{0,20}(?:\d{1,3}[.):]|[Ss]tep \d{1,3}|[-*\u2022][ \t])", re.MULTILINE)


def get_planner_reward(outcome: Reward, steps: int = 2) -> Reward:
    """
    Make a reward function for planners: half of the reward for the plan, half for the episode's outcome. A plan of at
    least `steps` steps (numbered or bulleted lines) gets its full half. A plan with fewer steps gets a proportional
    part.

    Args:
        outcome (`Callable`): reward function with TRL's signature. It scores the team's answer.
        steps (`int`, *optional*, defaults to `2`): number of steps for the full reward. MARFT v2 uses 2 for
            mathematics and 3 for code.
    """

    def planner_reward(turn: Sequence[Turn], **columns: Any) -> list[float | None]:
        plans = [min(len(_STEP.findall(one.text)) / steps, 1.0) for one in turn]
        ends = _outcomes(outcome, _answers(columns, "planner"), columns)
        return [None if end is None else 0.5 * plan + 0.5 * end for plan, end in zip(plans, ends, strict=True)]

    return planner_reward


def get_outcome_reward(outcome: Reward) -> Reward:
    """
    Make a reward function that returns the episode's outcome, e.g. for reflectors, whose turns cannot be scored.
    Metrics and transcripts show it under the name of `outcome`.
    """

    def outcome_reward(**columns: Any) -> list[float | None]:
        return list(_outcomes(outcome, _answers(columns, "outcome"), columns))

    outcome_reward.__name__ = get_callable_name(outcome)
    return outcome_reward


def get_solver_reward(outcome: Reward, floor: float = 0.1) -> Reward:
    """Make a reward function for solvers: the outcome, at least `floor`, for turns with `\\boxed{}`, else 0."""

    def solver_reward(turn: Sequence[Turn], **columns: Any) -> list[float | None]:
        return _if_formed(floor, outcome, turn, [boxed(one.text) is not None for one in turn], columns)

    return solver_reward


def get_coder_reward(outcome: Reward, floor: float = 0.1) -> Reward:
    """Make a reward function for coders: the outcome, at least `floor`, for turns with a Python block, else 0."""

    def coder_reward(turn: Sequence[Turn], **columns: Any) -> list[float | None]:
        return _if_formed(floor, outcome, turn, [last_python_block(one.text) is not None for one in turn], columns)

    return coder_reward


def get_verifier_reward(outcome: Reward) -> Reward:
    """Make a reward function for verifiers: the outcome of the episode, or of a candidate by itself."""

    def verifier_reward(turn: Sequence[Turn], **columns: Any) -> list[float | None]:
        return list(_outcomes(outcome, _answers_or_own(turn, columns), columns))

    return verifier_reward


def _if_formed(floor: float, outcome: Reward, turn: Sequence[Turn], has_form: Sequence[bool], columns: dict) -> list:
    ends = _outcomes(outcome, _answers_or_own(turn, columns), columns)
    return [
        None if end is None else max(end, floor) if holds else 0.0 for end, holds in zip(ends, has_form, strict=True)
    ]


def _answers_or_own(turn: Sequence[Turn], columns: dict[str, Any]) -> list[Turn]:
    """The team's answers. A candidate, whose episode has no answer yet, takes the place of the answer."""
    return [own if answer is None else answer for own, answer in zip(turn, columns["answer_turn"], strict=True)]


def _answers(columns: dict[str, Any], whose: str) -> list[Turn]:
    answers = [one for one in columns["answer_turn"] if one is not None]
    if len(answers) < len(columns["answer_turn"]):
        raise ValueError(
            f"The {whose} reward needs the answer of the episode, which a candidate turn does not have yet. With "
            "`advantage='turn'` set `own_reward_weight=0`, or give the agent a reward of its own turn alone."
        )
    return answers


def _outcomes(outcome: Reward, turns: Sequence[Turn], columns: dict[str, Any]) -> Sequence[float | None]:
    own = {"completions": [one.text for one in turns], "completion_ids": [list(one.completion_ids) for one in turns]}
    return outcome(**{**columns, **own})
