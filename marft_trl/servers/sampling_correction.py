# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Turns that a server sampled: whether it has the trainer's weights, and what their tokens weigh in the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .. import functional
from ..config.team_setup import RunContext
from ..rules.rows import Row
from ..seams.logs import get_logger


logger = get_logger(__name__)

# Share of the tolerance above which a difference is said
_ALARM = 0.25


class FidelityError(RuntimeError):
    """A server sampled with other weights than the trainer has. Nothing was trained on its turns."""


class SamplingCorrection:
    """
    Compares the log-probabilities of servers with the trainer's, and weighs tokens by their ratio.

    Args:
        run ([`RunContext`]): the run that trains it.
        tolerance (`float`): mean difference of log-probabilities above which a run ends.
        staleness (`Callable`): `staleness(adapter, version)` returns how often an adapter was published since.
    """

    def __init__(
        self,
        run: RunContext,
        tolerance: float,
        staleness: Callable[[str, int], int] = lambda adapter, version: 0,
    ):
        self._args, self._tolerance = run.args, tolerance
        self._metrics, self._processes, self._staleness = run.metrics, run.processes, staleness
        self._told: set[tuple[str, str]] = set()

    def corrected(self, rows: Sequence[Row]) -> list[Row]:
        """
        Rows with `sampling_weights`. They have `old_per_token_logps`, the log-probabilities under the weights that are
        trained.

        Raises:
            FidelityError: a server computes something else than the trainer.
        """
        compared = [row for row in rows if row.sampling_logps is not None and row.old_per_token_logps is not None]
        with self._processes.together():
            stale = self._check_staleness(rows)
            self._check([row for row in compared if not stale[row.number]])
        total, count = self._processes.sum(
            torch.tensor([sum(stale.values()), len(rows)], dtype=torch.float64)
        ).tolist()
        if count:
            self._metrics.add("sampling/staleness", total / count)
        weights = {}
        if self._args.vllm_importance_sampling_correction:
            weights = {row.number: self._weights(row) for row in compared}
        self._report(compared, list(weights.values()))
        ones = {row.number: torch.ones(len(row.completion_ids)) for row in rows} if weights else {}
        filled = ones | weights
        return [replace(row, sampling_weights=filled.get(row.number)) for row in rows]

    def _check_staleness(self, rows: Sequence[Row]) -> dict[int, int]:
        """Staleness of each row that a server sampled, by its number."""
        stale = {
            row.number: self._staleness(row.adapter, row.sampled_by.version) if row.sampled_by is not None else 0
            for row in rows
        }
        worst = max(rows, key=lambda row: stale[row.number], default=None)
        if worst is not None and stale[worst.number] > self._args.max_staleness:
            raise RuntimeError(
                f"A turn of {worst.agent!r} was sampled {stale[worst.number]} versions of its adapter ago; "
                f"`max_staleness` is {self._args.max_staleness}. Please report this."
            )
        return stale

    def _weights(self, row: Row) -> torch.Tensor:
        args = self._args
        bounds = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        return functional.sampling_weights(-_differences(row), args.vllm_importance_sampling_mode, *bounds)

    def _check(self, rows: Sequence[Row]) -> None:
        by_origin: dict[tuple[str, str, int], list[torch.Tensor]] = defaultdict(list)
        for row in rows:
            if row.sampled_by is not None:
                by_origin[row.agent, row.sampled_by.server, row.sampled_by.version].append(_differences(row))
        for (agent, server, version), found in by_origin.items():
            differences = torch.cat(found).abs()
            if not len(differences):
                continue
            mean, most = differences.mean().item(), differences.max().item()
            what = (
                f"The tokens of {agent!r} that {server} sampled (version {version} of its adapter) have other "
                f"log-probabilities there than under the trainer's weights: they differ by {mean:.3g} on average over "
                f"{len(differences)} tokens, and by {most:.3g} at most"
            )
            if not mean <= self._tolerance:
                raise FidelityError(
                    f"{what}. At most {self._tolerance:g} is expected. The server has other weights, or computes in "
                    "another precision; nothing was trained on its turns. If the difference is known and meant, set "
                    "`fidelity_tolerance`."
                )
            if mean > _ALARM * self._tolerance and (agent, server) not in self._told:
                self._told.add((agent, server))
                logger.warning(f"{what}. The run ends above {self._tolerance:g} (`fidelity_tolerance`).")

    def _report(self, rows: Sequence[Row], weights: Sequence[torch.Tensor]) -> None:
        """Differences and weights over all processes."""
        own: dict[str, tuple[int, float, float]] = {}
        for agent in {row.agent for row in rows}:
            found = torch.cat([_differences(row).abs() for row in rows if row.agent == agent])
            own[agent] = len(found), found.sum().item(), found.max().item() if len(found) else 0.0
        of_tokens = torch.cat(list(weights)) if weights else torch.empty(0)
        spread = tuple(map(float, of_tokens.aminmax())) if len(of_tokens) else None
        masked = (of_tokens == 0.0).sum().item()
        mine = (
            own,
            len(of_tokens),
            of_tokens.sum().item(),
            masked,
            None if spread is None else tuple(map(float, spread)),
        )
        everywhere = self._processes.gather([mine])
        self._report_differences([its for its, *_ in everywhere])
        count = sum(number for _, number, *_ in everywhere)
        if count:
            name = "sampling/importance_sampling_ratio"
            bounds = [bounds for *_, bounds in everywhere if bounds is not None]
            self._metrics.add(f"{name}/min", min(low for low, _ in bounds))
            self._metrics.add(f"{name}/mean", sum(total for _, _, total, _, _ in everywhere) / count)
            self._metrics.add(f"{name}/max", max(high for _, high in bounds))
            self._metrics.add("sampling/masked_tokens", sum(number for *_, number, _ in everywhere) / count)

    def _report_differences(self, everywhere: Sequence[dict[str, tuple[int, float, float]]]) -> None:
        name = "sampling/sampling_logp_difference"
        agents = sorted({agent for its in everywhere for agent in its})
        for agent in [None, *agents]:  # all of them together first
            found = [value for its in everywhere for own, value in its.items() if agent in (None, own)]
            count = sum(number for number, _, _ in found)
            if count:
                prefix = "" if agent is None else f"agents/{agent}/"
                self._metrics.add(f"{prefix}{name}/mean", sum(total for _, total, _ in found) / count)
                self._metrics.add(f"{prefix}{name}/max", max(largest for _, _, largest in found))


def _differences(row: Row) -> torch.Tensor:
    """Log-probabilities of a row's tokens on the server, minus those under the trainer's weights, `(L,)`."""
    if row.sampling_logps is None or row.old_per_token_logps is None:
        raise ValueError("The row has no log-probabilities to compare.")
    return row.sampling_logps - row.old_per_token_logps.float()
