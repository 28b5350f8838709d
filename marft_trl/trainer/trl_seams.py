# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Where other packages are bent: each place says which version it was checked against, what it changes, and why. The
tests are in `tests/test_seams.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.logging import get_logger
from torch import nn
from transformers import GenerationConfig
from trl import GRPOTrainer

from ..agents import AgentSpec
from ..rollout.transformers_generator import Sampling


logger = get_logger(__name__)


def keep_4bit_weights(model: nn.Module) -> None:
    """
    Keep the 4-bit layers of a model on the CPU as they were loaded.

    On a CPU with AVX512-BF16, bitsandbytes (0.50) repacks the weights of a `Linear4bit` at its first forward pass in
    evaluation mode without gradients. From then on the layer computes in bfloat16, whatever its compute dtype, also
    back in training mode. A trainer would then score otherwise than the model it was given, and otherwise than on a
    machine without these instructions. The layer's own switch turns this off.

    Args:
        model (`nn.Module`): the base; may carry adapters. Layers that are not on the CPU are left alone.
    """
    if not getattr(model, "is_loaded_in_4bit", False):
        return
    from bitsandbytes.nn import Linear4bit

    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    on_cpu = [layer for layer in layers if layer.weight.device.type == "cpu"]
    for layer in on_cpu:
        layer.support_avx512bf16_for_cpu = False
    if any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in on_cpu):
        logger.warning(
            "The 4-bit model was used in evaluation mode before, so bitsandbytes repacked its weights for bfloat16 "
            "and it no longer computes as it was loaded. Load it again to keep its compute dtype."
        )


class TrlEngine:
    """
    Generation of a trainer. `GRPOTrainer._generate_single_turn` (TRL 1.16) reads the settings of `generate` from the
    trainer's attributes, which hold one agent's; they are swapped for the time of a call.

    Args:
        trainer ([`~trl.GRPOTrainer`]): does the generating.
    """

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer
        self.tokenizer = trainer._tokenizer

    @property
    def model(self) -> Any:
        """The model without wrappers of data parallelism."""
        return self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        """
        All settings of `generate` for an agent's sampling. As in TRL, `generation_kwargs` win over the trainer's
        settings; an agent's own settings win over both.
        """
        args = self._trainer.args
        own, general = sampling.as_generation_kwargs(), Sampling.of(AgentSpec("solo"), args).as_generation_kwargs()
        explicit = set(args.generation_kwargs or {})
        own = {key: value for key, value in own.items() if key not in explicit or value != general[key]}
        return {**self._trainer.generation_kwargs, **own}

    def generate(self, prompt_ids: list[list[int]], settings: Mapping[str, Any]) -> list[list[int]]:
        """Sample a completion for each prompt, up to and including its end-of-sequence token."""
        trainer = self._trainer
        config, kwargs = trainer.generation_config, trainer.generation_kwargs
        trainer.generation_kwargs = dict(settings)
        trainer.generation_config = GenerationConfig(**settings, disable_compile=True)
        try:
            return trainer._generate_single_turn(prompt_ids, None, {}, 1)[0]
        finally:
            trainer.generation_config, trainer.generation_kwargs = config, kwargs
