# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What the parts of a trainer share: sampling settings, the team, and the run that trains it. Frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..adapters.policies import Policies
from ..agents import AgentSpec
from ..algorithms.critics import Critic
from ..algorithms.levels import Level
from ..seams.trl import TrlSettings, TrlState
from ..system.processes import Processes
from ..system.run_metrics import Metrics
from ..workflows import Workflow
from .marft_config import MARFTConfig


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
        """Return the settings of `agent`, with missing settings taken from the training arguments `args`."""

        def setting(name: str):
            own = getattr(agent, name)
            return getattr(args, name) if own is None else own

        return cls(
            max_completion_length=setting("max_completion_length"),
            temperature=setting("temperature"),
            top_p=setting("top_p"),
            top_k=setting("top_k"),
            min_p=setting("min_p"),
            stop=tuple(agent.stop or ()),
        )

    def as_generation_kwargs(self) -> dict[str, Any]:
        """The settings under the names of `generate`."""
        return {
            "max_new_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
        }


# Sampling settings of agents: name in `generate` -> name in `AgentSpec`
_OF_AGENTS = {
    "max_new_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
}


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
    """
    A team as it is trained, after all checks.

    Args:
        policies: adapters of agents, and which of them are trained.
        level: unit of the policy ratio.
    """

    agents: list[AgentSpec]
    workflow: Workflow
    policies: Policies
    critic: Critic | None
    level: Level
    samplings: Mapping[str, Sampling]
    aliases: Mapping[str, str]
    anonymous: str | None

    @property
    def names(self) -> list[str]:
        """Names of the agents."""
        return [agent.name for agent in self.agents]

    @property
    def trained(self) -> list[str]:
        """Names of the agents that are trained."""
        return [name for name in self.names if self.policies.is_trained(name)]


@dataclass(frozen=True, eq=False)
class RunContext:
    """
    The run that trains a team.

    Args:
        settings: settings that TRL has derived from them.
    """

    args: MARFTConfig
    settings: TrlSettings
    state: TrlState
    metrics: Metrics
    processes: Processes
