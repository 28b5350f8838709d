# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Reward functions."""

from .answers import boxed, math_answer
from .functions import (
    environment_reward,
    get_coder_reward,
    get_outcome_reward,
    get_planner_reward,
    get_solver_reward,
    get_verifier_reward,
    in_background,
    last_python_block,
    math_reward,
)
from .judge import judge_reward


__all__ = [
    "boxed",
    "environment_reward",
    "get_coder_reward",
    "get_outcome_reward",
    "get_planner_reward",
    "get_solver_reward",
    "get_verifier_reward",
    "in_background",
    "judge_reward",
    "last_python_block",
    "math_answer",
    "math_reward",
]
