# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What an episode asks its team for: a turn, and on what; and what all episodes of a team have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .records import Messages, Seen, Turn
from .tools import ToolLimits


# A function that an agent may call, or the JSON schema of one that is called elsewhere
Function = Callable | dict[str, Any]


@dataclass(frozen=True, eq=False)
class Given:
    """
    A request for a turn as another program writes it.

    Args:
        messages (`list[dict]`): what the agent is shown. The content of an assistant message may be a [`Turn`] of the
            same agent and episode; its sampled tokens are shown then.
        tools (`Sequence[dict]`): JSON schemas of functions that the agent may call. Calls are left to the program.
        stop (`Sequence[str]`): texts at which the turn is cut, after the text.
        sampling (`Mapping[str, float]`): sampling settings in place of the agent's own. Not used in training.
        max_tokens (`int`, *optional*): number of tokens after which the turn is cut. Not used in training.
    """

    messages: Messages
    tools: Sequence[dict[str, Any]] = ()
    stop: Sequence[str] = ()
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)
    max_tokens: int | None = None


class Ask(NamedTuple):
    """
    A turn that a workflow asks for.

    Args:
        agent (`str`): name of the agent.
        seen (`tuple[Turn | Feedback, ...]`): turns and feedback to show it.
        functions (`tuple[Callable, ...]`): functions that it may call.
        after ([`Turn`], *optional*): the turn of the same agent that called functions and that it goes on from.
        order (`int`): position among the requests of its episode; a turn and those that go on from it share one.
        is_final (`bool`): whether it is the agent's last turn of the request; calls of functions in it are not
            answered.
        given ([`Given`], *optional*): what the agent is shown in place of its view, and how it is asked.
    """

    agent: str
    seen: tuple[Seen, ...]
    functions: tuple[Function, ...] = ()
    after: Turn | None = None
    order: int = 0
    is_final: bool = True
    given: Given | None = None


@dataclass(eq=False)
class Call:
    """A function that an episode waits for, and for how many seconds it has; `None` before the first look."""

    name: str
    seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Setting:
    """
    What all episodes of a team have in common.

    Args:
        agents (`tuple[str, ...]`): names of the agents, in order.
        tools (`Mapping[str, Sequence[Callable]]`): functions that each agent may call in its turns.
        limits ([`ToolLimits`]): limits of calls of tools.
        aliases (`Mapping[str, str]`): names under which agents know one another, where they are not their own.
        max_turns (`int`, *optional*): largest number of turns of an episode.
        scripts (`Mapping[str, Script]`): for agents whose turns a function writes, what completes their requests.
        draw (`Callable`): `draw(index)` returns the past copies that agents act with in an episode.
        trains (`bool`): whether the turns are to be trained on, so that the agents' own sampling settings hold.
    """

    agents: tuple[str, ...]
    tools: Mapping[str, Sequence[Callable]] = dataclasses.field(default_factory=dict)
    limits: ToolLimits = dataclasses.field(default_factory=ToolLimits)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    max_turns: int | None = None
    scripts: Mapping[str, Callable[..., Awaitable[Any]]] = dataclasses.field(default_factory=dict)
    draw: Callable[[int], Mapping[str, int]] = lambda index: {}
    trains: bool = False
