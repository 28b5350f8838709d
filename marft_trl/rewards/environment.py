# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What the workflow's environment gave, as a reward function."""

from __future__ import annotations

from collections.abc import Sequence


def environment_reward(earned: Sequence[float], **kwargs) -> list[float]:
    """
    The sum of what the turns of each episode earned (`episode.observe(..., reward=...)`, `episode.earn`).

    The trainer adds this function to `reward_funcs` where the workflow earns rewards; name it yourself to give it a
    weight in `reward_weights`.
    """
    return list(earned)
