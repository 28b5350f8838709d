# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Handling of errors in user code: end the run, skip the episode, or retry it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from ..config.checks import EPISODE_RETRIES
from ..episodes.guard import EpisodeError
from ..episodes.records import Episode


logger = logging.getLogger(__name__)  # on every process, since each has its own failures

_PAUSE = 1.0  # seconds before a function is called again


class Failures:
    """How errors in users' code that do not end the run are handled, and their number since the last report."""

    def __init__(self, action: str, retries: int = EPISODE_RETRIES):
        self.skips = action == "skip"  # "skip" or "retry"
        self.tries = retries + 1 if action == "retry" else 1  # of a call, at most
        self._action, self._retries = action, retries
        self.counts: Counter[str] = Counter()  # by kind, e.g. "episodes/skipped"
        self.last = ""

    def apart(self) -> Failures:
        """Return failures for another thread, which are added later."""
        return Failures(self._action, self._retries)

    def note(self, kind: str, error: object, count: int = 1) -> None:
        self.counts[kind] += count
        self.last = str(error)
        # The beginning, and the end, where tracebacks have the error
        text = self.last if len(self.last) <= 600 else f"{self.last[:300]} ... {self.last[-300:]}"
        logger.warning(f"{kind}: {text}")

    def add(self, others: Failures) -> None:
        self.counts.update(others.counts)
        self.last = others.last or self.last

    def take(self) -> tuple[dict[str, int], str]:
        taken = dict(self.counts), self.last
        self.counts.clear()
        self.last = ""
        return taken


async def run_episodes(
    run: Callable[..., Awaitable[list[Episode]]], rows: Sequence[dict[str, Any]], failures: Failures
) -> list[Episode]:
    """Run one episode per row with `await run(rows, errors)`, and skip or retry those that fail."""
    errors: dict[int, EpisodeError] = {}
    episodes = await run(rows, errors)
    for _ in range(1, failures.tries):
        if not errors:
            break
        places = sorted(errors)
        for place in places:
            failures.note("episodes/retried", errors[place])
        inner: dict[int, EpisodeError] = {}
        done = await run([rows[place] for place in places], inner)
        for place, episode in zip(places, done, strict=True):
            episodes[place] = replace(episode, index=place)
        errors = {places[index]: error for index, error in inner.items()}
    for error in errors.values():
        if not failures.skips:
            raise error
        failures.note("episodes/skipped", error)
    return episodes


async def call_reward(
    call: Callable[[Sequence[int]], Awaitable[Sequence[Any]]],
    count: int,
    name: str,
    failures: Failures | None,
    sleep: Callable[[float], Awaitable[None]],
) -> Sequence[Any]:
    """Score `count` completions with `await call(positions)`, and skip or retry those that fail."""
    if failures is None:
        return await call(range(count))
    for number in range(failures.tries):
        try:
            return await call(range(count))
        except Exception as error:
            if number < failures.tries - 1:
                failures.note(f"rewards/{name}/retried", error)
                await sleep(_PAUSE)
            elif not failures.skips:
                raise
            elif count == 1 or isinstance(error, TimeoutError):
                failures.note(f"rewards/{name}/skipped", error, count)
                return [None] * count
            else:
                failures.note(f"rewards/{name}/one_by_one", error)
    scores: list[Any] = []
    for index in range(count):  # the call failed for all completions together: find the ones that fail
        try:
            scores += await call([index])
        except Exception as error:
            failures.note(f"rewards/{name}/skipped", error)
            scores.append(None)
    return scores


async def wait_here(seconds: float) -> None:
    """Wait without an event loop."""
    time.sleep(seconds)
