# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The state of a running episode, from which the engine makes its record."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from ..system.event_loop import StepContext, in_thread, one_at_a_time
from .images import ImageError, is_image, is_parts, may_have_images, read_prompt, split_parts
from .records import (
    TOOL,
    Call,
    Episode,
    Feedback,
    Horizon,
    Messages,
    Request,
    RequestedTurn,
    Seen,
    TeamContext,
    Turn,
    TurnLimitError,
    unknown_agent,
)
from .tools import ToolResult, call_tools, tool_name


T = TypeVar("T")
_CANCELLATION_ITERATIONS = 20  # of the event loop, that a cancelled task gets to finish


class Progress:
    """Counts the requested turns and the finished functions and tools of episodes that wait for each other."""

    count = 0


class EpisodeState:
    def __init__(
        self,
        row: dict[str, Any],
        index: int,
        speak: Callable[[Request], Awaitable[Turn]],  # takes a turn
        context: TeamContext,
    ):
        self.row, self.index = row, index
        self.prompt: str | Messages = row["prompt"]
        self.may_have_images, self._sees_images = _may_have_images(row), context.sees_images
        self.agents, self.aliases = context.agents, context.aliases
        self.turns: list[Turn] = []
        self.feedback: list[Feedback] = []
        self.environment: Any = None
        self.overflowed = False  # whether the episode ended because the context window is full
        self.busy = 0  # number of branches that wait for tools or for functions in a thread
        self.progress = Progress()
        self.calling: list[Call] = []
        self.answered_calls = 0
        # Program that drives the episode. Only turns count as progress: it may retry a rejected request forever
        self.waits_for: str | None = None
        self.is_rerun = False  # of a recorded episode
        self.is_queued = False  # whether the limit of running episodes keeps it from starting; others do not wait
        self.step_context: StepContext = contextlib.nullcontext  # around user code. [`EpisodeGuard`] sets it
        self.limits, self._max_turns, self.trains = context.limits, context.max_turns, context.trains
        self.count_tokens = context.count_tokens
        self._requested: list[Coroutine[Any, Any, Any]] = []  # turns and calls that the workflow has to await
        self.has_ended, self.num_late = False, 0  # turns that were requested after the end
        self.started: list[tuple[asyncio.Task, str]] = []  # tasks and the names of their coroutines
        self._speak, self.tools, self._scripts = speak, context.tools, context.scripts
        self._requests: list[Request] = []  # of the turns
        self.history: list[Seen] = []
        self.fed: list[int] = []  # indices of the turns that were passed to the environment
        self.earned: Counter[int] = Counter()  # rewards by the index of the turn after which they were received
        self.own: dict[str, Counter[int]] = {}  # of these, rewards to a single agent, by its name
        self.horizons: tuple[Horizon, ...] = ()
        self._counts: Counter[str] = Counter()
        self.chosen_answer: Turn | None = None
        # Of branches that wait for the other branches
        self._pending_results: list[tuple[int, Callable[[], Any], asyncio.Future]] = []
        self._num_requests = 0
        self._final_turns: dict[int, int] = {}

    def read_images(self) -> None:
        """Read the images of the prompt. Raises an [`ImageError`] for what cannot be read or seen."""
        self.prompt = read_prompt(self.row, self._sees_images)

    def record(self) -> Episode:
        return Episode(
            self.prompt,
            self.row,
            self.index,
            turns=tuple(self.turns),
            answer=self.answer,
            feedback=tuple(self.feedback),
            history=tuple(self.history),
            asked=tuple(request.seen for request in self._requests),
            given=tuple(request.requested_turn for request in self._requests),
            fed=tuple(self.fed),
            earned=tuple(self.earned[turn.index] for turn in self.turns),
            own={name: tuple(value[turn.index] for turn in self.turns) for name, value in self.own.items()},
            horizons=self.horizons,
            counts=Counter(self._counts),
            overflowed=self.overflowed,
            environment=self.environment,
            final_turns=dict(self._final_turns),
        )

    @property
    def answer(self) -> Turn | None:
        return self.chosen_answer or (self.turns[-1] if self.turns else None)

    def request(self, agent: str, requested: Coroutine[Any, Any, Turn]) -> Coroutine[Any, Any, Turn]:
        if self.has_ended and not self.overflowed:
            self.num_late += 1
            requested.close()
            raise RuntimeError(f"A task requested a turn of {agent!r} after the workflow returned. Await the task.")
        return self.expect(requested)

    def expect(self, requested: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Note a coroutine that the workflow has to await."""
        waiting = [item for item in self._requested if inspect.getcoroutinestate(item) != inspect.CORO_CLOSED]
        self._requested = [*waiting, requested]
        return requested

    async def close_unawaited(self) -> int:
        states = (inspect.CORO_CREATED, inspect.CORO_SUSPENDED)
        for _ in range(_CANCELLATION_ITERATIONS):
            unfinished = any(inspect.getcoroutinestate(coroutine) in states for coroutine in self._requested)
            if not unfinished or not any(task.cancelling() and not task.done() for task, _ in self.started):
                break
            await asyncio.sleep(0)  # let tasks that were just cancelled finish
        unawaited = [coroutine for coroutine in self._requested if inspect.getcoroutinestate(coroutine) in states]
        for coroutine in unawaited:
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()
        return len(unawaited)

    async def take_turn(
        self, agent: str, sees: Sequence[Seen] | None, tools: Sequence[Callable] | None, rounds: int | None
    ) -> Turn:
        self._check_turn_limit(agent)
        seen = tuple(self.seen_by(agent, sees, "turn"))
        environment_tools = list(tools or ()) if agent not in self._scripts else []  # `reply` calls tools itself
        functions = (*self.tools.get(agent, ()), *environment_tools)
        request = self._make_request(agent, seen, functions)
        if not functions:
            return await self._speak(request)
        return await self._with_tools(request, environment_tools, rounds)

    async def take_requested(self, agent: str, requested_turn: RequestedTurn, sees: Sequence[Seen] | None) -> Turn:
        self._check_turn_limit(agent)
        seen = tuple(self.seen_by(agent, sees, "turn_on"))
        if self.tools.get(agent):
            raise ValueError(
                f"Agent {agent!r} has `tools` in its spec, but another program writes its messages and runs its tool "
                "calls, so nothing would run these tools. Remove them, and send them with the request."
            )
        # Copy for the record: the caller may keep changing its list
        messages = [dict(message) for message in requested_turn.messages]
        requested_turn = dataclasses.replace(requested_turn, messages=messages)
        request = self._make_request(agent, seen, tuple(requested_turn.tools), requested_turn=requested_turn)
        return await self._speak(request)

    def _make_request(self, agent: str, seen: tuple[Seen, ...], functions: tuple, **fields: Any) -> Request:
        self.horizons = ()  # the episode continues after `cut`
        self._num_requests += 1
        return Request(self, agent, seen, functions, order=self._num_requests, fed=len(self.fed), **fields)

    def _check_turn_limit(self, agent: str) -> None:
        if self._max_turns is not None and len(self.turns) >= self._max_turns:
            raise TurnLimitError(
                f"The episode already has {len(self.turns)} turns, and {agent!r} is about to take another turn. If "
                "this is intended, increase `max_episode_turns` or set it to None; otherwise let the workflow stop."
            )

    async def _with_tools(self, request: Request, environment_tools: list[Callable], rounds: int | None) -> Turn:
        """Request turns from an agent until a turn calls no tool or a limit is reached. Return the final turn."""
        max_rounds = min((limit for limit in (rounds, self.limits.rounds) if limit is not None), default=math.inf)
        calls_left, num_rounds, calling_turns, is_exhausted = self.limits.calls, 0, [], False
        request.is_final = num_rounds >= max_rounds
        turn = await self._speak(request)
        while turn.audience is not None:  # the turn calls tools and the agent may continue with the results
            is_exhausted = calls_left <= 0
            results = await self._call_tools(turn, request, environment_tools, max(calls_left, 0))
            calling_turns.append(turn.index)
            calls_left, num_rounds = calls_left - len(turn.tool_calls), num_rounds + 1
            # The turn after the message that no calls are left is the final turn
            seen, is_final = (*request.seen, turn, *results), is_exhausted or num_rounds >= max_rounds
            request = dataclasses.replace(request, seen=seen, after=turn, is_final=is_final, fed=len(self.fed))
            turn = await self._speak(request)
        self._final_turns |= dict.fromkeys(calling_turns, turn.index)
        return turn

    async def _call_tools(
        self, turn: Turn, request: Request, environment_tools: Sequence[Callable], left: int
    ) -> list[Feedback]:
        functions = cast("Sequence[Callable]", request.functions)
        names, of_environment = set(map(tool_name, functions)), set(map(tool_name, environment_tools))

        async def call_all() -> list[ToolResult]:
            results = await call_tools(functions, turn.tool_calls, self.limits, left, environment_tools)
            self.count("tools/calls", len(results))
            for problem in [result.problem for result in results if result.problem is not None]:
                self.count("tools/failures")
                self.count(f"tools/{problem}")
            return results

        def record(results: list[ToolResult]) -> list[Feedback]:
            if any(result.name in of_environment for result in results):
                self.fed.append(turn.index)
            feedback = []
            for result in results:
                name = result.name if result.name in names else "unknown"  # invented names would be template text
                fields: dict[str, Any] = {"elements": result.elements, "images": result.images}
                shown = Feedback(result.text, TOOL, tool=name, audience=turn.agent, **fields)
                feedback.append(self._record_feedback(shown))
            return feedback

        return await self._in_order(request.order, call_all(), record)

    async def _in_order(self, order: int, job: Awaitable[Any], record: Callable[[Any], Any]) -> Any:
        """Await a job and return `record(result)`. Branches go on in order: nothing depends on how long jobs take."""
        self.busy += 1
        try:
            result = await job
        except BaseException:
            self._finish_branch()
            raise
        recorded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending_results.append((order, functools.partial(record, result), recorded))
        self._finish_branch()
        return await recorded

    def _finish_branch(self) -> None:
        self.busy -= 1
        self.progress.count += 1
        if self.busy:
            return
        returned, self._pending_results = sorted(self._pending_results, key=lambda pending: pending[0]), []
        for _, record, recorded in returned:
            # Deferred: otherwise the branch whose tool returned last would continue first
            asyncio.get_running_loop().call_soon(_set_result, recorded, record())

    def _record_feedback(self, feedback: Feedback) -> Feedback:
        feedback = dataclasses.replace(feedback, index=len(self.feedback))
        self.feedback.append(feedback)
        self.history.append(feedback)
        return feedback

    async def call(self, function: Callable, *arguments: Any, **named: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await self._await_call(function, function(*arguments, **named))
        value = await self._await_in_order(self._run_in_thread(function, *arguments, **named))
        if inspect.isawaitable(value):  # an asynchronous function behind a decorator
            return await self._await_call(function, value)
        return value

    async def write(self, function: Callable, messages: Messages) -> Any:
        """Call a function that writes a turn. Results are recorded in the order of requests, even if it is async."""
        return await self._await_in_order(self._run_reply(function, messages))

    async def _await_in_order(self, outcome: Awaitable[tuple[Any, BaseException | None]]) -> Any:
        """Return or raise an outcome, in the order of the calls."""
        self._num_requests += 1
        value, error = await self._in_order(self._num_requests, outcome, lambda result: result)
        if error is not None:
            raise error
        return value

    async def _run_in_thread(self, function: Callable, *arguments: Any, **named: Any) -> tuple[Any, Any]:
        async with one_at_a_time():
            job = functools.partial(function, *arguments, **named)
            return await self._await_call(function, in_thread(job, "environments"))

    async def _run_reply(self, function: Callable, messages: Messages) -> tuple[Any, BaseException | None]:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            job = function(messages)
        else:
            job, error = await self._run_in_thread(function, messages)
            if error is not None or not inspect.isawaitable(job):
                return job, error
        try:
            return await self._await_call(function, job), None
        except Exception as error:
            return None, error

    async def _await_call(self, function: Callable, outcome: Awaitable) -> Any:
        """Await an outcome. Meanwhile, `calling` lists the function, so that a timeout can name it."""
        call = Call(getattr(function, "__qualname__", type(function).__name__))
        self.calling.append(call)
        try:
            return await outcome
        finally:
            self.calling.remove(call)
            self.answered_calls += 1

    def count(self, name: str, by: float = 1) -> None:
        self._counts[name] += by  # type: ignore[assignment]

    def say(self, text: Any, source: str, audience: str | None = None, images: Sequence[Any] = ()) -> Feedback | None:
        """Record feedback: a text with images, or parts as a list."""
        if images or not isinstance(text, str | None):
            parts = list(text) if isinstance(text, (list, tuple)) else [] if text is None else [text]
            if images or is_parts(text) or may_have_images(text):
                further = [images] if is_image(images) else images
                text, images = split_parts([*parts, *({"type": "image", "image": image} for image in further)])
        if not text and not images:
            return None
        if images and not self._sees_images:
            raise ImageError(f"{source!r} shows an image, but no agent of the team sees images.")
        if not isinstance(text, str | None):
            raise TypeError(f"Feedback from {source!r} must be a string, got {text!r} of type {type(text).__name__}.")
        return self._record_feedback(Feedback(text or "", source, audience=audience, images=tuple(images)))

    def add(self, turn: Turn, request: Request) -> None:
        self.turns.append(turn)
        self.history.append(turn)
        self._requests.append(request)

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
            raise TypeError(f"`episode.{method}` takes a list of turns, got a single turn. Pass `[turn]`.")
        for item in seen:
            if not isinstance(item, kind):
                feedback = "" if kind is Turn else " and feedback"
                raise TypeError(
                    f"`episode.{method}` takes turns returned by `episode.turn`{feedback}, got a "
                    f"{type(item).__name__}."
                )
            known: Sequence[Seen] = self.turns if isinstance(item, Turn) else self.feedback
            if item.index >= len(known) or known[item.index] is not item:
                raise ValueError(
                    f"`episode.{method}` got a turn of {item.agent!r} from another episode. Keep turns in local "
                    "variables of `run`, not on the workflow: one workflow object runs many episodes at once."
                )


def _may_have_images(row: dict[str, Any]) -> bool:
    prompt = row["prompt"]
    contents = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    return "image" in row or "images" in row or any(isinstance(content, list) for content in contents)


def _set_result(recorded: asyncio.Future, result: Any) -> None:
    if not recorded.done():  # it is done if the branch was cancelled
        recorded.set_result(result)
