# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Environments of gymnasium that are read and written as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..workflows.environment import EnvironmentLoop
from .packages import load
from .seeds import seed_in


# What a terminal shows in colour, such as the place where one stands
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
            the picture of an environment with `render_mode="ansi"`, its colours as brackets, or else the
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
                raise TypeError(
                    f"Actions of {environment!r} are {self.env.action_space}: pass `act(text, environment)`."
                )

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
