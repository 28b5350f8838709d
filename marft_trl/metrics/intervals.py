# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Intervals of a mean score over questions and seeds, and of the difference of two means."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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


def interval(scores, confidence: float = 0.95, n_resamples: int = 4000, seed: int = 0) -> Interval:
    """
    Interval of a mean score, for other questions and other seeds.

    The questions are resampled (bootstrap). Seeds are few, so the deviation of their mean is drawn from Student's
    distribution with their standard error instead, which resampling would make too small. Both deviations are
    independent, and their sum gives the percentiles. Noise that belongs to one question in one seed is contained in
    both, so intervals are rather too wide than too narrow.

    Args:
        scores (array of shape `(seeds, questions)` or `(questions,)`):
            Mean score of the samples of each question; the same questions for all seeds.
        confidence (`float`, *optional*, defaults to `0.95`):
            Probability that the interval contains the mean over all questions and seeds.
        n_resamples (`int`, *optional*, defaults to `4000`):
            Number of draws.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Raises:
        ValueError: there are no scores, one of them is not a number, or `confidence` is not between 0 and 1.
    """
    table = np.atleast_2d(np.asarray(scores, dtype=float))
    if table.ndim != 2 or not table.size:
        raise ValueError(f"`scores` must have the shape (seeds, questions), got {np.shape(scores)}.")
    if np.isnan(table).any():
        raise ValueError(f"{int(np.isnan(table).sum())} of the {table.size} scores are no numbers.")
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be between 0 and 1, got {confidence!r}.")
    draws = np.random.default_rng(seed)
    seeds, questions = table.shape
    mean = table.mean()
    deviations = np.zeros(n_resamples)
    if questions > 1:
        means = table.mean(axis=0) - mean
        resampled = means[draws.integers(questions, size=(n_resamples, questions))].mean(axis=1)
        deviations += resampled * np.sqrt(questions / (questions - 1))
    if seeds > 1:
        error = table.mean(axis=1).std(ddof=1) / np.sqrt(seeds)
        deviations += error * draws.standard_t(seeds - 1, size=n_resamples)
    low, high = np.quantile(mean + deviations, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(mean), float(low), float(high), seeds, questions)


def paired_difference(scores, others, **options) -> Interval:
    """
    Interval of the difference of two means, `scores` minus `others`, with the same seeds and questions. What makes a
    question difficult for both cancels, so the interval is narrower than those of the means.

    Args:
        scores, others (arrays of shape `(seeds, questions)` or `(questions,)`):
            Mean score of the samples of each question.
        options:
            As in [`interval`].

    Raises:
        ValueError: the shapes differ, or as in [`interval`].
    """
    if np.shape(scores) != np.shape(others):
        raise ValueError(
            f"Paired scores need the same seeds and questions, got shapes {np.shape(scores)} and {np.shape(others)}."
        )
    return interval(np.asarray(scores, dtype=float) - np.asarray(others, dtype=float), **options)
