# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The record of an episode: turn requests, turns, feedback and completions, as frozen data without torch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..system.hints import NearNames, did_you_mean
from .tools import ToolCall, ToolLimits


# A function that an agent may call, or the JSON schema of one that is called elsewhere
Function = Callable | dict[str, Any]
Messages = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class RequestedTurn:
    """
    A request for a turn as another program writes it.

    Args:
        messages (`list[dict]`): what the agent is shown. The content of an assistant message may be a [`Turn`] of the
            same agent and episode; its sampled tokens are shown then.
        tools (`Sequence[dict]`): JSON schemas of functions that the agent may call. Calls are left to the program.
        stop (`Sequence[str]`): texts at which the turn is cut, after the text.
        sampling (`Mapping[str, float]`): sampling settings that replace the agent's. Not used in training.
        max_tokens (`int`, *optional*): number of tokens after which the turn is cut. Not used in training.
        lineage (`int`, *optional*): number of the conversation that the messages continue.
    """

    messages: Messages
    tools: Sequence[dict[str, Any]] = ()
    stop: Sequence[str] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    lineage: int | None = None


@dataclass(eq=False)
class Request:
    """A request for a turn. `seen` is what the agent's view is given, unless another program writes the messages."""

    episode: Any  # the `EpisodeState` that the turn becomes a part of
    agent: str
    seen: tuple[Seen, ...] = ()
    functions: tuple[Function, ...] = ()
    after: Turn | None = None  # turn of the same agent that called functions and that this turn goes on from
    order: int = 0  # position among the requests of its episode; a turn and those that go on from it share one
    is_final: bool = True  # whether it is the agent's last turn of the request; its calls are not answered
    requested_turn: RequestedTurn | None = None  # what the agent is shown instead of its view, and how it is asked
    waiter: asyncio.Future[Turn] = field(init=False, repr=False)
    fed: int = 0  # number of turns that had gone into the environment when this turn was requested, see [`Turn`]
    by_reference: bool = False  # whether the agent's reference policy samples the turn
    number: int = 0  # index that the turn will have in its episode if all earlier requests are answered

    def make_turn(
        self, text: str, seen: Sequence[Seen] | None = None, tool_calls: Sequence[ToolCall] = (), **fields: Any
    ) -> Turn:
        """Make the turn that answers the request. It gets its position when the episode adds it."""
        seen = self.seen if seen is None else seen
        return Turn(
            self.agent,
            text,
            index=-1,
            sees=tuple(item.index for item in seen if isinstance(item, Turn)),
            hears=tuple(item.index for item in seen if not isinstance(item, Turn)),
            fed=self.fed,
            tool_calls=tuple(tool_calls),
            # A turn that calls functions and is not final is shown to its own agent only
            audience=self.agent if tool_calls and not self.is_final else None,
            lineage=self.requested_turn.lineage if self.requested_turn is not None else None,
            **fields,
        )


@dataclass(eq=False)
class Call:
    """A function that an episode waits for, and for how many seconds it has; `None` before the first look."""

    name: str
    seconds: float | None = None


@dataclass(frozen=True, eq=False)
class TeamContext:
    agents: tuple[str, ...]
    tools: Mapping[str, Sequence[Callable]] = field(default_factory=dict)  # by agent
    limits: ToolLimits = field(default_factory=ToolLimits)
    aliases: Mapping[str, str] = field(default_factory=dict)
    max_turns: int | None = None
    # What completes the requests of agents whose turns a function writes
    scripts: Mapping[str, Callable[..., Awaitable[Any]]] = field(default_factory=dict)
    trains: bool = False  # whether turns are trained on, so that the agents' own sampling settings hold
    count_tokens: Callable[..., int] | None = None  # `count_tokens(agent, messages, tools)`, of what it would be shown
    sees_images: bool = False  # whether any agent does, so that images of rows are read


class SampledBy(NamedTuple):
    server: str
    version: int  # state of the adapter, counted by its updates
    seed: int


