# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What the parts of a trainer have in common: the team, and the run that trains it. Two frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..agents import AgentSpec
from ..rules.critic import Critic
from ..rules.levels import Level
from ..seams.trl import TrlSettings, TrlState
from ..system.processes import Processes
from ..system.run_metrics import Metrics
from ..weights.policies import Policies
from ..workflows import Workflow
from .marft_config import MARFTConfig
from .sampling import Sampling


@dataclass(frozen=True, eq=False)
class TeamSetup:
    """
    A team as it is trained, after all checks.

    Args:
        agents (`list[AgentSpec]`): the team, in order.
        workflow ([`Workflow`]): decides who acts next and what each sees.
        policies ([`Policies`]): adapters of agents, and which of them are trained.
        critic ([`Critic`], *optional*): predicts values.
        level ([`Level`]): unit of the policy ratio.
        samplings (`Mapping[str, Sampling]`): sampling settings of each agent.
        aliases (`Mapping[str, str]`): names under which agents know one another, where they are not their own.
        anonymous (`str`, *optional*): kind of the anonymous ablation.
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
        args ([`MARFTConfig`]): training arguments.
        settings ([`TrlSettings`]): settings that TRL has derived from them.
        state ([`TrlState`]): position in the run, and the training rows in use.
        metrics ([`Metrics`]): metrics since the last log.
        processes ([`Processes`]): the processes of the run.
    """

    args: MARFTConfig
    settings: TrlSettings
    state: TrlState
    metrics: Metrics
    processes: Processes
