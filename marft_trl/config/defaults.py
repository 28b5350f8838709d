# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Values of settings that are not set and depend on others."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from ..rules.baselines import BASELINES
from ..rules.credit_rules import CREDITS
from ..rules.levels import LEVELS
from .checks import has_turn_ratio, uses_candidates


logger = logging.getLogger(__name__)  # that of accelerate needs a state, which comes with the arguments
CISPO_EPSILON_HIGH = 5.0  # as TRL recommends after ScaleRL (2510.13786)


def resolve(config: Any) -> None:
    """Set what is `None` and depends on other settings of a [`MARFTConfig`], in place."""
    if config.ddp_backend is not None and not _is_launched(config.use_cpu):
        # accelerate would look for a process group that nobody has made
        logger.warning(f"`ddp_backend={config.ddp_backend!r}` has no effect on one process.")
        config.ddp_backend = None
    if config.ddp_broadcast_buffers is None:
        config.ddp_broadcast_buffers = False  # a collective in forward, which processes run unequally often
    if config.loss_type is None:
        config.loss_type = LEVELS[config.level].loss_type if config.level in LEVELS else "dapo"
    if config.loss_type == "cispo" and config.epsilon_high is None:
        # A bound of `epsilon` = 0.2, as `GRPOTrainer` takes it, would be below every ratio
        config.epsilon_high = CISPO_EPSILON_HIGH
        logger.warning(f"`epsilon_high` is {CISPO_EPSILON_HIGH}, the largest ratio with `loss_type='cispo'`.")
    if has_turn_ratio(config) and "use_bias_correction_kl" not in config.given:
        config.use_bias_correction_kl = False  # would weight the KL of every token by the ratio of the turn
    if config.credit_kind is None:
        is_stream = config.advantage == "gae" and not (config.credit in CREDITS and CREDITS[config.credit].reruns)
        config.credit_kind = "rewards" if is_stream else "returns"
    if config.skip_rows_without_signal is None:
        config.skip_rows_without_signal = config.share_prefixes
    if config.continue_from is None and uses_candidates(config):
        config.continue_from = BASELINES[config.advantage].goes_on


def _is_launched(on_cpu: bool) -> bool:
    """Whether a launcher has started this process, by the variables that accelerate reads."""
    if torch.distributed.is_initialized():
        return True
    sizes = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    several = any(int(os.environ.get(name, 1)) > 1 for name in sizes)
    return several or (not on_cpu and "LOCAL_RANK" in os.environ)
