# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Ready-made workflows: chains, graphs, debates, mixtures, and a workflow for each row."""

from __future__ import annotations

import asyncio
import graphlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..episodes.live import LiveEpisode
from ..episodes.records import Turn, unknown_agent
from ..system.hints import did_you_mean
from .base import Workflow, callable_name, check_count, check_names, rebuild, together


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

    described = {"agents": list[str], "rounds": int}

    def __init__(self, agents: Sequence[str] | None = None, rounds: int = 1):
        self.agents = check_names("agents", agents, self) if agents is not None else None
        self.rounds = check_count("rounds", rounds, self)

    async def run(self, episode: LiveEpisode) -> None:
        for _ in range(self.rounds):
            for agent in self.agents or episode.agents:
                await episode.turn(agent)

    def named_agents(self) -> list[str]:
        return list(self.agents or [])


class Graph(Workflow):
    """
    A directed acyclic graph (DAG) of turns. Each node is one turn, which sees the prompt and the turns of the nodes it
    lists. Nodes that do not depend on one another run in parallel and share batches.

    Args:
        sees (`Mapping[str, Sequence[str]]`):
            Nodes that each node sees, in the order in which they are shown.
        agents (`Mapping[str, str]`, *optional*):
            Agent of each node. Defaults to the agent with the name of the node. An agent that acts at several nodes
            needs an entry for each of them.
        answer (`str`, *optional*):
            Node whose turn is the team's answer. Defaults to the only node that no other node sees.

    Raises:
        ValueError: The graph has a cycle, contains unknown nodes, or has nodes that the answer does not depend on. The
            message lists all problems.

    Example:

    ```python
    Graph({"planner": [], "solver_a": ["planner"], "solver_b": ["planner"], "judge": ["solver_a", "solver_b"]})
    Graph({"draft": [], "review": ["draft"], "final": ["draft", "review"]}, {"draft": "writer", "final": "writer"})
    ```
    """

    described = {"sees": dict[str, list[str]], "agents": dict[str, str], "answer": str}

    def __init__(
        self, sees: Mapping[str, Sequence[str]], agents: Mapping[str, str] | None = None, answer: str | None = None
    ):
        self.sees = {node: _names(node, others) for node, others in _mapping("sees", sees).items()}
        self.agents = {node: node for node in self.sees} | dict(_mapping("agents", agents or {}))
        sinks = [node for node in self.sees if not any(node in others for others in self.sees.values())]
        problems = [*self._unknown_nodes(), *self._repeated(), *_cycles(self.sees)]
        problems += self._answer_problems(answer, sinks)
        if problems:
            raise ValueError("`Graph` cannot run:\n" + "\n".join(f"- {problem}" for problem in problems))
        self.answer = answer if answer is not None else sinks[0]
        self._order = list(graphlib.TopologicalSorter(self.sees).static_order())

    async def run(self, episode: LiveEpisode) -> None:
        tasks: dict[str, asyncio.Task[Turn]] = {}
        for node in self._order:
            tasks[node] = asyncio.ensure_future(self._speak(episode, node, tasks))
        await together(tasks.values())
        episode.answer = tasks[self.answer].result()

    async def _speak(self, episode: LiveEpisode, node: str, tasks: Mapping[str, asyncio.Task[Turn]]) -> Turn:
        # Awaiting a finished task does not yield to the event loop, so parallel nodes send requests in the same round.
        seen = [await tasks[other] for other in self.sees[node]]
        return await episode.turn(self.agents[node], sees=seen)

    def check(self, agents: Sequence[str]) -> None:
        if unknown := [(node, agent) for node, agent in self.agents.items() if agent not in agents]:
            where = "The node {!r} of `Graph`"
            raise ValueError("\n".join(unknown_agent(agent, agents, where.format(node)) for node, agent in unknown))

    def named_agents(self) -> list[str]:
        return list(dict.fromkeys(self.agents[node] for node in self._order))

    def describe(self) -> dict:
        renamed = {node: agent for node, agent in self.agents.items() if node != agent}
        return {**super().describe(), "agents": renamed or None}

    def _unknown_nodes(self) -> list[str]:
        named = [(f"the node {node!r} sees", other) for node, others in self.sees.items() for other in others]
        named += [("`agents` names", node) for node in self.agents if node not in self.sees]
        return [
            f"{where} {other!r}, which is not a node.{did_you_mean(other, self.sees)}"
            for where, other in named
            if other not in self.sees
        ]

    def _repeated(self) -> list[str]:
        return [
            f"the node {node!r} lists {other!r} {others.count(other)} times"
            for node, others in self.sees.items()
            for other in dict.fromkeys(others)
            if others.count(other) > 1
        ]

    def _answer_problems(self, answer: str | None, sinks: list[str]) -> list[str]:
        if not self.sees:
            return ["it has no nodes"]
        if answer is None and len(sinks) > 1:
            return [
                f"no other node sees {', '.join(map(repr, sinks))}, so the answer is ambiguous. Choose the answer "
                "with `answer=`, and let it see the others"
            ]
        if answer is not None and answer not in self.sees:
            return [f"`answer` names {answer!r}, which is not a node.{did_you_mean(answer, self.sees)}"]
        if answer is None and not sinks:
            return []  # the graph has a cycle, which is already reported
        idle = sorted(set(self.sees) - _ancestors(self.sees, answer if answer is not None else sinks[0]))
        return [f"the answer does not depend on {', '.join(map(repr, idle))}"] if idle else []


