# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Turns that are followed while a model samples them: their tokens go to who waits, and they end when nobody does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence

import torch
from transformers import LogitsProcessor, StoppingCriteria

from ..shared_prefix.decoding import draw
from .generator import LiveTurn


class LiveRows(StoppingCriteria):
    """
    The turns of one call of `generate`: a [`~marft_trl.shared_prefix.decoding.Watch`] of our own decoding loop, and a
    stopping criterion of that of transformers, whose rows keep their places.

    Args:
        turns (`Sequence[LiveTurn]`): who follows each row.
        ends (`Collection[int]`): ids of the tokens that end a turn.
        longest (`int`): largest number of tokens of a turn.
        samples (`bool`): whether tokens are drawn.
        device (`torch.device`): device of the logits.

    Attributes:
        other (`StoppingCriteria`, *optional*): what else ends turns, in the loop of transformers.
    """

    def __init__(
        self, turns: Sequence[LiveTurn], ends: Collection[int], longest: int, samples: bool, device: torch.device
    ):
        self.other: StoppingCriteria | None = None
        self._turns, self._ends = turns, frozenset(ends)
        self.limits = [min(longest, turn.limit or longest) for turn in turns]
        self._counts, self._over = [0] * len(turns), [False] * len(turns)
        self._width: int | None = None
        self.draws = torch.stack([_numbers(turn.seed, longest) for turn in turns]).to(device) if samples else None

    def look(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], done: Sequence[bool]) -> list[bool]:
        """Pass new tokens on, and tell which rows end here, see `Watch`."""
        heard: dict[asyncio.AbstractEventLoop, list[tuple[LiveTurn, list[int]]]] = {}
        for row, its, is_done in zip(rows, tokens, done, strict=True):
            turn = self._turns[row]
            new = [] if self._over[row] else self._up_to_end(row, its)
            self._over[row] = self._over[row] or is_done or turn.is_gone
            if new and turn.hear is not None and not turn.is_gone:
                heard.setdefault(turn.loop, []).append((turn, new))
        for loop, pairs in heard.items():
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(_tell, pairs)
        return [self._over[row] for row in rows]

    def _up_to_end(self, row: int, tokens: Sequence[int]) -> list[int]:
        new: list[int] = []
        for token in tokens[: self.limits[row] - self._counts[row]]:
            new.append(token)
            if token in self._ends:
                self._over[row] = True
                break
        self._counts[row] += len(new)
        self._over[row] = self._over[row] or self._counts[row] >= self.limits[row]
        return new

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        if self._width is None:  # the first call comes after the first token
            self._width = input_ids.size(1) - 1
        new, count = input_ids[:, self._width :].tolist(), len(self._turns)
        self._width = input_ids.size(1)
        done = [False] * count if self.other is None else self.other(input_ids, scores).tolist()
        return torch.tensor(self.look(range(count), new, done), device=input_ids.device)


class DrawnByRow(LogitsProcessor):
    """
    Draws tokens with the numbers of [`LiveRows`] in the loop of transformers: all other tokens become impossible. It
    has to be the last processor.

    Args:
        draws (`torch.Tensor` of shape `(B, T)`): the numbers.
    """

    def __init__(self, draws: torch.Tensor):
        self._draws, self._step = draws, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = draw(scores.softmax(dim=-1), self._draws[:, self._step].unsqueeze(1))
        self._step += 1
        return torch.full_like(scores, float("-inf")).scatter(1, chosen, 0.0)


def _numbers(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def _tell(pairs: Sequence[tuple[LiveTurn, list[int]]]) -> None:
    for turn, ids in pairs:
        if turn.hear is not None and not turn.is_gone:
            turn.hear(ids)
