# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Turns of many episodes that wait for nobody, sampled together by a model in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..rollout.generator import Generator, Observed, Sampled
from ..system.event_loop import finished


# Seconds that the thread waits for further turns when it has had nothing to do
_PAUSE = 0.002


class _Job(NamedTuple):
    """A turn that is waited for."""

    observed: Observed
    greedy: bool
    sampling: Mapping[str, float] | None
    loop: asyncio.AbstractEventLoop
    turn: asyncio.Future[Sampled]

    @property
    def kind(self) -> tuple:
        """What the turns of one call of the generator have in common."""
        return self.greedy, tuple(sorted((self.sampling or {}).items()))

    @property
    def is_gone(self) -> bool:
        return self.observed.live is not None and self.observed.live.is_gone

    def settle(self, result: Sampled | BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # its event loop is closed
            self.loop.call_soon_threadsafe(_settle, self.turn, result)


class DeviceThread(Generator):
    """
    Lets a generator that samples many turns at a time serve episodes that do not wait for one another: whatever turns
    are waiting when the model is free are sampled together. A turn that arrives meanwhile waits for the next batch.

    Args:
        generator ([`Generator`]): samples turns. It is called in a thread.
        acting (`Callable`): `acting()` makes the context manager around its calls.
        most (`Callable`): `most(tokens)` is the number of turns of so many tokens that there is memory for.
    """

    batches = False

    def __init__(
        self,
        generator: Generator,
        acting: Callable[[], contextlib.AbstractContextManager[None]],
        most: Callable[[int], int],
    ):
        self._generator, self._acting, self._most = generator, acting, most
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
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
        self, observed: Sequence[Observed], greedy: bool = False, sampling: Mapping[str, float] | None = None
    ) -> list[Sampled]:
        loop = asyncio.get_running_loop()
        jobs = [_Job(one, greedy, sampling, loop, loop.create_future()) for one in observed]
        for job in jobs:
            self._jobs.put(job)
        return await asyncio.gather(*[job.turn for job in jobs])

    # ---- In the thread ----

    def _work(self) -> None:
        while (first := self._jobs.get()) is not None:
            time.sleep(_PAUSE)
            waiting: list[_Job | None] = [first]
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

    def _next_batch(self, jobs: Sequence[_Job]) -> list[_Job]:
        """The longest waiting turn, and as many others of its kind as there is memory for."""
        alike = [job for job in jobs if job.kind == jobs[0].kind]
        lengths = [self._longest(job) for job in alike]
        count = next((n for n in range(len(alike), 1, -1) if n <= self._most(max(lengths[:n]))), 1)
        return alike[:count]

    def _longest(self, job: _Job) -> int:
        return len(job.observed.ids) + int(self._generator.settings(job.observed.agent)["max_new_tokens"])

    def _sample(self, batch: Sequence[_Job]) -> None:
        batch = [job for job in batch if not job.is_gone]
        if not batch:
            return
        observed, (first, *_) = [job.observed for job in batch], batch
        results: Sequence[Sampled | BaseException]
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


def _settle(turn: asyncio.Future[Sampled], result: Sampled | BaseException) -> None:
    if turn.done():  # nobody waits for it any more
        return
    if isinstance(result, BaseException):
        turn.set_exception(result)
    else:
        turn.set_result(result)
