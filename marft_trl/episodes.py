# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What happened: turns and episodes, as plain data. Nothing here knows torch, trl or a model."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .hints import did_you_mean
from .loops import in_thread, one_at_a_time
from .tools import ToolCall, ToolLimits, call_tools, tool_name


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
        hears (`tuple[int, ...]`):
            Positions, among the feedback of its episode, of what was shown to it.
        fed (`int`):
            How many entries of its episode's `fed` had gone into the environment when it was asked for: it depends on
            those turns, whether or not it was shown them.
        tool_calls (`tuple[ToolCall, ...]`):
            Functions that it asks for.
        without_calls (`str`, *optional*):
            Of a turn that calls functions, what it says before the calls: what teammates are shown.
        audience (`str`, *optional*):
            The one agent that is shown it where a workflow does not say what is seen: a turn that called tools, which
            only its own agent went on from. `None`: everybody.
        logps (`Sequence[float]`, *optional*):
            Log-probabilities of the sampled tokens, where generation has kept them.
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
    hears: tuple[int, ...] = ()
    fed: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    without_calls: str | None = None
    audience: str | None = None
    logps: Sequence[float] | None = field(default=None, repr=False)

    def __post_init__(self):
        if self.raw_text is None:
            object.__setattr__(self, "raw_text", self.text)
        for name in ("prompt_ids", "completion_ids"):  # what was sampled stays as it is, whoever holds the turn
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, eq=False)
class Feedback:
    """
    What an environment or a tool says. Agents are shown it like a teammate's words.

    Args:
        text (`str`): what it says.
        agent (`str`): name of the source, shown in the place of an agent's.
        index (`int`): position among the feedback of its episode.
        tool (`str`, *optional*): the function whose result it is.
        audience (`str`, *optional*): the one agent that is shown it where a workflow does not say what is seen.
    """

    text: str
    agent: str = "environment"
    index: int = 0
    tool: str | None = None
    audience: str | None = None

    @property
    def raw_text(self) -> str:
        return self.text


# What a turn can be shown: what agents said, and what an environment said.
Seen = Turn | Feedback
# What produces a turn: `speak(episode, agent, seen)`, with `functions=` it may call, `after=` the turn of the same
# agent, with its results in `seen`, from which it goes on, and `order=`, the how manyth turn it was asked for.
Speak = Callable[..., Awaitable[Turn]]
# The name under which results of tools are shown to agents other than the one that called.
TOOL = "tool"


class EndOfEpisode(BaseException):
    """
    Raised inside a workflow, out of `episode.turn`, to end its episode with the turns it has: an observation no longer
    fits the model's window and the policy is to end the episode. Not an `Exception`, so that a workflow's own error
    handling does not swallow it.
    """


