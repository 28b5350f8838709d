# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The chain: one agent after the other."""

from __future__ import annotations

from collections.abc import Sequence

from ..episodes import Episode
from .base import Workflow


class Sequential(Workflow):
    """
    Agents speak one after the other; each sees the prompt and all earlier turns. The last turn answers.

    Args:
        agents (`Sequence[str]`, *optional*):
            Names in the order of speaking; a name may appear more than once. The team's order unless given.
        rounds (`int`, *optional*, defaults to `1`):
            How many times the whole order is run.
    """

    def __init__(self, agents: Sequence[str] | None = None, rounds: int = 1):
        if isinstance(agents, str):
            raise TypeError(f"`agents` of `Sequential` must be a list of names, got the string {agents!r}.")
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
            raise ValueError(f"`rounds` of `Sequential` must be an integer of at least 1, got {rounds!r}.")
        if agents is not None and not agents:
            raise ValueError("`agents` of `Sequential` is empty; leave it out for all agents of the team in order.")
        self.agents = list(agents) if agents is not None else None
        self.rounds = rounds

    async def run(self, episode: Episode) -> None:
        for _ in range(self.rounds):
            for agent in self.agents or episode.agents:
                await episode.turn(agent)

    def named_agents(self) -> list[str]:
        return list(self.agents or [])

    def describe(self) -> dict:
        return {"class": "Sequential", "agents": self.agents, "rounds": self.rounds}