@dataclass(frozen=True, eq=False)
class Turn(NearNames):
    """
    One action: one generation by one agent, with its observation.

    Args:
        agent (`str`):
            Name of the agent that generated the turn.
        text (`str`):
            Generated text without control tokens. Reward functions and workflows read this text.
        index (`int`):
            Position among the turns of its episode.
        sees (`tuple[int, ...]`):
            Positions of the earlier turns that were shown to the agent. Over an episode, these positions are the
            dependency function *D* of the Flex-MG (named Flex-POMDP in the first versions of 2504.16129).
        observation (`str` or `list[dict]`):
            Observation before tokenization, as plain text or chat messages. The content of a message with images is a
            list of parts, as in TRL.
        prompt_ids (`tuple[int, ...]`):
            Token ids of the observation.
        completion_ids (`tuple[int, ...]`):
            Token ids as sampled; they are never re-tokenized. May be empty.
        raw_text (`str`):
            Text that teammates are shown: `text` including sampled control tokens, but without the final
            end-of-sequence token.
        truncated (`bool`):
            `True` if the turn reached its length limit before it ended.
        hears (`tuple[int, ...]`):
            Positions of the feedback that was shown to the agent, among all feedback of the episode.
        fed (`int`):
            Number of entries in the episode's `fed` when the turn was requested. The turn depends on these turns, even
            if they were not shown to the agent.
        tool_calls (`tuple[ToolCall, ...]`):
            Tool calls in the turn.
        without_calls (`str`, *optional*):
            Text before the tool calls, if the turn has any. Teammates are shown this text.
        tagged (`str`, *optional*):
            `text` with the control tokens around its reasoning, if it has any. Programs get this text, so that what
            they send back has the reasoning and the answer apart.
        audience (`str`, *optional*):
            Only agent that sees the turn if the workflow does not pass `sees`. Set for turns with tool calls, which
            only their own agent continues from. If `None`, all agents see the turn.
        logps (`Sequence[float]`, *optional*):
            Log-probabilities of the sampled tokens, if they were recorded during generation.
        sampled_by ([`SampledBy`], *optional*):
            The server that sampled the turn. `None` if the trainer's own model did.
        lineage (`int`, *optional*):
            Number of the conversation of an application that the turn belongs to, counted by episode. A sub-agent and
            a history that was shortened begin a new one. `None` if the workflow writes the messages.
        images (`tuple[PIL.Image.Image, ...]`):
            Images of the observation, in the order of their places in `prompt_ids`.
    """

    also_called = {"content": "text", "message": "text", "output": "text", "response": "text", "role": "agent"}

    agent: str
    text: str
    index: int
    sees: tuple[int, ...] = ()
    observation: str | Messages = field(default="", repr=False)
    prompt_ids: Sequence[int] = field(default=(), repr=False)
    completion_ids: Sequence[int] = field(default=(), repr=False)
    raw_text: str = None  # type: ignore[assignment]  # set below
    truncated: bool = False
    hears: tuple[int, ...] = ()
    fed: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    without_calls: str | None = None
    tagged: str | None = None
    audience: str | None = None
    logps: Sequence[float] | None = field(default=None, repr=False)
    sampled_by: SampledBy | None = field(default=None, repr=False)
    lineage: int | None = None
    images: tuple[Any, ...] = field(default=(), repr=False)

    def __post_init__(self):
        if self.raw_text is None:
            object.__setattr__(self, "raw_text", self.text)
        for name in ("prompt_ids", "completion_ids"):  # tuples, so that nobody can change the sampled tokens
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def repeat(self, request: Request, seen: Sequence[Seen]) -> Turn:
        """Make the turn that answers the request of a re-run with the same tokens, where `seen` was shown."""
        return request.make_turn(self.text, seen, **{name: getattr(self, name) for name in _GENERATED})


