# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A team and how it is trained, after the checks of `setup`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..agents import AgentSpec
from ..config.marft_config import MARFTConfig
from ..learning.schedules import Schedule
from ..metrics.at_k import Vote
from ..metrics.evaluation import EvalMetric
from ..rollout.failures import Failures
from ..rollout.views import View
from ..rules.critic import Critic
from ..rules.levels import Level
from ..servers.setup import Engine
from ..weights.policies import Policies
from ..workflows import Workflow


@dataclass(frozen=True, eq=False)
class Choices:
    """
    A team and how it is trained, after the checks of `setup`.

    Args:
        args ([`MARFTConfig`]): training arguments.
        agents (`list[AgentSpec]`): the team.
        workflow ([`Workflow`]): decides who acts next and what each sees.
        policies ([`Policies`]): the adapters on the base.
        critic ([`Critic`], *optional*): predicts values.
        schedule ([`Schedule`]): which adapters learn in a step.
        anonymous (`str`, *optional*): kind of the anonymous ablation.
        level ([`Level`]): unit of the policy ratio.
        view (`Callable`): observations of agents as messages.
        turn_rewards (`Mapping[str, Sequence[Callable]]`): for each agent, the functions that score its own turns.
        eval_metrics (`Sequence[EvalMetric]`): metrics over the team's answers.
        eval_vote (`Callable`): what is compared of answers when the samples of an evaluation vote.
        aliases (`Mapping[str, str]`): names under which agents know one another, where they are not their own.
        failures ([`Failures`]): what users' code has failed in.
        engine ([`Engine`], *optional*): servers that generate.
    """

    args: MARFTConfig
    agents: list[AgentSpec]
    workflow: Workflow
    policies: Policies
    critic: Critic | None
    schedule: Schedule
    anonymous: str | None
    level: Level
    view: View
    turn_rewards: Mapping[str, Sequence[Callable]]
    eval_metrics: Sequence[EvalMetric]
    eval_vote: Vote
    aliases: Mapping[str, str]
    failures: Failures
    engine: Engine | None = None
