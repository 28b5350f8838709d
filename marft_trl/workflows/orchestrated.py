# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Workflow with an orchestrator: an agent that decides who acts next. Its decisions are trained like all turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..agents import AgentSpec
from ..episodes.live import LiveEpisode
from ..episodes.records import Turn
from .base import Workflow, check_count, check_names


# The repetition is bounded and no alternatives are nested or overlap, so matching is linear in the length of any text
_TAG = re.compile(r"<call>([^<>]{0,64})</call>|<done ?/>")

PROMPT = """You lead a team. Decide who acts next. Your teammates:
{team}
To let a teammate act, write <call>name</call> with one of these names, after any instructions for it. When the task \
is solved, write <done/>. Write exactly one tag."""


@dataclass(frozen=True)
class Route:
    agent: str | None = None  # who acts next; `None` ends the episode
    problem: str | None = None  # why the text has no valid decision: "no_tag", "several_tags" or "unknown_agent"


def parse_route(text: str, agents: Sequence[str]) -> Route:
    """Parse the tag in an orchestrator's text, in linear time. Raise no error for any text."""
    tags = _TAG.finditer(text)
    first, second = next(tags, None), next(tags, None)
    if first is None:
        return Route(problem="no_tag")
    if second is not None:
        return Route(problem="several_tags")
    if first[1] is None:
        return Route()
    name = first[1].strip()
    return Route(name) if name in agents else Route(problem="unknown_agent")


class Orchestrated(Workflow):
    """
    Alternating turns of an orchestrator and of the agent that it calls, until the orchestrator ends the episode. All
    agents see all earlier turns. The last turn of a called agent is the team's answer; if the orchestrator called no
    agent, its own turn is the answer.

    The orchestrator decides with exactly one tag in its text: `<call>solver</call>` or `<done/>`. For any other text,
    `fallback` applies and the problem is counted (`workflow/routing/no_tag`, `several_tags`, `unknown_agent`).

    Args:
        orchestrator (`str`):
            Name of the orchestrator agent.
        agents (`Sequence[str]`, *optional*):
            Names of the agents that the orchestrator may call. Defaults to all other agents of the team.
        max_turns (`int`, *optional*, defaults to `10`):
            Maximum number of turns per episode, including turns of the orchestrator. Episodes that reach it end and
            are counted (`workflow/routing/out_of_turns`).
        max_tokens (`int`, *optional*):
            Number of sampled tokens per episode after which no further turn begins. Such episodes are counted
            (`workflow/routing/out_of_tokens`). If `None`, there is no limit.
        fallback (`str`, *optional*, defaults to `"finish"`):
            Action if the text of the orchestrator has no valid decision: `"finish"` ends the episode, and the name of
            an agent lets this agent act.
        penalty (`float`, *optional*, defaults to `0.0`):
            Reward, zero or negative, of an orchestrator's turn without a valid decision.
    """

    described = {
        **{"orchestrator": str, "agents": list[str], "max_turns": int},
        **{"max_tokens": int, "fallback": str, "penalty": float},
    }

    def __init__(
        self,
        orchestrator: str,
        agents: Sequence[str] | None = None,
        max_turns: int = 10,
        max_tokens: int | None = None,
        fallback: str = "finish",
        penalty: float = 0.0,
    ):
        (self.orchestrator,) = check_names("orchestrator", [orchestrator], self)
        self.agents = check_names("agents", agents, self) if agents is not None else None
        self.max_turns = check_count("max_turns", max_turns, self)
        self.max_tokens = check_count("max_tokens", max_tokens, self) if max_tokens is not None else None
        if not isinstance(penalty, (int, float)) or not -float("inf") < penalty <= 0:
            raise ValueError(f"`penalty` of `Orchestrated` must be a finite number of at most 0, got {penalty!r}.")
        self.fallback, self.penalty = fallback, penalty
        self.earns = penalty != 0
        if self.agents is not None and self.orchestrator in self.agents:
            raise ValueError(f"`Orchestrated` cannot let {self.orchestrator!r} call itself; leave it out of `agents`.")

    async def run(self, episode: LiveEpisode) -> None:
        # The orchestrator writes the names that it is shown, which are aliases in an anonymous team
        known = {episode.aliases.get(name, name): name for name in self._callable(episode.agents)}
        while True:
            decision = await self._turn(episode, self.orchestrator)
            route = parse_route(decision.text, list(known))
            agent = known[route.agent] if route.agent is not None else None
            if route.problem is not None:
                episode.count(f"routing/{route.problem}")
                if self.penalty:
                    episode.earn(decision, self.penalty)
                agent = None if self.fallback == "finish" else self.fallback
            if agent is None or self._is_over(episode):
                break
            episode.answer = await self._turn(episode, agent)
            if self._is_over(episode):
                break

    async def _turn(self, episode: LiveEpisode, agent: str) -> Turn:
        """Request a turn. Turns with tool calls count towards `max_turns`, which limits the rounds of calls."""
        return await episode.turn(agent, rounds=self.max_turns - len(episode.turns) - 1)

    def _is_over(self, episode: LiveEpisode) -> bool:
        if len(episode.turns) >= self.max_turns:
            episode.count("routing/out_of_turns")
            return True
        sampled = sum(len(turn.completion_ids) for turn in episode.turns)
        if self.max_tokens is not None and sampled >= self.max_tokens:
            episode.count("routing/out_of_tokens")
            return True
        return False

    def _callable(self, team: Sequence[str]) -> list[str]:
        return self.agents or [name for name in team if name != self.orchestrator]

    def check(self, agents: Sequence[str]) -> None:
        super().check(agents)
        known = self._callable(agents)
        if not known:
            raise ValueError(f"`Orchestrated` needs an agent that {self.orchestrator!r} can call, but has no other.")
        if self.fallback != "finish" and self.fallback not in known:
            raise ValueError(
                f"`fallback` of `Orchestrated` must be 'finish' or an agent that {self.orchestrator!r} can call "
                f"({', '.join(map(repr, known))}), got {self.fallback!r}."
            )

    def named_agents(self) -> list[str]:
        return [self.orchestrator, *(self.agents or [])]

    def system_prompts(self, agents: Sequence[AgentSpec], aliases: Mapping[str, str] | None = None) -> dict[str, str]:
        known = self._callable([agent.name for agent in agents])
        names = {agent.name: (aliases or {}).get(agent.name, agent.name) for agent in agents}
        team = [f"- {names[agent.name]}" + (f": {agent.description}" if agent.description else "") for agent in agents]
        lines = [line for line, agent in zip(team, agents, strict=True) if agent.name in known]
        return {self.orchestrator: PROMPT.format(team="\n".join(lines))}

    def links(self, agents: Sequence[str]) -> list[tuple[str, str]]:
        called = self._callable(agents)
        return [pair for name in called for pair in ((self.orchestrator, name), (name, self.orchestrator))]

    def describe(self) -> dict:
        return {**super().describe(), "penalty": self.penalty or None}
