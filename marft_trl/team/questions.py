# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What a team is asked: texts, messages or dataset rows, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl import is_conversational

from ..config.dataset_checks import check_prompts
from ..config.evaluation import check_sampling
from ..config.sampling import decoding


# Arguments of `generate` and of chat clients that a question has in another form, or not
SET_ELSEWHERE = {
    **{name: f"Write `sampling={{{name!r}: ...}}`." for name in ("temperature", "top_p", "top_k", "min_p")},
    **dict.fromkeys(
        ("max_new_tokens", "max_tokens", "max_length", "max_completion_length"),
        "The length limit of a turn is the `max_completion_length` of its agent, which was set for training and is "
        "saved with the team.",
    ),
    "do_sample": "Write `greedy=True` to decode without sampling.",
    "num_return_sequences": "Write `team.run(questions, num_samples=...)`.",
}


def questions(
    prompts: Any, num_samples: int, greedy: bool, sampling: Mapping[str, float] | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """
    Dataset rows, each prompt `num_samples` times, and the options of the generator.

    Raises:
        TypeError: `prompts` is a single prompt.
        ValueError: there is none, one is not valid, or the settings of sampling are not.
    """
    check_count("num_samples", num_samples)
    if greedy and sampling:
        raise ValueError("`greedy=True` and `sampling` were both passed. Leave one of them out.")
    rows = [_as_row(prompt) for prompt in _as_list(prompts) for _ in range(num_samples)]
    empty = [index for index, row in enumerate(rows) if _is_blank(row.get("prompt", "?"))]
    if empty:
        raise ValueError(
            f"Prompt {empty[0] // num_samples} of {len(rows) // num_samples} is empty, so there is nothing to "
            "answer. Pass a text or a list of messages."
        )
    check_prompts(rows, "prompts")
    check_sampling(sampling, "sampling")
    return rows, {"greedy": True} if greedy else decoding(sampling)


def check_one(question: Any, where: str) -> None:
    """
    Raises:
        TypeError: what is passed to the method `where` is not a single question.
    """
    if not isinstance(question, (str, Mapping)) and not (question and is_conversational({"prompt": question})):
        raise TypeError(
            f"`{where}` answers one question, a text or a list of messages, got {str(question)[:80]}. For several, "
            "use `team.run(questions)`: it returns an episode for each, with its answer in `episode.answer.text`."
        )


def check_count(name: str, number: Any) -> None:
    """
    Raises:
        ValueError: a number is no positive integer.
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {number!r}.")


def _as_list(prompts: Any) -> list:
    if (
        prompts is None
        or isinstance(prompts, (str, Mapping))
        or (len(prompts) and is_conversational({"prompt": prompts}))
    ):
        raise TypeError(
            "`prompts` must be a list of prompts; for a single one pass `[prompt]`, or call `team(prompt)`."
        )
    prompts = list(prompts)
    if not prompts:
        raise ValueError("`prompts` is empty: pass at least one.")
    return prompts


def _is_blank(prompt: Any) -> bool:
    return prompt is None or (isinstance(prompt, str) and not prompt.strip())


def _as_row(prompt: Any) -> dict[str, Any]:
    return dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
