# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Handling of errors in user code: end the run, skip the episode, or retry it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.checks import EPISODE_RETRIES
from ..config.marft_config import MARFTConfig
from ..episodes.guard import EpisodeError
from ..episodes.records import Episode


logger = logging.getLogger(__name__)  # on every process, since each has its own failures

# Seconds before a function is called again
_PAUSE = 1.0


@dataclass(frozen=True)
class OnFailure:
    """Policy for errors in user code."""

    action: str = "raise"  # "raise", "skip" or "retry"
    retries: int = 0
    timeout: float | None = None  # of a call of a reward function, in seconds

    @classmethod
    def from_args(cls, args: MARFTConfig) -> OnFailure:
        return cls(args.on_episode_error, EPISODE_RETRIES, args.reward_timeout)

    @property
    def skips(self) -> bool:
        return self.action == "skip"

    @property
    def tries(self) -> int:
        """Maximum number of attempts per call."""
        return self.retries + 1 if self.action == "retry" else 1


class Failures:
    """Counts of skipped and retried episodes and calls since the last report."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by kind, e.g. "episodes/skipped"
        self.last = ""

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
    run: Callable[..., Awaitable[list[Episode]]], rows: Sequence[dict[str, Any]], policy: OnFailure, failures: Failures
) -> list[Episode]:
    """Run one episode per row with `await run(rows, failures)`, and skip, retry or raise failures by `policy`."""
    if policy.action == "raise":
        return await run(rows, None)
    errors: dict[int, EpisodeError] = {}
    episodes = await run(rows, errors)
    for number in range(1, policy.tries):
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
        if errors and number == policy.tries - 1:
            raise next(iter(errors.values()))
    for error in errors.values():
        if not policy.skips:
            raise error
        failures.note("episodes/skipped", error)
    return episodes


async def call_reward(
    call: Callable[[Sequence[int]], Awaitable[Sequence[Any]]],
    count: int,
    name: str,
    policy: OnFailure,
    failures: Failures,
    sleep: Callable[[float], Awaitable[None]],
) -> Sequence[Any]:
    """Score `count` completions with `await call(positions)`, and skip, retry or raise failures by `policy`."""
    for number in range(policy.tries):
        try:
            return await call(range(count))
        except Exception as error:
            if number < policy.tries - 1:
                failures.note(f"rewards/{name}/retried", error)
                await sleep(_PAUSE)
            elif not policy.skips:
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
