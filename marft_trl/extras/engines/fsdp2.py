# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A base that is sharded over the processes (FSDP2), under adapters that every process has as a whole."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from trl import GRPOTrainer

from ...adapters.policies import Policies
from ...config.marft_config import MARFTConfig
from ...seams import sharding
from ...seams.libraries import get_logger
from ...seams.runs import timeout_of_processes
from ...system.processes import Processes


logger = get_logger(__name__)

# The next pass of a process, in the order of precedence. Passes without gradients leave nothing behind, so they come
# first. A backward pass comes last: when no process wants a forward pass, a process without its own open passes has
# lent some to the others, so it can go back through one of them.
_FORWARD, _FORWARD_WITH_GRADIENTS, _BACKWARD, _NOTHING = range(4)


class LockStep:
    """
    Keeps the passes of the processes in step. Every pass of the model goes through its `backbone`, the transformer
    without the head, once. The model may be sharded later. `timeout` is in seconds, `None` for torch's default.
    """

    def __init__(self, model: nn.Module, backbone: nn.Module, timeout: float | None):
        self._model, self._backbone = model, backbone
        limit = None if timeout is None else timedelta(seconds=timeout)
        # A separate group: its messages are small and meant for the CPU, whatever the device
        self._group = torch.distributed.new_group(backend="gloo", timeout=limit)
        self._is_ready = self._is_lending = False
        # A pass of this process runs, or has ended with an error: the others wait in the middle of it
        self.is_in_pass = False
        self._num_open = 0  # forward passes of its own that wait for their backward pass
        self._lent: list[tuple[torch.Tensor, torch.Tensor]] = []  # forward passes that wait for theirs
        backbone.register_forward_pre_hook(self._before_forward)
        backbone.register_forward_hook(self._after_forward)

    def wait(self) -> None:
        """Lend passes until no process wants one. All processes call this, before every collective."""
        if sharding.is_sharded(self._model):
            self._get_ready()
            self._until(_NOTHING)
            self._lent.clear()
            self._num_open = 0

    def backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Return a function that runs backward passes in step with those of the other processes."""

        @functools.wraps(backward)
        def in_step(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            # Not in a hook: within a backward pass, FSDP2 would keep the weights of a lent forward pass
            own, self._num_open = self._num_open, 0
            most = self._until(_BACKWARD, own) if own else 0
            self.is_in_pass = own > 0
            backward(loss, *args, **kwargs)
            self._lend_backward(most - own)
            self.is_in_pass = False

        return in_step

    def _until(self, wanted: int, passes: int = 0) -> int:
        """
        Return when all processes are about to do what this one wants. `passes` is the number of forward passes that
        its backward pass goes through; return the maximum of the processes.
        """
        while True:
            first = torch.tensor([wanted, -passes])
            torch.distributed.all_reduce(first, torch.distributed.ReduceOp.MIN, self._group)
            chosen, most = int(first[0]), -int(first[1])
            if chosen == wanted:
                return most
            if chosen == _BACKWARD:
                self._lend_backward(most)
            else:
                self._lend_forward(with_gradients=chosen == _FORWARD_WITH_GRADIENTS)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._is_lending or not sharding.is_sharded(self._model):
            return
        self._get_ready()
        self._until(_FORWARD_WITH_GRADIENTS if torch.is_grad_enabled() else _FORWARD)
        self._num_open += torch.is_grad_enabled()
        self.is_in_pass = True

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_lending:
            self.is_in_pass = False

    def _get_ready(self) -> None:
        """Run the whole model before the first pass, own or lent: FSDP2 takes the first module to run for the root."""
        if self._is_ready:
            return
        self._is_ready = True
        sharding.gather_in_one_order(self._model)
        with self._lending(), torch.no_grad():
            self._model(input_ids=self._token(), use_cache=False)
        sharding.keep_what_is_gathered(self._model)

    @contextlib.contextmanager
    def _lending(self) -> Iterator[None]:
        self._is_lending = True
        device = next(self._model.parameters()).device
        devices = [] if device.type == "cpu" else [device]
        try:
            with torch.random.fork_rng(devices, device_type=device.type):  # what is lent draws for dropout, too
                yield
        finally:
            self._is_lending = False

    def _token(self) -> torch.Tensor:
        return torch.zeros(1, 1, dtype=torch.long, device=next(self._model.parameters()).device)

    def _lend_backward(self, passes: int) -> None:
        """Go back through forward passes that were lent."""
        with self._lending():
            for _ in range(passes):
                hidden, start = self._lent.pop()
                torch.autograd.grad(hidden.sum(), start)  # gradients of no parameter

    def _lend_forward(self, with_gradients: bool) -> None:
        starts: list[torch.Tensor] = []
        embeddings = self._backbone.get_input_embeddings()
        handle = embeddings.register_forward_hook(lambda module, args, output: starts.append(output))
        with self._lending(), torch.set_grad_enabled(with_gradients):
            hidden = self._backbone(input_ids=self._token(), use_cache=False).last_hidden_state
        handle.remove()
        if with_gradients:
            self._lent.append((hidden, starts[0]))


def check_plugin(args: MARFTConfig) -> None:
    """Raise a `ValueError` before the base is loaded if FSDP2 would shard it in a way that suits one adapter only."""
    plugin = FullyShardedDataParallelPlugin(**(args.fsdp_plugin_args or {}))
    dimensions = (f"PARALLELISM_CONFIG_{name}_SIZE" for name in ("DP_REPLICATE", "TP", "CP", "SP"))
    sizes, version = [os.environ.get(name, "1") for name in dimensions], plugin.fsdp_version
    conflicts = {
        f"MARFTTrainer does not support FSDP{version}, which joins the parameters of several adapters into "
        "one. Set `fsdp_version: 2` in the accelerate config, or pass `--fsdp_version 2`.": version != 2,
        "MARFTTrainer shards the base by its layers, so FSDP2 needs `fsdp_auto_wrap_policy: "
        "TRANSFORMER_BASED_WRAP`.": plugin.auto_wrap_policy is not transformer_auto_wrap_policy,
        "`fsdp_activation_checkpointing` renames the layers that the adapters belong to. Set it to false, and set "
        "`MARFTConfig(gradient_checkpointing=True)` to save the same memory.": plugin.activation_checkpointing,
        "`fsdp_offload_params` is not supported: adapters stay on the GPU, and passes would mix both devices. Set it "
        "to false. A base in 4 bits takes a quarter of the memory.": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "MARFTTrainer sets `fsdp_ignored_modules` to the adapters itself. Remove the setting.": plugin.ignored_modules,
        "MARFTTrainer does not support reentrant gradient checkpointing with FSDP2: only parts of the passes that "
        "keep processes in step have gradients. Remove `use_reentrant` from `gradient_checkpointing_kwargs`.": (
            (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        ),
        "MARFTTrainer shards the base over all processes. Hybrid sharding, tensor parallelism and context parallelism "
        "are not supported: remove `parallelism_config`.": any(size.isdecimal() and int(size) > 1 for size in sizes),
        "MARFTTrainer does not support `torch_compile=True` with FSDP2, because hooks keep the passes of processes "
        "in step. Remove the setting.": args.torch_compile,
        "FSDP is enabled, but accelerate has no device to shard a model on: on the CPU, it runs plain data "
        "parallelism. Turn FSDP off, or run on GPUs with `accelerate launch`.": (
            args.distributed_state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
        ),
    }
    for message, applies in conflicts.items():
        if applies:
            raise ValueError(message)


def check_team(has_adapters: bool) -> None:
    """Raise a `ValueError` if a team has no adapters, which a sharded base needs."""
    if not has_adapters:
        raise ValueError(
            "FSDP2 shards and freezes the base, so only adapters are trained, and this team has no adapters. Pass "
            "`peft_config=LoraConfig(...)`, or launch without FSDP."
        )


def keep_adapters_whole(trainer: GRPOTrainer, policies: Policies) -> None:
    """Let accelerate shard only the base when it prepares the model, after the constructor of the trainer."""
    if trainer.accelerator.is_fsdp2:
        _check_base(trainer)
        sharding.WholeAdapters(trainer.accelerator, trainer.model, policies.all_parameters())
        if not trainer.model.get_base_model().config.get_text_config().tie_word_embeddings:
            sharding.in_the_precision_of_the_head(trainer.model)
        # All layers then take part in every backward pass, whichever of them the adapter of an agent has
        trainer.model.enable_input_require_grads()
        logger.info("FSDP2 shards the base over the processes. Each process has whole adapters and critics.")


def _check_base(trainer: GRPOTrainer) -> None:
    plugin, layers = trainer.accelerator.state.fsdp_plugin, sharding.names_of_layers(trainer.model)
    names = plugin.transformer_cls_names_to_wrap
    if names is not None and sorted(names) != layers:
        raise ValueError(
            f"`fsdp_transformer_layer_cls_to_wrap` names {', '.join(names)}, but the layers of this base are "
            f"{', '.join(layers)}. Remove the setting."
        )
    # FSDP2 casts gathered weights to the type of mixed precision, which would change the bytes of 4-bit weights
    stored = sharding.storage_of_4bit(trainer.model)
    computes = getattr(plugin.mixed_precision_policy, "param_dtype", None)
    if stored is not None and stored.is_floating_point and computes not in (None, stored):
        raise ValueError(
            f"The 4-bit base is stored as {stored}, and mixed precision would cast its shards to {computes}, which "
            f"changes the bytes. Set `BitsAndBytesConfig(bnb_4bit_quant_storage={computes})`."
        )


def keep_in_step(trainer: GRPOTrainer, processes: Processes) -> None:
    """Keep the passes of the processes in step if the base is sharded. Their collectives then wait for passes."""
    if trainer.accelerator.is_fsdp2 and processes.count > 1:
        steps = LockStep(trainer.model, trainer.model.get_base_model().base_model, timeout_of_processes())
        processes.set_hooks(steps.wait, lambda: steps.is_in_pass)
        trainer.accelerator.backward = steps.backward(trainer.accelerator.backward)
