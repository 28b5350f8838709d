# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Many questions at a time in an event loop, whose turns are sampled together in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..episodes.records import Episode, Messages
from ..prompts.builder import Observation
from ..rollout.generator import Generator, SampledTurn
from ..rollout.runner import EpisodeRunner, EpisodeSession, RunMode, SeedKeys
from ..system.event_loop import finished
from ..workflows import Workflow
from .events import Answer, Event, Narrator


_PAUSE = 0.002  # seconds that the thread waits for further turns when it has had nothing to do


class _GenerationJob(NamedTuple):
    observed: Observation
    greedy: bool
    sampling: Mapping[str, float] | None
    loop: asyncio.AbstractEventLoop
    turn: asyncio.Future[SampledTurn]

    @property
    def kind(self) -> tuple:
        """Sampling settings, which the turns of one call of the generator share."""
        return self.greedy, tuple(sorted((self.sampling or {}).items()))

    @property
    def is_gone(self) -> bool:
        return self.observed.live is not None and self.observed.live.is_gone

    def settle(self, result: SampledTurn | BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # its event loop is closed
            self.loop.call_soon_threadsafe(_settle, self.turn, result)


class DeviceThread(Generator):
    """Samples together, in a thread, the turns of independent episodes that wait when the model is free."""

    batches = False

    def __init__(
        self,
        generator: Generator,
        acting: Callable[[], contextlib.AbstractContextManager[None]],  # around calls of the generator
        most: Callable[[int], int],  # `most(tokens)`: number of turns of `tokens` tokens that fit into memory
    ):
        self._generator, self._acting, self._most = generator, acting, most
        self._jobs: queue.SimpleQueue[_GenerationJob | None] = queue.SimpleQueue()
        self._lock, self._users = threading.Lock(), 0

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        return self._generator.holds_stop(agent, ids)

    def settings(self, agent: str) -> dict[str, Any]:
        return self._generator.settings(agent)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                threading.Thread(target=self._work, name="marft-device", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._jobs.put(None)

    async def generate(
        self, observed: Sequence[Observation], greedy: bool = False, sampling: Mapping[str, float] | None = None
    ) -> list[SampledTurn]:
        loop = asyncio.get_running_loop()
        jobs = [_GenerationJob(item, greedy, sampling, loop, loop.create_future()) for item in observed]
        for job in jobs:
            self._jobs.put(job)
        return await asyncio.gather(*[job.turn for job in jobs])

    # ---- In the thread ----

    def _work(self) -> None:
        while (first := self._jobs.get()) is not None:
            time.sleep(_PAUSE)
            waiting: list[_GenerationJob | None] = [first]
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self._jobs.get_nowait())
            jobs = [job for job in waiting if job is not None]
            while jobs:
                try:
                    batch = self._next_batch(jobs)
                except Exception as error:
                    for job in jobs:
                        job.settle(error)
                    break
                jobs = [job for job in jobs if job not in batch]
                self._sample(batch)
            if None in waiting:
                for _ in range(waiting.count(None) - 1):  # ends of other threads
                    self._jobs.put(None)
                return

    def _next_batch(self, jobs: Sequence[_GenerationJob]) -> list[_GenerationJob]:
        """The longest waiting turn, and as many others of its kind as there is memory for."""
        alike = [job for job in jobs if job.kind == jobs[0].kind]
        limits = [self._generator.settings(job.observed.agent)["max_new_tokens"] for job in alike]
        lengths = [len(job.observed.ids) + int(limit) for job, limit in zip(alike, limits, strict=True)]
        count = next((n for n in range(len(alike), 1, -1) if n <= self._most(max(lengths[:n]))), 1)
        return alike[:count]

    def _sample(self, batch: Sequence[_GenerationJob]) -> None:
        batch = [job for job in batch if not job.is_gone]
        if not batch:
            return
        observed, (first, *_) = [job.observed for job in batch], batch
        results: Sequence[SampledTurn | BaseException]
        try:
            with self._acting():
                results = finished(self._generator.generate(observed, greedy=first.greedy, sampling=first.sampling))
        except torch.OutOfMemoryError as error:
            if len(batch) > 1:  # what is free may have been taken by others since
                half = len(batch) // 2
                self._sample(batch[:half])
                self._sample(batch[half:])
                return
            results = [error]
        except BaseException as error:
            results = [error] * len(batch)
        for job, result in zip(batch, results, strict=True):
            job.settle(result)


def _settle(turn: asyncio.Future[SampledTurn], result: SampledTurn | BaseException) -> None:
    if turn.done():  # nobody waits for it any more
        return
    if isinstance(result, BaseException):
        turn.set_exception(result)
    else:
        turn.set_result(result)


@dataclass(frozen=True)
class Question:
    """Rows for a team to answer, and how to answer them."""

    rows: Sequence[dict[str, Any]]  # dataset rows with a `prompt`, an episode for each
    seed: int  # answers depend on it, and not on what is answered at the same time
    options: Mapping[str, Any] = field(default_factory=dict)  # of the generator: `greedy`, or `sampling`
    workflow: Workflow | None = None
    max_tokens: int | None = None  # of a turn, where it is below the limit of its agent
    max_turns: int | None = None
    schema: Mapping[str, Any] | None = None  # JSON schema of turns, where the generator can constrain decoding


class _Connection:
    """A connection that the tasks of an event loop share."""

    def __init__(self) -> None:
        self.users = 0
        self.opening = asyncio.Lock()
        self.stack = contextlib.AsyncExitStack()
        self.session: EpisodeSession | None = None


class LiveTeam:
    """Runs any number of independent episodes at the same time in the caller's event loop, in any number of tasks."""

    def __init__(self, runner: EpisodeRunner, generator: Generator):
        self._runner, self._generator = runner, generator
        self._connections = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection]()

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[EpisodeSession]:
        """Keep the connections to servers, or the thread of the model, which each call of `run` makes otherwise."""
        loop = asyncio.get_running_loop()
        connection = self._connections.setdefault(loop, _Connection())
        connection.users += 1
        try:
            async with connection.opening:
                if connection.session is None:
                    runner = self._runner.changed(RunMode(is_concurrent=True), generator=self._generator)
                    self._generator.publish(alone=True)
                    connection.session = await connection.stack.enter_async_context(runner.session())
            yield connection.session
        finally:
            connection.users -= 1
            if not connection.users:
                self._connections.pop(loop, None)
                await connection.stack.aclose()

    async def count_tokens(self, agent: str, messages: Messages, tools: Sequence[Any] = ()) -> int:
        return await asyncio.to_thread(self._runner.count_tokens, agent, messages, tools)

    async def run(self, question: Question, on_event: Callable[[Event], None] | None = None) -> list[Episode]:
        """Return the episodes, in order. `on_event` needs a question with one row. Canceling the task ends turns."""
        narrator = Narrator(self._runner.prompts, on_event, question.max_tokens, question.schema)
        runner = self._runner.changed(
            RunMode(dict(question.options), is_concurrent=True, listener=narrator),
            generator=self._generator,
            workflow=question.workflow,
            max_turns=question.max_turns,
        )
        key = SeedKeys("seeded", question.seed).next(0)
        async with self.connected() as session:
            try:
                return await session.run(question.rows, key, runner=runner)
            finally:
                narrator.leave()

    async def stream(self, question: Question) -> AsyncIterator[Event]:
        """Events of an episode, the last of them an [`Answer`]. Closing the stream ends the episode."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        task = asyncio.ensure_future(self.run(question, events.put_nowait))
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            (episode,) = await task
            yield Answer(episode.answer.text if episode.answer is not None else "", episode)
        finally:
            task.cancel()
            await asyncio.wait([task])
            _ = task.cancelled() or task.exception()  # else asyncio logs it


def from_thread(events: Callable[[], AsyncIterator[Event]]) -> Iterator[Event]:
    """Events of an asynchronous stream for synchronous code. The stream runs in a thread."""
    arrived: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
    begun: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = queue.SimpleQueue()

    async def listen() -> None:
        begun.put((asyncio.get_running_loop(), asyncio.current_task()))  # type: ignore[arg-type]
        async with contextlib.aclosing(events()) as stream:  # type: ignore[type-var]
            async for event in stream:
                arrived.put(event)

    def run() -> None:
        try:
            asyncio.run(listen())
            arrived.put(None)
        except BaseException as error:
            arrived.put(error)

    thread = threading.Thread(target=run, name="marft-stream", daemon=True)
    thread.start()
    loop, task = begun.get()
    try:
        while (event := arrived.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
