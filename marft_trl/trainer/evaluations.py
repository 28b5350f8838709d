# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""How evaluations sample, and how many episodes a question has in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..config.evaluation import check_k, check_sampling
from ..config.sampling import decoding
from ..config.team_setup import RunContext
from ..learning.losses import TeamLoss
from ..reporting.reporter import Reporter
from ..rollout.runner import EpisodeRunner
from ..runs.collapse import Collapse


class Evaluations:
    """
    Settings of evaluations: those of the training arguments, or of one call of `evaluate`.

    Args:
        run ([`RunContext`]): the run that trains it.
        runner ([`EpisodeRunner`]): samples turns.
        reporter ([`Reporter`]): reports several episodes of a question.
        collapse ([`Collapse`], *optional*): looks at evaluations of the trainer's own set.
    """

    def __init__(self, run: RunContext, runner: EpisodeRunner, reporter: Reporter, collapse: Collapse | None = None):
        self._args, self._settings, self._runner, self._reporter = run.args, run.settings, runner, reporter
        self._collapse = collapse
        self._sampling: Mapping[str, Any] | None = run.args.eval_sampling  # type: ignore[assignment]
        self._k: Sequence[int] | None = run.args.eval_k
        self._with_losses = True

    @contextlib.contextmanager
    def chosen(
        self,
        num_samples: int | None,
        sampling: Mapping[str, float] | None,
        k: Sequence[int] | None,
        is_other_set: bool = False,
    ) -> Iterator[None]:
        """
        Context manager: evaluations have these settings, where they are not `None`. May be nested: `evaluate` calls
        itself for each of several sets.

        Args:
            num_samples (`int`, *optional*): episodes of each question.
            sampling (`dict`, *optional*): as `eval_sampling`.
            k (`Sequence[int]`, *optional*): as `eval_k`.
            is_other_set (`bool`, *optional*, defaults to `False`): whether it is not the trainer's own set.

        Raises:
            ValueError: as the same settings of [`MARFTConfig`], or a batch would have parts of questions.
        """
        check_sampling(sampling, "sampling")
        self._check_samples(num_samples)
        self._check_size("num_samples" if num_samples else "num_generations_eval", num_samples)
        values = self._k if k is None else k
        check_k(values, num_samples or self._settings.group_size(training=False), "eval_k" if k is None else "k")
        # `evaluate` of several sets calls itself; inner calls go on with the settings of the outer one
        kept = self._sampling, self._k
        is_other = is_other_set or num_samples is not None or sampling is not None
        watch = self._collapse.looking_away(is_other) if self._collapse is not None else contextlib.nullcontext()
        self._sampling, self._k = self._sampling if sampling is None else sampling, values
        try:
            with watch, self._settings.evaluating_with(num_samples), self._reporter.reporting_at(values):
                yield
        finally:
            self._sampling, self._k = kept

    @contextlib.contextmanager
    def without_losses(self) -> Iterator[None]:
        """Context manager: evaluations report no loss, which takes a pass through the model. Nothing else differs."""
        self._with_losses = False
        try:
            yield
        finally:
            self._with_losses = True

    def loss(self, losses: TeamLoss, *batch: Any) -> torch.Tensor | None:
        """The loss of an evaluation batch; `None` without losses. `batch` are the arguments of `in_evaluation`."""
        return losses.in_evaluation(*batch) if self._with_losses else None

    def _check_samples(self, num_samples: int | None) -> None:
        if num_samples is None:
            return
        if not isinstance(num_samples, int) or isinstance(num_samples, bool) or num_samples < 1:
            raise ValueError(f"`num_samples` must be an integer of at least 1, got {num_samples!r}.")

    def _check_size(self, name: str, num_samples: int | None) -> None:
        size = self._args.per_device_eval_batch_size * self._args.world_size
        num_samples = num_samples or self._settings.group_size(training=False)
        # pass@k needs all samples of a question in one batch
        if size % num_samples:
            raise ValueError(
                f"`{name}` ({num_samples}) must divide the episodes of an evaluation batch ({size}): "
                "`per_device_eval_batch_size` times the number of processes. Set `per_device_eval_batch_size` to a "
                f"multiple of {num_samples}."
            )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager around an evaluation: turns are sampled with its settings."""
        # An evaluation that failed before its end has left its episodes behind
        self._reporter.begin_evaluation()
        kept = self._runner.options, self._runner.trains
        self._runner.options, self._runner.trains = {**kept[0], **decoding(self._sampling)}, False
        try:
            yield
        finally:
            self._runner.options, self._runner.trains = kept

    def metrics(self, dataset: Any, prefix: str) -> dict[str, float]:
        """
        Metrics of the evaluation that has just run.

        Args:
            dataset: the evaluation set.
            prefix (`str`): what stands before the names, such as `"eval"`.
        """
        return {f"{prefix}_{name}": value for name, value in self._reporter.end_evaluation(dataset, prefix).items()}
