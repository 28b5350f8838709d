# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A team in an environment: rounds of turns, feedback and rewards, up to a horizon."""

from __future__ import annotations

import contextlib
import copy
import difflib
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from ..episodes.images import is_parts, may_have_images
from ..episodes.live import LiveEpisode
from ..episodes.records import EndOfEpisode, Feedback, Seen, Turn, unknown_agent
from ..system.hints import brief, did_you_mean
from .base import SPEAKER_PATTERN, Workflow, callable_name, check_count, check_names, together


logger = logging.getLogger(__name__)

_OWN_METHODS = ("reset", "step", "get_reward", "whose_turn")  # which agents cannot call as tools


class Environment(Protocol):
    """
    Interface of the environments of [`EnvironmentLoop`]. Any method may be `async`. Synchronous methods of all
    environments run in the same thread, one at a time. Randomness has to be derived from the row, so that all episodes
    of a group get the same task.

    As in TRL's `environment_factory`, `step` is optional, and agents can call public methods with type hints and
    docstrings as tools. The optional method `get_reward()` returns a reward for the whole episode, which is assigned
    to the last turn. With `EnvironmentLoop(turns="one")`, `whose_turn() -> str` names the agent that acts next. If an
    environment with `step` has a method `close()`, it is called when an episode has ended, also at the horizon, and
    before reward functions are. An error in it is logged.

    Feedback is a text for all agents, a mapping of texts by agent name that each sees alone, or `None`. Instead of a
    text, an image or a list of parts `{"type": "image", "image": ...}` and texts can be returned. A reward is a
    number for the team, or a mapping by agent name of rewards that are each agent's own, whether or not it acted.
    """

    def reset(self, **row: Any) -> str | Mapping[str, str] | None:
        """Begin an episode on a dataset row. Returns feedback to show to agents after the prompt."""

    def step(self, turns: Sequence[Turn]) -> tuple[Any, float | Mapping[str, float], bool]:
        """
        Play one round.

        Args:
            turns (`Sequence[Turn]`): turns of this round, in order.

        Returns: the feedback, the reward of the round, and `True` if the episode is finished.
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
        turns (`str`, *optional*, defaults to `"all"`):
            Who acts in a round: `"all"` agents, or `"one"`, whom the environment names (`whose_turn`), as in games of
            several players.
        shows (`str`, *optional*, defaults to `"all"`):
            Whose turns agents are shown: those of `"all"` agents, or each its `"own"`. They see feedback either way.
        side_by_side (`bool`, *optional*, defaults to `False`):
            Whether to run the turns of a round in parallel. Agents then do not see one another's turns of the round.
        source (`str`, *optional*, defaults to `"environment"`):
            Name of the environment that agents are shown with its feedback.
        tools (`Sequence[str]` or `Mapping[str, Sequence[str]]`, *optional*):
            Names of the methods that agents may call as tools, for all agents or by agent name. Defaults to all public
            methods if the environment has no `step`, else to none. An agent with `AgentSpec(tools=[])` has none.
    """

    described = {
        **{"environment": str, "agents": list[str], "horizon": int, "turns": str, "shows": str},
        **{"side_by_side": bool, "tools": list[str] | dict[str, list[str]], "source": str},
    }

    def __init__(
        self,
        environment: Callable[[], Environment],
        agents: Sequence[str] | None = None,
        horizon: int = 5,
        turns: str = "all",
        shows: str = "all",
        side_by_side: bool = False,
        source: str = "environment",
        tools: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    ):
        if not isinstance(source, str) or not SPEAKER_PATTERN.fullmatch(source):
            raise ValueError(
                "`source` of `EnvironmentLoop` must be a letter followed by at most 47 letters, digits, '_' or '-', "
                f"since agents see it as a speaker's name; got {source!r}."
            )
        if not callable(environment):
            raise TypeError(
                "`environment` of `EnvironmentLoop` must be a class with `reset`, or a function that returns an "
                f"object with `reset`, got {environment!r}. Pass the class, not an object: each episode creates its "
                "own."
            )
        self.environment = environment
        example = self._example()
        by_agent = tools if isinstance(tools, Mapping) else None
        listed = list(dict.fromkeys(name for names in by_agent.values() for name in names)) if by_agent else tools
        self.tools = _tool_names(example, cast(Any, listed))
        self._tools_by_agent = None if by_agent is None else {name: list(names) for name, names in by_agent.items()}
        self.functions = [getattr(example, name) for name in self.tools]
        self.has_steps = hasattr(example, "step")
        near = difflib.get_close_matches("step", () if self.has_steps or tools is not None else self.tools, 1, 0.85)
        if near:
            raise ValueError(
                f"`{type(example).__name__}` has no `step`, but `{near[0]}`. Rename it to `step`, or pass "
                f"`tools={self.tools}` if agents are to call it."
            )
        self.earns = self.has_steps or hasattr(example, "get_reward")
        self.agents = check_names("agents", agents, self) if agents is not None else None
        self.horizon = check_count("horizon", horizon, self)
        self.turns = _check_choice("turns", turns, ("all", "one"))
        self.shows = _check_choice("shows", shows, ("all", "own"))
        if turns == "one" and (side_by_side or not hasattr(example, "whose_turn") or not self.has_steps):
            raise ValueError(
                "`EnvironmentLoop(turns='one')` lets the environment choose who acts next, so "
                f"`{type(example).__name__}` needs `whose_turn()`, which returns the name of an agent, and "
                "`step(turns)`. `side_by_side` requires `turns='all'`."
            )
        self.side_by_side, self.source = side_by_side, source
        self._in_use: set[int] = set()  # ids of the environments of active episodes

    async def run(self, episode: LiveEpisode) -> None:
        agents = self.agents or list(episode.agents)
        environment = episode.environment = await episode.call(self.environment)
        if id(environment) in self._in_use:
            raise TypeError(
                f"The environment factory returned the same `{type(environment).__name__}` object to two concurrent "
                "episodes, which would mix their rounds and rewards. Return a new object on every call."
            )
        self._in_use.add(id(environment))
        try:
            await self._play(episode, agents, environment)
        finally:
            self._in_use.discard(id(environment))

    async def _play(self, episode: LiveEpisode, agents: Sequence[str], environment: Environment) -> None:
        row = copy.deepcopy(dict(episode.row))  # rewards see it too
        for name in ("environment", "prompt"):  # which choose the environment, or are empty where it gives the prompt
            if not _takes(environment.reset, name):
                row.pop(name, None)
        with _naming(environment, "reset", "the row's columns as keywords", "Add `**row` to its arguments."):
            observation = await episode.call(environment.reset, **row)
        episode.observe(observation, source=self.source)
        is_done = False
        for number in range(self.horizon):
            try:
                acting = await self._next(episode, agents, environment)
                tools = {name: self._methods(episode, name, environment) for name in acting}
                requested = (episode.turn(name, self._seen(episode, name), tools=tools[name]) for name in acting)
                turns = await together(requested) if self.side_by_side else [await turn for turn in requested]
            except EndOfEpisode:
                await self._finish(episode, environment, number)
                raise
            if not self.has_steps:
                is_done = True
                break
            with _naming(environment, "step", "the round's list of turns", "A turn's text is `turns[-1].text`."):
                outcome = await episode.call(environment.step, turns)
            feedback, reward, is_done = _checked(outcome, environment, number)
            self._record(episode, turns, feedback, reward)
            if is_done:
                break
        if not is_done:
            (following, *_) = await self._next(episode, agents, environment)
            sees = {name: self._seen(episode, name) for name in agents}
            episode.cut(following, sees, {name: self._methods(episode, name, environment) for name in agents})
        await self._finish(episode, environment, number + 1)

    def _methods(self, episode: LiveEpisode, agent: str, environment: Environment) -> list[Callable]:
        """The methods of an environment that an agent may call."""
        if episode.state.tools.get(agent) == ():
            return []
        by_agent = self._tools_by_agent
        return [getattr(environment, name) for name in (self.tools if by_agent is None else by_agent.get(agent, ()))]

    async def _finish(self, episode: LiveEpisode, environment: Environment, rounds: int) -> None:
        episode.count("rounds", rounds)
        if hasattr(environment, "get_reward") and episode.turns:
            reward = await episode.call(environment.get_reward)
            if reward == {}:
                raise TypeError(f"`{type(environment).__name__}.get_reward` returned {{}}. Return 0.0 for no reward.")
            episode.earn(episode.turns[-1], reward)
        close = getattr(environment, "close", None) if self.has_steps and "close" not in self.tools else None
        if close is not None and not inspect.signature(close).parameters:  # with arguments, it means something else
            try:
                await episode.call(close)
            except Exception as error:  # the episode is whole
                logger.warning(f"`{type(environment).__name__}.close` failed: {type(error).__name__}: {error}")

    async def _next(self, episode: LiveEpisode, agents: Sequence[str], environment: Any) -> Sequence[str]:
        if self.turns == "all":
            return agents
        name = await episode.call(environment.whose_turn)
        if name not in agents:
            raise ValueError(unknown_agent(name, agents, f"`{type(environment).__name__}.whose_turn`"))
        return [name]

    def _seen(self, episode: LiveEpisode, agent: str) -> list[Seen] | None:
        if self.shows == "all":
            return None
        visible = [seen for seen in episode.history if seen.audience in (None, agent)]
        return [seen for seen in visible if isinstance(seen, Feedback) or seen.agent == agent]

    def _example(self) -> Any:
        """Create an environment to inspect its methods, which a factory function does not reveal."""
        try:
            example = self.environment()
        except TypeError as error:
            raise TypeError(
                f"The environment of `EnvironmentLoop` cannot be created without arguments: {error}. Pass a function "
                "that creates it: `EnvironmentLoop(lambda: World(size=4))`."
            ) from error
        if not hasattr(example, "reset"):
            raise TypeError(
                f"The environment `{type(example).__name__}` of `EnvironmentLoop` has no `reset`. It needs "
                "`reset(**row)`, and may have `step(turns)`, or public methods that agents call as tools."
            )
        return example

    def _record(self, episode: LiveEpisode, turns: list[Turn], feedback: Any, reward: Any) -> None:
        if not isinstance(reward, Mapping):
            episode.observe(feedback, after=turns, reward=reward, source=self.source)
            return
        last = {turn.agent: turn for turn in turns}
        for agent, agent_reward in reward.items():  # after its own turn, or the last one if it did not act
            episode.earn(last.get(agent, turns[-1]), {agent: agent_reward})
        episode.observe(feedback, after=turns, source=self.source)

    def check(self, agents: Sequence[str]) -> None:
        super().check(agents)
        if self.source in agents:
            raise ValueError(f"`source` {self.source!r} of the environment is also the name of an agent. Change it.")

    def named_agents(self) -> list[str]:
        return list(dict.fromkeys([*(self.agents or []), *(self._tools_by_agent or {})]))

    def links(self, agents: Sequence[str]) -> list[tuple[str, str]]:
        speakers = self.agents or list(agents)
        if not speakers:
            return []
        if self.side_by_side or self.turns == "one":
            return [pair for name in speakers for pair in ((name, self.source), (self.source, name))]
        return list(itertools.pairwise([*speakers, self.source, speakers[0]]))

    @classmethod
    def from_description(cls, arguments: Mapping[str, Any], environment_factory: Any = None) -> Workflow:
        if environment_factory is None:
            raise ValueError(
                f"The team needs the environment `{arguments.get('environment')}`. Pass its class, or a function that "
                "creates it, as `environment_factory=`, or pass the whole workflow as `workflow=`."
            )
        return cls(**{**arguments, "environment": environment_factory})

    def describe(self) -> dict:
        return {
            **super().describe(),
            "environment": callable_name(self.environment),
            "turns": None if self.turns == "all" else self.turns,
            "shows": None if self.shows == "all" else self.shows,
            "side_by_side": self.side_by_side or None,
            "tools": self._tools_by_agent or self.tools or None,
        }


