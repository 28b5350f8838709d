# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Environments of gymnasium and OpenEnv as text, and datasets with their seeds."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from ...workflows.environment import Environment, EnvironmentLoop
from .reasoning_gym import load


def game_seeds(size: int, seed: int = 0, prompt: str = "Play the game.") -> Dataset:
    """
    A dataset of games: `prompt`, and a `seed` of each, from which all episodes of a group begin.

    Args:
        size (`int`): number of rows.
        seed (`int`, *optional*, defaults to `0`): first of the seeds. Other ranges give other games, for a test.
        prompt (`str`, *optional*): what all agents are shown first.
    """
    message = [{"role": "user", "content": prompt}]
    return Dataset.from_list([{"prompt": message, "seed": seed + index} for index in range(size)])


def seed_in(row: Mapping[str, Any], what: str) -> int:
    seed = row.get("seed")
    if not isinstance(seed, int):
        raise ValueError(f"{what} needs an integer in the column `seed`, got {seed!r}. See `game_seeds(size)`.")
    return seed


# Colored text of a terminal, such as the position of the player
_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)


def gymnasium_text(
    environment: str | Callable[[], Any],
    horizon: int,
    show: Callable[[Any, Any], str] | None = None,
    act: Callable[[str, Any], Any] | None = None,
    agents: Sequence[str] | None = None,
    **settings: Any,
) -> EnvironmentLoop:
    """
    A workflow in an environment of [gymnasium](https://gymnasium.farama.org): rounds of the agents, the last one of
    which acts. The dataset has the column `seed`, see [`game_seeds`].

    Args:
        environment (`str` or `Callable`): name of a registered environment, or what makes one.
        horizon (`int`): largest number of rounds.
        show (`Callable`, *optional*): `show(observation, environment)` is the text that agents are shown. By default
            the picture of an environment with `render_mode="ansi"`, with colored text in brackets, or else the
            observation as text.
        act (`Callable`, *optional*): `act(text, environment)` is the action of a turn, or `None` for a text that is
            none, which costs a round. By default the text itself, or the last number in it where actions are numbered.
        agents (`Sequence[str]`, *optional*): who speaks in a round. Defaults to all agents of the team.
        settings: as in `gymnasium.make`.

    Raises:
        ImportError: gymnasium is not installed.
        TypeError: actions are neither texts nor numbers, and there is no `act`.
    """
    package = load("gymnasium", "gymnasium", "`gymnasium_text`")

    class GymnasiumText:
        def __init__(self):
            self.env = package.make(environment, **settings) if isinstance(environment, str) else environment()
            if act is None and not isinstance(self.env.action_space, (package.spaces.Text, package.spaces.Discrete)):
                raise TypeError(f"The action space of {environment!r} is {self.env.action_space}. Pass `act`.")

        def reset(self, **row: Any) -> str:
            observation, _ = self.env.reset(seed=seed_in(row, f"The environment {environment!r}"))
            return self._shown(observation)

        def step(self, turns: Sequence[Any]) -> tuple[str, float, bool]:
            action = (act or _action)(turns[-1].text, self.env)
            if action is None:
                return "This is no action.", 0.0, False
            observation, reward, terminated, truncated, _ = self.env.step(action)
            return self._shown(observation), float(reward), bool(terminated or truncated)

        def close(self) -> None:
            self.env.close()

        def _shown(self, observation: Any) -> str:
            if show is not None:
                return show(observation, self.env)
            if self.env.render_mode != "ansi":
                return str(observation)
            return _COLOURED.sub(r"[\1]", str(self.env.render()))

    return EnvironmentLoop(GymnasiumText, agents=agents, horizon=horizon)


def _action(text: str, env: Any) -> Any:
    if not hasattr(env.action_space, "n"):
        return text.strip()
    numbers = re.findall(r"\d{1,9}", text)
    number = int(numbers[-1]) if numbers else -1
    return number if env.action_space.start <= number < env.action_space.start + env.action_space.n else None


def open_env(
    client: Callable[[], Any],
    act: Callable[[str], Any],
    show: Callable[[Any], str],
    horizon: int,
    agents: Sequence[str] | None = None,
) -> EnvironmentLoop:
    """
    A workflow in an environment of [OpenEnv](https://github.com/meta-pytorch/OpenEnv): rounds of the agents, the last
    one of which acts. The client may be synchronous or not. The columns `seed` and `episode_id` of a row, if it has
    them, are passed to `reset`. Clients that are written as TRL's `environment_factory` need no adapter.

    Args:
        client (`Callable`): makes the client of an episode, such as `lambda: EchoEnv(base_url="http://localhost:8000")`.
        act (`Callable`): `act(text)` is the action of a turn, such as `lambda text: EchoAction(message=text)`.
        show (`Callable`): `show(observation)` is the text that agents are shown.
        horizon (`int`): largest number of rounds.
        agents (`Sequence[str]`, *optional*): who speaks in a round. Defaults to all agents of the team.
    """

    class OpenEnv(Environment):
        client: Any = None

        async def reset(self, **row: Any) -> str:  # type: ignore[override]
            self.client = client()
            columns = {name: row[name] for name in ("seed", "episode_id") if row.get(name) is not None}
            return show((await _called(self.client.reset, **columns)).observation)

        async def step(self, turns: Sequence[Any]) -> tuple[str, float, bool]:  # type: ignore[override]
            result = await _called(self.client.step, act(turns[-1].text))
            return show(result.observation), float(result.reward or 0.0), bool(result.done)

        async def close(self) -> None:
            close = getattr(self.client, "close", None)  # clients without a connection have none
            if close is not None:
                await _called(close)

    return EnvironmentLoop(OpenEnv, agents=agents, horizon=horizon)


async def _called(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a client; synchronous methods run in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await asyncio.to_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result
