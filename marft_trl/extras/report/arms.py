# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Arms of a report: the changes of an experiment that are compared with the team."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...agents import AgentSpec, check_team
from ...system.hints import did_you_mean
from ...workflows import (
    Debate,
    EnvironmentLoop,
    Graph,
    MixtureOfAgents,
    Orchestrated,
    Sequential,
    UntilApproved,
    Workflow,
)
from .experiment import Experiment


# Workflows that end with an answer to the prompt, which a single agent can give as well
_ANSWERING = (Sequential, Graph, Debate, MixtureOfAgents, UntilApproved, Orchestrated)


@dataclass(frozen=True)
class Arm:
    """A change of the experiment, such as `solo` or `frozen:planner`."""

    name: str
    what: str
    change: Callable[[Experiment], Experiment] | None = None  # `None`: evaluated in the run of the arm `of`
    evaluation: str = "end"  # or "start", or that of an emptied message
    of: str = ""
    is_budgeted: bool = False  # training ends when the arm has generated as many tokens as the team
    is_variant: bool = False  # one of the user's `variants`
    skip_reason: str | None = None

    @property
    def run(self) -> str:
        """The arm whose run has the evaluation of this one."""
        return self.of or self.name

    @property
    def folder(self) -> str:
        return make_folder_name(self.run)

    def changed(self, experiment: Experiment) -> Experiment:
        """Return the experiment of this arm, without variants."""
        alone = experiment.changed(variants={})
        return alone if self.change is None else self.change(alone)


def make_folder_name(name: str) -> str:
    return name.replace(":", "-")


def make_arms(experiment: Experiment, names: Sequence[str] | None = None) -> list[Arm]:
    """Make the arms of a report, the trained team first. A name such as `frozen` stands for the arms of all agents."""
    known = [*_team_arms(experiment), *_agent_arms(experiment)]
    known += _variant_arms(experiment, {arm.name for arm in known})
    if names is None:
        return known
    names = [names] if isinstance(names, str) else names
    kinds = {arm.name for arm in known} | {arm.name.partition(":")[0] for arm in known}
    for name in names:
        if name not in kinds:
            shown = ", ".join(sorted(kinds))
            raise ValueError(f"Unknown arm {name!r}.{did_you_mean(name, kinds)} Available arms: {shown}.")
    wanted = {"team", *names}
    return [arm for arm in known if arm.name in wanted or arm.name.partition(":")[0] in wanted]


def _team_arms(experiment: Experiment) -> list[Arm]:
    def solo(experiment: Experiment) -> Experiment:
        agents, workflow = [experiment.solo_agent()], _solo_workflow(experiment)[0]
        return experiment.changed(agents=agents, workflow=workflow, solo=None, solo_workflow=None)

    def nameless(experiment: Experiment) -> Experiment:
        return experiment.changed(options={**experiment.options, "anonymous": True})

    alone = "the team is one agent" if len(experiment.agents) == 1 else _solo_workflow(experiment)[1]
    anonymous = "the team is anonymous" if experiment.options.get("anonymous") else None
    return [
        Arm("team", "the team, trained"),
        Arm("untrained", "the team, untrained", evaluation="start", of="team"),
        Arm("solo", "one agent, trained with as many generated tokens", solo, is_budgeted=True, skip_reason=alone),
        Arm("solo_untrained", "one agent, untrained", evaluation="start", of="solo", skip_reason=alone),
        Arm("anonymous", "no names and no roles", nameless, skip_reason=anonymous),
        *_adapter_arms(experiment),
    ]


def _variant_arms(experiment: Experiment, taken: Collection[str]) -> list[Arm]:
    """Make the arms of the user's `variants`, whose names must be new."""
    if twice := sorted({*experiment.variants} & {*taken, *map(make_folder_name, taken)}):
        raise ValueError(f"`variants` of the `Experiment` must not have names of other arms, got {', '.join(twice)}.")
    arms, alone = [], experiment.changed(variants={})
    for name, change in experiment.variants.items():
        made = change(alone)
        if not isinstance(made, Experiment):
            raise TypeError(f"The variant {name!r} must return an `Experiment`, got {type(made).__name__}.")
        is_budgeted = made.args.max_steps == alone.args.max_steps
        arms.append(Arm(name, name, change, is_budgeted=is_budgeted, is_variant=True))
    return arms


