# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The anonymous ablation: the same team without its role prompts, and without names in what agents are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .agents import AgentSpec
from .episodes.records import Seen
from .hints import did_you_mean


KINDS = ("numbered", "none")


def anonymity(value: bool | str) -> str | None:
    """
    What `anonymous=` of the trainer asks for: `"numbered"`, `"none"`, or `None` for named agents.

    Raises:
        ValueError: anything but a boolean or one of the two names.
    """
    if isinstance(value, bool):
        return "numbered" if value else None
    if value in KINDS:
        return value
    raise ValueError(
        f"`anonymous` must be False, True, 'numbered' or 'none'; got {value!r}.{did_you_mean(value, KINDS)}"
    )


def alias_names(agents: Sequence[AgentSpec]) -> dict[str, str]:
    """For each agent the name that says nothing: `agent_1`, `agent_2`, ... in the order of the team."""
    return {agent.name: f"agent_{number}" for number, agent in enumerate(agents, start=1)}


def anonymize(agents: Sequence[AgentSpec], kind: str, needed: Mapping[str, str] | None = None) -> list[AgentSpec]:
    """
    The agents with generic role prompts. Names, adapters and everything else stay; nobody is shown them.

    Args:
        agents (`Sequence[AgentSpec]`):
            The team.
        kind (`str`):
            `"numbered"`: each is told which agent of how many it is, as in MARFT v2's code; `"none"`: no role prompt,
            as its README has it.
        needed (`Mapping[str, str]`, *optional*):
            Prompts without which the workflow cannot run, such as that of an orchestrator; kept in both cases.
    """
    count = len(agents)
    generic = {
        agent.name: f"You are agent {number} of {count} that solve the task together." if kind == "numbered" else None
        for number, agent in enumerate(agents, start=1)
    }
    return [
        dataclasses.replace(agent, system_prompt=(needed or {}).get(agent.name, generic[agent.name]))
        for agent in agents
    ]


def renamed(agent: AgentSpec, seen: Sequence[Seen], aliases: Mapping[str, str]) -> tuple[AgentSpec, list[Seen]]:
    """An agent and what it sees as a view is given them: under aliases."""
    if not aliases:
        return agent, list(seen)
    shown = [
        dataclasses.replace(
            item, agent=aliases.get(item.agent, item.agent), audience=aliases.get(item.audience or "", item.audience)
        )
        for item in seen
    ]
    return dataclasses.replace(agent, name=aliases.get(agent.name, agent.name), adapter=agent.adapter), shown
