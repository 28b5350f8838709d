# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Environments behind an OpenEnv client."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..workflows.environment import Environment, EnvironmentLoop


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
        def __init__(self):
            self.client: Any = None

        async def reset(self, **row: Any) -> str:  # type: ignore[override]
            self.client = client()
            known = {name: row[name] for name in ("seed", "episode_id") if row.get(name) is not None}
            return show((await _called(self.client.reset, **known)).observation)

        async def step(self, turns: Sequence[Any]) -> tuple[str, float, bool]:  # type: ignore[override]
            result = await _called(self.client.step, act(turns[-1].text))
            return show(result.observation), float(result.reward or 0.0), bool(result.done)

        async def close(self) -> None:
            close = getattr(self.client, "close", None)  # clients without a connection have none
            if close is not None:
                await _called(close)

    return EnvironmentLoop(OpenEnv, agents=agents, horizon=horizon)


async def _called(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """The result of a method of a client; synchronous ones wait for the network in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    found = await asyncio.to_thread(function, *args, **kwargs)
    return await found if inspect.isawaitable(found) else found
