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

# Seconds before a function is called again
_PAUSE = 1.0


class Failures:
    """What is done about errors in users' code if they do not end the run, and how many there were since a report."""

    def __init__(self, action: str, retries: int = EPISODE_RETRIES):
        self.skips = action == "skip"  # "skip" or "retry"
        self.tries = retries + 1 if action == "retry" else 1  # of a call, at most
        self._action, self._retries = action, retries
        self.counts: Counter[str] = Counter()  # by kind, e.g. "episodes/skipped"
        self.last = ""

    def apart(self) -> Failures:
        """Others for another thread, which are added later."""
        return Failures(self._action, self._retries)

    def note(self, kind: str, error: object, count: int = 1) -> None:
        self.counts[kind] += count
        self.last = str(error)
        logger.warning(f"{kind}: {_brief(self.last)}")

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
    for number in range(1, failures.tries):
        if not errors:
            break
        again, errors = sorted(errors.items()), {}
        for _, error in again:
            failures.note("episodes/retried", error)
        inner: dict[int, EpisodeError] = {}
        places = [index for index, _ in again]
        done = await run([rows[place] for place in places], inner)
        for place, episode in zip(places, done, strict=True):
            episodes[place] = replace(episode, index=place)
        errors = {places[index]: error for index, error in inner.items()}
        if errors and number == failures.tries - 1:
            raise next(iter(errors.values()))
    for error in errors.values():
        if not failures.skips:
            raise error
        failures.note("episodes/skipped", error)
    return episodes


async def call_reward(
    call: Callable[[Sequence[int]], Awaitable[Sequence[Any]]],
    count: int,
    name: str,
    failures: Failures,
    sleep: Callable[[float], Awaitable[None]],
) -> Sequence[Any]:
    """Score `count` completions with `await call(positions)`, and skip or retry those that fail."""
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


def _brief(text: str, limit: int = 600) -> str:
    """Shorten a text to its beginning and its end, where tracebacks have the error."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
