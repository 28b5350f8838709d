# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Gradients by adapter: reduction, optimizer groups, and the share of each agent."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..adapters.policies import Policies
from ..system.processes import Processes
from ..system.run_metrics import Metrics


Parameters = Mapping[str, torch.nn.Parameter]

# Maximum number of elements to reduce in one call. It holds whole adapters, but limits copies of a full model.
_BUCKET = 2**26


def average_gradients(parameters: Iterable[torch.nn.Parameter], world_size: int) -> None:
    """Average gradients over processes, in place, in the same order on each. A missing gradient counts as zeros."""
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
    for gradient, averaged in zip(gradients, flat.split([item.numel() for item in gradients]), strict=True):
        gradient.copy_(averaged.view_as(gradient))


def drop_gradients(parameters: Parameters) -> None:
    """Skip the adapter in the next optimizer step. Its weights and its optimizer state do not change."""
    for parameter in parameters.values():
        parameter.grad = None


def split_groups(
    optimizer: torch.optim.Optimizer, adapters: Mapping[str, Parameters], learning_rates: Mapping[str, float | None]
) -> None:
    """
    Split the optimizer's parameter groups by adapter, in place, before its first step. Adapters without a learning
    rate keep that of the optimizer.

    Groups are sorted by adapter name. The optimizer state is saved by position, so a fixed order lets it find its
    adapter again, even if the order of the agents changes. The critic's groups come last, because the Trainer logs the
    learning rate of the first group.
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
    optimizer: torch.optim.Optimizer, find_saved_name: Callable[[str], str | None] | None = None
) -> Iterator[None]:
    """
    Context manager: a state that is loaded into an optimizer must belong to its parameter groups, whose settings stay.
    `find_saved_name` returns the name of an adapter in the state, or `None` if it starts fresh. Without it, the groups
    must be the same.
    """
    settings = [{key: group[key] for key in _SETTINGS if key in group} for group in optimizer.param_groups]

    def prepare(mine: torch.optim.Optimizer, saved: dict) -> dict | None:
        if find_saved_name is not None:
            return matched_state(saved, mine.param_groups, find_saved_name)
        check_groups(saved["param_groups"], mine.param_groups)
        return None

    hook = optimizer.register_load_state_dict_pre_hook(prepare)
    try:
        yield
    finally:
        hook.remove()
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def matched_state(saved: dict, current: Sequence[dict], find_saved_name: Callable[[str], str | None]) -> dict:
    """
    Order a saved optimizer state, with one group per adapter, as the current parameter groups. Groups without saved
    state start fresh. Raises `ValueError` if an adapter has another number of tensors.
    """
    saved_groups = {group.get("adapter"): group for group in saved["param_groups"]}
    groups: list[dict] = []
    state: dict[int, Any] = {}
    position = 0
    for group in current:
        source = find_saved_name(str(group.get("adapter")))
        kept = saved_groups.get(source) if source is not None else None
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
    """Raise `ValueError`, with the adapters of both, if a saved optimizer state belongs to other parameter groups."""
    saved_sizes = [(group.get("adapter"), len(group["params"])) for group in saved]
    mine = [(group.get("adapter"), len(group["params"])) for group in current]
    if saved_sizes != mine:
        raise ValueError(
            f"The optimizer state of the checkpoint belongs to {_count(saved_sizes)}, but the team trains "
            f"{_count(mine)}. Resume with the agents, adapters and `peft_config` that the checkpoint was written with."
        )


def _count(groups: Sequence[tuple[str | None, int]]) -> str:
    return ", ".join(f"{name!r} ({count} tensors)" for name, count in groups) or "nothing"


# Elements of a shared adapter that are looked at. More are thinned out evenly
_ELEMENTS = 2**20


class GradientShares:
    """
    Logs `agents/<name>/grad_share`: the norm of an agent's gradient, divided by the sum of the norms of all agents.
    Micro-batches are of one agent, so what a backward pass adds to the gradient of an adapter is that agent's.
    """

    def __init__(self, policies: Policies, metrics: Metrics, processes: Processes):
        self._policies, self._metrics, self._processes = policies, metrics, processes
        groups = {adapter: policies.get_agents(adapter) for adapter in policies.trained}
        self._groups = {adapter: agents for adapter, agents in groups.items() if len(agents) > 1}
        self._parts: dict[str, torch.Tensor] = {}  # by agent, since the optimizer step began
        self._last: dict[str, torch.Tensor] = {}  # by adapter, when the gradient was looked at
        self._current: list[str] = []

    def begin(self, agents: Sequence[str]) -> None:
        """The next backward passes are those of these agents, which act with different adapters."""
        watched = [agent for agent in agents if self._policies.get_adapter(agent) in self._groups]
        if watched != self._current:
            self._settle()
            self._current = watched

    def _settle(self) -> None:
        """Give what was added to a gradient since the last look to the agent whose passes ran."""
        for agent in self._current:
            adapter = self._policies.get_adapter(agent)
            now, before = self._look(adapter), self._last.get(adapter)
            part = now if before is None else now - before
            known = self._parts.get(agent)
            self._parts[agent] = part if known is None else known + part
            self._last[adapter] = now
        self._current = []

    def _look(self, adapter: str) -> torch.Tensor:
        parameters = list(self._policies.parameters(adapter).values())
        stride = self._stride(adapter)
        found = [
            torch.zeros(len(range(0, p.numel(), stride)), device=p.device)
            if p.grad is None
            else p.grad.reshape(-1)[::stride].float()
            for p in parameters
        ]
        return torch.cat([part.to(found[0].device) for part in found]).clone()

    def _stride(self, adapter: str) -> int:
        size = sum(parameter.numel() for parameter in self._policies.parameters(adapter).values())
        return max(math.ceil(size / _ELEMENTS), 1)

    def report(self, norms: Mapping[str, float], scale: float = 1.0) -> None:
        """Log an optimizer step and clear it. `norms` are by trained adapter; `scale` is that of fp16 gradients."""
        self._settle()
        agent_norms: dict[str, float] = {}
        for adapter, norm in norms.items():
            agents = self._groups.get(adapter)
            if agents is None:
                agent_norms[self._policies.get_agents(adapter)[0]] = norm
            else:
                agent_norms |= self._within(adapter, agents, scale)
        total = sum(agent_norms.values())
        if total > 0 and math.isfinite(total):
            for agent, norm in agent_norms.items():
                self._metrics.add(f"agents/{agent}/grad_share", norm / total)
        self.clear()

    def _within(self, adapter: str, agents: list[str], scale: float) -> dict[str, float]:
        """Norms of the parts of agents in the gradient of their adapter, averaged over processes."""
        nothing = torch.zeros_like(self._look(adapter))
        parts = torch.stack([self._parts.get(agent, nothing) for agent in agents])
        norms = self._processes.sum(parts).norm(dim=1) / self._processes.count / scale
        return dict(zip(agents, (norms * self._stride(adapter) ** 0.5).tolist(), strict=True))

    def snapshot(self) -> Callable[[], None]:
        """Return a function that removes everything recorded after this call."""
        self._settle()
        kept = {"_parts": dict(self._parts), "_last": dict(self._last), "_current": list(self._current)}
        return functools.partial(vars(self).update, kept)

    def clear(self) -> None:
        """Begin the next optimizer step."""
        self._parts.clear()
        self._last.clear()
        self._current = []
