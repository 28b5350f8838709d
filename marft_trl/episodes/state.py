# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The state of a running episode, which makes the record."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..system.event_loop import StepContext, in_thread, one_at_a_time
from .records import (
    TOOL,
    Call,
    Episode,
    Feedback,
    Horizon,
    Messages,
    RequestedTurn,
    Seen,
    TeamContext,
    Turn,
    TurnLimitError,
    TurnRequest,
    unknown_agent,
)
from .tools import call_tools, tool_name


# Rounds of the event loop in which a task that was cancelled comes to an end
_LAST_ROUNDS = 20


class Speak(Protocol):
    """Takes a turn for a running episode. The collector supplies it."""

    async def __call__(self, episode: EpisodeState, ask: TurnRequest) -> Turn: ...


class EpisodeState:
    """
    What the engine knows of a running episode.

    Args:
        row (`dict`): the dataset row, with a `prompt`.
        index (`int`): position of the episode in its batch.
        speak ([`Speak`]): takes a turn.
        setting ([`TeamContext`]): the team.
        copies (`Mapping[str, int]`, *optional*): the past copies that agents act with. Drawn if left out.

    Attributes:
        trains (`bool`): whether its turns are to be trained on.
        overflowed (`bool`): whether it is ended because the model's window is full.
        busy (`int`): number of its branches that wait for tools or for functions in a thread.
        calling (`list[Call]`): functions that it has called and waits for.
        answered_calls (`int`): number of functions that have come back.
        waits_for (`str`, *optional*): the program that decides whether the episode goes on, as messages name it. Only
            a turn is progress of a program: a request may be refused, and made again without end.
        is_queued (`bool`): whether it has not begun, since no more may run at a time. The others do not wait for it.
        around (`Callable`): makes a context manager around users' code of this episode. Set by what runs it.
        started (`list[tuple[asyncio.Task, str]]`): tasks that users' code has started, and what they run.
        num_late (`int`): turns that were requested after the end.
        fed (`list[int]`): indices of the turns that have gone into the environment.
        earned (`Counter[int]`): rewards by the index of the turn after which they were received.
        own (`dict[str, Counter[int]]`): the same of single agents.
        horizons (`tuple[Horizon, ...]`): what agents would have seen next, where the episode was truncated.
    """

    def __init__(
        self,
        row: dict[str, Any],
        index: int,
        speak: Speak,
        setting: TeamContext,
        copies: Mapping[str, int] | None = None,
    ):
        self.row, self.index = row, index
        self.copies = dict(setting.draw(index) if copies is None else copies)
        self.prompt: str | Messages = row["prompt"]
        self.agents, self.aliases = setting.agents, setting.aliases
        self.turns: list[Turn] = []
        self.feedback: list[Feedback] = []
        self.environment: Any = None
        self.overflowed = False
        self.busy = 0
        self.calling: list[Call] = []
        self.answered_calls = 0
        self.waits_for: str | None = None
        self.is_queued = False
        self.around: StepContext = contextlib.nullcontext
        self.limits, self._max_turns, self.trains = setting.limits, setting.max_turns, setting.trains
        self._requested: list[Coroutine[Any, Any, Turn]] = []
        self.has_ended, self.num_late = False, 0  # turns that were requested after the end
        self.started: list[tuple[asyncio.Task, str]] = []  # tasks, and what they run
        self._speak, self.tools, self._scripts = speak, setting.tools, setting.scripts
        self._asks: list[TurnRequest] = []
        self.history: list[Seen] = []
        self.fed: list[int] = []
        self.earned: Counter[int] = Counter()
        self.own: dict[str, Counter[int]] = {}
        self.horizons: tuple[Horizon, ...] = ()
        self._counts: Counter[str] = Counter()
        self.chosen_answer: Turn | None = None
        # Results of tools that are back before those of other branches; number of requests; final turns
        self._returned: list[tuple[int, int | None, list[Feedback], asyncio.Future]] = []
        self._orders = 0
        self._final_turns: dict[int, int] = {}

    def record(self) -> Episode:
        """The episode as far as it has come, as frozen data."""
        return Episode(
            self.prompt,
            self.row,
            self.index,
            turns=tuple(self.turns),
            answer=self.answer,
            feedback=tuple(self.feedback),
            history=tuple(self.history),
            asked=tuple(ask.seen for ask in self._asks),
            given=tuple(ask.given for ask in self._asks),
            fed=tuple(self.fed),
            earned=tuple(self.earned[turn.index] for turn in self.turns),
            own={name: tuple(value[turn.index] for turn in self.turns) for name, value in self.own.items()},
            horizons=self.horizons,
            counts=Counter(self._counts),
            overflowed=self.overflowed,
            environment=self.environment,
            final_turns=dict(self._final_turns),
            copies=self.copies,
        )

    @property
    def answer(self) -> Turn | None:
        """The turn that answers for the team: the one set by the workflow, else the last one."""
        return self.chosen_answer or (self.turns[-1] if self.turns else None)

    def request(self, agent: str, requested: Coroutine[Any, Any, Turn]) -> Coroutine[Any, Any, Turn]:
        if self.has_ended and not self.overflowed:
            self.num_late += 1
            requested.close()
            raise RuntimeError(f"A task asks {agent!r} for a turn after the workflow has returned. Await the task.")
        waiting = [item for item in self._requested if inspect.getcoroutinestate(item) != inspect.CORO_CLOSED]
        self._requested = [*waiting, requested]
        return requested

    async def forgotten(self) -> int:
        """Number of turns that were requested and that nobody has waited for. They are given up."""
        states = (inspect.CORO_CREATED, inspect.CORO_SUSPENDED)
        for _ in range(_LAST_ROUNDS):
            unfinished = any(inspect.getcoroutinestate(value) in states for value in self._requested)
            if not unfinished or not any(task.cancelling() and not task.done() for task, _ in self.started):
                break
            await asyncio.sleep(0)  # tasks that have just been cancelled end
        left = [item for item in self._requested if inspect.getcoroutinestate(item) in states]
        for entry in left:
            if inspect.getcoroutinestate(entry) == inspect.CORO_CREATED:
                entry.close()
        return len(left)

    async def take_turn(
        self, agent: str, sees: Sequence[Seen] | None, tools: Sequence[Callable] | None, rounds: int | None
    ) -> Turn:
        self._check_room(agent)
        seen = tuple(self.seen_by(agent, sees, "turn"))
        self.horizons = ()  # the episode continues after `cut`
        of_environment = list(tools or ()) if agent not in self._scripts else []  # a script calls what it likes
        functions = (*self.tools.get(agent, ()), *of_environment)
        self._orders += 1
        ask = TurnRequest(agent, seen, functions, order=self._orders)
        if not functions:
            return await self._speak(self, ask)
        return await self._with_tools(ask, functions, of_environment, rounds)

    async def take_requested(self, agent: str, given: RequestedTurn, sees: Sequence[Seen] | None) -> Turn:
        self._check_room(agent)
        seen = tuple(self.seen_by(agent, sees, "turn_on"))
        if self.tools.get(agent):
            raise ValueError(
                f"Agent {agent!r} has tools of its own, and is asked on messages that are written elsewhere, so "
                "nobody would call them. Leave `tools` out of its spec, and send them with the request."
            )
        self.horizons = ()
        self._orders += 1
        # A copy for the record: the caller may go on with its list
        given = dataclasses.replace(given, messages=[dict(message) for message in given.messages])
        return await self._speak(self, TurnRequest(agent, seen, tuple(given.tools), order=self._orders, given=given))

    def _check_room(self, agent: str) -> None:
        if self._max_turns is not None and len(self.turns) >= self._max_turns:
            raise TurnLimitError(
                f"the episode has {len(self.turns)} turns, and {agent!r} is to take another. If that is meant, set "
                "`max_episode_turns` to a larger number, or to None; else give the workflow a condition to end."
            )

    async def _with_tools(
        self, ask: TurnRequest, functions: Sequence[Callable], of_environment: list[Callable], rounds: int | None
    ) -> Turn:
        """Request turns from an agent until one calls no tool or a limit is reached. Returns the final turn."""
        most = min((limit for limit in (rounds, self.limits.rounds) if limit is not None), default=math.inf)
        left, number, called, was_refused = self.limits.calls, 0, [], False
        turn = await self._speak(self, ask._replace(is_final=number >= most))
        while turn.audience is not None:  # it calls functions and may go on from their results
            was_refused = left <= 0
            said = await self._call_tools(turn, functions, of_environment, max(left, 0), ask.order)
            called.append(turn.index)
            left, number = left - len(turn.tool_calls), number + 1
            # Once told that no calls are left, an agent speaks for the last time
            ask = ask._replace(seen=(*ask.seen, turn, *said), after=turn, is_final=was_refused or number >= most)
            turn = await self._speak(self, ask)
        self._final_turns |= dict.fromkeys(called, turn.index)
        return turn

    async def _call_tools(
        self, turn: Turn, functions: Sequence[Callable], of_environment: Sequence[Callable], left: int, order: int
    ) -> list[Feedback]:
        """
        Run the tool calls of a turn and return the results as feedback for its agent. Branches that call tools at the
        same time continue together, so that results do not depend on how long tools take.
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
        said = [  # an invented name is not shown, since names are tokenized as template text
            Feedback(item.text, TOOL, tool=item.name if item.name in names else "unknown", audience=turn.agent)
            for item in results
        ]
        went_in = {tool_name(function) for function in of_environment} & {result.name for result in results}
        noted: asyncio.Future[list[Feedback]] = asyncio.get_running_loop().create_future()
        self._returned.append((order, turn.index if went_in else None, said, noted))
        self._is_back()
        return await noted

    def _is_back(self) -> None:
        """When the tools of all branches have returned, record their results in the order of the requests."""
        self.busy -= 1
        if self.busy:
            return
        returned, self._returned = sorted(self._returned, key=lambda one: one[0]), []
        for _, index, said, noted in returned:
            if index is not None:
                self.fed.append(index)
            results = [self._note(item) for item in said]
            # Not immediately, since then the branch whose tool returned last would continue first
            asyncio.get_running_loop().call_soon(_settle, noted, results)

    def _note(self, said: Feedback) -> Feedback:
        said = dataclasses.replace(said, index=len(self.feedback))
        self.feedback.append(said)
        self.history.append(said)
        return said

    async def call(self, function: Callable, *arguments: Any, **named: Any) -> Any:
        """See [`LiveEpisode.call`]."""
        if inspect.iscoroutinefunction(function):
            return await self._called(function, function(*arguments, **named))
        value = await self._in_order(self._threaded(function, functools.partial(function, *arguments, **named)))
        if inspect.isawaitable(value):  # an asynchronous function behind a decorator
            return await self._called(function, value)
        return value

    async def write(self, function: Callable, *arguments: Any) -> Any:
        """
        Call a function that writes a turn. Like [`~EpisodeState.call`], but branches of this episode that wait for
        asynchronous functions continue together as well, so that the order of turns does not depend on how long they
        take.
        """
        return await self._in_order(self._written(function, arguments))

    async def _in_order(self, outcome: Awaitable[tuple[Any, BaseException | None]]) -> Any:
        """What a function returns or raises. Branches that wait at the same time go on in the order of their calls."""
        self._orders += 1
        order = self._orders
        self.busy += 1
        try:
            value, error = await outcome
        except BaseException:
            self._is_back()
            raise
        noted: asyncio.Future[list[Feedback]] = asyncio.get_running_loop().create_future()
        self._returned.append((order, None, [], noted))
        self._is_back()
        await noted
        if error is not None:
            raise error
        return value

    async def _threaded(self, function: Callable, job: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        async with one_at_a_time():
            return await self._called(function, in_thread(job, "environments"))

    async def _written(self, function: Callable, arguments: tuple) -> tuple[Any, BaseException | None]:
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        if is_async:
            job = function(*arguments)
        else:
            job, error = await self._threaded(function, functools.partial(function, *arguments))
            if error is not None or not inspect.isawaitable(job):
                return job, error
        try:
            return await self._called(function, job), None
        except Exception as error:
            return None, error

    async def _called(self, function: Callable, outcome: Awaitable) -> Any:
        """Await an outcome. Meanwhile, `calling` lists the function, so that a timeout can name it."""
        with self.waiting_for(_name_of(function)):
            return await outcome

    @contextlib.contextmanager
    def waiting_for(self, name: str) -> Iterator[None]:
        """Context manager: the episode waits for something of this name, which a time limit can name."""
        call = Call(name)
        self.calling.append(call)
        try:
            yield
        finally:
            self.calling.remove(call)
            self.answered_calls += 1

    def count(self, name: str, by: float = 1) -> None:
        """See [`LiveEpisode.count`]."""
        self._counts[name] += by  # type: ignore[assignment]

    def say(self, text: str | None, source: str, audience: str | None = None) -> Feedback | None:
        if not text:
            return None
        if not isinstance(text, str):
            raise TypeError(f"Feedback of {source!r} has to be a text, got {text!r} of type {type(text).__name__}.")
        return self._note(Feedback(text, source, audience=audience))

    def add(self, turn: Turn, ask: TurnRequest) -> None:
        """Append a finished turn."""
        self.turns.append(turn)
        self.history.append(turn)
        self._asks.append(ask)

    def seen_by(self, agent: str, sees: Sequence[Seen] | None, method: str) -> list[Seen]:
        self.check_agent(agent, method)
        if sees is None:
            return [item for item in self.history if item.audience in (None, agent)]
        self.check_own(sees, f"{method}({agent!r})")
        return list(sees)

    def check_agent(self, agent: str, method: str) -> None:
        if agent not in self.agents:
            raise ValueError(unknown_agent(agent, self.agents, f"`episode.{method}`"))

    def check_own(self, seen: Sequence[Seen], method: str, kind: Any = (Turn, Feedback)) -> None:
        if isinstance(seen, (Turn, Feedback)):
            raise TypeError(f"`episode.{method}` takes a list of turns, got a single one. Write `[turn]`.")
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


def _settle(noted: asyncio.Future, results: list[Feedback]) -> None:
    if not noted.done():  # else its branch was cancelled
        noted.set_result(results)


def _name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