@dataclass(frozen=True, eq=False)
class Feedback:
    """
    Text from an environment or a tool. It is shown to agents in the same way as a teammate's turn.

    Args:
        text (`str`): text of the feedback.
        agent (`str`): name of the source, shown instead of an agent's name.
        index (`int`): position among the feedback of the episode.
        tool (`str`, *optional*): name of the tool, if the feedback is the result of a tool call.
        audience (`str`, *optional*): only agent that sees the feedback if the workflow does not pass `sees`.
        elements (`Sequence`, *optional*): the list that the tool returned, which the chat template shows as it does.
        images (`tuple[PIL.Image.Image, ...]`): images that are shown with the text, to agents that see images.
    """

    text: str
    agent: str = "environment"
    index: int = 0
    tool: str | None = None
    audience: str | None = None
    elements: Sequence[Any] | None = None
    images: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def raw_text(self) -> str:
        return self.text


# Fields that depend on the generated tokens alone, and `observation` and `prompt_ids`
_GENERATED = (
    *("raw_text", "observation", "prompt_ids", "completion_ids", "truncated", "tool_calls"),
    *("without_calls", "tagged", "logps", "sampled_by", "images"),
)
# What an agent can be shown: turns of agents, and feedback of an environment.
Seen = Turn | Feedback
# Name of the speaker under which tool results are shown to agents other than the one that called the tool.
TOOL = "tool"


