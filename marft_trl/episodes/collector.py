# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Runs the workflow on many rows at once and returns the finished episodes."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ..system.event_loop import Result, StepContext, run_coroutine, surrounding
from ..system.watchdog import TimeLimit, time_limit
from .guard import EpisodeError, EpisodeGuard, HangDetector, RunsEpisodes, brief
from .records import Completion, EndOfEpisode, Episode, Function, RequestedTurn, Seen, TeamContext, Turn, TurnRequest
from .rerun import Found, Rerun
from .state import EpisodeState


logger = logging.getLogger(__name__)


# Number of rounds of the event loop without a new request after which no episode can continue on its own. A coroutine
# that awaits another one continues immediately; `asyncio.gather` and futures need one or two rounds.
_QUIET_ROUNDS = 4
# Seconds between two checks of episodes that wait for something other than a turn
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
# Seconds after which code that blocks the event loop is interrupted, beyond the patience with code that waits
BLOCKED_EXTRA_SECONDS = 5.0
# The time limit of code that blocks the event loop, in [`collecting`]
_LIMIT: contextvars.ContextVar[TimeLimit | None] = contextvars.ContextVar("marft_limit", default=None)
# Seconds between two signs of life of the event loop
HEARTBEAT_SECONDS = 1.0
# Maximum time in seconds for the clean-up of a cancelled workflow
_CLEAN_UP = 1.0


@dataclass(frozen=True, eq=False)
class Request:
    """
    A turn that an episode is waiting for.

    Args:
        fed (`int`): number of turns that had gone into the environment when it was asked for.
        by_reference (`bool`): whether the reference of the agent is to take the turn.
        number (`int`): position that the turn will have in its episode, if those asked for before it are taken.
    """

    episode: EpisodeState
    ask: TurnRequest
    waiter: asyncio.Future[Turn]
    fed: int = 0
    by_reference: bool = False
    number: int = 0

    @property
    def agent(self) -> str:
        return self.ask.agent

    @property
    def seen(self) -> tuple[Seen, ...]:
        return self.ask.seen

    @property
    def after(self) -> Turn | None:
        return self.ask.after

    @property
    def functions(self) -> tuple[Function, ...]:
        return self.ask.functions

    @property
    def given(self) -> RequestedTurn | None:
        return self.ask.given

    def completed(self, text: str, seen: Sequence[Seen] | None = None, **fields: Any) -> Completion:
        """
        A completion with a text.

        Args:
            seen (`Sequence[Turn | Feedback]`, *optional*, defaults to what was asked for): items that were shown.
            fields: other fields of the [`Completion`].
        """
        return Completion(text, seen=self.seen if seen is None else tuple(seen), **fields)

    def turn(self, completion: Completion) -> Turn:
        """The turn that the request gets with a completion, as the next one of its episode."""
        return Turn.of(completion, self.agent, len(self.episode.turns), self.fed, self.ask.is_final)


# Answers requests, in order. An `EndOfEpisode` in place of a completion ends that episode.
Answer = Callable[[Sequence[Request]], Sequence["Completion | EndOfEpisode"]]
AsyncAnswer = Callable[[Sequence[Request]], Awaitable[Sequence["Completion | EndOfEpisode"]]]


def collect(
    workflow: RunsEpisodes,
    rows: Sequence[dict[str, Any]],
    setting: TeamContext,
    answer: Answer,
    reruns: Sequence[Rerun] | None = None,
    patience: float | None = None,
    failures: dict[int, EpisodeError] | None = None,
) -> list[Episode]:
    """
    Run the workflow once on every row. All episodes run concurrently.

    Whenever all unfinished episodes wait for a turn, their requests are answered together, in the order of the
    episodes, so that agents and parallel branches share batches.

    Args:
        workflow ([`Workflow`]):
            Decides who acts next and what each sees.
        rows (`Sequence[dict]`):
            Dataset rows with a `prompt`. Each row gives one episode.
        setting ([`TeamContext`]):
            Names of the agents, the functions that they may call, and the limits of these calls.
        answer (`Callable`):
            Turns requests into completions, in order.
        reruns (`Sequence[Rerun]`, *optional*):
            For each row, a recorded episode whose turns are taken where they fit. They cost no generation.
        patience (`float`, *optional*):
            Seconds that an episode waits for a function that it has called, or for anything else that is neither a
            turn nor a tool, or that its code blocks the others. Defaults to no limit.
        failures (`dict[int, EpisodeError]`, *optional*):
            Gets the errors of episodes that fail, by their position, while the others go on. If left out, the first
            error ends all.

    Returns: one finished episode per row, in order; one that failed has no turns.

    Raises:
        EpisodeError: the workflow raised, hangs, or ended without a single turn.
    """

    async def answered(requests: Sequence[Request]) -> Sequence[Completion | EndOfEpisode]:
        return answer(requests)

    async def collected() -> list[Episode]:
        return await collecting(workflow, rows, setting, answered, reruns, patience, failures, together=True)

    return run_unblocked(workflow, patience, collected)


