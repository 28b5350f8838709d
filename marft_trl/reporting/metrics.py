# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Metrics of a team's answers: pass@k, avg@k, maj@k, exact match, and intervals over questions and seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np


if TYPE_CHECKING:
    import evaluate


def pass_at_k(n: int, c: int, k: int) -> float:
    """
    Probability that at least one of `k` samples is right: `1 - C(n - c, k) / C(n, k)`.

    Args:
        n (`int`): number of samples.
        c (`int`): number of right samples.
        k (`int`): number of samples that may be tried, at most `n`.

    Returns: `float` in `[0, 1]`, unbiased for `n` independent samples.

    Raises:
        ValueError: `0 <= c <= n` or `1 <= k <= n` does not hold.

    Source: Chen et al. 2021 (2107.03374), equation 1.
    """
    _check_counts(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"`c`, the number of correct samples, must be between 0 and `n` ({n}), got {c}.")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def avg_at_k(scores: Sequence[float], k: int | None = None) -> float:
    """
    Mean score of `k` samples: the mean over all samples, which estimates it for every `k`.

    Args:
        scores (`Sequence[float]`): score of each sample.
        k (`int`, *optional*): at most the number of samples. It does not change the value.

    Raises:
        ValueError: there are no scores, or fewer than `k`.
    """
    _check_counts(len(scores), 1 if k is None else k)
    return math.fsum(scores) / len(scores)


