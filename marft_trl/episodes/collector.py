# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Run a workflow on many dataset rows at once and return the episodes, or try it with made-up turns and no model."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ..system.event_loop import Result, StepContext, make_task, run_coroutine
from ..system.watchdog import TimeLimit, time_limit
from .guard import EpisodeError, EpisodeGuard, HangDetector, RunsEpisodes, shorten
from .records import EndOfEpisode, Episode, Messages, Request, Seen, TeamContext, Turn
from .rerun import RecordedTurn, Rerun
from .state import EpisodeState, Progress
from .tools import ToolCall


logger = logging.getLogger(__name__)


# Event-loop iterations without a new request after which no episode can continue on its own. A coroutine that awaits
# another coroutine continues immediately; `asyncio.gather` and futures need one or two iterations.
_IDLE_ITERATIONS = 4
# Minimum and maximum seconds between two checks of episodes that wait for something other than a turn
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.0005, 0.05
BLOCKING_SECONDS = 1.0  # that the steps of all episodes may take before a warning is logged
BLOCKED_EXTRA_SECONDS = 5.0  # after `workflow_timeout`, until code that blocks the event loop is interrupted
# Time limit that [`collect_async`] applies to code that blocks the event loop
_BLOCKING_LIMIT: contextvars.ContextVar[TimeLimit | None] = contextvars.ContextVar("marft_limit", default=None)
HEARTBEAT_SECONDS = 1.0  # of the event loop
_CLEANUP_SECONDS = 1.0  # that a cancelled workflow has


# Returns one turn per request, in order. An `EndOfEpisode` instead of a turn ends that episode.
AsyncAnswerFunction = Callable[[Sequence[Request]], Awaitable[Sequence["Turn | EndOfEpisode"]]]


def collect(
    workflow: RunsEpisodes,
    rows: Sequence[dict[str, Any]],
    context: TeamContext,
    answer: Callable[[Sequence[Request]], Sequence[Turn | EndOfEpisode]],  # as [`AsyncAnswerFunction`]
    reruns: Sequence[Rerun] | None = None,  # for each row; matching requests reuse its turns instead of generating
    # Maximum seconds for which an episode may wait for anything but a turn or a tool, or block the other episodes
    workflow_timeout: float | None = None,
    failures: dict[int, EpisodeError] | None = None,  # collects errors, by row index
) -> list[Episode]:
    """
    Run the workflow once on every row, all episodes concurrently, and return one episode per row, in order. Whenever
    all unfinished episodes wait for a turn, `answer` gets their requests in one call, in the order of the episodes. If
    the workflow raises an error, hangs, or ends without a turn, an [`EpisodeError`] ends all episodes. With
    `failures`, only this episode ends, without turns.
    """

    async def answer_async(requests: Sequence[Request]) -> Sequence[Turn | EndOfEpisode]:
        return answer(requests)

    collect_all = functools.partial(
        collect_async, workflow, rows, context, answer_async, reruns, workflow_timeout, failures, together=True
    )
    return run_to_completion(workflow, workflow_timeout, collect_all)


async def collect_async(
    workflow: RunsEpisodes,
    rows: Sequence[dict[str, Any]],
    context: TeamContext,
    answer: AsyncAnswerFunction,
    reruns: Sequence[Rerun] | None = None,
    workflow_timeout: float | None = None,
    failures: dict[int, EpisodeError] | None = None,
    make_step_context: Callable[[int], StepContext] | None = None,  # by episode; each step in user code has one
    # Whether all episodes wait for each other, so that one batch answers their requests. Parallel branches of an
    # episode always share a batch, so that turn indices and observations do not depend on generation time.
    together: bool = False,
) -> list[Episode]:
    """Asynchronous version of [`collect`]. Call it within [`limit_blocking_code`]."""
    limit = _BLOCKING_LIMIT.get()

    async def answer_unlimited(requests: Sequence[Request]) -> Sequence[Turn | EndOfEpisode]:
        # A function that answers for all episodes may block the event loop, for example while a local model generates
        with limit.paused() if limit is not None and together else contextlib.nullcontext():
            return await answer(requests)

    guard = EpisodeGuard(workflow, workflow_timeout, limit, failures, make_step_context)
    batch = _EpisodeBatch(rows, context, answer_unlimited, reruns, guard)
    indices = range(len(rows))
    return await batch.run([indices] if together else [[index] for index in indices])


