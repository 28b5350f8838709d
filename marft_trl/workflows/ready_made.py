# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Short ready-made workflows, each an example of how to write one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..episodes.live import LiveEpisode
from ..episodes.records import Turn
from .base import Workflow, callable_name, check_count, check_names, together


class Debate(Workflow):
    """
    Agents answer side by side, round after round, each seeing what all said in the rounds before; then a judge sees
    everything and answers. Source: Du et al. (2305.14325).

    Args:
        agents (`Sequence[str]`):
            Names of the debaters.
        rounds (`int`, *optional*, defaults to `2`):
            How many times everybody speaks.
        judge (`str`, *optional*):
            Agent that answers after the last round. Without one the most frequent text of the last round answers, the
            earliest debater's where several are.
    """

    def __init__(self, agents: Sequence[str], rounds: int = 2, judge: str | None = None):
        self.agents = check_names("agents", agents, self)
        self.rounds = check_count("rounds", rounds, self)
        self.judge = judge

    async def run(self, episode: LiveEpisode) -> None:
        said: list[Turn] = []
        for _ in range(self.rounds):
            latest = await together(episode.turn(agent, sees=said) for agent in self.agents)
            said = [*said, *latest]
        episode.answer = await episode.turn(self.judge, sees=said) if self.judge else most_frequent(latest)

    def named_agents(self) -> list[str]:
        return [*self.agents, *([self.judge] if self.judge else [])]

    def describe(self) -> dict:
        return {"class": self.class_name, "agents": self.agents, "rounds": self.rounds, "judge": self.judge}


class MixtureOfAgents(Workflow):
    """
    Layers of agents that speak side by side, each seeing the layer before; then an aggregator sees the last layer and
    answers. Source: Wang et al. (2406.04692).

    Args:
        layers (`Sequence[Sequence[str]]`):
            Names of the agents of each layer; a name may appear more than once.
        aggregator (`str`):
            Agent that answers.
    """

    def __init__(self, layers: Sequence[Sequence[str]], aggregator: str):
        if isinstance(layers, str) or not layers:
            raise ValueError(f"`layers` of `MixtureOfAgents` must be a list of lists of names, got {layers!r}.")
        self.layers = [check_names("layers", layer, self) for layer in layers]
        self.aggregator = aggregator

    async def run(self, episode: LiveEpisode) -> None:
        said: list[Turn] = []
        for layer in self.layers:
            said = await together(episode.turn(agent, sees=said) for agent in layer)
        episode.answer = await episode.turn(self.aggregator, sees=said)

    def named_agents(self) -> list[str]:
        return list(dict.fromkeys([*(agent for layer in self.layers for agent in layer), self.aggregator]))

    def describe(self) -> dict:
        return {"class": self.class_name, "layers": self.layers, "aggregator": self.aggregator}


class UntilApproved(Workflow):
    """
    A writer writes, a reviewer reviews, the writer writes again, until the reviewer approves. The last draft answers.

    Args:
        writer (`str`): agent that writes; sees its own last draft and the review of it.
        reviewer (`str`): agent that reviews; sees the last draft alone.
        rounds (`int`, *optional*, defaults to `3`): largest number of reviews.
        approves (`str` or `Callable`, *optional*, defaults to `"APPROVED"`):
            Text that an approving review holds, or `approves(review: Turn) -> bool`.
    """

    def __init__(
        self, writer: str, reviewer: str, rounds: int = 3, approves: str | Callable[[Turn], bool] = "APPROVED"
    ):
        self.writer, self.reviewer = check_names("writer and reviewer", [writer, reviewer], self)
        self.rounds = check_count("rounds", rounds, self)
        if not callable(approves) and (not isinstance(approves, str) or not approves):
            raise TypeError(
                f"`approves` of `UntilApproved` must be a text or a function of the review, got {approves!r}."
            )
        self.approves = approves

    async def run(self, episode: LiveEpisode) -> None:
        episode.answer = draft = await episode.turn(self.writer)
        for _ in range(self.rounds):
            review = await episode.turn(self.reviewer, sees=[draft])
            if self.approves(review) if callable(self.approves) else self.approves in review.text:
                break
            episode.answer = draft = await episode.turn(self.writer, sees=[draft, review])

    def named_agents(self) -> list[str]:
        return [self.writer, self.reviewer]

    def describe(self) -> dict:
        return {
            "class": self.class_name,
            "writer": self.writer,
            "reviewer": self.reviewer,
            "rounds": self.rounds,
            "approves": self.approves if isinstance(self.approves, str) else None,
            "approves_function": None if isinstance(self.approves, str) else callable_name(self.approves),
        }


def most_frequent(turns: Sequence[Turn]) -> Turn:
    """The first turn of those whose text, without surrounding blanks, occurs most often."""
    counts = Counter(turn.text.strip() for turn in turns)
    return max(turns, key=lambda turn: counts[turn.text.strip()])
