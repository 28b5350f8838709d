# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What a team needs in memory, part by part, before anything has run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class MemoryPlan:
    """
    Bytes on one process.

    Args:
        base (`int`): the model that all agents share, as it is stored; a 4-bit one at half a byte per weight.
        adapters (`int`): the agents' LoRAs, or 0 where the base itself is trained.
        critic (`int`): LoRAs and heads of the critic.
        gradients (`int`): of everything that is trained.
        optimizer (`int`): its state, of everything that is trained.
        activations (`int`): of the largest micro-batch, an estimate.
        cache (`int`): keys and values of one generation batch of an agent, with the longest turns.
    """

    base: int
    adapters: int
    critic: int
    gradients: int
    optimizer: int
    activations: int
    cache: int

    @property
    def total(self) -> int:
        """What has to fit at once: generation and training take turns."""
        lasting = self.base + self.adapters + self.critic + self.optimizer
        return lasting + max(self.gradients + self.activations, self.cache)

    def __str__(self) -> str:
        parts = [(item.name, getattr(self, item.name)) for item in fields(self)]
        return "\n".join(f"{name:12}{_readable(size):>12}" for name, size in [*parts, ("at once", self.total)])


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors, each counted once."""
    return sum(
        tensor.numel() * tensor.element_size() for tensor in {id(tensor): tensor for tensor in tensors}.values()
    )


def optimizer_size(trained: Iterable[torch.Tensor], optim: str) -> int:
    """Bytes of the optimizer's state: two moments per weight, of a byte each in the 8-bit optimizers."""
    per_weight = 2 if "8bit" in optim else None
    momentum_free = optim in ("sgd", "adafactor")
    return sum(
        0 if momentum_free else tensor.numel() * (per_weight or 2 * tensor.element_size()) for tensor in trained
    )


def activation_size(config, tokens: int, scored: int, checkpointing: bool, width: int) -> int:
    """
    Bytes of what the backward pass keeps, for one micro-batch.

    Args:
        config ([`~transformers.PreTrainedConfig`]): of the model.
        tokens (`int`): tokens of the micro-batch.
        scored (`int`): those of them whose log-probability counts.
        checkpointing (`bool`): whether layers are computed again in the backward pass.
        width (`int`): bytes per number.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    # Per token and layer: the inputs of the projections, of the attention and of the gated MLP
    layer = tokens * (8 * hidden + 4 * inner) * width
    kept = tokens * hidden * width * layers + layer if checkpointing else layer * layers
    logits = 3 * scored * config.vocab_size * 4  # in full precision, with their gradient and the normalized ones
    return kept + logits


def cache_size(config, rows: int, tokens: int, width: int) -> int:
    """Bytes of the keys and values of `rows` sequences of `tokens` tokens."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * rows * tokens * heads * head_dim * width


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