def run_to_completion(
    workflow: RunsEpisodes, workflow_timeout: float | None, function: Callable[[], Coroutine[Any, Any, Result]]
) -> Result:
    """
    Run episodes, which `await function()` runs, from synchronous code. If an event loop already runs, as in a
    notebook, they run in another thread, where blocking code cannot be interrupted.
    """

    async def run_limited() -> Result:
        async with _run_heartbeat(limit):
            with apply_time_limit(limit):
                return await function()

    with _time_limit(workflow, workflow_timeout) as limit:
        return run_coroutine(run_limited)


@contextlib.asynccontextmanager
async def limit_blocking_code(
    workflow: RunsEpisodes, workflow_timeout: float | None
) -> AsyncIterator[TimeLimit | None]:
    """Limits code that blocks the event loop, within [`apply_time_limit`]. Different tasks may enter and exit it."""
    with _time_limit(workflow, workflow_timeout) as limit:
        async with _run_heartbeat(limit):
            yield limit


@contextlib.contextmanager
def apply_time_limit(limit: TimeLimit | None) -> Iterator[None]:
    reset_token = _BLOCKING_LIMIT.set(limit)
    try:
        yield
    finally:
        _BLOCKING_LIMIT.reset(reset_token)


def _time_limit(
    workflow: RunsEpisodes, workflow_timeout: float | None
) -> contextlib.AbstractContextManager[TimeLimit | None]:
    def message(where: str) -> str:
        return (
            f"The workflow `{type(workflow).__name__}` blocks the event loop: {where} has not returned for "
            f"{workflow_timeout:g} seconds, so no other episode can continue. Call slow functions with "
            "`await episode.call(function, ...)`, use `await asyncio.sleep(...)` instead of `time.sleep(...)`, or "
            "increase `workflow_timeout`."
        )

    return time_limit(None if workflow_timeout is None else workflow_timeout + BLOCKED_EXTRA_SECONDS, message)


@contextlib.asynccontextmanager
async def _run_heartbeat(limit: TimeLimit | None) -> AsyncIterator[None]:
    task = asyncio.ensure_future(_heartbeat(limit)) if limit is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _heartbeat(limit: TimeLimit) -> None:
    """Restart the time limit regularly while the event loop responds."""
    while True:
        limit.restart()
        await asyncio.sleep(HEARTBEAT_SECONDS)


