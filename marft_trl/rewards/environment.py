# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The rewards of the workflow's environment as a reward function."""

from __future__ import annotations

from collections.abc import Sequence


def environment_reward(earned: Sequence[float], **kwargs) -> list[float]:
    """
    Sum of the rewards that the turns of each episode earned (`episode.observe(..., reward=...)`, `episode.earn`).

    If the workflow earns rewards, the trainer adds this function to `reward_funcs`. To set its weight in
    `reward_weights`, add it to `reward_funcs` yourself.
    """
    return list(earned)