def _takes(function: Callable, name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of a function that is not written in Python
        return True
    return name in parameters or any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())


def _check_choice(name: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        expected = " or ".join(map(repr, known))
        raise ValueError(f"`{name}` must be {expected}, got {value!r}.{did_you_mean(value, known)}")
    return value


def _tool_names(environment: Any, tools: Sequence[str] | None) -> list[str]:
    # Those of the class, as TRL does: inspecting the object itself could run its properties
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    methods = [name for name in names if not name.startswith("_") and name not in _OWN_METHODS]
    if isinstance(tools, str):
        raise TypeError(f"`tools` of `EnvironmentLoop` must be a list of method names, got {tools!r}.")
    if tools is None:
        return [] if hasattr(environment, "step") else methods
    for name in tools:
        if name not in methods:
            raise ValueError(
                f"`tools` of `EnvironmentLoop` names {name!r}, but the environment {type(environment).__name__!r} has "
                f"the public methods {', '.join(map(repr, methods)) or 'none'}.{did_you_mean(name, methods)}"
            )
    return list(tools)


@contextlib.contextmanager
def _naming(environment: Any, method: str, what: str, cure: str) -> Iterator[None]:
    """Name a method and its actual arguments in errors within the context: it may expect other arguments."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        raise type(error)(
            f"`{type(environment).__name__}.{method}` failed when called with {what}: {error}. {cure}"
        ) from error


def _checked(outcome: Any, environment: Any, number: int) -> tuple[Any, Any, bool]:
    where = f"`{type(environment).__name__}.step` (round {number + 1})"
    if not isinstance(outcome, (tuple, list)) or len(outcome) != 3:
        raise TypeError(f"{where} must return feedback, reward and done, got {outcome!r}.")
    feedback, reward, is_done = outcome
    if not (
        feedback is None or isinstance(feedback, (str, Mapping)) or is_parts(feedback) or may_have_images(feedback)
    ):
        raise TypeError(
            f"{where} must return a string, an image, parts, a mapping of them by agent name, or None as feedback, "
            f"got {brief(repr(feedback), 200)}."
        )
    if reward is None or reward == {}:
        raise TypeError(f"{where} returned {reward!r} as reward. Return 0.0 for no reward.")
    if not isinstance(is_done, bool) and type(is_done).__name__ not in ("bool_", "bool"):  # NumPy's
        raise TypeError(f"{where} must return True or False as the third value (done), got {is_done!r}.")
    return feedback, reward, bool(is_done)
