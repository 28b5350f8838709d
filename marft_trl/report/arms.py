# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Arms of a report: what is changed in an experiment, and what it is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..agents import AgentSpec
from ..hints import did_you_mean
from ..workflows import Sequential
from .experiment import Experiment


@dataclass(frozen=True)
class Arm:
    """
    One thing that is changed.

    Args:
        name (`str`): such as `"solo"` or `"frozen:planner"`.
        what (`str`): the change in words.
        change (`Callable`, *optional*): the experiment with the change; `None` for an arm that is evaluated with the
            weights of another one.
        evaluation (`str`): name of the evaluation that counts: `"end"`, `"start"` or that of an emptied message.
        of (`str`): the arm whose run has this evaluation.
        is_budgeted (`bool`): whether training ends with as many generated tokens as the team has had.
        why_not (`str`, *optional*): why this arm is left out.
    """

    name: str
    what: str
    change: Callable[[Experiment], Experiment] | None = None
    evaluation: str = "end"
    of: str = ""
    is_budgeted: bool = False
    why_not: str | None = None

    @property
    def run(self) -> str:
        """The arm whose run has the evaluation of this one."""
        return self.of or self.name


def arms_of(experiment: Experiment, names: Sequence[str] | None = None) -> list[Arm]:
    """
    The arms of a report, the trained team first.

    Args:
        experiment ([`Experiment`]): what the report is about.
        names (`Sequence[str]`, *optional*): those that are wanted; a kind such as `"frozen"` is that of each agent.

    Raises:
        ValueError: there is no such arm.
    """
    known = [*_of_team(experiment), *_of_agents(experiment)]
    if names is None:
        return known
    kinds = {arm.name for arm in known} | {arm.name.partition(":")[0] for arm in known}
    for name in names:
        if name not in kinds:
            shown = ", ".join(sorted(kinds))
            raise ValueError(f"There is no arm {name!r}; there are {shown}.{did_you_mean(name, kinds)}")
    wanted = {"team", *names}
    return [arm for arm in known if arm.name in wanted or arm.name.partition(":")[0] in wanted]


def _of_team(experiment: Experiment) -> list[Arm]:
    def solo(one: Experiment) -> Experiment:
        return one.changed(agents=[one.solo_agent()], workflow=None, solo=None)

    is_shared = len({agent.adapter or agent.name for agent in experiment.agents if agent.trainable}) == 1
    alone = "the team is one agent" if len(experiment.agents) == 1 else None
    other = "own adapters" if is_shared else "one adapter for all agents"
    return [
        Arm("team", "the team, trained"),
        Arm("untrained", "the team, untrained", evaluation="start", of="team"),
        Arm("solo", "one agent, trained with as many generated tokens", solo, is_budgeted=True, why_not=alone),
        Arm("solo_untrained", "one agent, untrained", evaluation="start", of="solo", why_not=alone),
        Arm("anonymous", "no names and no roles", lambda one: one.changed(options={**one.options, "anonymous": True})),
        Arm("own" if is_shared else "shared", other, _own if is_shared else _shared, why_not=alone),
    ]


def _of_agents(experiment: Experiment) -> list[Arm]:
    agents = list(experiment.agents)
    trained = [agent.name for agent in agents if agent.trainable and agent.has_policy]
    last = "it is the last agent, which nobody waits for"
    is_chain = experiment.workflow is None or type(experiment.workflow) is Sequential
    arms: list[Arm] = []
    for agent in agents:
        name, is_last = agent.name, agent is agents[-1] and is_chain
        only = "the team is one agent" if len(agents) == 1 else None
        others = None if set(trained) - {name} else "no other agent is trained"
        frozen = others if name in trained else "it is not trained"
        without = only or others or (None if is_chain else "the workflow is no chain")
        arms += [
            Arm(f"frozen:{name}", f"{name} is not trained", _frozen(name), why_not=frozen),
            Arm(f"without:{name}", f"a team without {name}", _without(name), why_not=without),
            Arm(f"emptied:{name}", f"what {name} says is emptied", evaluation=f"emptied:{name}", of="team",
                why_not=only or (last if is_last else None)),
        ]  # fmt: skip
    return arms


def _replaced(experiment: Experiment, change: Callable[[AgentSpec], AgentSpec]) -> Experiment:
    return experiment.changed(agents=[change(agent) for agent in experiment.agents])


def _shared(experiment: Experiment) -> Experiment:
    return _replaced(experiment, lambda one: dataclasses.replace(one, adapter="team") if one.has_policy else one)


def _own(experiment: Experiment) -> Experiment:
    return _replaced(experiment, lambda one: dataclasses.replace(one, adapter=one.name) if one.has_policy else one)


def _frozen(name: str) -> Callable[[Experiment], Experiment]:
    # Of agents that share an adapter, this one stays as the base is
    def frozen(one: AgentSpec) -> AgentSpec:
        return dataclasses.replace(one, trainable=False, adapter=name) if one.name == name else one

    return lambda experiment: _replaced(experiment, frozen)


def _without(name: str) -> Callable[[Experiment], Experiment]:
    return lambda experiment: experiment.changed(agents=[one for one in experiment.agents if one.name != name])
