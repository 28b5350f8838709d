# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A team in an environment: rounds of turns, feedback and rewards, up to a horizon."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..episodes.live import LiveEpisode
from ..episodes.records import EndOfEpisode, Turn
from ..hints import did_you_mean
from .base import SPEAKER_PATTERN, Workflow, callable_name, check_count, check_names, together


# Methods that the loop calls; agents cannot call them as tools
_OWN_METHODS = ("reset", "step", "get_reward")


class Environment(Protocol):
    """
    Interface of the environments of [`EnvironmentLoop`]. Any method may be `async`. Synchronous methods of all
    environments run in the same thread, one at a time. Randomness has to be derived from the row, so that all episodes
    of a group get the same task.

    As in TRL's `environment_factory`, `step` is optional, and agents can call public methods with type hints and
    docstrings as tools. The optional method `get_reward() -> float` returns a reward for the whole episode, which is
    assigned to the last turn.
    """

    def reset(self, **row: Any) -> str | None:
        """Begin an episode on a dataset row. Returns feedback to show to agents after the prompt, or `None`."""

    def step(self, turns: Sequence[Turn]) -> tuple[str | None, float | Mapping[str, float], bool]:
        """
        Play one round.

        Args:
            turns (`Sequence[Turn]`): turns of this round, in order.

        Returns: the feedback for the agents; the reward of the round, as a number for the team or a mapping by agent
            name; and `True` if the episode is finished.
        """


class EnvironmentLoop(Workflow):
    """
    Rounds of turns followed by a step of an environment, until the environment is done or the horizon is reached. Each
    episode has its own environment object; an additional one is created at the start to inspect its methods. Agents
    see the prompt and all turns and feedback so far. If the environment has no `step`, there is a single round, in
    which agents can call the methods of the environment as tools.

    The rewards of the rounds are reported as the reward function `environment_reward`. With a critic, GAE propagates
    each reward back from the round that earned it. If the horizon ends an episode, the critic's value of the first
    agent's next observation is added.

    Args:
        environment (`Callable[[], Environment]`):
            Function that creates an environment, usually its class.
        agents (`Sequence[str]`, *optional*):
            Names of the agents that act in each round, in order. Defaults to all agents of the team.
        horizon (`int`, *optional*, defaults to `5`):
            Maximum number of rounds.
        side_by_side (`bool`, *optional*, defaults to `False`):
            Whether to run the turns of a round in parallel. The agents then do not see one another's turns of this
            round.
        source (`str`, *optional*, defaults to `"environment"`):
            Name of the environment that agents are shown with its feedback.
        tools (`Sequence[str]`, *optional*):
            Names of the methods that agents may call as tools. Defaults to all public methods if the environment has
            no `step`, and to none otherwise.
    """

    def __init__(
        self,
        environment: Callable[[], Environment],
        agents: Sequence[str] | None = None,
        horizon: int = 5,
        side_by_side: bool = False,
        source: str = "environment",
        tools: Sequence[str] | None = None,
    ):
        if not isinstance(source, str) or not SPEAKER_PATTERN.fullmatch(source):
            raise ValueError(
                f"`source` of `EnvironmentLoop` is shown as the name of a speaker: a letter followed by at most 47 "
                f"letters, digits, '_' or '-'; got {source!r}."
            )
        if not callable(environment):
            raise TypeError(
                "`environment` of `EnvironmentLoop` must be a class (or a function that makes an object) with "
                f"`reset`, got {environment!r}. Pass the class, not an object: each episode has its own."
            )
        self.environment = environment
        example = self._example()
        self.tools = _tool_names(example, tools)
        self.functions = [getattr(example, name) for name in self.tools]
        self.has_steps = hasattr(example, "step")
        self.earns = self.has_steps or hasattr(example, "get_reward")
        self.agents = check_names("agents", agents, self) if agents is not None else None
        self.horizon = check_count("horizon", horizon, self)
        self.side_by_side = side_by_side
        self.source = source

    async def run(self, episode: LiveEpisode) -> None:
        agents = self.agents or list(episode.agents)
        environment = episode.environment = await episode.call(self.environment)
        episode.observe(await episode.call(environment.reset, **episode.row), source=self.source)
        is_done = False
        for number in range(self.horizon):
            try:
                turns = await self._round(episode, agents, environment)
            except EndOfEpisode:
                await self._finish(episode, environment, number)
                raise
            if not self.has_steps:
                is_done = True
                break
            feedback, reward, is_done = _checked(await episode.call(environment.step, turns), environment, number)
            self._record(episode, turns, feedback, reward)
            if is_done:
                break
        if not is_done:
            episode.cut(agents[0], tools=[getattr(environment, name) for name in self.tools])
        await self._finish(episode, environment, number + 1)

    async def _finish(self, episode: LiveEpisode, environment: Environment, rounds: int) -> None:
        episode.count("rounds", rounds)
        if hasattr(environment, "get_reward") and episode.turns:
            episode.earn(episode.turns[-1], await episode.call(environment.get_reward))

    async def _round(self, episode: LiveEpisode, agents: Sequence[str], environment: Environment) -> list[Turn]:
        tools = [getattr(environment, name) for name in self.tools]
        if self.side_by_side:
            return await together(episode.turn(agent, tools=tools) for agent in agents)
        return [await episode.turn(agent, tools=tools) for agent in agents]

    def _example(self) -> Any:
        """Create an environment to inspect its methods, which a factory function does not reveal."""
        try:
            example = self.environment()
        except TypeError as error:
            raise TypeError(
                f"The environment of `EnvironmentLoop` cannot be made without arguments: {error}. Pass a function "
                "that makes it: `EnvironmentLoop(lambda: World(size=4))`."
            ) from error
        if not hasattr(example, "reset"):
            raise TypeError(
                f"The environment `{type(example).__name__}` of `EnvironmentLoop` has no `reset`. It needs "
                "`reset(**row)`, and may have `step(turns)`, or public methods that agents call as tools."
            )
        return example

    def _record(self, episode: LiveEpisode, turns: list[Turn], feedback: str | None, reward: Any) -> None:
        if not isinstance(reward, Mapping):
            episode.observe(feedback, after=turns, reward=reward, source=self.source)
            return
        last = {turn.agent: turn for turn in turns}
        for agent, its in reward.items():
            if agent not in last:
                raise ValueError(
                    f"The environment rewards {agent!r}, which did not act: {', '.join(map(repr, last))} did."
                )
            episode.earn(last[agent], its)
        episode.observe(feedback, after=turns, source=self.source)

    def check(self, agents: Sequence[str]) -> None:
        super().check(agents)
        if self.source in agents:
            raise ValueError(
                f"The environment speaks as {self.source!r}, which is the name of an agent. Set another `source=`."
            )

    def named_agents(self) -> list[str]:
        return list(self.agents or [])

    def links(self, agents: Sequence[str]) -> list[tuple[str, str]]:
        speakers = self.agents or list(agents)
        if not speakers:
            return []
        if self.side_by_side:
            return [pair for name in speakers for pair in ((name, self.source), (self.source, name))]
        chain = [*speakers, self.source, speakers[0]]
        return list(itertools.pairwise(chain))

    def describe(self) -> dict:
        return {
            "class": self.class_name,
            "environment": callable_name(self.environment),
            "agents": self.agents,
            "horizon": self.horizon,
            "side_by_side": self.side_by_side or None,
            "tools": self.tools or None,
            "source": self.source,
        }


