# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Workflow as a chain: one agent after the other."""

from __future__ import annotations

from collections.abc import Sequence

from ..episodes.live import LiveEpisode
from .base import Workflow, check_count, check_names


class Sequential(Workflow):
    """
    Chain of turns, one agent after the other. Each agent sees the prompt and all earlier turns. The last turn is the
    team's answer.

    Args:
        agents (`Sequence[str]`, *optional*):
            Names of the agents in the order of their turns. A name may appear more than once. Defaults to all agents
            in the order of the team.
        rounds (`int`, *optional*, defaults to `1`):
            Number of times that the whole chain runs.
    """

    def __init__(self, agents: Sequence[str] | None = None, rounds: int = 1):
        self.agents = check_names("agents", agents, self) if agents is not None else None
        self.rounds = check_count("rounds", rounds, self)

    async def run(self, episode: LiveEpisode) -> None:
        for _ in range(self.rounds):
            for agent in self.agents or episode.agents:
                await episode.turn(agent)

    def named_agents(self) -> list[str]:
        return list(self.agents or [])

    def describe(self) -> dict:
        return {"class": self.class_name, "agents": self.agents, "rounds": self.rounds}
