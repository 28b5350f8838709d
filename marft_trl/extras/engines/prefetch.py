# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Episodes of later generation batches, sampled by a thread while training runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

from ...config.team_setup import RunContext
from ...episodes.records import Episode
from ...learning.adapter_updates import Schedule
from ...rollout.failures import Failures, run_episodes
from ...rollout.runner import EpisodeRunner, EpisodeSession
from ...seams.trl import TrlState
from .vllm_generator import VLLMGenerator


class UpcomingRows:
    """Reads dataloaders ahead by a number of generation batches, in order, and never beyond the end of a pass."""

    def __init__(self, state: TrlState, schedule: Schedule, batches: int):
        self._state, self._schedule, self._batches = state, schedule, batches
        self._source: Iterator | None = None
        self._reader: Iterator = iter(())
        self._ahead: dict[int, Any] = {}  # rows that were read in this pass, by their micro-step

    def over(self, iterator: Iterator) -> Iterator:
        """The iterator of a pass over the dataset, read ahead."""
        if self._source is not iterator:
            depth = self._batches * self._schedule.generate_every
            self._source, self._ahead = iterator, {}
            self._reader = _read_ahead(iterator, self._state.micro_step, depth, self._ahead)
        return self._reader

    def number(self) -> int:
        """Number of the generation batch that is due."""
        return self._state.micro_step // self._schedule.generate_every

    def upcoming(self) -> dict[int, list[dict[str, Any]]]:
        """Known rows of later generation batches, by their numbers."""
        for step in [step for step in self._ahead if step <= self._state.micro_step]:
            del self._ahead[step]
        due = filter(self._schedule.is_due, self._ahead)
        return {step // self._schedule.generate_every: self._ahead[step] for step in due}


def _read_ahead(iterator: Iterator, first: int, depth: int, ahead: dict[int, Any]) -> Iterator:
    """Yield rows once `depth` later ones are in `ahead`, by micro-steps that count from `first`."""
    buffer: deque[Any] = deque()
    for step, rows in enumerate(iterator, first):
        ahead[step] = rows
        buffer.append(rows)
        if len(buffer) > depth:
            yield buffer.popleft()
    yield from buffer


# Seconds that the thread has to end
_JOIN_SECONDS = 10.0


class _PrefetchJob(NamedTuple):
    """A generation batch, sampled from the weights of a pin."""

    rows: Sequence[dict[str, Any]]
    key: tuple
    pin: Any
    failures: Failures | None
    episodes: Future[list[Episode]]


class Prefetcher:
    """
    Episodes of generation batches on servers, begun before they are due.

    When batch `k` is due, the weights are published, and batch `k + max_staleness` begins with them. So each batch is
    sampled from the weights of `max_staleness` publications ago, the first ones from the first weights, no matter how
    long rollouts and training take.
    """

    def __init__(self, run: RunContext, runner: EpisodeRunner, look_ahead: UpcomingRows, failures: Failures | None):
        self._runner, self._look_ahead, self._staleness = runner, look_ahead, int(run.args.max_staleness)
        self._generator = cast(VLLMGenerator, runner.generator)
        self._failures, self._processes = failures, run.processes
        self._jobs: dict[int, _PrefetchJob] = {}
        self._worker: _PrefetchThread | None = None

    def episodes(self, rows: Sequence[dict[str, Any]]) -> list[Episode]:
        """The episodes of the batch that is due. Later batches begin. Raises an `EpisodeError` if one fails."""
        now = self._look_ahead.number()
        self._generator.publish()
        with self._processes.failing_together():
            self._begin(now, rows)
            for number, upcoming_rows in sorted(self._look_ahead.upcoming().items()):
                if now < number <= now + self._staleness:
                    self._begin(number, upcoming_rows)
            return self._take(now)

    def close(self) -> None:
        """End the thread, and abandon its episodes."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None
        for job in self._jobs.values():
            self._generator.release(job.pin)
        self._jobs.clear()

    def _begin(self, number: int, rows: Sequence[dict[str, Any]]) -> None:
        if number in self._jobs:
            return
        if self._worker is None:
            self._worker = _PrefetchThread(self._runner)
        key = self._runner.keys.next(self._processes.index * len(rows))
        failures = None if self._failures is None else self._failures.apart()
        job = self._jobs[number] = _PrefetchJob(list(rows), key, self._generator.pin(), failures, Future())
        self._worker.begin(job)

    def _take(self, number: int) -> list[Episode]:
        job = self._jobs[number]
        try:
            return job.episodes.result()
        finally:
            del self._jobs[number]
            self._generator.release(job.pin)
            if self._failures is not None and job.failures is not None:
                self._failures.add(job.failures)
            if self._worker is not None:
                self._runner.dropped_turns += self._worker.take_dropped()


class _PrefetchThread:
    """A thread with an event loop, in which all active batches run."""

    def __init__(self, runner: EpisodeRunner):
        runner.randomness.shares = True  # the random states of the training thread are not touched
        self._runner = runner.changed(dataclasses.replace(runner.mode, is_concurrent=True))
        self._generator = cast(VLLMGenerator, runner.generator)
        self._loop = asyncio.new_event_loop()
        self._queue: asyncio.Queue[_PrefetchJob | None] = asyncio.Queue()
        self._thread = threading.Thread(target=self._run, name="marft-rollouts", daemon=True)
        self._thread.start()

    def begin(self, job: _PrefetchJob) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, job)

    def take_dropped(self) -> int:
        """Number of turns that did not fit the model's window since the last call."""
        dropped, self._runner.dropped_turns = self._runner.dropped_turns, 0
        return dropped

    def end(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._work())
        finally:
            self._loop.close()

    async def _work(self) -> None:
        tasks: set[asyncio.Task] = set()
        while True:
            try:
                async with self._runner.session() as session:
                    while (job := await self._queue.get()) is not None:
                        task = asyncio.ensure_future(self._episodes(job, session))
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    return
            except Exception as error:  # no connection, for instance
                waiting = await self._queue.get()
                if waiting is None:
                    return
                waiting.episodes.set_exception(error)

    async def _episodes(self, job: _PrefetchJob, session: EpisodeSession) -> None:
        tries = itertools.count()

        async def run(rows, failures):  # a repeated episode is no copy of another one
            number = next(tries)
            key = job.key if number == 0 else (*job.key[:-1], f"try {number}", job.key[-1])
            return await session.run(rows, key, failures)

        try:
            with self._generator.using(job.pin):
                episodes = await (run_episodes(run, job.rows, job.failures) if job.failures else run(job.rows, None))
        except asyncio.CancelledError:
            job.episodes.cancel()
            raise
        except BaseException as error:
            job.episodes.set_exception(error)
        else:
            job.episodes.set_result(episodes)
