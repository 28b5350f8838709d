# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer's part that fits micro-batches into the memory of the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from ..configs import MARFTConfig
from .adapters import Policies
from .batching import MicroBatch, Row, micro_batches
from .memory import ActivationCost, free_memory, head_size, measure_activations, optimizer_size, size_of


logger = get_logger(__name__)

# Of the free memory, what micro-batches may fill: the rest is for what is needed for a moment, and for fragments.
_FILLED = 0.7


class TeamFitting(GRPOTrainer):
    """How many tokens go through the model at once, and whether gradients are checkpointed."""

    args: MARFTConfig
    policies: Policies
    _base_of: Callable[[nn.Module], Any]
    _shares_prefixes: bool
    _specs: dict[str, Any]
    _trained_parameters: Callable[[], dict[str, dict[str, nn.Parameter]]]

    def _prepare_fitting(self) -> None:
        self._activation_cost: ActivationCost | None = None
        self._max_tokens = self.args.max_tokens_per_micro_batch
        self._room = math.inf

    def _micro_batches(self, rows: Sequence[Row], **options: Any) -> Iterator[MicroBatch]:
        repeat = None
        if self._shares_prefixes:
            cost = self._activation_cost
            repeat = 0.0 if cost is None else cost.per_repeat / cost.of_token(self._is_checkpointing)
        return micro_batches(rows, self.args.per_device_train_batch_size, self._max_tokens, repeat=repeat, **options)

    def _measure(self, length: int) -> ActivationCost:
        model, was_training = self._base_of(self.model), self.model.training
        self.policies.activate_adapter(self.policies.trained[0])  # a frozen one keeps nothing for a backward pass
        model.train()
        try:
            # Dropout must not move the random numbers that training goes on with
            with (
                disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
                self.accelerator.autocast(),
                torch.random.fork_rng(),
            ):
                return measure_activations(model, length, self._shares_prefixes)
        finally:
            model.train(was_training)

    @property
    def _is_checkpointing(self) -> bool:
        return bool(self.args.gradient_checkpointing) or self.model.is_gradient_checkpointing

    def _fit(self, rows: Sequence[Row]) -> None:
        """
        Before rows are trained on for the first time: bound micro-batches by the memory that is free, and checkpoint
        gradients where not even the longest row fits without. What is set in the arguments stays as it is.
        """
        longest = max((row.length for row in rows), default=0)
        if not longest:
            return
        if self._activation_cost is None:
            self._activation_cost = self._measure(longest)
            self._room = self._free_for_activations(sum(len(row.completion_ids) for row in rows))
        limit, checkpointing = self._limits(longest, self._activation_cost, self._room)
        if checkpointing and not self._is_checkpointing:
            logger.warning(
                f"Rows of {longest:,} tokens do not fit into the {self._room / 1e9:.1f} GB that are free for what the "
                "backward pass keeps: gradients are checkpointed from now on."
            )
            self._checkpoint_gradients()
        if self._max_tokens is None or checkpointing:
            self._max_tokens = limit

    def _limits(self, longest: int, cost: ActivationCost, room: float) -> tuple[int, bool]:
        """Tokens of a micro-batch, and whether gradients have to be checkpointed, for rows up to a length."""
        limit = self.args.max_tokens_per_micro_batch
        checkpointing = self._is_checkpointing
        if self.args.gradient_checkpointing is None and not checkpointing:
            checkpointing = max(longest, limit or 0) * cost.per_token > room
        if limit is None:
            fitting = max(room / cost.of_token(checkpointing), 1)
            # A power of 2, so that other tenants of the device rarely change how rows are cut
            limit = max(2 ** int(math.log2(fitting)), longest)
        return limit, checkpointing

    def _free_for_activations(self, scored: int) -> float:
        device, vocabulary = self.accelerator.device, self._base_of(self.model).config.get_text_config().vocab_size
        trained = [p for its in self._trained_parameters().values() for p in its.values()]
        awaited = (
            0
            if self.optimizer is not None and self.optimizer.state
            else size_of(trained) + optimizer_size(trained, str(getattr(self.args.optim, "value", self.args.optim)))
        )
        return max(_FILLED * (free_memory(device) - awaited) - head_size(vocabulary, scored, device), 1.0)

    def _checkpoint_gradients(self) -> None:
        model = self.accelerator.unwrap_model(self.model)
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, **(self.args.gradient_checkpointing_kwargs or {})}
        )
        if self.policies.has_adapters:
            model.enable_input_require_grads()
