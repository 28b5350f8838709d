# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Objects that the parts of a trainer share: sampling settings, the team, and the run that trains it. Frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..adapters.policies import Policies
from ..agents import AgentSpec
from ..algorithms.critics import Critic
from ..algorithms.rows import Level
from ..seams.trl import TrlSettings, TrlState
from ..system.processes import Processes
from ..system.run_metrics import Metrics
from ..workflows import Workflow
from .marft_config import MARFTConfig


# Sampling settings of agents: name in `generate` -> name in `AgentSpec`
_OF_AGENTS = {
    "max_new_tokens": "max_completion_length",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p")},
}


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of an agent. Settings that the agent does not have are the trainer's."""

    max_completion_length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    stop: tuple[str, ...]

    @classmethod
    def from_agent(cls, agent: AgentSpec, args: Any) -> Sampling:
        of_agent = {name: getattr(agent, name) for name in _OF_AGENTS.values()}
        settings = {name: getattr(args, name) if value is None else value for name, value in of_agent.items()}
        return cls(**settings, stop=tuple(agent.stop or ()))

    def as_generation_kwargs(self) -> dict[str, Any]:
        return {name: getattr(self, of_agent) for name, of_agent in _OF_AGENTS.items()}


def general_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `generate` that are the same for all agents and JSON-serializable."""
    plain = (str, int, float, bool, list, type(None))
    return {key: value for key, value in settings.items() if key not in _OF_AGENTS and isinstance(value, plain)}


def own_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `generate` that an agent can override, with their names in `AgentSpec`."""
    return {name: settings[of_agent] for of_agent, name in _OF_AGENTS.items()}


def decoding(sampling: Mapping[str, float] | None) -> dict[str, Any]:
    """Options of a generator for the sampling settings of an evaluation. A temperature of 0 is greedy decoding."""
    if not sampling:
        return {}
    return {"greedy": True} if sampling.get("temperature") == 0 else {"sampling": dict(sampling)}


# Settings of `generate` for greedy decoding. Sampling settings are `None`, since they would have no effect
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}


@dataclass(frozen=True, eq=False)
class TeamSetup:
    """A team as it is trained, after all checks."""

    agents: list[AgentSpec]
    workflow: Workflow
    policies: Policies  # adapters of agents, and which of them are trained
    critic: Critic | None
    level: Level  # unit of the policy ratio
    samplings: Mapping[str, Sampling]
    aliases: Mapping[str, str]
    anonymous: str | None

    @property
    def names(self) -> list[str]:
        return [agent.name for agent in self.agents]

    @property
    def trained(self) -> list[str]:
        return [name for name in self.names if self.policies.is_trained(name)]


@dataclass(frozen=True, eq=False)
class RunContext:
    """The run that trains a team."""

    args: MARFTConfig
    settings: TrlSettings  # which TRL has derived from the arguments
    state: TrlState
    metrics: Metrics
    processes: Processes
