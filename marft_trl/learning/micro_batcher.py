# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""How many tokens go through the model at once, and whether gradients are checkpointed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..config.marft_config import MARFTConfig
from ..rules.rows import MicroBatch, Row
from ..seams.logs import get_logger
from ..weights.policies import Policies
from .batching import micro_batches
from .memory import (
    ActivationCost,
    free_memory,
    head_size,
    measure_activations,
    memory_of_server,
    optimizer_size,
    size_of,
)
from .passes import Passes


logger = get_logger(__name__)

# Share of the free memory that micro-batches may use. The rest is for short-lived tensors and fragmentation.
_FILLED = 0.7


class MicroBatcher:
    """
    Cuts rows into micro-batches that fit into the memory of the device.

    Args:
        passes ([`Passes`]): the model, and how rows go through it.
        policies ([`Policies`]): switch adapters.
        args ([`MARFTConfig`]): limits of micro-batches, gradient checkpointing, the optimizer.
        trained (`Callable`): `trained()` returns the tensors that are trained.
        has_optimizer_state (`Callable`): `has_optimizer_state()` tells whether the optimizer has its memory already.
    """

    def __init__(
        self,
        passes: Passes,
        policies: Policies,
        args: MARFTConfig,
        trained: Callable[[], Sequence[nn.Parameter]],
        has_optimizer_state: Callable[[], bool],
    ):
        self._passes, self._policies, self._args, self.share = passes, policies, args, passes.share
        self._trained, self._has_optimizer_state = trained, has_optimizer_state
        self.cost: ActivationCost | None = None  # of the first rows
        self.max_tokens = args.max_tokens_per_micro_batch
        self._room, self._proven = math.inf, math.inf  # tokens that have fitted, where more have not

    def cut(self, rows: Sequence[Row], **options: Any) -> Iterator[MicroBatch]:
        """Micro-batches of one agent each; `options` are those of [`micro_batches`]."""
        repeat = None
        if self.share:
            repeat = 0.0 if self.cost is None else self.cost.per_repeat / self.cost.of_token(self.is_checkpointing)
        # Once memory has been measured, it decides alone: each pass costs a GPU much the same, whatever it holds
        is_free = self.joins_slices and self.max_tokens is not None
        most = None if is_free else self._args.per_device_train_batch_size
        return micro_batches(rows, most, self.max_tokens, repeat=repeat, **options)

    @property
    def joins_slices(self) -> bool:
        """
        `True` if rows of several slices go through the model together. In TRL's own passes each slice stays apart, so
        that sums have TRL's order. So does each if only tokens of high entropy are trained, which TRL finds by slice,
        and if the scale of values moves from one slice to the next.
        """
        args = self._args
        several = args.steps_per_generation * args.num_iterations < args.gradient_accumulation_steps
        is_apart = args.top_entropy_quantile < 1.0 or (args.normalize_values and several)
        return self._passes.give_positions and not is_apart

    @property
    def is_checkpointing(self) -> bool:
        """`True` if gradients are checkpointed."""
        return self._passes.is_checkpointing

    def fit(self, rows: Sequence[Row]) -> None:
        """
        Bound micro-batches by the memory that is free, before rows are trained on for the first time, and checkpoint
        gradients if not even the longest row fits without. Settings of the training arguments stay as they are.
        """
        longest = max((row.length for row in rows), default=0)
        if not longest:
            return
        if self.cost is None:
            self.cost = self.measure(longest)
            self._room = self.free_for_activations(sum(len(row.completion_ids) for row in rows), self.cost.fixed)
        limit, checkpointing = self.limits(longest, self.cost, self._room)
        if checkpointing and not self.is_checkpointing:
            logger.warning(
                f"Rows of {longest:,} tokens do not fit into the {self._room / 1e9:.1f} GB that are free for what the "
                "backward pass keeps: gradients are checkpointed from now on."
            )
            self._passes.checkpoint_gradients()
        if self.max_tokens is None or checkpointing:
            self.max_tokens = int(min(limit, self._proven))

    def shrink(self, rows: Sequence[Row]) -> str | None:
        """
        Halve the micro-batches of these rows, and of all later ones, or checkpoint gradients where the longest row is
        too long alone.

        Returns: what was changed, in words; `None` if nothing is left to change.
        """
        longest = max((row.length for row in rows), default=0)
        largest = max((batch.num_tokens for batch in self.cut(rows)), default=0)
        if largest > longest:
            self.max_tokens = self._proven = max(int(largest / 2), longest)
            return f"micro-batches have at most {self.max_tokens:,} tokens"
        if self.is_checkpointing or self._args.gradient_checkpointing is not None:
            return None
        self._passes.checkpoint_gradients()
        return "gradients are checkpointed"

    def measure(self, length: int) -> ActivationCost:
        """Cost of the tokens of rows of this length, measured on short rows, on all processes with a sharded base."""
        model, base, device = self._passes.model, self._passes.base, self._passes.device
        was_training = model.training
        self._policies.activate_adapter(self._policies.trained[0])  # a frozen one keeps nothing for a backward pass
        base.train()
        try:
            # Dropout must not move the random numbers that training goes on with
            with (
                self._passes.without_checkpointing(),
                self._passes.autocast(),
                torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
            ):
                return measure_activations(base, self.share).at(length)
        finally:
            base.train(was_training)

    def limits(self, longest: int, cost: ActivationCost, room: float) -> tuple[int, bool]:
        """
        Tokens of a micro-batch, and whether gradients have to be checkpointed.

        Args:
            longest (`int`): tokens of the longest row.
            cost ([`ActivationCost`]): bytes of a token.
            room (`float`): bytes that are free for activations.
        """
        limit = self._args.max_tokens_per_micro_batch
        checkpointing = self.is_checkpointing
        if self._args.gradient_checkpointing is None and not checkpointing:
            checkpointing = max(longest, limit or 0) * cost.per_token > room
        if limit is None:
            fitting = max(room / cost.of_token(checkpointing), 1)
            # A power of 2, so that other tenants of the device rarely change how rows are cut
            limit = max(2 ** int(math.log2(fitting)), longest)
        return limit, checkpointing

    def free_for_activations(self, scored: int, fixed: float = 0.0) -> float:
        """
        Bytes that are free for what grows with the tokens of a pass.

        Args:
            scored (`int`): tokens that are scored at once.
            fixed (`float`, *optional*, defaults to `0.0`): bytes of a pass, whatever its size.
        """
        device, vocabulary = self._passes.device, self._passes.base.config.get_text_config().vocab_size
        trained, optim = self._trained(), str(getattr(self._args.optim, "value", self._args.optim))
        awaited = 0 if self._has_optimizer_state() else size_of(trained) + optimizer_size(trained, optim)
        free = free_memory(device) - memory_of_server(self._args, device)
        return max(_FILLED * (free - awaited) - head_size(vocabulary, scored, device) - fixed, 1.0)
