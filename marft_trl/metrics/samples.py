# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Accuracy of several samples of a question: pass@k, avg@k and maj@k, as unbiased estimates from `n` samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from fractions import Fraction


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
    _check(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"`c` ({c}) right samples of `n` ({n}): it must be from 0 to `n`.")
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
    _check(len(scores), 1 if k is None else k)
    return math.fsum(scores) / len(scores)


def maj_at_k(answers: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    """
    Expected score of the most frequent answer among `k` of the samples, over all choices of `k`. Of answers that are
    equally frequent, one is drawn at random. Samples without an answer do not vote; if no sample has one, the score
    is 0.

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
        raise ValueError(f"There are {len(answers)} answers and {len(scores)} scores; each sample has one of both.")
    _check(len(answers), k)
    of_answer: dict[Hashable, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            of_answer[answer].append(score)
    sizes = sorted(len(its) for its in of_answer.values())
    silent = len(answers) - sum(sizes)
    wins = {size: _share_of_wins(size, sizes, silent, k) for size in set(sizes)}
    return math.fsum(float(wins[len(its)]) * math.fsum(its) / len(its) for its in of_answer.values())


def _check(n: int, k: int) -> None:
    if n < 1:
        raise ValueError("There are no samples.")
    if not 1 <= k <= n:
        raise ValueError(f"`k` ({k}) must be from 1 to the number of samples ({n}).")


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
                for its in range(min(other, votes, k - votes - drawn) + 1):
                    following[drawn + its, ties + (its == votes)] += count * math.comb(other, its)
            ways = following
        total += math.comb(size, votes) * sum(
            Fraction(count, 1 + ties) for (drawn, ties), count in ways.items() if drawn == k - votes
        )
    return total / math.comb(sum(sizes) + silent, k)
