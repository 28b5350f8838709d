# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The scale of values: heads predict normalized returns, whatever the size of the rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import functional
from ..rules.rows import Row
from ..system.processes import Processes


_SMALLEST = 0.1  # deviation of targets that differ less: where nothing is earned, they are the noise of the critic

_EARLIER_DECAY = 0.99  # in checkpoints that do not say it


class ValueScale:
    """
    Running mean and standard deviation of the value targets of each part of the critic. Values are read as
    `mean + deviation * output`, and the loss compares outputs with normalized targets.

    Both moments are exponential moving averages over generation batches, divided by `1 - decay^n` as in Adam. The
    deviation is at least 0.1.

    Args:
        is_on (`bool`): whether values are normalized; else the mean is 0 and the deviation 1.
        parts (`Sequence[str]`): parts of the critic.
        processes ([`Processes`]): the processes of the run.
        decay (`float`, *optional*, defaults to `0.99999`): decay of the averages per generation batch.

    Source: `ValueNorm` of MAPPO (2103.01955): the statistics of PopArt (1602.07714) without the correction of the
    head's weights. There they take in each minibatch of each epoch.
    """

    def __init__(self, is_on: bool, parts: Sequence[str], processes: Processes, decay: float = 0.99999):
        self.is_on, self._parts, self._processes, self._decay = is_on, list(parts), processes, decay
        # For each part the averages of returns and of their squares, and the weight of all batches so far
        self._moments = {part: [0.0, 0.0, 0.0] for part in self._parts}

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {"decay": self._decay, "moments": {part: list(its) for part, its in self._moments.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        moments, decay = state.get("moments", state), state.get("decay", _EARLIER_DECAY)
        self._moments |= {part: self._rescaled(its, decay) for part, its in moments.items()}

    def _rescaled(self, moments: Sequence[float], decay: float) -> list[float]:
        """Moments with the weight that as many batches have under the present decay."""
        weight = moments[2]
        if decay == self._decay or not 0 < weight < 1:
            return list(moments)
        batches = math.log1p(-weight) / math.log(decay)
        return [its * (1 - self._decay**batches) / weight for its in moments]

    def of(self, part: str) -> tuple[float, float]:
        """Mean and standard deviation of the value targets of a part; 0 and 1 before the first."""
        mean, square, weight = self._moments[part]
        if not self.is_on or not weight:
            return 0.0, 1.0
        mean, square = mean / weight, square / weight
        return mean, max(square - mean**2, _SMALLEST**2) ** 0.5

    def read(self, part: str, outputs: torch.Tensor) -> torch.Tensor:
        """Values from the outputs of a head, of any shape."""
        mean, deviation = self.of(part)
        return outputs if (mean, deviation) == (0.0, 1.0) else mean + deviation * outputs

    def normalized(self, part: str, values: torch.Tensor) -> torch.Tensor:
        """What a head has to put out for values of any shape."""
        mean, deviation = self.of(part)
        return values if (mean, deviation) == (0.0, 1.0) else (values - mean) / deviation

    def update(self, rows: Sequence[Row]) -> None:
        """Take in the value targets of the rows of a generation batch, of all processes."""
        if not self.is_on:
            return
        totals = torch.zeros(len(self._parts), 3, dtype=torch.float64)
        for index, part in enumerate(self._parts):
            targets = [row.value_targets for row in rows if row.critic == part and row.num_value_targets]
            if targets:
                totals[index] = functional.moments(torch.cat([its for its in targets if its is not None]))
        for part, (count, total, squares) in zip(self._parts, self._processes.sum(totals).tolist(), strict=True):
            if not count:
                continue
            news = total / count, squares / count, 1.0
            self._moments[part] = [
                self._decay * old + (1 - self._decay) * new for old, new in zip(self._moments[part], news, strict=True)
            ]
