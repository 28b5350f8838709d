# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The memory that a team needs, which limits the size of micro-batches: measured, counted, and what is free."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from ..seams.libraries import get_logger
from ..seams.sharding import local
from ..shared_prefix.forward import hidden_states, scored_at_once


logger = get_logger(__name__)


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that a team needs on one process, in bytes."""

    # As stored (half a byte per weight in 4 bits); if sharded, the own shards and the layers gathered at once
    base: int
    adapters: int  # LoRAs; 0 if the base itself is trained
    critic: int  # LoRAs and value heads
    gradients: int  # of all trained parameters
    optimizer: int  # state of all trained parameters
    activations: int  # of the largest micro-batch, with the LM head; estimated from short rows
    cache: int  # keys and values of a generation batch of an agent, with turns of maximum length
    prefill: int  # what a layer computes of prompts, or the distributions of the next tokens, whichever is larger
    kept: int = 0  # what stays of keys, values and graphs while training runs, if decoding is captured

    @classmethod
    def join(cls, plans: Sequence[MemoryPlan]) -> MemoryPlan:
        """The plan of a team from those of its bases. Only one base is in use at the same time."""
        alone = ("activations", "cache", "prefill")
        return cls(
            **{name: (max if name in alone else sum)(getattr(p, name) for p in plans) for name in vars(plans[0])}
        )

    @property
    def total(self) -> int:
        """Peak memory. Generation and training never run at the same time, so only the larger of the two counts."""
        lasting = self.base + self.adapters + self.critic + self.optimizer + self.kept
        return lasting + max(self.gradients + self.activations, self.cache + self.prefill)

    def __str__(self) -> str:
        sizes = {**vars(self), "at once": self.total}
        return "\n".join(f"{name:12}{readable(size):>12}" for name, size in sizes.items())


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Size of tensors in bytes. A tensor that occurs several times is counted once."""
    return sum(item.numel() * item.element_size() for item in {id(item): item for item in tensors}.values())


def optimizer_size(trained: Iterable[torch.Tensor], optim: str) -> int:
    """Size of the optimizer state in bytes: two moments per weight, which take one byte each in 8-bit optimizers."""
    if optim in ("sgd", "adafactor"):
        return 0
    return sum(tensor.numel() * (2 if "8bit" in optim else 2 * tensor.element_size()) for tensor in trained)


@dataclass(frozen=True)
class ActivationCost:
    """Peak memory of a forward and a backward pass, in bytes."""

    per_token: float  # that goes through the model, padding included
    per_repeat: float  # per copied token of a shared prefix (keys and values)
    per_checkpointed: float  # per token with gradient checkpointing
    fixed: float = 0.0  # copies of weights in the precision of mixed precision
    per_pair: float = 0.0  # per token that a token attends to

    def at(self, length: int) -> ActivationCost:
        """The cost of the tokens of rows of this length."""
        return replace(self, per_token=self.per_token + self.per_pair * length, per_pair=0.0)

    def bytes_per_token(self, checkpointing: bool) -> float:
        return self.per_checkpointed if checkpointing else self.per_token

    def size(self, tokens: int, repeated: int, checkpointing: bool) -> int:
        """Bytes of a pass that computes `tokens` tokens and repeats `repeated` tokens, each summed over rows."""
        return round(self.fixed + self.bytes_per_token(checkpointing) * tokens + self.per_repeat * repeated)


# Lengths of a shared prefix and of what follows it. They, and half of their sum, are primes, so that the size of a
# tensor tells which of them it grows with, unless a dimension of the model is a multiple of one
_LENGTHS = ((61, 73), (47, 59), (41, 53), (31, 43), (17, 29), (11, 23))
# Share of what is kept that may seem to grow with none of them. If it is more, as with copies of weights and with the
# tokens of experts, a second pass tells whether it grows
_FIXED = 0.1
# Gradients that live at once in the backward pass of a layer, as a share of what the layer keeps
GRADIENTS = 2 / 3


