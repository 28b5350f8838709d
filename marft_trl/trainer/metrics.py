# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Figures of a training step, collected per agent over micro-batches and joined over processes once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch


# How TRL's metric of a micro-batch is joined with those of other micro-batches; all others are token means.
_JOINS = {"clip_ratio/low_min": "min", "clip_ratio/high_max": "max"}


# Of TRL's figures, those that are also reported for each agent.
AGENT_FIGURES = frozenset(
    {
        *("entropy", "kl", "policy_loss", "clip_ratio/region_mean", "cispo_clip_ratio", "vespo/phi_seq_mean"),
        *("completions/mean_length", "completions/max_length", "completions/clipped_ratio"),
    }
)


class LocalAccelerator:
    """
    The accelerator as one process alone sees it: what TRL gathers inside the loss stays local.

    Processes run different numbers of micro-batches, so a collective inside one would wait forever or mix rows of
    different agents. [`StepMetrics`] joins the figures afterwards.
    """

    def __init__(self, accelerator):
        self._accelerator = accelerator

    def __getattr__(self, name):
        return getattr(self._accelerator, name)

    def gather(self, tensor):
        return tensor.reshape(1) if tensor.ndim == 0 else tensor

    def gather_for_metrics(self, tensor, **kwargs):
        return self.gather(tensor)

    def reduce(self, tensor, **kwargs):
        return tensor

    def pad_across_processes(self, tensor, **kwargs):
        return tensor


class StepMetrics:
    """
    Metrics of the micro-batches of one slice, by agent.

    Args:
        agents (`Sequence[str]`):
            Names of the agents.
    """

    def __init__(self, agents: Sequence[str]):
        self._agents = list(agents)
        self._values: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)

    def add(self, agent: str, metrics: dict[str, list[float]], num_tokens: int) -> None:
        """Take over what TRL's loss appended to its metrics for one micro-batch."""
        for name, values in metrics.items():
            for value in values:
                if value is not None and not math.isnan(value):
                    self._values[agent, name].append((value, num_tokens))

    def join(self, names: Sequence[str], reduce: Callable[[torch.Tensor, str], torch.Tensor]) -> dict[str, float]:
        """
        Join over micro-batches and processes.

        Args:
            names (`Sequence[str]`):
                Metrics to join, the same on every process.
            reduce (`Callable`):
                `reduce(tensor, how)` over all processes, `how` being `"sum"` or `"max"`.

        Returns: `name` for the team and `agents/<agent>/name` for each agent that had tokens.
        """
        sums = torch.zeros(len(self._agents), len(names), 2, dtype=torch.float64)
        extremes = torch.full((len(self._agents), len(names)), -math.inf, dtype=torch.float64)
        for a, agent in enumerate(self._agents):
            for n, name in enumerate(names):
                sign = -1.0 if _JOINS.get(name) == "min" else 1.0
                for value, weight in self._values[agent, name]:
                    sums[a, n] += torch.tensor([value * weight, weight], dtype=torch.float64)
                    extremes[a, n] = max(extremes[a, n].item(), sign * value)
        self._values.clear()
        sums, extremes = reduce(sums, "sum"), reduce(extremes, "max")
        joined: dict[str, float] = {}
        for n, name in enumerate(names):
            for a, agent in enumerate(self._agents):
                if name in AGENT_FIGURES and sums[a, n, 1] > 0:
                    joined[f"agents/{agent}/{name}"] = self._figure(name, sums[a, n], extremes[a, n])
            if sums[:, n, 1].sum() > 0:
                joined[name] = self._figure(name, sums[:, n].sum(dim=0), extremes[:, n].max())
        return joined

    @staticmethod
    def _figure(name: str, total: torch.Tensor, extreme: torch.Tensor) -> float:
        if name in _JOINS:
            return extreme.item() * (-1.0 if _JOINS[name] == "min" else 1.0)
        return (total[0] / total[1]).item()


def length_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """
    TRL's figures of completions.

    Args:
        lengths (`Sequence[int]`): tokens of each turn.
        truncated (`Sequence[bool]`): whether it ran into its limit.
    """
    ended = [length for length, is_truncated in zip(lengths, truncated, strict=True) if not is_truncated] or [0]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
        "completions/mean_terminated_length": sum(ended) / len(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }
