# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The seams of FSDP2: accelerate and transformers shard the base, and leave the adapters whole."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from trl import GRPOTrainer

from .swapping import swapped


class WholeAdapters:
    """
    `Accelerator.prepare` (1.15) for a model whose adapters stay whole on every process, while the rest is sharded.

    - What belongs to no layer and is no input embedding, such as the last norm, is left out of the shards, too:
      upstream does not find it under the wrapper of PEFT and adds it to the unit of the whole model, which is gathered
      only by a pass that begins there. A head with its own weights would be gathered only by processes that read it.
    - Upstream replaces parameters in the optimizer by their shards. Here no trained parameter is sharded, and value
      heads are not part of the model, so the optimizer is left alone.
    - Upstream refuses a model without an optimizer, as in an evaluation before training.
    - With `fsdp_cpu_ram_efficient_loading`, transformers (5.23) loads the weights on the first process alone, and
      accelerate sends them while it shards, which fails for parameters that are not sharded. Here they are sent first.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, adapters: Iterable[nn.Parameter]):
        self._accelerator, plugin = accelerator, accelerator.state.fsdp_plugin
        whole = {id(parameter) for parameter in [*adapters, *_between_layers(model)]}
        plugin.ignored_modules = [
            module for module in model.modules() if any(id(p) in whole for p in module.parameters(recurse=False))
        ]
        if plugin.cpu_ram_efficient_loading:
            with torch.no_grad():  # from the first process, in place and one by one
                for tensor in [*model.parameters(), *model.buffers()]:
                    sent = tensor.data.to(accelerator.device)
                    torch.distributed.broadcast(sent, src=0)
                    tensor.data.copy_(sent)
            plugin.cpu_ram_efficient_loading = False
        self._whole = plugin.ignored_modules
        self._shard, self._prepare = accelerator._prepare_fsdp2, accelerator.prepare
        accelerator._prepare_fsdp2, accelerator.prepare = self._shard_model, self.prepare

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], nn.Module):
            return self._shard_model(*args)[0]
        return self._prepare(*args, **kwargs)

    def _shard_model(self, *args: Any) -> tuple[Any, ...]:
        for module in self._whole:
            module.to(self._accelerator.device)  # upstream moves what it shards, and no more
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
        saved_parameters = [[group["params"] for group in optimizer.param_groups] for optimizer in optimizers]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = []
        try:
            return tuple(self._shard(*args))
        finally:
            for optimizer, groups in zip(optimizers, saved_parameters, strict=True):
                for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                    group["params"] = parameters


def names_of_layers(model: nn.Module) -> list[str]:
    """Sorted class names of the layers (transformers 5.23)."""
    return sorted(model._no_split_modules)


def _layers(model: nn.Module) -> list[nn.Module]:
    names = set(model._no_split_modules)
    return [module for module in model.modules() if any(kind.__name__ in names for kind in type(module).__mro__)]


def _between_layers(model: nn.Module) -> list[nn.Parameter]:
    """Parameters outside of the layers and the input embeddings."""
    units = [*_layers(model), model.get_input_embeddings()]
    within = {id(parameter) for unit in units for parameter in unit.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in within]


class ShardSizes(NamedTuple):
    """Memory of a process for the weights of a sharded base, in bytes."""

    held: int  # shards, and what is whole on every process
    gathered: int  # at once: two layers, and the embeddings if the head reads them


def shard_sizes(
    model: nn.Module, adapters: Iterable[nn.Parameter], world: int, width: int | None = None
) -> ShardSizes:
    """Sizes of a base that FSDP2 (torch 2.13) shards as in [`WholeAdapters`], along the first dimension, padded."""
    # `width`: bytes of a gathered element, if mixed precision changes it. Adapters do not count
    apart = {id(parameter) for parameter in adapters}
    whole = apart | {id(parameter) for parameter in _between_layers(model)}

    def is_split(parameter: nn.Parameter) -> bool:  # accelerate leaves 4-bit weights that are stored as bytes
        return id(parameter) not in whole and parameter.is_floating_point()

    def held(parameter: nn.Parameter) -> int:
        rows = -(-parameter.shape[0] // world) if is_split(parameter) else parameter.shape[0]
        # By its shape: to slice a sharded tensor is a collective
        return rows * math.prod(parameter.shape[1:]) * parameter.element_size()

    def gathered(unit: nn.Module | None) -> int:
        cut = [p for p in unit.parameters() if is_split(p)] if unit is not None else []
        return sum(p.numel() * (width or p.element_size()) for p in cut)

    layers = sorted((gathered(layer) for layer in _layers(model)), reverse=True)
    before_layers, output_head = gathered(model.get_input_embeddings()), gathered(model.get_output_embeddings())
    parameters = [p for p in model.parameters() if id(p) not in apart]
    return ShardSizes(
        sum(held(p) if p.dim() else p.element_size() for p in parameters) + constants(model),
        max(sum(layers[:2]) + output_head, before_layers + layers[0]),
    )


def constants(model: nn.Module) -> int:
    """Bytes that bitsandbytes (0.50) stores with the 4-bit weights, whole on every process."""
    size = 0
    for module in model.modules():
        state = getattr(module, "quant_state", None)  # sharded weights have none themselves
        while state is not None:
            tensors = [item for item in (state.absmax, state.code, state.offset) if isinstance(item, torch.Tensor)]
            size, state = size + sum(item.numel() * item.element_size() for item in tensors), state.state2
    return size


def storage_of_4bit(model: nn.Module) -> torch.dtype | None:
    """Storage type of 4-bit weights (bitsandbytes 0.50); `None` without any."""
    return next((parameter.dtype for parameter in model.parameters() if hasattr(parameter, "quant_state")), None)


def in_the_precision_of_the_head(model: nn.Module) -> None:
    """Cast hidden states to the precision of the head: FSDP2 (torch 2.13) returns the lower one of mixed precision."""
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, args: (args[0].to(module.weight.dtype), *args[1:]))


def is_sharded(model: nn.Module) -> bool:
    """`True` if FSDP2 (torch 2.13) has sharded the model."""
    return isinstance(model, FSDPModule)


def with_all_layers(hidden: torch.Tensor, earlier: torch.Tensor, backbone: nn.Module) -> torch.Tensor:
    """
    Hidden states `(B, S, H)` of a pass that reads keys and values of an `earlier` one `(G, W, H)`, whose last layer
    gets zeros as a gradient: FSDP2 (torch 2.13) gathers a layer when one arrives. Without sharding, nothing changes.
    """
    if not any(isinstance(module, FSDPModule) for module in backbone.modules()):
        return hidden
    return _WithZeros.apply(hidden, earlier)


class _WithZeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, earlier):
        ctx.save_for_backward(earlier)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        (earlier,) = ctx.saved_tensors
        return gradient, torch.zeros_like(earlier)


def gather_in_one_order(model: nn.Module) -> None:
    """
    Gather the units of a sharded model (torch 2.13) in an order that depends on the model alone: each layer prefetches
    the next one, or in a backward pass the one before it. By default, a unit prefetches by the order of the latest
    pass, so processes whose passes differ would gather different units.
    """
    layers = [layer for layer in _layers(model) if isinstance(layer, FSDPModule)]
    before, after = dict(zip(layers[1:], layers, strict=False)), dict(itertools.pairwise(layers))
    for layer in layers:
        layer.set_modules_to_forward_prefetch([after[layer]] if layer in after else [])
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_modules_to_backward_prefetch([before.get(unit, unit)])
    embeddings = model.get_input_embeddings()
    # Backward passes do not read those with weights of their own; a head that reads them too would be the unit
    if isinstance(embeddings, FSDPModule):
        embeddings.set_unshard_in_backward(False)


def keep_what_is_gathered(model: nn.Module) -> None:
    """
    Let `state_dict` and `load_state_dict` leave the units of a sharded model (torch 2.13) as they are, after its first
    pass. By default, they free gathered weights on the one process that saves, which would gather more than others.
    """
    for module in model.modules():
        when = module._state_dict_pre_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
        for hooks in when:
            for key, hook in list(hooks.items()):
                if getattr(hook, "hook", hook).__qualname__.startswith(FSDPParam.__name__):  # and its group's
                    del hooks[key]


def as_if_not_sharded(trainer: GRPOTrainer) -> contextlib.AbstractContextManager[None]:
    """`Trainer` (transformers 5.23) saves and loads as without FSDP, because every process has all adapters."""
    return swapped(trainer, {"is_fsdp_enabled": False})


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a tensor on this process (torch 2.13), or all of a tensor that is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