def _public_methods(environment: Any) -> list[str]:
    """Return the public methods of the class, as TRL does. Inspecting the object itself could run its properties."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name not in _OWN_METHODS]


def _tool_names(environment: Any, tools: Sequence[str] | None) -> list[str]:
    """
    Return the names of the methods that agents may call.

    Raises:
        TypeError: `tools` is a string instead of a list.
        ValueError: The environment does not have a method of `tools`.
    """
    methods = _public_methods(environment)
    if isinstance(tools, str):
        raise TypeError(f"`tools` of `EnvironmentLoop` must be a list of names of methods, got {tools!r}.")
    if tools is None:
        return [] if hasattr(environment, "step") else methods
    for name in tools:
        if name not in methods:
            raise ValueError(
                f"`tools` of `EnvironmentLoop` names {name!r}, but the environment {type(environment).__name__!r} has "
                f"the public methods {', '.join(map(repr, methods)) or 'none'}.{did_you_mean(name, methods)}"
            )
    return list(tools)


def _checked(outcome: Any, environment: Any, number: int) -> tuple[str | None, Any, bool]:
    where = f"`{type(environment).__name__}.step`, in round {number + 1},"
    if not isinstance(outcome, (tuple, list)) or len(outcome) != 3:
        raise TypeError(f"{where} has to return feedback, reward and done; got {outcome!r}.")
    feedback, reward, is_done = outcome
    if feedback is not None and not isinstance(feedback, str):
        raise TypeError(f"{where} has to return a text or None as feedback, got {feedback!r}.")
    if reward is None:
        raise TypeError(f"{where} returned None as reward. Return 0.0 where there is none.")
    if not isinstance(is_done, bool) and type(is_done).__name__ not in ("bool_", "bool"):  # NumPy's
        raise TypeError(f"{where} has to return True or False as third value (done), got {is_done!r}.")
    return feedback, reward, bool(is_done)
