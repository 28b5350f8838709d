# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
TRL's loss types (TRL 1.16), as far as a team has to know them: what they divide by, and what they log. A loss type
that a later version of TRL adds gets its line here; `tests/test_seams.py` compares the table with `GRPOTrainer`.
"""

from __future__ import annotations

from dataclasses import dataclass


_OF_CLIPPING = tuple(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"))


@dataclass(frozen=True)
class LossType:
    """
    A loss type.

    Args:
        by_rows (`bool`, *optional*, defaults to `False`): whether the loss of a micro-batch is a mean over rows; else
            it is divided by a number of tokens.
        fits_actions (`bool`, *optional*, defaults to `False`): whether a turn may be a single action, which does not
            weigh more with more tokens. `luspo` weighs by length on purpose.
        one_advantage (`bool`, *optional*, defaults to `False`): whether all tokens of a turn need the same advantage.
        metrics (`tuple[str, ...]`, *optional*): names of the metrics that it logs.
    """

    by_rows: bool = False
    fits_actions: bool = False
    one_advantage: bool = False
    metrics: tuple[str, ...] = ()


LOSSES = {
    "grpo": LossType(by_rows=True, fits_actions=True, metrics=_OF_CLIPPING),
    "dr_grpo": LossType(by_rows=True, metrics=_OF_CLIPPING),
    "dapo": LossType(metrics=_OF_CLIPPING),
    "bnpo": LossType(metrics=_OF_CLIPPING),
    "cispo": LossType(metrics=("cispo_clip_ratio",)),
    "sapo": LossType(by_rows=True, fits_actions=True),
    "luspo": LossType(by_rows=True, fits_actions=True, metrics=_OF_CLIPPING),
    "vespo": LossType(one_advantage=True, metrics=("vespo/phi_seq_mean",)),
}