def maj_at_k(answers: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    """
    Expected score of the most frequent answer among `k` of the samples, over all choices of `k`. Of answers that are
    equally frequent, one is drawn at random. Samples without an answer do not vote; without any vote, it is 0.

    Args:
        answers (`Sequence`): answer of each sample in the form that is compared; `None` where there is none.
        scores (`Sequence[float]`): score of each sample. Equal answers share the mean of their scores.
        k (`int`): number of samples that vote, at most the number of samples.

    Returns: `float`, exact: it is counted, not sampled.

    Raises:
        ValueError: `answers` and `scores` differ in length, or `1 <= k <= n` does not hold.

    Source: self-consistency (2203.11171), averaged over all subsets of size `k`.
    """
    if len(answers) != len(scores):
        raise ValueError(f"`answers` and `scores` must have the same length, got {len(answers)} and {len(scores)}.")
    _check_counts(len(answers), k)
    of_answer: dict[Hashable, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            of_answer[answer].append(score)
    sizes = sorted(len(votes) for votes in of_answer.values())
    silent = len(answers) - sum(sizes)
    wins = {size: _share_of_wins(size, sizes, silent, k) for size in set(sizes)}
    return math.fsum(float(wins[len(votes)]) * math.fsum(votes) / len(votes) for votes in of_answer.values())


def _check_counts(n: int, k: int) -> None:
    if n < 1:
        raise ValueError("There are no samples.")
    if not 1 <= k <= n:
        raise ValueError(f"`k` must be between 1 and the number of samples ({n}), got {k}.")


def _share_of_wins(size: int, sizes: Sequence[int], silent: int, k: int) -> Fraction:
    """
    Probability that an answer of `size` samples is chosen by `k` votes. `ways[drawn][ties]` counts the choices of
    `drawn` samples with other answers, of which `ties` have as many votes.
    """
    others = list(sizes)
    others.remove(size)
    total = Fraction(0)
    for votes in range(1, min(size, k) + 1):
        ways = {(drawn, 0): math.comb(silent, drawn) for drawn in range(min(silent, k - votes) + 1)}
        for other in others:
            following: dict[tuple[int, int], int] = defaultdict(int)
            for (drawn, ties), count in ways.items():
                for value in range(min(other, votes, k - votes - drawn) + 1):
                    following[drawn + value, ties + (value == votes)] += count * math.comb(other, value)
            ways = following
        total += math.comb(size, votes) * sum(
            Fraction(count, 1 + ties) for (drawn, ties), count in ways.items() if drawn == k - votes
        )
    return total / math.comb(sum(sizes) + silent, k)


class Interval(NamedTuple):
    """
    A mean with its interval.

    Args:
        mean (`float`): mean over questions and seeds.
        low, high (`float`): ends of the interval.
        seeds, questions (`int`): what it is a mean of. With one seed, the interval does not contain the spread of
            training: it is about this one run.
    """

    mean: float
    low: float
    high: float
    seeds: int
    questions: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0 or self.high < 0


# What is added to the questions, so that scores that happen to be the same do not give an interval of width 0: two
# right and two wrong ones (Agresti and Coull 1998) or, of pairs, a half for each way to differ and one that does not
# (Agresti and Min 2005). As places between the bounds, and weights.
_ADDED_TO_ONE = ((0.0, 1.0), (2.0, 2.0))
_ADDED_TO_PAIRS = ((0.0, 0.5, 1.0), (0.5, 1.0, 0.5))


def interval(
    scores,
    confidence: float = 0.95,
    n_resamples: int = 4000,
    seed: int = 0,
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> Interval:
    """
    Interval of a mean score, for other questions and other seeds.

    The questions are resampled (bootstrap), as they are and with two right and two wrong ones added, as in the
    interval of Agresti and Coull: if all of a few questions are wrong, the next one may be right. Each end is the
    outer one of both: for low scores of several samples each, what is added is far from all of them. Seeds are few, so
    the deviation of their mean is drawn from Student's distribution with their standard error instead, which
    resampling would make too small. Both deviations are independent, and their sum gives the percentiles. Noise that
    belongs to one question in one seed is contained in both, so intervals are rather too wide than too narrow.

    Args:
        scores (array of shape `(seeds, questions)` or `(questions,)`):
            Mean score of the samples of each question; the same questions for all seeds.
        confidence (`float`, *optional*, defaults to `0.95`):
            Probability that the interval contains the mean over all questions and seeds.
        n_resamples (`int`, *optional*, defaults to `4000`):
            Number of draws.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.
        bounds (`tuple[float, float]`, *optional*, defaults to `(0.0, 1.0)`):
            Smallest and largest possible score. `None` if there are none: nothing is added then.

    Raises:
        ValueError: there are no scores, one of them is not a number or beyond the bounds, or `confidence` is not
            between 0 and 1.
    """
    return _interval(scores, bounds, _ADDED_TO_ONE, confidence, n_resamples, seed)


def _interval(scores, bounds, added, confidence: float = 0.95, n_resamples: int = 4000, seed: int = 0) -> Interval:
    table = np.atleast_2d(np.asarray(scores, dtype=float))
    if table.ndim != 2 or not table.size:
        raise ValueError(f"`scores` must have the shape (seeds, questions), got {np.shape(scores)}.")
    if np.isnan(table).any():
        raise ValueError(f"{int(np.isnan(table).sum())} of the {table.size} scores are NaN.")
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be between 0 and 1, got {confidence!r}.")
    if bounds is not None and (table.min() < bounds[0] or table.max() > bounds[1]):
        raise ValueError(
            f"Scores range from {table.min():g} to {table.max():g}, outside `bounds` {bounds}. Set `bounds` to the "
            "smallest and largest possible score, or to `None`."
        )
    draws = np.random.default_rng(seed)
    seeds, questions = table.shape
    of_seeds = np.zeros(n_resamples)
    if seeds > 1:
        error = table.mean(axis=1).std(ddof=1) / np.sqrt(seeds)
        of_seeds += error * draws.standard_t(seeds - 1, size=n_resamples)
    mean, means = float(table.mean()), table.mean(axis=0)
    ends = [mean, mean]
    for places, weights in [((), ()), *([added] if bounds is not None else [])]:
        reached = [bounds[0] + place * (bounds[1] - bounds[0]) for place in places] if bounds is not None else []
        drawn = _resampled([*means, *reached], [*np.ones(questions), *weights], n_resamples, draws) + of_seeds
        low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
        ends = [min(ends[0], float(low)), max(ends[1], float(high))]
    if bounds is not None:
        ends = [max(ends[0], bounds[0]), min(ends[1], bounds[1])]
    return Interval(mean, ends[0], ends[1], seeds, questions)


def _resampled(values, weights, count: int, draws: np.random.Generator) -> np.ndarray:
    """Means of resamples `(count,)` of weighted values, as far from their mean as of one question more."""
    total = sum(weights)
    center = float(np.dot(values, weights) / total)
    if total <= 1:
        return np.full(count, center)
    drawn = draws.choice(values, size=(count, round(total)), p=np.divide(weights, total))
    return center + (drawn.mean(axis=1) - center) * np.sqrt(total / (total - 1))


def paired_difference(scores, others, bounds: tuple[float, float] | None = (0.0, 1.0), **options) -> Interval:
    """
    Interval of the difference of two means, `scores` minus `others`, with the same seeds and questions. What makes a
    question difficult for both cancels, so the interval is narrower than those of the means.

    Args:
        scores, others (arrays of shape `(seeds, questions)` or `(questions,)`):
            Mean score of the samples of each question.
        bounds (`tuple[float, float]`, *optional*, defaults to `(0.0, 1.0)`):
            Smallest and largest possible score of one question, or `None`.
        options:
            `confidence`, `n_resamples` and `seed`, as in [`interval`].

    Raises:
        ValueError: the shapes differ, or as in [`interval`].

    Source of what is added to the questions: Agresti and Min 2005.
    """
    if np.shape(scores) != np.shape(others):
        raise ValueError(f"Scores need the same seeds and questions, got {np.shape(scores)} and {np.shape(others)}.")
    reach = None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])
    difference = np.asarray(scores, dtype=float) - np.asarray(others, dtype=float)
    return _interval(difference, reach, _ADDED_TO_PAIRS, **options)


def team_exact_match() -> evaluate.EvaluationModule:
    """The metric of `team_exact_match.py`: exact match of the team's answers with a bootstrap interval."""
    import evaluate  # when it is used: it takes half a second

    return evaluate.load(str(Path(__file__).with_name("team_exact_match.py")))
