# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Gradients and optimizer groups by adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


Parameters = Mapping[str, torch.nn.Parameter]

# Maximum number of elements to reduce in one call. It holds whole adapters, but limits copies of a full model.
_BUCKET = 2**26


def average_gradients(parameters: Iterable[torch.nn.Parameter], world_size: int) -> None:
    """
    Average the gradients over processes, in place. A process without a gradient contributes zeros, so processes need
    not know which agents acted on the others.

    Args:
        parameters (`Iterable[torch.nn.Parameter]`): parameters, in the same order on every process.
        world_size (`int`): number of processes.
    """
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if bucket and (bucket[0].dtype != parameter.grad.dtype or sum(g.numel() for g in bucket) > _BUCKET):
            _average(bucket, world_size)
            bucket = []
        bucket.append(parameter.grad)
    if bucket:
        _average(bucket, world_size)


def _average(gradients: list[torch.Tensor], world_size: int) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    torch.distributed.all_reduce(flat)
    flat /= world_size
    for gradient, averaged in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(averaged.view_as(gradient))


def clip_gradients(parameters: Parameters, max_norm: float) -> torch.Tensor:
    """
    Clip the gradients of one adapter by their own norm, in place.

    Args:
        parameters (`Mapping[str, torch.nn.Parameter]`): parameters of the adapter.
        max_norm (`float`): maximum norm. Pass infinity to disable clipping.

    Returns: norm before clipping, a scalar.
    """
    return torch.nn.utils.clip_grad_norm_(list(parameters.values()), max_norm)


def drop_gradients(parameters: Parameters) -> None:
    """Skip the adapter in the next optimizer step. Its weights and its optimizer state do not change."""
    for parameter in parameters.values():
        parameter.grad = None


def split_groups(
    optimizer: torch.optim.Optimizer, adapters: Mapping[str, Parameters], learning_rates: Mapping[str, float | None]
) -> None:
    """
    Split the optimizer's parameter groups by adapter, in place, before its first step.

    Groups are sorted by adapter name. The optimizer state is saved by position, so a fixed order lets it find its
    adapter again, even if the order of the agents changes. The critic's groups come last, because the Trainer logs the
    learning rate of the first group.

    Args:
        optimizer (`torch.optim.Optimizer`):
            An optimizer over the parameters of all adapters.
        adapters (`Mapping[str, Mapping[str, torch.nn.Parameter]]`):
            Parameters of each trained adapter.
        learning_rates (`Mapping[str, float | None]`):
            Learning rate of each adapter. If `None` or missing, that of the optimizer is kept.
    """
    groups = []
    for adapter in sorted(adapters, key=lambda name: (name.startswith("_"), name)):
        own = {id(parameter) for parameter in adapters[adapter].values()}
        for group in optimizer.param_groups:
            parameters = [parameter for parameter in group["params"] if id(parameter) in own]
            if parameters:
                rate = learning_rates.get(adapter)
                changed = {} if rate is None else {"lr": rate}
                groups.append({**group, **changed, "params": parameters, "adapter": adapter})
    optimizer.param_groups[:] = groups


def fill_with_zeros(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give parameters of which none has a gradient a gradient of 0."""
    parameters = list(parameters)
    if all(parameter.grad is None for parameter in parameters):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)


def add_group(
    optimizer: torch.optim.Optimizer, name: str, parameters: Iterable[torch.nn.Parameter], learning_rate: float
) -> None:
    """Add parameters that are not part of the model, without weight decay. Call it before [`split_groups`]."""
    optimizer.add_param_group({"params": list(parameters), "lr": learning_rate, "weight_decay": 0.0, "adapter": name})


def untrained(optimizer: torch.optim.Optimizer, adapters: Mapping[str, Parameters]) -> list[str]:
    """Names of the adapters that have a parameter missing in the optimizer."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [
        adapter
        for adapter, parameters in adapters.items()
        if any(id(parameter) not in known for parameter in parameters.values())
    ]


# Settings of a parameter group that come from the training arguments. Others may be the optimizer's own state.
_SETTINGS = ("weight_decay", "betas", "eps", "momentum", "initial_lr")


@contextlib.contextmanager
def checked_groups(
    optimizer: torch.optim.Optimizer, source_of: Callable[[str], str | None] | None = None
) -> Iterator[None]:
    """
    Context manager: a state that is loaded into an optimizer must belong to its parameter groups. Settings of the
    groups stay those of the optimizer.

    Args:
        optimizer (`torch.optim.Optimizer`): the optimizer.
        source_of (`Callable`, *optional*): name that an adapter has in the state, or `None` if it starts anew. If left
            out, the groups must be the same.
    """
    settings = [{key: group[key] for key in _SETTINGS if key in group} for group in optimizer.param_groups]

    def prepare(mine: torch.optim.Optimizer, saved: dict) -> dict | None:
        if source_of is not None:
            return matched_state(saved, mine.param_groups, source_of)
        check_groups(saved["param_groups"], mine.param_groups)
        return None

    hook = optimizer.register_load_state_dict_pre_hook(prepare)
    try:
        yield
    finally:
        hook.remove()
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def matched_state(saved: dict, current: Sequence[dict], source_of: Callable[[str], str | None]) -> dict:
    """
    The saved optimizer state in the order of the current parameter groups. Groups without a saved one start anew.

    Args:
        saved (`dict`): state of an optimizer with one group per adapter.
        current (`Sequence[dict]`): parameter groups.
        source_of (`Callable`): name that an adapter has in the saved state; `None` if it starts anew.

    Raises:
        ValueError: an adapter has another number of tensors.
    """
    theirs = {group.get("adapter"): group for group in saved["param_groups"]}
    groups: list[dict] = []
    state: dict[int, Any] = {}
    position = 0
    for group in current:
        source = source_of(str(group.get("adapter")))
        kept = theirs.get(source) if source is not None else None
        indices = list(range(position, position + len(group["params"])))
        position += len(indices)
        if kept is not None:
            check_groups([{**kept, "adapter": group.get("adapter")}], [group])
            state |= {
                new: saved["state"][old]
                for new, old in zip(indices, kept["params"], strict=True)
                if old in saved["state"]
            }
        own = {key: value for key, value in (kept or group).items() if key not in ("params", "adapter")}
        groups.append({**own, "params": indices, "adapter": group.get("adapter")})
    return {**saved, "param_groups": groups, "state": state}


def check_groups(saved: Sequence[dict], current: Sequence[dict]) -> None:
    """
    Raise if a saved optimizer state does not belong to the current parameter groups.

    Raises:
        ValueError: the groups differ. The message names the adapters of both.
    """
    theirs = [(group.get("adapter"), len(group["params"])) for group in saved]
    mine = [(group.get("adapter"), len(group["params"])) for group in current]
    if theirs != mine:
        raise ValueError(
            f"The optimizer state of the checkpoint belongs to {_count(theirs)}, but the team trains {_count(mine)}. "
            "Resume with the agents, adapters and `peft_config` that the checkpoint was written with."
        )


def _count(groups: Sequence[tuple[str | None, int]]) -> str:
    return ", ".join(f"{name!r} ({count} tensors)" for name, count in groups) or "nothing"