@dataclass(eq=False, repr=False)
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
        tools (`dict[str, Sequence[Callable]]`, *optional*):
            Functions that each agent may call in its turns.
        limits ([`ToolLimits`], *optional*):
            What these may cost.
        aliases (`dict[str, str]`, *optional*):
            The names under which agents know one another, where they are not their own.
    """

    prompt: str | Messages
    row: dict[str, Any]
    index: int
    speak: Speak
    agents: tuple[str, ...]
    tools: Mapping[str, Sequence[Callable]] = field(default_factory=dict)
    limits: ToolLimits = field(default_factory=ToolLimits)
    aliases: Mapping[str, str] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    # For each turn, what the workflow asked to show, whether or not it fitted
    asked: list[tuple[Seen, ...]] = field(default_factory=list)
    # What the environment said; turns and feedback in the order in which they came
    feedback: list[Feedback] = field(default_factory=list)
    history: list[Seen] = field(default_factory=list)
    # Positions of the turns that went into the environment, in that order
    fed: list[int] = field(default_factory=list)
    # What the environment gave for each turn, by position; 0 where it is missing
    earned: Counter[int] = field(default_factory=Counter)
    # What reward functions of single turns gave each turn; empty where there are none
    own_rewards: list[float] = field(default_factory=list)
    # Where a horizon ended the episode: who would have acted next, what it would have seen, and what it could call
    horizon: tuple[str, tuple[Seen, ...], tuple[Callable, ...]] | None = None
    # What the workflow counts, for the metrics
    counts: Counter[str] = field(default_factory=Counter)
    # Whether the context overflowed and the episode was ended for it
    overflowed: bool = False
    # The environment it is played in, if it is; reward functions get it
    environment: Any = None
    # Functions that it has called and waits for, and how often one has come back
    calling: list[Call] = field(default_factory=list)
    answered_calls: int = 0
    # How many of its branches wait for tools or for functions in a thread; what came of the tools that are done, until
    # all are; how many turns were asked for; and for each turn that called tools the one that its agent's word is in
    busy: int = 0
    _returned: list[tuple[int, int | None, list[Feedback], asyncio.Future]] = field(default_factory=list)
    _orders: int = 0
    _words: dict[int, int] = field(default_factory=dict)
    _answer: Turn | None = None

    def __repr__(self) -> str:
        # asyncio writes out what its tasks return, and every turn names all that it saw
        return f"Episode(index={self.index}, prompt={str(self.prompt)[:40]!r}, turns={len(self.turns)})"

    async def turn(
        self,
        agent: str,
        sees: Sequence[Seen] | None = None,
        tools: Sequence[Callable] | None = None,
        rounds: int | None = None,
    ) -> Turn:
        """
        Let an agent speak and wait for what it says. Where it calls tools it speaks again with their results, until it
        calls none; each time is a turn of its own, and the last one is returned. Those before it are shown to nobody
        else, unless named in `sees`.

        Args:
            agent (`str`):
                Name of the agent.
            sees (`Sequence[Turn]`, *optional*):
                Earlier turns of this episode, and feedback, to show it, in this order. All so far unless given.
            tools (`Sequence[Callable]`, *optional*):
                Methods of an environment that it may call in this turn, besides the tools of its spec. Turns that come
                later depend on a turn that called one.
            rounds (`int`, *optional*):
                How often it may go on after results of tools, where that is less than the limits allow.

        Raises:
            ValueError: the agent is not in the team, or a turn in `sees` is not one of this episode.
        """
        seen = self._seen(agent, sees, "turn")
        self.horizon = None  # it goes on after all
        of_environment = list(tools or ())
        functions = [*self.tools.get(agent, ()), *of_environment]
        self._orders += 1
        if not functions:
            return await self.speak(self, agent, seen, order=self._orders)
        return await self._with_tools(agent, seen, functions, of_environment, self._orders, rounds)

    async def _with_tools(
        self,
        agent: str,
        seen: list[Seen],
        functions: list[Callable],
        of_environment: list[Callable],
        order: int,
        rounds: int | None,
    ) -> Turn:
        """Let an agent speak, and again after its calls, until it calls nothing or may not any more."""
        most = min((limit for limit in (rounds, self.limits.rounds) if limit is not None), default=None)
        turn = await self.speak(self, agent, seen, functions=functions, order=order)
        left, number, called = self.limits.calls, 0, []
        while turn.tool_calls and (most is None or number < most):
            was_refused = left <= 0
            said = await self._call_tools(turn, functions, of_environment, max(left, 0), order)
            called.append(turn.index)
            left, number = left - len(turn.tool_calls), number + 1
            seen = [*seen, turn, *said]
            turn = await self.speak(self, agent, seen, functions=functions, after=turn, order=order)
            if was_refused:
                break  # it was told that no calls are left
        object.__setattr__(turn, "audience", None)  # whatever it calls: this is its word
        self._words |= dict.fromkeys(called, turn.index)
        return turn

    def word_of(self, turn: Turn) -> Turn | None:
        """What an agent said in the end, for a turn that called tools; other turns are their own word."""
        if not turn.tool_calls or turn.audience is None:
            return turn
        index = self._words.get(turn.index)
        return self.turns[index] if index is not None and self.turns[turn.index] is turn else None

    async def _call_tools(
        self, turn: Turn, functions: Sequence[Callable], of_environment: Sequence[Callable], left: int, order: int
    ) -> list[Feedback]:
        """
        Run what a turn asks for; the results, as feedback for its agent. Branches that call tools at the same time go
        on together, so that nothing depends on how long tools take.
        """
        self.busy += 1
        try:
            results = await call_tools(functions, turn.tool_calls, self.limits, left, of_environment)
        except BaseException:
            self._is_back()
            raise
        self.count("tools/calls", len(results))
        for result in results:
            if result.problem is not None:
                self.count("tools/failures")
                self.count(f"tools/{result.problem}")
        names = {tool_name(function) for function in functions}
        said = [  # what a model made up is no name: templates render names as their own text
            Feedback(one.text, TOOL, tool=one.name if one.name in names else "unknown", audience=turn.agent)
            for one in results
        ]
        went_in = {tool_name(function) for function in of_environment} & {result.name for result in results}
        noted: asyncio.Future[list[Feedback]] = asyncio.get_running_loop().create_future()
        self._returned.append((order, turn.index if went_in else None, said, noted))
        self._is_back()
        return await noted

    def _is_back(self) -> None:
        """Once the tools of all branches are back, take down what they gave, in the order of the turns' requests."""
        self.busy -= 1
        if self.busy:
            return
        returned, self._returned = sorted(self._returned, key=lambda one: one[0]), []
        for _, index, said, noted in returned:
            if index is not None:
                self.fed.append(index)
            results = [self._note(one) for one in said]
            # Soon, not now: else the branch that is back last would go on first
            asyncio.get_running_loop().call_soon(_settle, noted, results)

    def _note(self, said: Feedback) -> Feedback:
        said = dataclasses.replace(said, index=len(self.feedback))
        self.feedback.append(said)
        self.history.append(said)
        return said

    async def call(self, function: Callable, *arguments: Any, **named: Any) -> Any:
        """
        Call a function of one's own. One that is not asynchronous runs in a thread, after those of other episodes and
        in the same thread as they; other episodes go on meanwhile, and branches of this one that call something at
        the same time go on together, so that nothing depends on how long it takes.

        Returns: what it returns, awaited if it is asynchronous.
        """
        if inspect.iscoroutinefunction(function):
            return await self._called(function, function(*arguments, **named))
        self._orders += 1
        order = self._orders
        self.busy += 1
        try:
            async with one_at_a_time():
                job = in_thread(functools.partial(function, *arguments, **named), "environments")
                value, error = await self._called(function, job)
        except BaseException:
            self._is_back()
            raise
        noted: asyncio.Future[list[Feedback]] = asyncio.get_running_loop().create_future()
        self._returned.append((order, None, [], noted))
        self._is_back()
        await noted
        if error is not None:
            raise error
        if inspect.isawaitable(value):  # an asynchronous function behind a decorator
            return await self._called(function, value)
        return value

    async def _called(self, function: Callable, outcome: Awaitable) -> Any:
        """Await an outcome, and let it be seen of which function."""
        call = Call(_name_of(function))
        self.calling.append(call)
        try:
            return await outcome
        finally:
            self.calling.remove(call)
            self.answered_calls += 1

    def observe(
        self, text: str | None, after: Sequence[Turn] = (), reward: float = 0.0, source: str = "environment"
    ) -> Feedback | None:
        """
        Record that turns went into an environment (or a tool) and what it answered. Turns asked for from now on depend
        on them, and see the feedback unless told otherwise.

        Args:
            text (`str`, *optional*):
                What the environment says. With `None` or an empty text there is nothing to show.
            after (`Sequence[Turn]`, *optional*):
                The turns that went into it.
            reward (`float`, *optional*, defaults to `0.0`):
                What it gives for them: earned by the last of these turns.
            source (`str`, *optional*, defaults to `"environment"`):
                Name under which agents are shown the text.

        Returns: the [`Feedback`], to be named in `sees`; `None` if there is no text.

        Raises:
            ValueError: a turn of another episode, a reward that is not finite, or a reward for no turn.
        """
        self._check_own(after, "observe", Turn)
        if reward and not after:
            raise ValueError(f"`episode.observe` got the reward {reward!r} and no turn that earned it: set `after=`.")
        if after:
            self.earn(after[-1], reward)
        self.fed += [turn.index for turn in after]
        if not text:
            return None
        if not isinstance(text, str):
            raise TypeError(f"What {source!r} says has to be a text, got {text!r} of type {type(text).__name__}.")
        return self._note(Feedback(text, source))

    def earn(self, turn: Turn, reward: float) -> None:
        """
        Give a turn a reward of its own, on top of what reward functions give the episode.

        Raises:
            ValueError: the reward is not a finite number, or the turn is not one of this episode.
        """
        self._check_own([turn], "earn", Turn)
        try:
            value = float(reward)
        except (TypeError, ValueError) as error:
            raise TypeError(f"A reward has to be a number, got {reward!r} for the turn of {turn.agent!r}.") from error
        if not math.isfinite(value):
            raise ValueError(f"A reward has to be finite, got {reward!r} for the turn of {turn.agent!r}.")
        self.earned[turn.index] += value  # type: ignore[assignment]  # a Counter of floats

    def count(self, name: str, by: float = 1) -> None:
        """Count something for the metrics: `workflow/<name>` is its mean over episodes."""
        self.counts[name] += by  # type: ignore[assignment]

    def joint_steps(self) -> list[int]:
        """The joint step of each turn, see [`joint_steps`]."""
        return joint_steps(self.turns, self.fed)

    def rounds(self) -> list[int]:
        """The joint action that each turn is part of, see [`rounds`]."""
        return rounds(self.turns)

    def cut(self, agent: str, sees: Sequence[Seen] | None = None, tools: Sequence[Callable] | None = None) -> None:
        """
        Say that a horizon ends the episode here and not the task. A critic then values what `agent` would have seen
        next and adds it to the return; without a critic it changes nothing.

        Args:
            agent (`str`):
                Name of the agent that would have acted next.
            sees (`Sequence[Turn]`, *optional*):
                Turns and feedback it would have been shown. All so far unless given.
            tools (`Sequence[Callable]`, *optional*):
                Methods of an environment that it could have called.
        """
        functions = (*self.tools.get(agent, ()), *(tools or ()))
        self.horizon = agent, tuple(self._seen(agent, sees, "cut")), functions

    def add(self, turn: Turn, seen: Sequence[Seen]) -> None:
        """Append a finished turn. Called by what runs the episode, not by workflows."""
        if turn.tool_calls:  # until its agent's word is known, nobody else is shown it
            object.__setattr__(turn, "audience", turn.agent)
        self.turns.append(turn)
        self.history.append(turn)
        self.asked.append(tuple(seen))

    def _seen(self, agent: str, sees: Sequence[Seen] | None, method: str) -> list[Seen]:
        if agent not in self.agents:
            raise ValueError(unknown_agent(agent, self.agents, f"`episode.{method}`"))
        if sees is None:
            return [item for item in self.history if item.audience in (None, agent)]
        self._check_own(sees, f"{method}({agent!r})")
        return list(sees)

    def _check_own(self, seen: Sequence[Seen], method: str, kind: Any = (Turn, Feedback)) -> None:
        for item in seen:
            if not isinstance(item, kind):
                feedback = "" if kind is Turn else ", and feedback"
                raise TypeError(
                    f"`episode.{method}` takes turns, as returned by `episode.turn`{feedback}; got a "
                    f"{type(item).__name__}."
                )
            known: Sequence[Seen] = self.turns if isinstance(item, Turn) else self.feedback
            if item.index >= len(known) or known[item.index] is not item:
                raise ValueError(
                    f"`episode.{method}` got a turn of {item.agent!r} from another episode. "
                    "Keep turns in local variables of `run`, not on the workflow: one workflow object runs many "
                    "episodes at once."
                )

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
        self._check_own([turn], "answer", Turn)
        self._answer = turn