async def collecting(
    workflow: RunsEpisodes,
    rows: Sequence[dict[str, Any]],
    setting: TeamContext,
    answer: AsyncAnswer,
    reruns: Sequence[Rerun] | None = None,
    patience: float | None = None,
    failures: dict[int, EpisodeError] | None = None,
    around: Callable[[int], StepContext] | None = None,
    together: bool = False,
) -> list[Episode]:
    """
    Like [`collect`], within an event loop and [`limiting`].

    Args:
        workflow, rows, setting, reruns, patience, failures: as for [`collect`].
        around (`Callable`, *optional*): `around(index)` makes what makes a context manager around each piece of users'
            code of an episode that runs without waiting.
        together (`bool`, *optional*, defaults to `False`): whether the requests of all episodes are answered together.
            Else no episode waits for another one. Within an episode, the requests of parallel branches are still
            answered together, so that turns have the same numbers, and agents are shown the same, however long answers
            take.

    Returns: one finished episode per row, in order; one that failed has no turns.

    Raises:
        EpisodeError: the workflow raised, hangs, or ended without a single turn.
    """
    limit = _LIMIT.get()

    async def answered(requests: Sequence[Request]) -> Sequence[Completion | EndOfEpisode]:
        # Whoever answers for all may block the event loop meanwhile, with a model for instance
        with limit.paused() if limit is not None and together else contextlib.nullcontext():
            return await answer(requests)

    guard = EpisodeGuard(workflow, patience, limit, failures, around)
    collection = _Collection(rows, setting, answered, reruns, guard)
    positions = range(len(rows))
    return await collection.run([positions] if together else [[index] for index in positions])


def run_unblocked(
    workflow: RunsEpisodes, patience: float | None, function: Callable[[], Coroutine[Any, Any, Result]]
) -> Result:
    """
    Run episodes to their end, from code that is not asynchronous.

    The time limit of code that blocks is that of the calling thread. If a loop already runs there, as in a notebook,
    the episodes run in another thread, in which nothing that blocks could be interrupted.

    Args:
        function (`Callable`): `await function()` runs the episodes.
    """

    async def limited() -> Result:
        async with _beating(limit):
            with limited_by(limit):
                return await function()

    with _time_limit(workflow, patience) as limit:
        return run_coroutine(limited)


@contextlib.asynccontextmanager
async def limiting(workflow: RunsEpisodes, patience: float | None) -> AsyncIterator[TimeLimit | None]:
    """
    Asynchronous context manager: within [`collecting`] and [`limited_by`], in any task of the event loop, code that
    blocks the loop has a time limit. It may be left by another task than it was entered by.
    """
    with _time_limit(workflow, patience) as limit:
        async with _beating(limit):
            yield limit


@contextlib.contextmanager
def limited_by(limit: TimeLimit | None) -> Iterator[None]:
    """Context manager: [`collecting`] takes this time limit for code that blocks."""
    before = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(before)


def _time_limit(workflow: RunsEpisodes, patience: float | None) -> contextlib.AbstractContextManager[TimeLimit | None]:
    blocks = functools.partial(_blocks, workflow, patience)
    return time_limit(None if patience is None else patience + BLOCKED_EXTRA_SECONDS, blocks)


@contextlib.asynccontextmanager
async def _beating(limit: TimeLimit | None) -> AsyncIterator[None]:
    beats = asyncio.ensure_future(_heartbeat(limit)) if limit is not None else None
    try:
        yield
    finally:
        if beats is not None:
            beats.cancel()


async def _heartbeat(limit: TimeLimit) -> None:
    """Restart a time limit as long as nothing blocks the event loop."""
    while True:
        limit.restart()
        await asyncio.sleep(HEARTBEAT_SECONDS)


def _blocks(workflow: RunsEpisodes, patience: float | None, where: str) -> str:
    return (
        f"The workflow `{type(workflow).__name__}` blocks: {where} has not returned for {patience:g} seconds, so no "
        "other episode can go on. Call functions that take long with `await episode.call(function, ...)`, await "
        "`asyncio.sleep` in place of `time.sleep`, or set a larger `workflow_timeout`."
    )


