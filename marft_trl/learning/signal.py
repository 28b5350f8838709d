# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Rows that teach nothing: their gradient is exactly 0, so they take no backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config.marft_config import MARFTConfig
from ..rules.rows import Row
from ..seams.trl import TrlSettings, TrlState


# TRL's metrics of a row whose advantage is 0 that are known without a pass
_KNOWN = ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
KNOWN_METRICS: dict[str, list[float]] = {f"clip_ratio/{name}": [0.0] for name in _KNOWN} | {"cispo_clip_ratio": [0.0]}
# Share of the rows of an agent that took no pass
WITHOUT_SIGNAL = "frac_rows_without_signal"


class Signal:
    """
    Tells rows that have a gradient from those that have none.

    TRL's losses (TRL 1.16) multiply each token's term by its advantage and by its mask. If all advantages of a row are
    0, only the KL to the reference, an entropy bonus and the loss of a mixture's routers are left. If none of them is
    on, the gradient of the row is exactly 0. The same holds for a row whose tokens do not count.

    Args:
        args ([`MARFTConfig`]): `skip_rows_without_signal`, `target_kl`.
        settings ([`TrlSettings`]): what else is in the loss.
        state ([`TrlState`]): whether training runs, and whether there is an entropy bonus.
    """

    def __init__(self, args: MARFTConfig, settings: TrlSettings, state: TrlState):
        self._args, self._settings, self._state = args, settings, state

    @property
    def needs_divergence(self) -> bool:
        """`True` if rows without a gradient take a forward pass, because the divergence of all rows is watched."""
        return self._args.target_kl is not None

    def split(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """The rows that have a gradient, and those that have none, in their order."""
        with_gradient: list[Row] = []
        without: list[Row] = []
        for row in rows:
            (with_gradient if self._has_gradient(row) else without).append(row)
        return with_gradient, without

    def _has_gradient(self, row: Row) -> bool:
        settings, state = self._settings, self._state
        if not self._args.skip_rows_without_signal or not state.is_training or not len(row.completion_ids):
            return True
        # The routers' loss is over all tokens, and the highest entropies are found among those of all rows
        if settings.aux_loss_enabled or settings.top_entropy_quantile < 1.0:
            return True
        if not row.counts:
            return False
        if settings.beta != 0.0 or state.has_entropy_bonus:
            return True
        advantage = row.advantage
        return row.factor != 0.0 and bool(advantage.any() if isinstance(advantage, torch.Tensor) else advantage)
