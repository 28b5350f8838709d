# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Rows of generation batches that are due later, read from the dataloader before training needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from ..learning.schedules import Schedule
from ..seams.trl import TrlState


class LookAhead:
    """
    Reads dataloaders ahead. Batches come in the order of the dataloader, and none is read beyond the end of a pass.

    Args:
        state ([`TrlState`]): position in the run.
        schedule ([`Schedule`]): when new episodes are due.
        batches (`int`): number of generation batches to read ahead.
    """

    def __init__(self, state: TrlState, schedule: Schedule, batches: int):
        self._state, self._schedule, self._batches = state, schedule, batches
        self._source: Iterator | None = None
        self._reader: _Reader | None = None

    def over(self, iterator: Iterator) -> Iterator:
        """The iterator of a pass over the dataset, read ahead."""
        if self._source is not iterator or self._reader is None:
            depth = self._batches * self._schedule.generate_every
            self._source, self._reader = iterator, _Reader(iterator, self._state.micro_step, depth)
        return self._reader

    def number(self) -> int:
        """Number of the generation batch that is due."""
        return self._state.micro_step // self._schedule.generate_every

    def upcoming(self) -> dict[int, list[dict[str, Any]]]:
        """Rows of the generation batches that are due later, by their numbers, as far as they are known."""
        ahead = self._reader.ahead if self._reader is not None else {}
        for place in [place for place in ahead if place <= self._state.micro_step]:
            del ahead[place]
        due = filter(self._schedule.is_due, ahead)
        return {place // self._schedule.generate_every: ahead[place] for place in due}


class _Reader:
    """
    Attributes:
        ahead (`dict[int, list[dict]]`): rows by the micro-step that they are for.
    """

    def __init__(self, iterator: Iterator, first: int, depth: int):
        self._iterator, self._depth = iterator, depth
        self._buffer: deque[Any] = deque()
        self._read = first
        self.ahead: dict[int, Any] = {}

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> Any:
        while len(self._buffer) <= self._depth:
            try:
                rows = next(self._iterator)
            except StopIteration:
                break
            self._buffer.append(rows)
            self.ahead[self._read] = rows
            self._read += 1
        if not self._buffer:
            raise StopIteration
        return self._buffer.popleft()
