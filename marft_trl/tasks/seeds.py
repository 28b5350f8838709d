# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Rows for games and environments, which begin from a seed instead of a question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import Dataset


def game_seeds(size: int, seed: int = 0, prompt: str = "Play the game.") -> Dataset:
    """
    A dataset of games: `prompt`, and a `seed` of each, from which all episodes of a group begin.

    Args:
        size (`int`): number of rows.
        seed (`int`, *optional*, defaults to `0`): first of the seeds. Other ranges give other games, for a test.
        prompt (`str`, *optional*): what all agents are shown first.
    """
    message = [{"role": "user", "content": prompt}]
    return Dataset.from_list([{"prompt": message, "seed": seed + index} for index in range(size)])


def seed_in(row: Mapping[str, Any], what: str) -> int:
    """
    The seed of a row.

    Raises:
        ValueError: it has none.
    """
    seed = row.get("seed")
    if not isinstance(seed, int):
        raise ValueError(
            f"{what} begins from the column `seed` of the dataset, an integer; got {seed!r}. `game_seeds(size)` makes "
            "such a dataset."
        )
    return seed