class _EpisodeBatch:
    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        context: TeamContext,
        answer: AsyncAnswerFunction,
        reruns: Sequence[Rerun] | None,
        guard: EpisodeGuard,
    ):
        self._answer, self._reruns, self._guard = answer, reruns or (), guard
        self._pending: list[list[Request]] = [[] for _ in rows]  # by episode
        self._reply_functions = context.scripts
        self._episodes = [EpisodeState(row, index, self._request_turn, context) for index, row in enumerate(rows)]
        for state in self._episodes:
            state.is_rerun = reruns is not None
        self._tasks: list[asyncio.Task] = []
        self._began = time.monotonic()  # the first steps are taken right away
        self._not_awaited: set[int] = set()  # indices of episodes that the other episodes do not wait for

    async def _request_turn(self, request: Request) -> Turn:
        if request.agent in self._reply_functions:
            return await self._run_reply(request)
        request.waiter = asyncio.get_running_loop().create_future()
        self._pending[request.episode.index].append(request)
        request.episode.progress.count += 1
        return await request.waiter

    async def _run_reply(self, request: Request) -> Turn:
        recorded = self._find_recorded_turn(request)
        turn = self._get_recorded(request, recorded) or await self._reply_functions[request.agent](request)
        if isinstance(turn, EndOfEpisode):
            raise turn
        return self._add_turn(request, turn, recorded)

    def _find_recorded_turn(self, request: Request) -> RecordedTurn | None:
        return self._reruns[request.episode.index].find(request) if self._reruns else None

    def _get_recorded(self, request: Request, recorded: RecordedTurn | None) -> Turn | None:
        return self._reruns[request.episode.index].turn(recorded, request) if recorded is not None else None

    def _add_turn(self, request: Request, turn: Turn, recorded: RecordedTurn | None) -> Turn:
        turn = replace(turn, index=len(request.episode.turns))
        request.episode.add(turn, request)
        if recorded is not None:
            self._reruns[request.episode.index].add(turn, recorded)
        return turn

    async def run(self, groups: Sequence[Sequence[int]]) -> list[Episode]:
        """Run all episodes. The episodes of a group of indices wait for each other, so that requests share a batch."""
        is_over = asyncio.Event()
        # The task factory stays set: other batches of this loop may continue after this batch has ended
        asyncio.get_running_loop().set_task_factory(make_task)
        self._tasks = [asyncio.ensure_future(self._guard.run(episode, is_over)) for episode in self._episodes]
        drivers = [asyncio.ensure_future(self._drive(group)) for group in groups]
        try:
            if drivers:
                finished, _ = await asyncio.wait(drivers, return_when=asyncio.FIRST_EXCEPTION)
                for driver in drivers:  # the first that failed raises
                    if driver in finished:
                        driver.result()
            for index, task in enumerate(self._tasks):
                if index not in self._guard.failed:
                    task.result()
        finally:
            is_over.set()
            tasks = [*drivers, *self._tasks]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLEANUP_SECONDS)
            for task in tasks:
                _ = task.cancelled() or (task.done() and task.exception())  # retrieve the error, or asyncio logs it
        self._check_tasks()
        failed = self._guard.failed
        return [
            Episode(state.prompt, state.row, index, failure=str(failed[index])) if index in failed else state.record()
            for index, state in enumerate(self._episodes)
        ]

    def _check_tasks(self) -> None:
        """Report tasks that user code started and did not await: late turns as errors, running tasks as warnings."""
        workflow_name = self._guard.name
        for episode in self._episodes:
            if episode.num_late:
                error = EpisodeError(
                    f"A task that the workflow `{workflow_name}` started requested {episode.num_late} turns after the "
                    f"end of episode {episode.index}, on the prompt {shorten(episode.prompt)}. Await the task in "
                    "`run`.",
                    episode.index,
                )
                self._guard.note(error)
        # If the context window was full, branches may still be running
        complete = [episode for episode in self._episodes if not episode.overflowed]
        running = {task_name for episode in complete for task, task_name in episode.started if not task.done()}
        for task_name in sorted(running):
            _warn_once(
                f"The task `{task_name}` that the workflow `{workflow_name}` started is still running after the end "
                "of its episode. Await it in `run`. Its later results are ignored."
            )

    async def _drive(self, group: Sequence[int]) -> None:
        self._check_blocking(self._began)  # the first steps
        hang_detector, progress = HangDetector(self._guard), Progress()
        for index in group:
            self._episodes[index].progress = progress
        while not all(self._tasks[index].done() for index in group):
            try:
                await self._run_until_waiting(group, progress, hang_detector)
            except EpisodeError as error:  # an episode hangs
                self._guard.note(error, replace=True)
                self._tasks[cast(int, error.episode)].cancel()
            for index in group:
                if _has_failed(task := self._tasks[index]):
                    if not isinstance(failure := task.exception(), EpisodeError):
                        task.result()  # raises
                    else:
                        self._guard.note(failure)
            await self._answer_all(self._take_requests(group))

    def _take_requests(self, group: Sequence[int]) -> list[Request]:
        batch = []
        for index in group:
            # If a branch ended the episode, the requests of the other branches are cancelled or obsolete
            has_ended = self._tasks[index].done()
            valid = [request for request in self._pending[index] if not request.waiter.done() and not has_ended]
            batch += sorted(valid, key=lambda request: request.order)
            self._pending[index].clear()
        return batch

    async def _run_until_waiting(self, group: Sequence[int], progress: Progress, hang_detector: HangDetector) -> None:
        idle_iterations, poll_seconds, pending_since = 0, _MIN_POLL_SECONDS, math.inf
        hang_detector.begin()
        while True:
            count, start = progress.count, time.monotonic()
            await asyncio.sleep(0)
            self._check_blocking(start)
            # After a function returns, its branch needs a few iterations to request a turn
            idle_iterations = idle_iterations + 1 if progress.count == count else 0
            if idle_iterations < _IDLE_ITERATIONS:
                continue
            # Wait for the tools of all episodes in the group, so that batches do not depend on how long tools take
            requesting = [index for index in group if any(not it.waiter.done() for it in self._pending[index])]
            self._not_awaited.difference_update(requesting)
            unfinished = [index for index in group if not self._tasks[index].done()]
            started = [index for index in unfinished if not self._episodes[index].is_queued]
            blocked = [index for index in started if self._episodes[index].busy or index not in requesting]
            pending_since = min(pending_since, time.monotonic()) if requesting else math.inf
            must_stop = not self._guard.tolerates and any(_has_failed(self._tasks[index]) for index in group)
            if must_stop or (not blocked and (requesting or not unfinished)):
                return
            hang_detector.check(self._episodes, blocked)
            if requesting and self._not_awaited.issuperset(blocked):
                return
            max_wait = self._guard.max_wait_for_episodes
            if max_wait is not None and time.monotonic() - pending_since > max_wait:
                self._stop_waiting_for(blocked, max_wait)
                return
            # A workflow awaits something else, such as a web service: check again after a short pause
            tasks = [self._tasks[index] for index in blocked or unfinished]
            await asyncio.wait(tasks, timeout=poll_seconds, return_when=asyncio.FIRST_COMPLETED)
            idle_iterations, poll_seconds = 0, min(2 * poll_seconds, _MAX_POLL_SECONDS)

    def _check_blocking(self, start: float) -> None:
        """Warn once if the steps that all episodes have taken since `start` took long."""
        if time.monotonic() - start > max(BLOCKING_SECONDS, 0.05 * len(self._episodes)):
            _warn_once(
                f"Steps of the workflow `{self._guard.name}` block the other episodes for more than a second. Use "
                "`await asyncio.sleep(...)`, and call slow functions with `await episode.call(function, ...)`."
            )

    def _stop_waiting_for(self, blocked: Sequence[int], seconds: float) -> None:
        self._not_awaited.update(blocked)
        for index in blocked:
            self._episodes[index].count("held_up")
        _warn_once(
            f"Episodes of the workflow `{self._guard.name}` have waited {seconds:g} seconds for another episode and "
            "now continue without it, so results depend on timing. Check whether the episodes wait for each other, "
            "for a thread pool or for a shared limit. Otherwise, increase `max_wait_for_episodes`."
        )

    async def _answer_all(self, batch: list[Request]) -> None:
        pairs: list[tuple[Request, RecordedTurn | None]] = []
        num_earlier: Counter[int] = Counter()  # in the batch, by episode
        for request in batch:
            recorded, index = self._find_recorded_turn(request), request.episode.index
            request.by_reference = recorded is not None and recorded.turn is None
            request.number = len(request.episode.turns) + num_earlier[index]
            pairs.append((request, recorded))
            num_earlier[index] += 1
        to_generate = [request for request, recorded in pairs if recorded is None or recorded.turn is None]
        generated = iter(await self._answer(to_generate)) if to_generate else iter(())
        await asyncio.sleep(0)  # let pending cancellations take effect first
        for request, recorded in pairs:
            turn = self._get_recorded(request, recorded) or next(generated)
            if request.waiter.done():  # the episode was cancelled during generation
                continue
            if isinstance(turn, EndOfEpisode):
                request.waiter.set_exception(turn)
            else:
                request.waiter.set_result(self._add_turn(request, turn, recorded))


