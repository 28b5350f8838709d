# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The share of each agent in the gradients of a step, also where agents have one adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ..system.processes import Processes
from ..system.run_metrics import Metrics
from ..weights.policies import Policies


# Elements of a shared adapter that are looked at. More are thinned out evenly
_ELEMENTS = 2**20


class GradientShares:
    """
    Measures the gradient of each agent. Micro-batches are of one agent, so what a backward pass adds to the gradient
    of an adapter is that agent's.

    Args:
        policies ([`Policies`]): who acts with which adapter.
        metrics ([`Metrics`]): get `agents/<name>/grad_share`: the norm of an agent's gradient, divided by the sum of
            the norms of all agents.
        processes ([`Processes`]): gradients are averaged over them.
    """

    def __init__(self, policies: Policies, metrics: Metrics, processes: Processes):
        self._policies, self._metrics, self._processes = policies, metrics, processes
        groups = {adapter: policies.agents_of(adapter) for adapter in policies.trained}
        self._groups = {adapter: agents for adapter, agents in groups.items() if len(agents) > 1}
        self._parts: dict[str, torch.Tensor] = {}  # by agent, since the optimizer step began
        self._last: dict[str, torch.Tensor] = {}  # by adapter, when the gradient was looked at
        self._current: list[str] = []

    def begin(self, agents: Sequence[str]) -> None:
        """The next backward passes are those of these agents, which act with different adapters."""
        watched = [agent for agent in agents if self._policies.adapter_of(agent) in self._groups]
        if watched != self._current:
            self._settle()
            self._current = watched

    def _settle(self) -> None:
        """Give what was added to a gradient since the last look to the agent whose passes ran."""
        for agent in self._current:
            adapter = self._policies.adapter_of(agent)
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
        """
        Add the metrics of an optimizer step, and forget it.

        Args:
            norms (`Mapping[str, float]`): norm of the gradient of each trained adapter that has one.
            scale (`float`, *optional*, defaults to `1.0`): factor of gradients in backward passes (fp16).
        """
        self._settle()
        of_agents: dict[str, float] = {}
        for adapter, norm in norms.items():
            agents = self._groups.get(adapter)
            if agents is None:
                of_agents[self._policies.agents_of(adapter)[0]] = norm
            else:
                of_agents |= self._within(adapter, agents, scale)
        total = sum(of_agents.values())
        if total > 0 and math.isfinite(total):
            for agent, norm in of_agents.items():
                self._metrics.add(f"agents/{agent}/grad_share", norm / total)
        self.clear()

    def _within(self, adapter: str, agents: list[str], scale: float) -> dict[str, float]:
        """Norms of the parts of agents in the gradient of their adapter, averaged over processes."""
        nothing = torch.zeros_like(self._look(adapter))
        parts = torch.stack([self._parts.get(agent, nothing) for agent in agents])
        norms = self._processes.sum(parts).norm(dim=1) / self._processes.count / scale
        return dict(zip(agents, (norms * self._stride(adapter) ** 0.5).tolist(), strict=True))

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that takes back what is seen after this."""
        self._settle()
        kept = dict(self._parts), dict(self._last), list(self._current)

        def take_back() -> None:
            self._parts, self._last, self._current = kept

        return take_back

    def clear(self) -> None:
        """Begin the next optimizer step."""
        self._parts.clear()
        self._last.clear()
        self._current = []