def measure_activations(model: PreTrainedModel, share: bool = True) -> ActivationCost:
    """Measure what a model in training mode keeps for a backward pass, by the shapes of tensors, on one short pass."""
    config = model.config.get_text_config()
    (prefix, rest), *others = _lengths_for(model)
    middle = (prefix + rest) // 2
    sizes = _kept_sizes(model, prefix, rest, share)
    whole = prefix + rest if share else rest
    joined = _sum_divisible(sizes, middle, [rest]) / (2 * whole) if share else 0.0
    linear = _sum_divisible(sizes, rest, [middle, rest**2]) / (2 * rest) + joined
    squared = _sum_divisible(sizes, rest * middle if share else rest**2) / (2 * rest * whole)
    fixed: float = _sum_divisible(sizes, 1, [prefix, rest, middle])
    if others and fixed > _FIXED * sum(size for _, size in sizes):
        shorter = others[0]
        tokens, fewer = (share * item + 2 * other for item, other in ((prefix, rest), shorter))
        less = _sum_divisible(_kept_sizes(model, *shorter, share), 1, [*shorter, sum(shorter) // 2])
        growth = (fixed - less) / (tokens - fewer)
        linear, fixed = linear + max(growth, 0.0), max(fixed - max(growth, 0.0) * tokens, 0.0)
    layers = config.num_hidden_layers
    inputs = layers * config.hidden_size * model.get_input_embeddings().weight.element_size()
    # In the backward pass of a layer, gradients live next to tensors that are not freed yet: a third of what a layer
    # keeps, counted op by op; twice as much is planned. Those of attention scores exist before and after the softmax
    more = 1 + GRADIENTS / layers
    quadratic = squared * (1 + 1.5 / layers)
    return ActivationCost(linear * more, joined * more, inputs + 2 * linear / layers, fixed, quadratic)


def _lengths_for(model: PreTrainedModel) -> list[tuple[int, int]]:
    dimensions = {size for tensor in model.parameters() for size in tensor.shape if size > 1}
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    return [
        (prefix, rest)
        for prefix, rest in _LENGTHS
        if prefix + rest <= window
        and all(size % prime for size in dimensions for prime in (prefix, rest, (prefix + rest) // 2))
    ] or [_LENGTHS[-1]]


def _sum_divisible(sizes: Sequence[tuple[int, int]], factor: int, without: Sequence[int] = ()) -> int:
    """Bytes of the tensors whose number of elements is divisible by a factor, and by none of others."""
    return sum(size for numel, size in sizes if numel % factor == 0 and all(numel % other for other in without))


def _kept_sizes(model: PreTrainedModel, prefix: int, rest: int, share: bool) -> list[tuple[int, int]]:
    """Elements and bytes of what autograd keeps in a pass of two rows, the second padded, without the model's own."""
    replies = [[0] * rest, [0] * (rest - 1)]
    prompts = [[0] * (prefix * share + 1)] * 2
    own = {local(tensor).untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[id(storage)] = storage, tensor.element_size()
        return tensor.detach()  # a node that saves its own output would hold itself: the graph would never be freed

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = hidden_states(model.base_model, prompts, replies, share)
    del output
    # Gathered weights of a sharded base are empty again
    return [(storage.nbytes() // width, storage.nbytes()) for storage, width in kept.values() if storage.nbytes()]


# Number of columns that TRL's LM head takes at once, and of their copies in memory if Triton is not used.
_HEAD_COLUMNS, _HEAD_COPIES = 32768, 6


def head_size(vocabulary: int, scored: int, device: torch.device) -> int:
    """Peak memory of the LM head in bytes. It works in float32."""
    copies = 2 if device.type == "cuda" else _HEAD_COPIES
    return min(scored, scored_at_once(vocabulary, device)) * min(vocabulary, _HEAD_COLUMNS) * 4 * copies


# Files with the memory limit and the memory usage of a container, by version of cgroups.
_CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def free_memory(device: torch.device, cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take on a device. Main memory is divided among the local processes."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = psutil.virtual_memory().available
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no container, or "max"
            free = min(free, max(int((cgroups / limit).read_text()) - int((cgroups / used).read_text()), 0))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def memory_of_server(args: Any, device: torch.device) -> float:
    """Bytes that a sleeping vLLM server takes again when it wakes. They look free, but have to be left to it."""
    sleeps = args.use_vllm and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode
    if not sleeps or device.type != "cuda":
        return 0.0
    return args.vllm_gpu_memory_utilization * torch.cuda.mem_get_info(device)[1]


def cache_size(config, rows: int, tokens: int, width: int) -> int:
    """Bytes of the keys and values of `rows` sequences of `tokens` tokens."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * rows * tokens * heads * head_dim * width


# Bytes of a possible next token when one is drawn: its logit, scores, log-probabilities and probabilities in float32,
# and probabilities and their sums in double precision
DRAW_BYTES = 4 * 4 + 2 * 8
# Bytes of the workspaces of graphs and products on CUDA
WORKSPACE_BYTES = 96 * 2**20


def readable(size: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
