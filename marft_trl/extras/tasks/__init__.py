# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Tasks of other packages: datasets with their rewards, and games and environments as workflows."""

from .environments import game_seeds, gymnasium_text, open_env
from .games import (
    Chance,
    Decision,
    End,
    average_policy,
    best_return,
    expected_returns,
    exploitability,
    find_information_sets,
)
from .human_eval import get_human_eval_reward, human_eval, human_eval_reward
from .reasoning_gym import (
    get_reasoning_gym_reward,
    reasoning_gym,
    reasoning_gym_answer,
    reasoning_gym_exact,
    reasoning_gym_reward,
)
from .smollm2 import smollm2
from .textarena import TextArena


__all__ = [
    "Chance",
    "Decision",
    "End",
    "TextArena",
    "average_policy",
    "best_return",
    "expected_returns",
    "exploitability",
    "find_information_sets",
    "game_seeds",
    "get_human_eval_reward",
    "get_reasoning_gym_reward",
    "gymnasium_text",
    "human_eval",
    "human_eval_reward",
    "open_env",
    "reasoning_gym",
    "reasoning_gym_answer",
    "reasoning_gym_exact",
    "reasoning_gym_reward",
    "smollm2",
]