def _mapping(name: str, value: object) -> Mapping:
    if not isinstance(value, Mapping):
        raise TypeError(f"`{name}` of `Graph` must be a mapping, got {value!r}.")
    if wrong := [key for key in value if not isinstance(key, str)]:
        raise TypeError(f"Node names of `Graph` must be strings, but `{name}` has {wrong[0]!r}.")
    return value


def _names(node: str, others: object) -> list[str]:
    if isinstance(others, str) or not isinstance(others, Collection) or not all(isinstance(o, str) for o in others):
        raise TypeError(f"`sees` of `Graph` needs a list of node names for {node!r}, got {others!r}.")
    return list(others)


def _cycles(sees: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the cycles of the graph. Cycles that share a node with an earlier one are omitted."""
    found: list[str] = []
    rest = dict(sees)
    while True:
        try:
            graphlib.TopologicalSorter(rest).prepare()
        except graphlib.CycleError as error:
            cycle = error.args[1]
            found.append("it has the cycle " + " -> ".join(map(repr, cycle)))
            kept = {node: others for node, others in rest.items() if node not in cycle}
            rest = {node: [other for other in others if other not in cycle] for node, others in kept.items()}
        else:
            return found


def _ancestors(sees: Mapping[str, Sequence[str]], node: str) -> set[str]:
    found, waiting = {node}, [node]
    while waiting:
        fresh = [other for other in sees.get(waiting.pop(), ()) if other not in found]
        found.update(fresh)
        waiting += fresh
    return found


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

    described = {"agents": list[str], "rounds": int, "judge": str}

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
                "`vote` of `Debate` must be a function `vote(text)` and cannot be combined with `judge`, got "
                f"{vote!r}."
            )
        self.vote = vote

    async def run(self, episode: LiveEpisode) -> None:
        turns: list[Turn] = []
        for _ in range(self.rounds):
            latest = await together(episode.turn(agent, sees=turns) for agent in self.agents)
            turns = [*turns, *latest]
        episode.answer = await episode.turn(self.judge, sees=turns) if self.judge else most_frequent(latest, self.vote)

    def named_agents(self) -> list[str]:
        return [*self.agents, *([self.judge] if self.judge else [])]

    def describe(self) -> dict:
        return {**super().describe(), "vote_function": None if self.vote is None else callable_name(self.vote)}


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

    described = {"layers": list[list[str]], "aggregator": str}

    def __init__(self, layers: Sequence[Sequence[str]], aggregator: str):
        if isinstance(layers, str) or not layers:
            raise ValueError(f"`layers` of `MixtureOfAgents` must be a list of lists of names, got {layers!r}.")
        self.layers = [check_names("layers", layer, self) for layer in layers]
        self.aggregator = aggregator

    async def run(self, episode: LiveEpisode) -> None:
        turns: list[Turn] = []
        for layer in self.layers:
            turns = await together(episode.turn(agent, sees=turns) for agent in layer)
        episode.answer = await episode.turn(self.aggregator, sees=turns)

    def named_agents(self) -> list[str]:
        return list(dict.fromkeys([*(agent for layer in self.layers for agent in layer), self.aggregator]))


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

    described = {"writer": str, "reviewer": str, "rounds": int, "approves": str}

    def __init__(
        self, writer: str, reviewer: str, rounds: int = 3, approves: str | Callable[[Turn], bool] = "APPROVED"
    ):
        self.writer, self.reviewer = check_names("writer and reviewer", [writer, reviewer], self)
        self.rounds = check_count("rounds", rounds, self)
        if not callable(approves) and (not isinstance(approves, str) or not approves):
            raise TypeError(f"`approves` of `UntilApproved` must be a string or a function, got {approves!r}.")
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
        text = self.approves if isinstance(self.approves, str) else None
        function = None if isinstance(self.approves, str) else callable_name(self.approves)
        return {**super().describe(), "approves": text, "approves_function": function}


def most_frequent(turns: Sequence[Turn], vote: Callable[[str], str | None] | None = None) -> Turn:
    """Return the first turn with the most frequent non-empty vote, by default its stripped text, or the first turn."""
    votes = [turn.text.strip() if vote is None else (vote(turn.text) or "").strip() or None for turn in turns]
    counts = Counter(votes)
    counts[None] = 0
    return turns[max(range(len(turns)), key=lambda index: counts[votes[index]])]


class ByColumn(Workflow):
    """
    Runs the workflow that a column of the dataset row names. `environment_factory={"shop": Shop, "maze": Maze}` of the
    trainer is short for `ByColumn({"shop": EnvironmentLoop(Shop), "maze": EnvironmentLoop(Maze)})`.

    Args:
        workflows (`dict[str, Workflow]`):
            The workflows, by the value of the column.
        column (`str`, *optional*, defaults to `"environment"`):
            Name of the column.
    """

    described = {"column": str, "workflows": dict[str, dict[str, Any]]}

    def __init__(self, workflows: Mapping[str, Workflow], column: str = "environment"):
        if not isinstance(workflows, Mapping) or not workflows:
            raise ValueError(f"`workflows` of `ByColumn` must map column values to workflows, got {workflows!r}.")
        for name, workflow in workflows.items():
            if not isinstance(workflow, Workflow):
                raise TypeError(f"`workflows` of `ByColumn` must map {name!r} to a `Workflow`, got {workflow!r}.")
        self.workflows, self.column = dict(workflows), column
        self.functions = [function for workflow in self.workflows.values() for function in workflow.functions]
        limits = [workflow.max_wait_for_episodes for workflow in self.workflows.values()]
        self.max_wait_for_episodes = min((limit for limit in limits if limit is not None), default=None)
        self.acts_outside = any(workflow.acts_outside for workflow in self.workflows.values())
        self.earns = any(workflow.earns for workflow in self.workflows.values())

    @property
    def uses_tools(self) -> bool:
        return any(workflow.uses_tools for workflow in self.workflows.values())

    async def run(self, episode: LiveEpisode) -> None:
        await self.of(episode.row.get(self.column)).run(episode)

    def of(self, value: Any) -> Workflow:
        """
        Return the workflow for a value of the column.

        Raises:
            ValueError: no workflow has this value.
        """
        if value not in self.workflows:
            known = ", ".join(map(repr, self.workflows))
            raise ValueError(
                f"A row has {value!r} in the column {self.column!r}, but `ByColumn` has workflows only for "
                f"{known}.{did_you_mean(str(value), list(self.workflows))}"
            )
        return self.workflows[value]

    def check(self, agents: Sequence[str]) -> None:
        for workflow in self.workflows.values():
            workflow.check(agents)

    def named_agents(self) -> list[str]:
        return list(dict.fromkeys(name for workflow in self.workflows.values() for name in workflow.named_agents()))

    def links(self, agents: Sequence[str]) -> list[tuple[str, str]]:
        return list(dict.fromkeys(pair for workflow in self.workflows.values() for pair in workflow.links(agents)))

    @classmethod
    def from_description(cls, arguments: Mapping[str, Any], environment_factory: Any = None) -> ByColumn:
        factories = environment_factory if isinstance(environment_factory, Mapping) else {}
        descriptions = arguments.get("workflows", {})
        workflows = {name: rebuild(description, factories.get(name)) for name, description in descriptions.items()}
        return cls(**{**arguments, "workflows": workflows})

    def describe(self) -> dict:
        workflows = {name: workflow.describe() for name, workflow in self.workflows.items()}
        return {**super().describe(), "workflows": workflows}
