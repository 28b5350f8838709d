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
    Places for questions that are answered at the same time.

    Args:
        running (`int`): number of places.
        waiting (`int`): largest number of questions that wait for one.
    """

    def __init__(self, running: int, waiting: int):
        self._places, self._most = asyncio.Semaphore(running), waiting
        self.running = self.waiting = 0

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """
        Asynchronous context manager: a place, as soon as one is free.

        Raises:
            FullError: too many are waiting.
        """
        if self._places.locked() and self.waiting >= self._most:
            raise FullError(f"{self.running} questions are being answered, and {self.waiting} wait.")
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._places.release()


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
