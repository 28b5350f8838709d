# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Scores of reasoning-gym as reward functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..rewards.texts import last_text
from .packages import load
from .reasoning_gym import entry_of, family_of


def reasoning_gym_answer(text: str) -> str | None:
    """What is scored of a text: what stands in its last `<answer>` tag, or else all of it; `None` if it is empty."""
    found = load("reasoning_gym.utils", "reasoning-gym", "`reasoning_gym_answer`").extract_answer(text)
    return (text if found is None else found).strip() or None


def get_reasoning_gym_reward(
    answer: Callable[[str], str | None] = reasoning_gym_answer, exact: bool = False
) -> Callable[..., list[float]]:
    """
    Make a reward function with the scores of reasoning-gym, from 0 to 1. Many families give a part for a text that
    holds the right answer. A text that reasoning-gym fails to read scores 0.

    Args:
        answer (`Callable`, *optional*): what is scored of a text, such as [`~marft_trl.rewards.math_answer`], its last
            number. Defaults to [`reasoning_gym_answer`].
        exact (`bool`, *optional*, defaults to `False`): whether only the full score counts: 1, or else 0.
    """

    def reasoning_gym_reward(completions: Sequence[Any], family: Sequence[str], entry: Sequence[str], **kwargs: Any):
        """Scores of answers to questions of [`reasoning_gym`], by the family's own rules: a reward function."""
        texts = [answer(last_text(completion)) for completion in completions]
        scores = [_score(*one) for one in zip(texts, family, entry, strict=True)]
        return [float(score >= 1.0) for score in scores] if exact else scores

    reasoning_gym_reward.__name__ = "reasoning_gym_exact" if exact else "reasoning_gym_reward"
    return reasoning_gym_reward


reasoning_gym_reward = get_reasoning_gym_reward()
reasoning_gym_exact = get_reasoning_gym_reward(exact=True)


def _score(text: str | None, family: str, entry: str) -> float:
    questions = family_of(family)
    if text is None:
        return 0.0
    try:
        return float(questions.score_answer(text, entry_of(entry)))
    except Exception:  # of families that parse what a model wrote without a check
        return 0.0
