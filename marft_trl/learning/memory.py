# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What a team needs in memory, part by part, and what a pass through the model keeps, measured on short rows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from ..shared_prefix.forward import hidden_states, scored_at_once


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
        activations (`int`): of the largest micro-batch, with the LM head's tiles; from a measurement on short rows.
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


@dataclass(frozen=True)
class ActivationCost:
    """
    Bytes that a forward and a backward pass need at once.

    Args:
        per_token (`float`): for each token that goes through the model, padding included.
        per_repeat (`float`): for each shared token and each row behind it, whose keys and values are repeated.
        per_checkpointed (`float`): for each token where layers are computed again in the backward pass.
    """

    per_token: float
    per_repeat: float
    per_checkpointed: float

    def of_token(self, checkpointing: bool) -> float:
        """Bytes of a token, with or without gradient checkpointing."""
        return self.per_checkpointed if checkpointing else self.per_token

    def size(self, tokens: int, repeated: int, checkpointing: bool) -> int:
        """Bytes of a pass that computes so many tokens and repeats so many (both summed over rows)."""
        return round(self.of_token(checkpointing) * tokens + self.per_repeat * repeated)


# Longest row that activations are measured on; what grows with the square of longer ones is not seen.
_LONGEST = 2048


def measure_activations(model: PreTrainedModel, length: int, share: bool = True) -> ActivationCost:
    """
    Measure what passes need of a model with its active adapter: what is kept for the backward pass, on rows of a
    length and of half of it, since attention may keep what grows with the square.

    Args:
        model ([`~transformers.PreTrainedModel`]): in training mode, without gradient checkpointing.
        length (`int`): tokens of the rows it is for.
        share (`bool`, *optional*, defaults to `True`): whether rows will share what they have in common.
    """
    config, whole = model.config.get_text_config(), max(min(length, _LONGEST), 16)

    def kept(shared: int, own: int) -> int:  # two rows of which the second is shorter, so that there is padding
        prompts, replies = [[0] * (shared + 2)] * 2, [[0] * own, [0] * (own - 1)]
        return _kept_bytes(model, lambda: hidden_states(model.base_model, prompts, replies, share))

    half = whole // 2
    per_token = (kept(0, whole) - kept(0, half)) / (2 * (whole - half))
    of_shared = (kept(whole, 8) - kept(half, 8)) / (whole - half) if share else 0.0
    layers = config.num_hidden_layers
    inputs = layers * config.hidden_size * model.get_input_embeddings().weight.element_size()
    # While a layer is gone through backwards, the gradients of what it has kept are there too
    return ActivationCost(
        per_token=per_token * (1 + 1 / layers),
        per_repeat=max(of_shared - per_token, 0.0) / 2 * (1 + 1 / layers),
        per_checkpointed=inputs + 2 * per_token / layers,
    )


def _kept_bytes(model: PreTrainedModel, run: Callable[[], torch.Tensor]) -> int:
    """Bytes of the tensors that autograd keeps in a pass, those of the model left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()  # alive until here, so that no address is used twice
    del output
    return sum(sizes.values())


# TRL's LM head takes so many columns at once; with Triton it works in place, otherwise with copies.
_HEAD_COLUMNS, _HEAD_COPIES = 32768, 6


def head_size(vocabulary: int, scored: int, device: torch.device) -> int:
    """Bytes of what the LM head holds at once, in float32."""
    copies = 2 if device.type == "cuda" else _HEAD_COPIES
    return min(scored, scored_at_once(vocabulary, device)) * min(vocabulary, _HEAD_COLUMNS) * 4 * copies


# What a container may take and takes, by version of cgroups.
_CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def free_memory(device: torch.device, cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take on a device; of the main memory, its share among the local processes."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = psutil.virtual_memory().available
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no container, or "max"
            free = min(free, max(int((cgroups / limit).read_text()) - int((cgroups / used).read_text()), 0))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


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