def _solo_workflow(experiment: Experiment) -> tuple[Workflow | None, str | None]:
    """Return the workflow of the agent that works alone, or why there is none."""
    workflow = experiment.workflow
    if experiment.solo_workflow is not None or workflow is None or type(workflow) in _ANSWERING:
        return experiment.solo_workflow, None
    if type(workflow) is EnvironmentLoop and workflow.turns == "all":
        alone = copy.copy(workflow)
        alone.agents = None  # all agents of the team
        return alone, None
    return None, f"`{type(workflow).__name__}` needs a `solo_workflow` in the `Experiment`"


def _adapter_arms(experiment: Experiment) -> list[Arm]:
    """Make the arms with a shared adapter and with separate adapters, where that is a change."""
    adapters = [agent.adapter for agent in _trained(experiment)]
    alone = "only one agent is trained" if len(adapters) < 2 else None
    alone = alone if _has_adapters(experiment) else "there are no adapters"
    if len({agent.model for agent in _trained(experiment)}) > 1:
        alone = "the agents have different models"
    arms = []
    if len({*adapters}) > 1 or alone:
        change = partial(_with_adapters, lambda agent: "team")
        arms.append(Arm("shared", "one adapter for all agents", change, skip_reason=alone))
    if len({*adapters}) < len(adapters):
        change = partial(_with_adapters, lambda agent: agent.name)
        arms.append(Arm("own", "own adapters", change, skip_reason=alone))
    return arms


def _agent_arms(experiment: Experiment) -> list[Arm]:
    trained = [agent.name for agent in _trained(experiment)]
    last = "it is the last agent, whose turns no teammate reads"
    is_chain = experiment.workflow is None or type(experiment.workflow) is Sequential
    adapters = None if _has_adapters(experiment) else "there are no adapters"
    arms: list[Arm] = []
    for agent in experiment.agents:
        name, is_last = agent.name, agent is experiment.agents[-1] and is_chain
        only = "the team is one agent" if len(experiment.agents) == 1 else None
        others = None if set(trained) - {name} else "no other agent is trained"
        frozen = adapters or others if name in trained else "it is not trained"
        without = only or others or (None if is_chain else "the workflow is not a chain")
        arms += [
            Arm(f"frozen:{name}", f"{name} is not trained", partial(_frozen, name), skip_reason=frozen),
            Arm(f"without:{name}", f"a team without {name}", partial(_without, name), skip_reason=without),
            Arm(f"emptied:{name}", f"what {name} says is emptied", evaluation=f"emptied:{name}", of="team",
                skip_reason=only or (last if is_last else None)),
        ]  # fmt: skip
    return arms


def _trained(experiment: Experiment) -> list[AgentSpec]:
    return [agent for agent in experiment.agents if agent.trainable and agent.has_policy]


def _has_adapters(experiment: Experiment) -> bool:
    return experiment.peft_config is not None or any(agent.peft_config is not None for agent in experiment.agents)


def _with_adapters(name: Callable[[AgentSpec], str], experiment: Experiment) -> Experiment:
    trained = {agent.name for agent in _trained(experiment)}
    agents = [replace(agent, adapter=name(agent)) if agent.name in trained else agent for agent in experiment.agents]
    return experiment.changed(agents=agents)


def _frozen(name: str, experiment: Experiment) -> Experiment:
    # If agents share an adapter, the frozen agent gets its own, which stays untrained
    others = {agent.adapter for agent in experiment.agents if agent.name != name}
    adapter = next(free for free in (name + "-frozen" * count for count in itertools.count()) if free not in others)
    agents = [
        replace(agent, trainable=False, adapter=adapter) if agent.name == name else agent
        for agent in experiment.agents
    ]
    return experiment.changed(agents=agents)


def _without(name: str, experiment: Experiment) -> Experiment:
    workflow = experiment.workflow
    if isinstance(workflow, Sequential) and workflow.agents is not None:
        workflow = Sequential([agent for agent in workflow.agents if agent != name], workflow.rounds)
    return experiment.changed(agents=[agent for agent in experiment.agents if agent.name != name], workflow=workflow)


def check_arms(experiment: Experiment, arms: Sequence[Arm]) -> None:
    """Check before the first run that all arms can run."""
    for arm in (item for item in arms if item.skip_reason is None):
        try:
            changed = arm.changed(experiment)
            agents = check_team(changed.agents)
            if changed.workflow is not None:
                changed.workflow.check([agent.name for agent in agents])
        except (TypeError, ValueError) as error:
            raise ValueError(f"The arm {arm.name!r} cannot run: {error} Leave it out of `arms`.") from error
