# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Short ready-made workflows, which are also examples for your own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..episodes.live import LiveEpisode
from ..episodes.records import Turn
from .base import Workflow, callable_name, check_count, check_names, together


class Debate(Workflow):
    """
    Rounds of parallel turns, in which each agent sees the turns of all earlier rounds. At the end, a judge sees all
    turns and answers. Source: Du et al. (2305.14325).

    Args:
        agents (`Sequence[str]`):
            Names of the debaters.
        rounds (`int`, *optional*, defaults to `2`):
            Number of rounds. Each debater has one turn per round.
        judge (`str`, *optional*):
            Name of the agent that answers after the last round. If `None`, the turn with the most frequent text of the
            last round is the answer; among equally frequent texts, the one of the first debater.
        vote (`Callable`, *optional*):
            `vote(text: str) -> str | None` returns what is compared of a text, such as
            [`~marft_trl.rewards.math_answer`], and `None` for a text that does not vote. Defaults to the whole text.
    """

    def __init__(
        self,
        agents: Sequence[str],
        rounds: int = 2,
        judge: str | None = None,
        vote: Callable[[str], str | None] | None = None,
    ):
        self.agents = check_names("agents", agents, self)
        self.rounds = check_count("rounds", rounds, self)
        self.judge = judge
        if vote is not None and (judge or not callable(vote)):
            raise TypeError(
                f"`vote` of `Debate` must be a function of a text, and leaves no room for a `judge`; got {vote!r}."
            )
        self.vote = vote

    async def run(self, episode: LiveEpisode) -> None:
        said: list[Turn] = []
        for _ in range(self.rounds):
            latest = await together(episode.turn(agent, sees=said) for agent in self.agents)
            said = [*said, *latest]
        episode.answer = await episode.turn(self.judge, sees=said) if self.judge else most_frequent(latest, self.vote)

    def named_agents(self) -> list[str]:
        return [*self.agents, *([self.judge] if self.judge else [])]

    def describe(self) -> dict:
        return {
            "class": self.class_name,
            "agents": self.agents,
            "rounds": self.rounds,
            "judge": self.judge,
            "vote_function": None if self.vote is None else callable_name(self.vote),
        }


class MixtureOfAgents(Workflow):
    """
    Layers of agents that act in parallel, where each layer sees the turns of the layer before. At the end, an
    aggregator sees the last layer and answers. Source: Wang et al. (2406.04692).

    Args:
        layers (`Sequence[Sequence[str]]`):
            Names of the agents of each layer. A name may appear more than once.
        aggregator (`str`):
            Name of the agent that gives the team's answer.
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
    Drafts of a writer, each reviewed by a reviewer, until the reviewer approves. The last draft is the team's answer.

    Args:
        writer (`str`): name of the agent that writes. It sees its own last draft and the review of this draft.
        reviewer (`str`): name of the agent that reviews. It sees only the last draft.
        rounds (`int`, *optional*, defaults to `3`): maximum number of reviews.
        approves (`str` or `Callable`, *optional*, defaults to `"APPROVED"`):
            Text that marks a review as an approval, or a function `approves(review: Turn) -> bool`.
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


def most_frequent(turns: Sequence[Turn], vote: Callable[[str], str | None] | None = None) -> Turn:
    """
    Return the first turn with the most frequent vote, by default its text, without surrounding whitespace. An empty
    vote of `vote` is none. The first turn of all if none votes.
    """
    votes = [turn.text.strip() if vote is None else (vote(turn.text) or "").strip() or None for turn in turns]
    counts = Counter(votes)
    counts[None] = 0
    return turns[max(range(len(turns)), key=lambda index: counts[votes[index]])]
