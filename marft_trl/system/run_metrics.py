# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Metrics of a run: those since the last log, and those of a slice, by agent."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .processes import Processes


# TRL's metrics that are joined over micro-batches by minimum or maximum. All others are averaged over tokens.
_JOINS = {"clip_ratio/low_min": "min", "clip_ratio/high_max": "max"}
AGENT_METRICS = frozenset(
    {
        "frac_rows_without_signal",
        *("entropy", "kl", "policy_loss", "clip_ratio/region_mean", "cispo_clip_ratio", "vespo/phi_seq_mean"),
        *("completions/mean_length", "completions/max_length", "completions/clipped_ratio"),
    }
)


class Metrics:
    """
    Metrics of a run since the last log, in the dictionary that TRL logs and clears: values by mode (`"train"` or
    `"eval"`) and name. The mode is that of `trainer.model`, which training may replace, as in TRL.
    """

    def __init__(self, store: dict[str, dict[str, list[float]]], trainer: Any):
        self._store, self._trainer = store, trainer
        self._latest: dict[str, float] = {}

    @property
    def mode(self) -> str:
        return "train" if self._trainer.model.training else "eval"

    def add(self, name: str, value: float) -> None:
        """Add a value. The values of a name are averaged when they are logged."""
        mode = self.mode
        self._store[mode][name].append(value)
        if mode == "train":
            self._latest[name] = value

    def take_latest(self) -> dict[str, float]:
        """The latest value of each name that training has added since the last call."""
        taken, self._latest = self._latest, {}
        return taken

    def set(self, name: str, value: float) -> None:
        self._store[self.mode][name] = [value]

    def means(self, mode: str) -> dict[str, float]:
        """Means of the values that are not NaN, by name."""
        without_nan = {name: [v for v in values if v == v] for name, values in self._store[mode].items()}
        return {name: sum(values) / len(values) for name, values in without_nan.items() if values}

    def clear(self, mode: str) -> None:
        self._store[mode].clear()


class StepMetrics:
    """Metrics of the micro-batches of one slice, by agent."""

    def __init__(self, agents: Sequence[str]):
        self._agents = list(agents)
        self._values: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)

    def add(self, agent: str, metrics: dict[str, list[float]], weight: int) -> None:
        """Add the metrics that TRL's loss recorded for one micro-batch."""
        for name, values in metrics.items():
            for value in values:
                if value is not None and not math.isnan(value):
                    self._values[agent, name].append((value, weight))

    def snapshot(self) -> Callable[[], None]:
        """Return a function that takes back what is added after this."""
        kept = {key: list(values) for key, values in self._values.items()}

        def take_back() -> None:
            self._values.clear()
            self._values.update(kept)

        return take_back

    def join(self, names: Sequence[str], processes: Processes) -> dict[str, float]:
        """Join metrics, of the same `names` on every process: those of the team, and of agents that had tokens."""
        sums = torch.zeros(len(self._agents), len(names), 2, dtype=torch.float64)
        extremes = torch.full((len(self._agents), len(names)), -math.inf, dtype=torch.float64)
        for a, agent in enumerate(self._agents):
            for n, name in enumerate(names):
                sign = -1.0 if _JOINS.get(name) == "min" else 1.0
                for value, weight in self._values[agent, name]:
                    sums[a, n] += torch.tensor([value * weight, weight], dtype=torch.float64)
                    extremes[a, n] = max(extremes[a, n].item(), sign * value)
        self._values.clear()
        sums, extremes = processes.sum(sums), processes.max(extremes)
        joined: dict[str, float] = {}
        for n, name in enumerate(names):
            for a, agent in enumerate(self._agents):
                if name in AGENT_METRICS and sums[a, n, 1] > 0:
                    joined[f"agents/{agent}/{name}"] = self._value(name, sums[a, n], extremes[a, n])
            if sums[:, n, 1].sum() > 0:
                joined[name] = self._value(name, sums[:, n].sum(dim=0), extremes[:, n].max())
        return joined

    @staticmethod
    def _value(name: str, total: torch.Tensor, extreme: torch.Tensor) -> float:
        if name in _JOINS:
            return extreme.item() * (-1.0 if _JOINS[name] == "min" else 1.0)
        return (total[0] / total[1]).item()


def length_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """TRL's metrics of completion lengths, from the number of tokens of each turn and whether it was truncated."""
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