def _has_failed(task: asyncio.Task) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


# ---- Without a model ----


def rehearse(
    workflow: RunsEpisodes,
    agents: Sequence[str],
    reply: Callable[[str, Sequence[Seen]], str | ToolCall | Sequence[ToolCall]],
    prompt: str | Messages = "",
    tools: Mapping[str, Sequence[Callable]] | None = None,
    **row,
) -> Episode:
    """
    Run a workflow on one prompt without a model. A function supplies the text of every turn.

    Args:
        workflow ([`Workflow`]):
            The workflow to try.
        agents (`Sequence[str]`):
            Names of the agents of the team.
        reply (`Callable`):
            Function `reply(agent, seen)` that returns the text of a turn, or its [`ToolCall`]s. `seen` contains the
            turns and the feedback shown to the agent.
        prompt (`str` or `list[dict]`, *optional*):
            The prompt of the episode.
        tools (`Mapping[str, Sequence[Callable]]`, *optional*):
            Functions that each agent may call, by agent name.
        row:
            Other columns of the dataset row.

    Returns: the finished [`Episode`].

    Example:

    ```python
    >>> episode = rehearse(Redraft(), ["writer", "critic"], lambda agent, seen: "OK")
    >>> [turn.agent for turn in episode.turns]
    ['writer', 'critic']
    ```
    """

    def complete_request(request: Request) -> Turn | EndOfEpisode:
        try:
            answer = reply(request.agent, request.seen)
        except EndOfEpisode as end:  # as in training, an episode may be ended with the turns it has
            return end
        if isinstance(answer, str):
            return request.make_turn(answer)
        if not isinstance(answer, (ToolCall, Sequence)):
            raise TypeError(f"`reply(agent, seen)` must return the text of a turn, got {answer!r}.")
        calls: tuple[Any, ...] = (answer,) if isinstance(answer, ToolCall) else tuple(answer)
        return request.make_turn(str(answer), tool_calls=calls if request.functions else ())

    if isinstance(workflow, type):
        raise TypeError(f"`rehearse` takes a workflow object. Write `{workflow.__name__}()`.")
    if isinstance(agents, str) or not callable(reply):
        raise TypeError("`rehearse(...)` takes a list of names and a function `reply(agent, seen)`.")
    workflow.check(agents)
    context = TeamContext(tuple(agents), dict(tools or {}))
    rows = [{"prompt": prompt, **row}]
    try:
        (episode,) = collect(workflow, rows, context, lambda requests: list(map(complete_request, requests)))
    except EpisodeError as error:
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise
    return episode
