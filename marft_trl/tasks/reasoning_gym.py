# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Questions of reasoning-gym, with its own scores."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from ..rewards.texts import last_text
from .packages import load


# The package draws question `i` from `seed + i`: seeds that are this far apart have no question in common by design
_SEED_STEP = 2**20
# Draws for each question that is wanted, before a family is said to have no more of them
_MOST_DRAWS = 50


def reasoning_gym(
    name: str, size: int = 500, seed: int = 0, without: Dataset | None = None, distinct: bool = False, **settings: Any
) -> Dataset:
    """
    Questions of a family of [reasoning-gym](https://github.com/open-thought/reasoning-gym), with the columns that its
    rewards need: `prompt`, `answer` (empty where there are many), `family` (name and settings), `entry`.

    Args:
        name (`str`): family, such as `"chain_sum"`, or `"composite"` with `datasets=[{"name": ..., "weight": ...,
            "config": {...}}, ...]`.
        size (`int`, *optional*, defaults to `500`): number of questions.
        seed (`int`, *optional*, defaults to `0`): other seeds draw other questions. Small families draw the same ones
            again: use `without` for a test set.
        without (`Dataset`, *optional*): questions that are left out, such as those of the test set.
        distinct (`bool`, *optional*, defaults to `False`): whether every question occurs once, as in a test set.
        settings: as in `reasoning_gym.create_dataset`.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: there is no such family, a setting is not valid, a question cannot be kept in a dataset, or there
            are too few questions.
    """
    # Questions can depend on the hash seed of the process, so rows hold all that their scores need
    family = json.dumps({"name": name, **settings}, sort_keys=True)
    known = {one[0]["content"] for one in without["prompt"]} if without is not None else set()
    choose = bool(known) or distinct
    entries = _family(family, size * (_MOST_DRAWS if choose else 1), seed * _SEED_STEP % (2**31 - 1))
    rows: list[dict[str, Any]] = []
    for index in range(len(entries)):
        entry = entries[index]
        question = str(entry["question"])
        if question not in known:
            rows.append(
                {
                    "prompt": [{"role": "user", "content": question}],
                    "answer": "" if entry["answer"] is None else str(entry["answer"]),
                    "family": family,
                    "entry": _text_of(entry, entries),
                }
            )
            if distinct:
                known.add(question)
        if len(rows) == size:
            return Dataset.from_list(rows)
    kind = "distinct questions" if distinct else "questions"
    raise ValueError(
        f"Among {len(entries):,} questions of {family} there are {len(rows)} {kind} that can be used, and `size` is "
        f"{size}. Lower it, or choose settings with more questions."
    )


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
        texts = [answer(last_text(completion)) for completion in completions]
        scores = [_score(*one) for one in zip(texts, family, entry, strict=True)]
        return [float(score >= 1.0) for score in scores] if exact else scores

    reasoning_gym_reward.__name__ = "reasoning_gym_exact" if exact else "reasoning_gym_reward"
    return reasoning_gym_reward


reasoning_gym_reward = get_reasoning_gym_reward()
reasoning_gym_exact = get_reasoning_gym_reward(exact=True)


def _score(text: str | None, family: str, entry: str) -> float:
    questions = _family(family)
    if text is None:
        return 0.0
    try:
        return float(questions.score_answer(text, _entry_of(entry)))
    except Exception:  # of families that parse what a model wrote without a check
        return 0.0


@functools.lru_cache(maxsize=256)
def _family(family: str, size: int = 1, seed: int = 0) -> Any:
    settings = json.loads(family)
    package = load("reasoning_gym", "reasoning-gym", "`reasoning_gym`")
    if settings.get("datasets"):
        if not all(isinstance(one, Mapping) for one in settings["datasets"]):
            raise ValueError(
                '`datasets` of a composite must be a list such as [{"name": "gcd", "weight": 2}], got '
                f"{settings['datasets']!r}."
            )
        spec = load("reasoning_gym.composite", "reasoning-gym", "`reasoning_gym`").DatasetSpec
        settings["datasets"] = [spec(**{"weight": 1.0, "config": {}, **one}) for one in settings["datasets"]]
    try:
        return package.create_dataset(settings.pop("name"), size=size, seed=seed, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym has no questions for {family}: {error}") from error


def _text_of(entry: Mapping[str, Any], entries: Any) -> str:
    """A question with all that its score needs, as text: Python's own notation, or JSON where that does not do."""
    for write, read in ((repr, ast.literal_eval), (json.dumps, json.loads)):
        try:
            text = write(dict(entry))
            again = read(text)
            if all(
                entries.score_answer(one, again) == entries.score_answer(one, entry) for one in ("", entry["answer"])
            ):
                return text
        except (ValueError, TypeError, SyntaxError):
            continue
    raise ValueError(f"A question of reasoning-gym cannot be kept in a dataset: {str(entry)[:200]}")


@functools.lru_cache(maxsize=4096)
def _entry_of(text: str) -> dict[str, Any]:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return json.loads(text)
