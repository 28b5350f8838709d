# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Who is answered at a time, who waits, and what was counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from ..episodes.records import Episode


class FullError(RuntimeError):
    """Too many questions are waiting already."""


class Desk:
    """
    Places for answers that are written at the same time.

    Args:
        places (`int`): number of places.
        waiting (`int`): largest number of questions that wait for some.
    """

    def __init__(self, places: int, waiting: int):
        self.places, self._free, self._most = places, asyncio.Semaphore(places), waiting
        self._first = asyncio.Lock()  # held by the question that has waited longest
        self.running = self.waiting = 0

    @contextlib.asynccontextmanager
    async def place(self, answers: int = 1) -> AsyncIterator[None]:
        """
        Asynchronous context manager: a place for each answer to a question, as soon as so many are free.

        Raises:
            FullError: too many are waiting.
        """
        if (self._free.locked() or self._first.locked()) and self.waiting >= self._most:
            raise FullError(f"{self.running} questions are being answered, and {self.waiting} wait.")
        self.waiting += 1
        taken = 0
        try:
            try:
                async with self._first:
                    while taken < answers:
                        await self._free.acquire()
                        taken += 1
            finally:
                self.waiting -= 1
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
        finally:
            for _ in range(taken):
                self._free.release()


class Counts:
    """What a gateway has done, in Prometheus' text format."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._turns: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def request(self, model: str, status: int, seconds: float) -> None:
        """A request has ended."""
        self._requests[model, status] += 1
        self._seconds[model] = self._seconds.get(model, 0.0) + seconds

    def episodes(self, episodes: Sequence[Episode]) -> None:
        """Episodes have ended."""
        for turn in (turn for episode in episodes for turn in episode.turns):
            self._turns[turn.agent] += 1
            self._tokens[turn.agent, "prompt"] += len(turn.prompt_ids)
            self._tokens[turn.agent, "completion"] += len(turn.completion_ids)

    def text(self, desk: Desk) -> str:
        """All of it, with the present numbers of a desk."""
        lines = [
            "# TYPE marft_requests_running gauge",
            f"marft_requests_running {desk.running}",
            "# TYPE marft_requests_waiting gauge",
            f"marft_requests_waiting {desk.waiting}",
            "# TYPE marft_requests_total counter",
            *(f'marft_requests_total{{model="{m}",status="{s}"}} {n}' for (m, s), n in self._requests.items()),
            "# TYPE marft_request_seconds_total counter",
            *(f'marft_request_seconds_total{{model="{m}"}} {n:.6f}' for m, n in self._seconds.items()),
            "# TYPE marft_turns_total counter",
            *(f'marft_turns_total{{agent="{agent}"}} {n}' for agent, n in self._turns.items()),
            "# TYPE marft_tokens_total counter",
            *(f'marft_tokens_total{{agent="{agent}",kind="{k}"}} {n}' for (agent, k), n in self._tokens.items()),
        ]
        return "\n".join(lines) + "\n"
