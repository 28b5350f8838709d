# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Running baselines: the mean return so far, which needs no second episode of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class RunningBaselines:
    """
    Exponential moving averages of returns, one for each kind of task, and for each agent where agents have returns of
    their own.

    The baseline of a generation batch is the average before it, so that it does not depend on the batch. As in Adam,
    the average is divided by `1 - decay^n` after `n` batches: after the first one it is the mean of that batch.

    Args:
        decay (`float`): weight of the average so far, in `[0, 1)`.
        column (`str`, *optional*): dataset column whose values have averages of their own.

    Source: role-conditioned advantage estimation of SPIRAL (2506.24119), there updated after each episode.
    """

    def __init__(self, decay: float, column: str | None = None):
        self._decay, self._column = decay, column
        self._averages: dict[str, tuple[float, int]] = {}  # before correction, and number of batches

    @classmethod
    def of_args(cls, args: Any) -> RunningBaselines:
        """Those of `rae_decay` and `rae_column`."""
        return cls(args.rae_decay, args.rae_column)

    def key(self, agent: str, row: Mapping[str, Any], is_own: bool) -> str:
        """
        Key of the average that a turn is compared with.

        Args:
            agent (`str`): whose turn it is.
            row (`Mapping[str, Any]`): the dataset row of its episode.
            is_own (`bool`): whether every agent has its own return.
        """
        kind = "" if self._column is None else str(row[self._column])
        return f"{agent}/{kind}" if is_own else kind

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {key: list(value) for key, value in self._averages.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._averages = {key: (average, count) for key, (average, count) in state.items()}

    def of(self, keys: Sequence[str]) -> torch.Tensor:
        """Baselines `(N,)`; 0 for keys without a return so far."""
        return torch.tensor([self._of(key) for key in keys])

    def _of(self, key: str) -> float:
        average, count = self._averages.get(key, (0.0, 0))
        return average / (1 - self._decay**count) if count else average

    def update(self, keys: Sequence[str], returns: torch.Tensor, weights: torch.Tensor) -> None:
        """
        Take in the returns of a batch.

        Args:
            keys (`Sequence[str]`): of `N` turns.
            returns (`torch.Tensor` of shape `(N,)`): their returns, NaN where nothing scored them.
            weights (`torch.Tensor` of shape `(N,)`): their weights in the mean of the batch.
        """
        for key in sorted(set(keys)):
            mine = torch.tensor([one == key for one in keys]) & ~returns.isnan()
            if not mine.any():
                continue
            total, part = weights[mine].double(), returns[mine].double()
            average, count = self._averages.get(key, (0.0, 0))
            mean = ((total * part).sum() / total.sum()).item()
            self._averages[key] = (self._decay * average + (1 - self._decay) * mean, count + 1)
