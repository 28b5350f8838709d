# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Log-probabilities at the temperature that each agent samples with."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable

from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head


class ScoringTemperature:
    """
    Switches the temperature of TRL's fused LM head, which is built for one.

    Args:
        models (`Iterable[PreTrainedModel]`):
            Models with TRL's head at `default`: the base and, without adapters, the reference.
        temperatures (`Iterable[float]`):
            Temperatures of all agents.
        default (`float`):
            The trainer's temperature.
        head (`dict`):
            Further arguments of TRL's `add_fused_lm_head`.
    """

    def __init__(self, models: Iterable[PreTrainedModel], temperatures: Iterable[float], default: float, head: dict):
        self._current = default
        if set(temperatures) == {default}:
            return
        for model in models:
            self._install(model, {*temperatures, default}, default, head)

    def switch_to(self, temperature: float) -> None:
        """Score at this temperature from now on."""
        self._current = temperature

    def _install(self, model: PreTrainedModel, temperatures: set[float], default: float, head: dict) -> None:
        forwards = {default: model.forward}
        for temperature in temperatures - {default}:
            add_fused_lm_head(model, temperature=temperature, **head)
            forwards[temperature] = model.forward
            model.forward = forwards[default]

        # Keep the original signature: `generate` validates its model kwargs against it
        @functools.wraps(type(model).forward)
        def forward(_, *args, **kwargs):
            return forwards[self._current](*args, **kwargs)

        model.forward = types.MethodType(forward, model)
