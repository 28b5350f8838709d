# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A team in an environment: rounds of turns, feedback and rewards, up to a horizon."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..episodes import EndOfEpisode, Episode, Turn
from .base import Workflow, check_count, check_names, together


class Environment(Protocol):
    """
    What [`EnvironmentLoop`] plays with. Both methods may be `async`. What is random in it has to follow from the row,
    so that all episodes of a group face the same task.
    """

    def reset(self, **row: Any) -> str | None:
        """Begin an episode on a dataset row. Returns what agents are shown besides the prompt, if anything."""

    def step(self, turns: Sequence[Turn]) -> tuple[str | None, float | Mapping[str, float], bool]:
        """
        Play one round.

        Args:
            turns (`Sequence[Turn]`): the turns of this round, in order.

        Returns: feedback that agents are shown; the reward of the round, for the team or by the name of the agent; and
            whether the episode is over.
        """


class EnvironmentLoop(Workflow):
    """
    Agents speak, an environment answers, until it is done or the horizon is reached. Each episode has an environment
    object of its own. Agents see the prompt and all turns and feedback so far.

    The rewards of the rounds are counted as the reward function `environment_reward`. With a critic they flow back
    through GAE from the round that earned them, and where the horizon ends an episode the critic values what the first
    agent would have seen next.

    Args:
        environment (`Callable[[], Environment]`):
            Makes an environment: usually its class. An optional method `get_reward() -> float`, as in TRL's
            `environment_factory`, gives a reward for the whole episode; the last turn earns it.
        agents (`Sequence[str]`, *optional*):
            Who speaks in a round, in order; all agents of the team unless given.
        horizon (`int`, *optional*, defaults to `5`):
            Largest number of rounds.
        side_by_side (`bool`, *optional*, defaults to `False`):
            Whether the agents of a round speak at once, without seeing one another's turns of it.
        source (`str`, *optional*, defaults to `"environment"`):
            Name under which agents are shown its words.
    """

    earns = True

    def __init__(
        self,
        environment: Callable[[], Environment],
        agents: Sequence[str] | None = None,
        horizon: int = 5,
        side_by_side: bool = False,
        source: str = "environment",
    ):
        missing = [
            name for name in ("reset", "step") if inspect.isclass(environment) and not hasattr(environment, name)
        ]
        if not callable(environment) or missing:
            lack = f" without `{missing[0]}`" if missing else ""
            raise TypeError(
                "`environment` of `EnvironmentLoop` must be a class (or a function that makes an object) with `reset` "
                f"and `step`, got {environment!r}{lack}. Pass the class, not an object: each episode has its own."
            )
        self.environment = environment
        self.agents = check_names("agents", agents, self) if agents is not None else None
        self.horizon = check_count("horizon", horizon, self)
        self.side_by_side = side_by_side
        self.source = source

    async def run(self, episode: Episode) -> None:
        agents = self.agents or list(episode.agents)
        environment = self.environment()
        episode.observe(await _result(environment.reset(**episode.row)), source=self.source)
        is_done = False
        for number in range(self.horizon):
            try:
                turns = await self._round(episode, agents)
            except EndOfEpisode:
                await self._finish(episode, environment, number)
                raise
            feedback, reward, is_done = _checked(await _result(environment.step(turns)), environment, number)
            self._record(episode, turns, feedback, reward)
            if is_done:
                break
        if not is_done:
            episode.cut(agents[0])
        await self._finish(episode, environment, number + 1)

    async def _finish(self, episode: Episode, environment: Environment, rounds: int) -> None:
        episode.count("rounds", rounds)
        if hasattr(environment, "get_reward") and episode.turns:
            episode.earn(episode.turns[-1], await _result(environment.get_reward()))

    async def _round(self, episode: Episode, agents: Sequence[str]) -> list[Turn]:
        if self.side_by_side:
            return await together(episode.turn(agent) for agent in agents)
        return [await episode.turn(agent) for agent in agents]

    def _record(self, episode: Episode, turns: list[Turn], feedback: str | None, reward: Any) -> None:
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
        if self.side_by_side:
            return [pair for name in speakers for pair in ((name, self.source), (self.source, name))]
        chain = [*speakers, self.source, speakers[0]]
        return list(itertools.pairwise(chain))

    def describe(self) -> dict:
        name = getattr(self.environment, "__name__", type(self.environment).__name__)
        return {
            "class": "EnvironmentLoop",
            "environment": name,
            "agents": self.agents,
            "horizon": self.horizon,
            "side_by_side": self.side_by_side or None,
        }


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _checked(outcome: Any, environment: Any, number: int) -> tuple[str | None, Any, bool]:
    where = f"`{type(environment).__name__}.step`, in round {number + 1},"
    if not isinstance(outcome, (tuple, list)) or len(outcome) != 3:
        raise TypeError(f"{where} has to return feedback, reward and done; got {outcome!r}.")
    feedback, reward, is_done = outcome
    if feedback is not None and not isinstance(feedback, str):
        raise TypeError(f"{where} has to return a text or None as feedback, got {feedback!r}.")
    if reward is None:
        raise TypeError(f"{where} returned None as reward. Return 0.0 where there is none.")
    return feedback, reward, bool(is_done)