class _Collection:
    """Episodes that run at the same time."""

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        setting: TeamContext,
        answer: AsyncAnswer,
        reruns: Sequence[Rerun] | None,
        guard: EpisodeGuard,
    ):
        self._answer, self._reruns, self._guard = answer, reruns, guard
        self._waiting: list[list[Request]] = [[] for _ in rows]  # by episode
        self._scripts = setting.scripts
        copies = [item.copies for item in reruns] if reruns is not None else [None] * len(rows)
        self._episodes = [
            EpisodeState(row, index, self._speak, setting, value)
            for index, (row, value) in enumerate(zip(rows, copies, strict=True))
        ]
        self._tasks: list[asyncio.Task] = []
        self._left: set[int] = set()  # episodes that the others do not wait for

    async def _speak(self, episode: EpisodeState, ask: TurnRequest) -> Turn:
        waiter: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        request = Request(episode, ask, waiter, fed=len(episode.fed))
        if ask.agent in self._scripts:
            return await self._write(request)
        self._waiting[episode.index].append(request)
        return await waiter

    async def _write(self, request: Request) -> Turn:
        """The turn of an agent whose turns a function writes. It waits for no batch."""
        found = self._find(request)
        completion = self._recorded(request, found) or await self._scripts[request.agent](request)
        if isinstance(completion, EndOfEpisode):
            raise completion
        return self._taken(request, completion, found)

    def _find(self, request: Request) -> Found | None:
        """What was recorded for a request of a re-run."""
        return self._reruns[request.episode.index].find(request.ask) if self._reruns is not None else None

    def _recorded(self, request: Request, found: Found | None) -> Completion | None:
        """The recorded completion of a request, if it has one."""
        if self._reruns is None or found is None:
            return None
        return self._reruns[request.episode.index].completion(found, request.ask)

    def _taken(self, request: Request, completion: Completion, found: Found | None) -> Turn:
        """The turn of a request, which its episode has now."""
        turn = request.turn(completion)
        request.episode.add(turn, request.ask)
        if self._reruns is not None and found is not None:
            self._reruns[request.episode.index].add(turn, found)
        return turn

    async def run(self, groups: Sequence[Sequence[int]]) -> list[Episode]:
        """
        Run all episodes.

        Args:
            groups (`Sequence[Sequence[int]]`): positions of episodes. Episodes of a group wait for one another, and
                their requests are answered together.
        """
        is_over = asyncio.Event()
        # For good: other batches of this loop may go on when this one has ended
        asyncio.get_running_loop().set_task_factory(surrounding)
        self._tasks = [asyncio.ensure_future(self._guard.run(episode, is_over)) for episode in self._episodes]
        drivers = [asyncio.ensure_future(self._drive(group)) for group in groups]
        try:
            await _all_or_first_error(drivers)
            for index, task in enumerate(self._tasks):
                if index not in self._guard.failed:
                    task.result()
        finally:
            is_over.set()
            tasks = [*drivers, *self._tasks]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLEAN_UP)
            for task in tasks:
                _ = task.cancelled() or (task.done() and task.exception())  # else asyncio logs it
        self._check_tasks()
        failed = self._guard.failed
        return [
            Episode(item.prompt, item.row, index, failure=str(failed[index])) if index in failed else item.record()
            for index, item in enumerate(self._episodes)
        ]

    def _check_tasks(self) -> None:
        """What tasks did that users' code has started, and that nobody has waited for."""
        name = self._guard.name
        for episode in self._episodes:
            if episode.num_late:
                error = EpisodeError(
                    f"A task that the workflow `{name}` started asked for {episode.num_late} turns after episode "
                    f"{episode.index} had ended, on the prompt {brief(episode.prompt)}. Await the task in `run`.",
                    episode.index,
                )
                self._guard.note(error)
        ended = [episode for episode in self._episodes if not episode.overflowed]
        for what in sorted({what for episode in ended for task, what in episode.started if not task.done()}):
            _say_once(
                f"A task that the workflow `{name}` started has not ended with its episode: {what}. Await it in "
                "`run`: what it does later does not count."
            )

    async def _drive(self, group: Sequence[int]) -> None:
        watch = self._guard.watch()
        while not all(self._tasks[index].done() for index in group):
            try:
                await self._settle(group, watch)
            except EpisodeError as error:  # an episode hangs
                self._guard.note(error, replace=True)
                self._tasks[cast(int, error.episode)].cancel()
            for index in group:
                if _has_failed(task := self._tasks[index]):
                    if not isinstance(failed := task.exception(), EpisodeError):
                        task.result()  # raises
                    else:
                        self._guard.note(failed)
            await self._answer_all(self._take(group))

    def _take(self, group: Sequence[int]) -> list[Request]:
        """Take the requests that are waiting, in the order of the episodes."""
        batch = []
        for index in group:
            # If a branch has ended its episode, requests of its other branches are cancelled or obsolete
            live = [item for item in self._waiting[index] if not item.waiter.done() and not self._tasks[index].done()]
            batch += sorted(live, key=lambda request: request.ask.order)
            self._waiting[index].clear()
        return batch

    async def _settle(self, group: Sequence[int], watch: HangDetector) -> None:
        """Run the event loop until all unfinished episodes wait for a turn, or an episode has failed."""
        quiet, pause, since = 0, _SHORTEST_PAUSE, math.inf
        watch.begin()
        while True:
            known = self._state_of(group)
            await asyncio.sleep(0)
            # A function that has just come back takes some rounds until its branch requests a turn
            quiet = quiet + 1 if self._state_of(group) == known else 0
            if quiet < _QUIET_ROUNDS:
                continue
            # Wait for the tools of all alternatives, so that batches do not depend on how long tools take
            asks = [index for index in group if self._asks(index)]
            self._left.difference_update(asks)
            unfinished = [index for index in group if not self._tasks[index].done()]
            begun = [index for index in unfinished if not self._episodes[index].is_queued]
            elsewhere = [index for index in begun if self._episodes[index].busy or index not in asks]
            since = min(since, time.monotonic()) if asks else math.inf
            fails = not self._guard.tolerates and any(_has_failed(self._tasks[index]) for index in group)
            if fails or (not elsewhere and (asks or not unfinished)):
                return
            watch.look(self._episodes, elsewhere)
            if asks and self._left.issuperset(elsewhere):
                return
            if self._guard.holds_up is not None and time.monotonic() - since > self._guard.holds_up:
                self._go_on_without(elsewhere, self._guard.holds_up)
                return
            # A workflow awaits something else, such as a web service: check again after a short pause.
            running = [self._tasks[index] for index in elsewhere or unfinished]
            await asyncio.wait(running, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            quiet, pause = 0, min(2 * pause, _LONGEST_PAUSE)

    def _asks(self, index: int) -> bool:
        """Whether an episode waits for a turn."""
        return any(not request.waiter.done() for request in self._waiting[index])

    def _go_on_without(self, elsewhere: Sequence[int], seconds: float) -> None:
        """The others wait for these episodes no more, until they ask for a turn again."""
        self._left.update(elsewhere)
        for index in elsewhere:
            self._episodes[index].count("held_up")
        _say_once(
            f"Episodes of `{self._guard.name}` have waited for another one for {seconds:g} seconds, and go on without "
            "it, so results depend on how long it takes. Do they wait for one another, for a pool of threads or for a "
            "limit that they share? Else `holds_up` sets how long they wait."
        )

    def _state_of(self, group: Sequence[int]) -> tuple[int, int, int]:
        """Numbers of requests that wait, of functions that are running, and of episodes that have not begun."""
        episodes = [self._episodes[index] for index in group]
        waiting = sum(len(self._waiting[index]) for index in group)
        return waiting, sum(episode.busy for episode in episodes), sum(item.is_queued for item in episodes)

    async def _answer_all(self, batch: list[Request]) -> None:
        """Answer requests in order, with recorded completions if there are any, else with generated ones."""
        found = [self._find(request) for request in batch]
        earlier: Counter[int] = Counter()  # by episode
        for position, (request, known) in enumerate(zip(batch, found, strict=True)):
            index, by_reference = request.episode.index, known is not None and known.completion is None
            number = len(request.episode.turns) + earlier[index]
            batch[position] = replace(request, by_reference=by_reference, number=number)
            earlier[index] += 1
        pairs = list(zip(batch, found, strict=True))
        asked = [request for request, known in pairs if known is None or known.completion is None]
        answers = iter(await self._answer(asked)) if asked else iter(())
        await asyncio.sleep(0)  # what others have cancelled meanwhile is not noted
        for request, known in pairs:
            completion = self._recorded(request, known) or next(answers)
            if request.waiter.done():  # its episode was cancelled meanwhile
                continue
            if isinstance(completion, EndOfEpisode):
                request.waiter.set_exception(completion)
                continue
            request.waiter.set_result(self._taken(request, completion, known))


async def _all_or_first_error(tasks: Sequence[asyncio.Task]) -> None:
    """Wait for all tasks, or until one fails. Of those that have failed by then, the first one's error is raised."""
    if tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()


def _has_failed(task: asyncio.Task) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)
