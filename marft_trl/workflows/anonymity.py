# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Anonymous ablation: the same team without role prompts, and with generic names in the agents' observations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..agents import AgentSpec
from ..episodes.records import Seen
from ..system.hints import did_you_mean


KINDS = ("numbered", "none")


def anonymity(value: bool | str) -> str | None:
    """
    Return the kind of anonymity that the trainer's `anonymous=` selects: `"numbered"`, `"none"`, or `None` for named
    agents.

    Raises:
        ValueError: `value` is neither a boolean nor one of the two names.
    """
    if isinstance(value, bool):
        return "numbered" if value else None
    if value in KINDS:
        return value
    raise ValueError(
        f"`anonymous` must be False, True, 'numbered' or 'none'; got {value!r}.{did_you_mean(value, KINDS)}"
    )


def alias_names(agents: Sequence[AgentSpec]) -> dict[str, str]:
    """Return a generic name for each agent: `agent_1`, `agent_2`, ... in the order of the team."""
    return {agent.name: f"agent_{number}" for number, agent in enumerate(agents, start=1)}


def anonymize(agents: Sequence[AgentSpec], kind: str, needed: Mapping[str, str] | None = None) -> list[AgentSpec]:
    """
    Return the agents with generic role prompts. Names and adapters are unchanged, but are not shown to any agent.

    Args:
        agents (`Sequence[AgentSpec]`):
            The team.
        kind (`str`):
            `"numbered"`: the role prompt states the agent's number and the size of the team, as in the code of MARFT
            v2. `"none"`: no role prompt, as described in the README of MARFT v2.
        needed (`Mapping[str, str]`, *optional*):
            Prompts that the workflow cannot run without, by agent name, e.g. the prompt of an orchestrator. They are
            kept for both kinds.
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
    """Return an agent, and the turns and feedback shown to it, with names replaced by aliases for the view."""
    if not aliases:
        return agent, list(seen)
    shown = [
        dataclasses.replace(
            item, agent=aliases.get(item.agent, item.agent), audience=aliases.get(item.audience or "", item.audience)
        )
        for item in seen
    ]
    return dataclasses.replace(agent, name=aliases.get(agent.name, agent.name), adapter=agent.adapter), shown
