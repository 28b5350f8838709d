# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments of evaluations, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..system.hints import did_you_mean
from .options import documented, option


# Sampling settings of an evaluation, with their ranges
_SAMPLING = {"temperature": (0, None), "top_p": (0, 1), "top_k": (0, None), "min_p": (0, 1)}


@documented
@dataclass
class EvaluationSettings:
    """
    Settings of evaluations, in addition to those of [`~trl.GRPOConfig`]. `num_generations_eval` is the number of
    episodes of each question.

    Args:
        eval_sampling (`dict`, *optional*, defaults to `None`):
            Sampling settings of all agents in evaluations, in place of those of training: `temperature`, `top_p`,
            `top_k`, `min_p`. `{"temperature": 0.0}` decodes greedily.
        eval_k (`list[int]`, *optional*, defaults to `None`):
            Values of k for which evaluations report `pass@<k>` and `maj@<k>`, at most the number of episodes of each
            question; also reports `avg@<n>` of all `n` episodes, and writes `evaluations.jsonl`. If `None`, none of
            these.
        eval_right_at (`float`, *optional*, defaults to `1.0`):
            Reward from which the answer of an episode counts as right, for `eval_k`.
        eval_right_by (`str`, *optional*, defaults to `None`):
            Name of the reward function that decides it. If `None`, the reward of the episode.
        eval_reference_column (`str`, *optional*, defaults to `"solution"`):
            Column of the dataset that metrics of the `evaluate` package get as `references`, see `eval_metrics` of the
            trainer.
    """

    eval_sampling: dict | str | None = option(None, about="evaluations")
    eval_k: list[int] | None = option(None, about="evaluations")
    eval_right_at: float = option(1.0, about="evaluations")
    eval_right_by: str | None = option(None, about="evaluations")
    eval_reference_column: str = option("solution", about="evaluations")


def check_evaluation(args: Any) -> None:
    """
    Check the settings of evaluations.

    Raises:
        ValueError, TypeError: a setting is not valid, or asks for more episodes than a question has.
    """
    check_sampling(args.eval_sampling)
    check_k(args.eval_k, args.num_generations_eval or args.num_generations)
    if args.eval_k is None:
        for name, default in (("eval_right_at", 1.0), ("eval_right_by", None)):
            if getattr(args, name) != default:
                raise ValueError(
                    f"`{name}={getattr(args, name)!r}` has no effect with `eval_k=None`. Set `eval_k`, or leave "
                    f"`{name}` out."
                )


def check_sampling(sampling: Any, what: str = "eval_sampling") -> None:
    """
    Check sampling settings of an evaluation.

    Raises:
        TypeError: it is no mapping.
        ValueError: a name is not known, or a value is out of its range.
    """
    if sampling is None:
        return
    if not isinstance(sampling, Mapping):
        raise TypeError(f'`{what}` must be a mapping such as {{"temperature": 0.6}}, got {sampling!r}.')
    for name, value in sampling.items():
        if name not in _SAMPLING:
            raise ValueError(f"`{what}` has {name!r}; it takes {', '.join(_SAMPLING)}.{did_you_mean(name, _SAMPLING)}")
        least, most = _SAMPLING[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or value < least or (most is not None and value > most):
            span = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"`{name}` of `{what}` must be a number {span}, got {value!r}.")


def check_k(values: Any, samples: int, what: str = "eval_k") -> None:
    """
    Check the values of k of an evaluation with this number of episodes of each question.

    Raises:
        ValueError: a value is no integer of at least 1, or larger than `samples`.
    """
    if values is None:
        return
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"`{what}` must be a list of integers such as [1, 4], got {values!r}.")
    for k in values:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError(f"`{what}` must be a list of integers of at least 1, got {values!r}.")
        if k > samples:
            raise ValueError(
                f"`{what}` ({k}) needs at least {k} episodes of each question, and evaluations have {samples}. Set "
                f"`num_generations_eval={k}` (for one evaluation `num_samples={k}`) or more."
            )
