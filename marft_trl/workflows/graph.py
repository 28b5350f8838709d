# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Workflow as a directed acyclic graph of turns, with branches that run in parallel."""

from __future__ import annotations

import asyncio
import graphlib
from collections.abc import Collection, Mapping, Sequence

from ..episodes.live import LiveEpisode
from ..episodes.records import Turn, unknown_agent
from ..system.hints import did_you_mean
from .base import Workflow


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

    def __init__(
        self,
        sees: Mapping[str, Sequence[str]],
        agents: Mapping[str, str] | None = None,
        answer: str | None = None,
    ):
        self.sees = {node: _names(node, others) for node, others in _mapping("sees", sees).items()}
        self.agents = {node: node for node in self.sees} | dict(_mapping("agents", agents or {}))
        sinks = [node for node in self.sees if not any(node in others for others in self.sees.values())]
        problems = [
            *self._unknown_nodes(),
            *self._repeated(),
            *_cycles(self.sees),
            *self._answer_problems(answer, sinks),
        ]
        if problems:
            raise ValueError("`Graph` cannot run:\n" + "\n".join(f"- {problem}" for problem in problems))
        self.answer = answer if answer is not None else sinks[0]
        self._order = list(graphlib.TopologicalSorter(self.sees).static_order())

    async def run(self, episode: LiveEpisode) -> None:
        tasks: dict[str, asyncio.Task[Turn]] = {}
        for node in self._order:
            tasks[node] = asyncio.ensure_future(self._speak(episode, node, tasks))
        try:
            for node in self._order:
                await tasks[node]
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        episode.answer = tasks[self.answer].result()

    async def _speak(self, episode: LiveEpisode, node: str, tasks: Mapping[str, asyncio.Task[Turn]]) -> Turn:
        # Awaiting a finished task does not yield to the event loop, so parallel nodes send requests in the same round.
        seen = [await tasks[other] for other in self.sees[node]]
        return await episode.turn(self.agents[node], sees=seen)

    def check(self, agents: Sequence[str]) -> None:
        unknown = [(node, agent) for node, agent in self.agents.items() if agent not in agents]
        if unknown:
            where = [f"`Graph`, at the node {node!r}," for node, _ in unknown]
            lines = [unknown_agent(agent, agents, text) for text, (_, agent) in zip(where, unknown, strict=True)]
            raise ValueError("\n".join(lines))

    def named_agents(self) -> list[str]:
        return list(dict.fromkeys(self.agents[node] for node in self._order))

    def describe(self) -> dict:
        renamed = {node: agent for node, agent in self.agents.items() if node != agent}
        return {"class": self.class_name, "sees": self.sees, "agents": renamed or None, "answer": self.answer}

    # ---- Problems of a graph ----

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
            f"the node {node!r} names {other!r} {others.count(other)} times"
            for node, others in self.sees.items()
            for other in dict.fromkeys(others)
            if others.count(other) > 1
        ]

    def _answer_problems(self, answer: str | None, sinks: list[str]) -> list[str]:
        if not self.sees:
            return ["it has no node"]
        if answer is None and len(sinks) > 1:
            return [
                f"no other node sees {', '.join(map(repr, sinks))}, so it is open which of them answers. Name it with "
                "`answer=`, and let it see the others"
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
    wrong = [key for key in value if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"Nodes of `Graph` are named by strings; `{name}` has {wrong[0]!r}.")
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
            rest = {
                node: [other for other in others if other not in cycle]
                for node, others in rest.items()
                if node not in cycle
            }
        else:
            return found


def _ancestors(sees: Mapping[str, Sequence[str]], node: str) -> set[str]:
    """Return the node and all nodes that it depends on."""
    found, waiting = {node}, [node]
    while waiting:
        fresh = [other for other in sees.get(waiting.pop(), ()) if other not in found]
        found.update(fresh)
        waiting += fresh
    return found
