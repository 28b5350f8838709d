# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What happened: turns and episodes, as plain data. Nothing here knows torch, trl or a model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


Messages = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Turn:
    """
    One action: one generation by one agent, with the observation it was made from.

    Args:
        agent (`str`):
            Name of the agent that spoke.
        text (`str`):
            What it said, without control tokens: what reward functions and workflows read.
        index (`int`):
            Position among the turns of its episode.
        sees (`tuple[int, ...]`):
            Positions of the earlier turns that were shown to it. Over an episode this is the dependency function *D*
            of the Flex-POMDP.
        observation (`str` or `list[dict]`):
            What it was shown, before tokenization: plain text or chat messages.
        prompt_ids (`tuple[int, ...]`):
            The observation in tokens.
        completion_ids (`tuple[int, ...]`):
            The tokens as sampled. They are never re-tokenized. May be empty.
        raw_text (`str`):
            As `text`, with sampled control tokens spelled out and the closing end-of-sequence token left off: what
            teammates are shown.
        truncated (`bool`):
            Whether the turn ran into its length limit instead of ending by itself.
    """

    agent: str
    text: str
    index: int
    sees: tuple[int, ...] = ()
    observation: str | Messages = field(default="", repr=False)
    prompt_ids: Sequence[int] = field(default=(), repr=False)
    completion_ids: Sequence[int] = field(default=(), repr=False)
    raw_text: str = None  # type: ignore[assignment]  # set below
    truncated: bool = False

    def __post_init__(self):
        if self.raw_text is None:
            object.__setattr__(self, "raw_text", self.text)
        for name in ("prompt_ids", "completion_ids"):  # what was sampled stays as it is, whoever holds the turn
            object.__setattr__(self, name, tuple(getattr(self, name)))


Speak = Callable[["Episode", str, Sequence[Turn]], Awaitable[Turn]]


@dataclass(eq=False)
class Episode:
    """
    One run of the workflow on one prompt.

    Args:
        prompt (`str` or `list[dict]`):
            The `prompt` of the dataset row.
        row (`dict`):
            The whole dataset row.
        index (`int`):
            Position of the episode in its batch.
        speak (`Callable`):
            Produces a turn: `await speak(episode, agent, seen)`. The collector supplies it.
        agents (`tuple[str, ...]`):
            Names of the agents of the team, in order.
    """

    prompt: str | Messages
    row: dict[str, Any]
    index: int
    speak: Speak
    agents: tuple[str, ...]
    turns: list[Turn] = field(default_factory=list)
    # For each turn, the positions of the turns that the workflow asked to show, whether or not they fitted
    asked: list[tuple[int, ...]] = field(default_factory=list)
    # Where a horizon ended the episode: who would have acted next, and the turns it would have seen
    horizon: tuple[str, tuple[Turn, ...]] | None = None
    _answer: Turn | None = None

    async def turn(self, agent: str, sees: Sequence[Turn] | None = None) -> Turn:
        """
        Let an agent speak and wait for what it says.

        Args:
            agent (`str`):
                Name of the agent.
            sees (`Sequence[Turn]`, *optional*):
                Earlier turns of this episode to show it, in this order. All turns so far unless given.

        Raises:
            ValueError: the agent is not in the team, or a turn in `sees` is not one of this episode.
        """
        seen = self._seen(agent, sees, "turn")
        self.horizon = None  # it goes on after all
        return await self.speak(self, agent, seen)

    def cut(self, agent: str, sees: Sequence[Turn] | None = None) -> None:
        """
        Say that a horizon ends the episode here and not the task. A critic then values what `agent` would have seen
        next and adds it to the return; without a critic it changes nothing.

        Args:
            agent (`str`):
                Name of the agent that would have acted next.
            sees (`Sequence[Turn]`, *optional*):
                Turns it would have been shown. All turns so far unless given.
        """
        self.horizon = agent, tuple(self._seen(agent, sees, "cut"))

    def _seen(self, agent: str, sees: Sequence[Turn] | None, method: str) -> list[Turn]:
        if agent not in self.agents:
            raise ValueError(unknown_agent(agent, self.agents, f"`episode.{method}`"))
        seen = list(self.turns) if sees is None else list(sees)
        for turn in seen:
            if not isinstance(turn, Turn):
                raise TypeError(
                    f"`sees` of `episode.{method}({agent!r})` takes turns, as returned by `episode.turn`; got a "
                    f"{type(turn).__name__}."
                )
            if turn.index >= len(self.turns) or self.turns[turn.index] is not turn:
                raise ValueError(
                    f"`sees` of `episode.{method}({agent!r})` holds a turn of {turn.agent!r} from another episode. "
                    "Keep turns in local variables of `run`, not on the workflow: one workflow object runs many "
                    "episodes at once."
                )
        return seen

    @property
    def answer(self) -> Turn | None:
        """The turn that answers for the team: the one set by the workflow, else the last one."""
        if self._answer is not None:
            return self._answer
        return self.turns[-1] if self.turns else None

    @answer.setter
    def answer(self, turn: Turn) -> None:
        if not isinstance(turn, Turn):
            raise TypeError(
                f"`episode.answer` has to be a turn, as returned by `episode.turn`; got a {type(turn).__name__}. "
                "Rewards score the tokens of a turn, so a text made by the workflow cannot answer."
            )
        self._answer = turn


def unknown_agent(name: object, known: Sequence[str], where: str) -> str:
    """The error text for an agent name that the team does not have, with the nearest one that it has."""
    import difflib

    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{where} names the agent {name!r}, but the team has {', '.join(map(repr, known))}.{hint}"


def joint_steps(turns: Sequence[Turn]) -> list[int]:
    """
    The joint step of each turn, 0, 1, ...: turns that do not depend on one another act simultaneously.

    A turn comes one step after the latest turn it sees. In a chain every turn is a step of its own; two solvers that
    both see the planner alone share step 1.
    """
    steps: list[int] = []
    for turn in turns:
        steps.append(1 + max((steps[index] for index in turn.sees), default=-1))
    return steps
