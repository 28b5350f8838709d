# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Settings of evaluation, from the training arguments or from a call of `evaluate`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..config.marft_config import check_k, check_sampling
from ..config.team_setup import RunContext, decoding
from ..episodes.records import unknown_agent
from ..learning.losses import TeamLoss
from ..reporting.reporter import Reporter
from ..rollout.runner import RunMode
from ..runs.collapse import Collapse
from ..seams.swapping import swapped
from ..team.events import check_count


class EvaluationOptions:
    def __init__(self, run: RunContext, agents: Sequence[str], reporter: Reporter, collapse: Collapse | None):
        self._args, self._settings, self._agents, self._reporter = run.args, run.settings, agents, reporter
        self._collapse = collapse
        self._silent: frozenset[str] = frozenset()
        self._sampling: Mapping[str, Any] | None = run.args.eval_sampling  # type: ignore[assignment]
        self._with_losses = True

    @contextlib.contextmanager
    def override(
        self,
        num_samples: int | None,
        sampling: Mapping[str, float] | None,
        k: Sequence[int] | None,
        is_other_set: bool,
    ) -> Iterator[None]:
        """Override settings that are not `None` within the context. `is_other_set`: the set is not the trainer's."""
        check_sampling(sampling, "sampling")
        if num_samples is not None:
            check_count("num_samples", num_samples)
        count = num_samples or self._settings.group_size(training=False)
        batch_size = self._args.per_device_eval_batch_size * self._args.world_size
        if batch_size % count:  # pass@k needs all samples of a question in one batch
            raise ValueError(
                f"`{'num_samples' if num_samples else 'num_generations_eval'}` ({count}) must divide the number of "
                f"episodes in an evaluation batch ({batch_size}), which is `per_device_eval_batch_size` times the "
                f"number of processes. Set `per_device_eval_batch_size` to a multiple of {count}."
            )
        values = self._reporter.k_values if k is None else k
        check_k(values, count, "eval_k" if k is None else "k")
        is_other = is_other_set or num_samples is not None or sampling is not None
        watch = self._collapse.ignoring_evaluations(is_other) if self._collapse else contextlib.nullcontext()
        # `evaluate` calls itself for each of several sets. The inner calls keep the settings of the outer call
        own_sampling = swapped(self, {"_sampling": self._sampling if sampling is None else sampling})
        own_values = swapped(self._reporter, {"k_values": values})
        with watch, own_sampling, own_values, self._settings.override_eval_group_size(num_samples):
            yield

    def without_losses(self) -> contextlib.AbstractContextManager[None]:
        """Evaluate without a loss within the context, which saves a forward pass. Other metrics stay the same."""
        return swapped(self, {"_with_losses": False})

    def loss(self, losses: TeamLoss, *batch: Any) -> torch.Tensor | None:
        return losses.evaluation_loss(*batch) if self._with_losses else None

    def silence_agents(self, *names: str) -> contextlib.AbstractContextManager[None]:
        """Replace turns of these agents by empty text within the context, also for environments and answers."""
        for name in names:
            if name not in self._agents:
                raise ValueError(unknown_agent(name, self._agents, "`silence_agents`"))
        return swapped(self, {"_silent": frozenset(names)})

    @property
    def mode(self) -> RunMode:
        return RunMode(decoding(self._sampling), silent=self._silent)
