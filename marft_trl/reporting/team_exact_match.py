# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Exact match of a team's answers, with a bootstrap interval over questions."""

import datasets
import evaluate
import numpy as np


_DESCRIPTION = """
Share of answers that equal their reference, after stripping white space at both ends, with a percentile bootstrap
interval. If `groups` is given, answers to the same question are resampled together.
"""

_KWARGS = """
Args:
    predictions (`list[str]`): answers of the team.
    references (`list[str]`): reference answers.
    groups (`list`, *optional*): question of each answer. By default, every answer has its own question.
    confidence (`float`, *optional*, defaults to 0.95): share of the resamples that the interval holds.
    n_resamples (`int`, *optional*, defaults to 2000): number of resamples.
    seed (`int`, *optional*, defaults to 0): seed of the resamples.

Returns:
    exact_match (`float`): share in [0, 1].
    exact_match_low, exact_match_high (`float`): ends of the interval.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS)
class TeamExactMatch(evaluate.Metric):
    """Exact match with a bootstrap interval."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=_KWARGS, features=features
        )

    def _compute(self, predictions, references, groups=None, confidence=0.95, n_resamples=2000, seed=0):
        right = np.array([p.strip() == r.strip() for p, r in zip(predictions, references, strict=True)], dtype=float)
        _, question = np.unique([str(group) for group in groups] if groups else range(len(right)), return_inverse=True)
        hits, counts = np.bincount(question, weights=right), np.bincount(question)
        drawn = np.random.default_rng(seed).integers(len(counts), size=(n_resamples, len(counts)))
        shares = hits[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
        low, high = np.quantile(shares, [(1 - confidence) / 2, (1 + confidence) / 2])
        return {"exact_match": right.mean(), "exact_match_low": low, "exact_match_high": high}