def _settle(noted: asyncio.Future, results: list[Feedback]) -> None:
    if not noted.done():  # else its branch was cancelled
        noted.set_result(results)


@dataclass(frozen=True, eq=False)
class Call:
    """A function that an episode waits for."""

    name: str


def _name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def unknown_agent(name: object, known: Sequence[str], where: str) -> str:
    """The error text for an agent name that the team does not have, with the nearest one that it has."""
    hint = did_you_mean(name, known)
    return f"{where} names the agent {name!r}, but the team has {', '.join(map(repr, known))}.{hint}"


def joint_steps(turns: Sequence[Turn], fed: Sequence[int] = ()) -> list[int]:
    """
    The joint step of each turn, 0, 1, ...: turns that do not depend on one another act simultaneously.

    A turn comes one step after the latest turn it sees or that had gone into its environment. In a chain every turn is
    a step of its own; two solvers that both see the planner alone share step 1.

    Args:
        turns (`Sequence[Turn]`): turns of an episode.
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


def rounds(turns: Sequence[Turn]) -> list[int]:
    """
    The joint action that each turn is part of, 0, 1, ...: one turn of each agent, as in algorithms for teams that act
    once per step of an environment. A chain of agents is one joint action, though its turns are joint steps of their
    own. A new one begins where turns have gone into the environment and where an agent speaks again; a turn that calls
    tools and the one that goes on from the results are one.

    Args:
        turns (`Sequence[Turn]`): turns of an episode.
    """
    found: list[int] = []
    spoken: Counter[str] = Counter()  # turns of each agent since turns last went into the environment
    calling: dict[str, int] = {}  # rounds of turns whose agents go on from results
    first = fed = 0
    for turn in turns:
        if turn.agent in calling:
            fed = turn.fed  # what its call changed is no new step of the environment
        elif turn.fed != fed:
            first, fed = max(found, default=-1) + 1, turn.fed
            spoken.clear()
        found.append(calling.pop(turn.agent, first + spoken[turn.agent]))
        if turn.tool_calls and turn.audience is not None:
            calling[turn.agent] = found[-1]
        else:
            spoken[turn.agent] += 1
    return found