class Horizon(NamedTuple):
    """Where a horizon cut an episode: what an agent would have been shown next, and could have called."""

    agent: str
    seen: tuple[Seen, ...]
    functions: tuple[Callable, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Episode(NearNames):
    """
    The record of one run of a workflow on one prompt. `K` turns.

    Args:
        prompt (`str` or `list[dict]`): the `prompt` of the dataset row.
        row (`dict`): the whole dataset row.
        index (`int`): position of the episode in its batch.
        turns (`tuple[Turn, ...]`): turns of all agents, in order.
        answer ([`Turn`], *optional*): the turn that answers for the team; `None` if there is no turn yet.
        feedback (`tuple[Feedback, ...]`): texts of environments and tools, in order.
        history (`tuple[Turn | Feedback, ...]`): turns and feedback together, in the order in which they came.
        asked (`tuple[tuple[Turn | Feedback, ...], ...]`): for each turn the items that the workflow asked to show,
            whether or not they fitted into the model's window.
        given (`tuple[RequestedTurn, ...]`): for each turn the messages that another program had written
            for it, or `None`.
        fed (`tuple[int, ...]`): positions of the turns that went into the environment, in that order.
        earned (`tuple[float, ...]`): reward that each turn earned in the workflow, `K` numbers.
        own (`Mapping[str, tuple[float, ...]]`): for agents that were rewarded by name, the part of `earned` that was
            theirs: what each received after every turn, whoever took it, `K` numbers.
        horizons (`tuple[Horizon, ...]`): where a horizon cut the episode: of the agent that would have acted next,
            then of the others.
        counts (`Mapping[str, float]`): numbers that the workflow counted, for the metrics; 0 for names that it did
            not.
        overflowed (`bool`): whether the episode was ended because the model's window was full.
        environment (`Any`): the environment that it was played in, or `None`.
        final_turns (`Mapping[int, int]`): for each turn that called tools and that its agent went on from, the
            position of the turn that the agent ended with.
        failure (`str`, *optional*): why the episode was skipped (`on_episode_error="skip"`). It has no turns then.
    """

    prompt: str | Messages
    row: dict[str, Any]
    index: int
    turns: tuple[Turn, ...] = ()
    answer: Turn | None = None
    feedback: tuple[Feedback, ...] = ()
    history: tuple[Seen, ...] = ()
    asked: tuple[tuple[Seen, ...], ...] = ()
    given: tuple[Any, ...] = ()
    fed: tuple[int, ...] = ()
    earned: tuple[float, ...] = ()
    own: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    horizons: tuple[Horizon, ...] = ()
    counts: Mapping[str, float] = field(default_factory=Counter)
    overflowed: bool = False
    environment: Any = None
    final_turns: Mapping[int, int] = field(default_factory=dict)
    failure: str | None = None

    def __repr__(self) -> str:
        # Every turn names all that it was shown
        return f"Episode(index={self.index}, prompt={str(self.prompt)[:40]!r}, turns={len(self.turns)})"

    @property
    def horizon(self) -> Horizon | None:
        """Where a horizon cut the episode, for the agent that would have acted next."""
        return self.horizons[0] if self.horizons else None

    def final_turn_of(self, turn: Turn) -> Turn | None:
        """The turn that an agent ended with after a turn with calls, else the turn. `None` if it has not ended yet."""
        if not turn.tool_calls or turn.audience is None:
            return turn
        index = self.final_turns.get(turn.index)
        return self.turns[index] if index is not None and self.turns[turn.index] is turn else None

    def joint_steps(self) -> list[int]:
        """Index of the joint step of each turn, see [`joint_steps`]."""
        return joint_steps(self.turns, self.fed)

    def joint_actions(self) -> list[int]:
        """Index of the joint action of each turn, see [`joint_actions`]."""
        return joint_actions(self.turns)


class EndOfEpisode(BaseException):
    """
    Raised by `episode.turn` if an observation does not fit the model's window and `context_overflow="end_episode"`.
    The episode then ends with the turns it has. It is a `BaseException`: `except Exception` does not catch it.

    Args:
        problem (`str`): why.
        is_too_long (`bool`, *optional*, defaults to `True`): whether it is for want of room.
    """

    def __init__(self, problem: str, is_too_long: bool = True):
        super().__init__(problem)
        self.is_too_long = is_too_long


class PromptError(ValueError):
    """What an agent is to be shown cannot be rendered, or does not fit the model's window (`is_too_long`)."""

    def __init__(self, problem: str, is_too_long: bool = False):
        super().__init__(problem)
        self.is_too_long = is_too_long


class TurnLimitError(RuntimeError):
    """A workflow asks for more turns than an episode may have."""


def unknown_agent(name: object, known: Sequence[str], where: str) -> str:
    """Return the error message for an unknown agent name, with the nearest known name."""
    hint = did_you_mean(name, known)
    if not isinstance(name, str):
        own = getattr(name, "name", None)
        hint = f" Pass the name of the agent: {own!r}." if own else " Pass the name of the agent, a text."
        name = type(name).__name__
    return f"{where} names the agent {name!r}, but the team's agents are {', '.join(map(repr, known))}.{hint}"


def joint_steps(turns: Sequence[Turn], fed: Sequence[int] = ()) -> list[int]:
    """
    The joint step of each turn, 0, 1, ...: turns that do not depend on one another act simultaneously.

    A turn comes one step after the latest turn it sees or that had gone into its environment. In a chain every turn is
    a step of its own; two solvers that both see the planner alone share step 1.

    Args:
        fed (`Sequence[int]`, *optional*): positions of the turns that went into the environment, in that order.
    """
    steps: list[int] = []
    latest_fed = [-1]  # for each number of entries of `fed` the latest step among them
    for turn in turns:
        while len(latest_fed) <= turn.fed:
            latest_fed.append(max(latest_fed[-1], steps[fed[len(latest_fed) - 1]]))
        steps.append(1 + max((steps[index] for index in turn.sees), default=-1))
        steps[-1] = max(steps[-1], 1 + latest_fed[turn.fed])
    return steps


def joint_actions(turns: Sequence[Turn]) -> list[int]:
    """
    Index of the joint action of each turn, 0, 1, ... A joint action has at most one turn of each agent, as in
    algorithms for teams that act once per step of an environment. A chain of agents is one joint action, although each
    of its turns is a joint step. A new joint action begins after turns have gone into the environment, and when an
    agent speaks again. A turn with tool calls and the turn that continues from it belong to the same joint action.
    """
    actions: list[int] = []
    spoken: Counter[str] = Counter()  # turns of each agent since turns last went into the environment
    calling: dict[str, int] = {}  # joint actions of turns whose agents go on from results
    first = fed = 0
    for turn in turns:
        if turn.agent in calling:
            fed = turn.fed  # what its call changed is no new step of the environment
        elif turn.fed != fed:
            first, fed = max(actions, default=-1) + 1, turn.fed
            spoken.clear()
        actions.append(calling.pop(turn.agent, first + spoken[turn.agent]))
        if turn.tool_calls and turn.audience is not None:
            calling[turn.agent] = actions[-1]
        else:
            spoken[turn.agent] += 1
    return actions
