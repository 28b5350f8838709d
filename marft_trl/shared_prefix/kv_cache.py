# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The cache of a decoding loop: memory for all tokens from the start, filled with the keys and values of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from .forward import Cluster, KeptLayer, RepeatedLayer, RowAdapters, plan_passes, prefill, shared_pass


# Tokens that go through the model together while a cache is filled. More do not make a device faster, and what a layer
# computes of them is in memory at once.
PREFILL_TOKENS = 2**14


class PreallocatedLayer(DynamicLayer):
    """
    Cache layer with preallocated memory, which grows in use: a pass attends to what is in it so far.

    Args:
        rows: number of sequences.
        size: number of tokens of each.
    """

    is_initialized: bool
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, rows: int, size: int):
        super().__init__()
        self.rows, self.size, self.length = rows, size, 0

    def put(self, rows: torch.Tensor, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values `(R, heads, W, D)` of some rows from a column on."""
        self._begin(keys, values)
        rows, columns = rows.to(self.keys.device), slice(start, start + keys.size(2))
        self.keys[rows, :, columns], self.values[rows, :, columns] = keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self._begin(key_states, value_states)
        start, self.length = self.length, self.length + key_states.size(-2)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length

    def keep_rows(self, count: int, free: torch.Tensor, moved: torch.Tensor) -> None:
        """Move the rows `moved` to the places `free`, then keep the first `count` rows."""
        self.rows = count
        if not self.is_initialized:  # the last layers of some models (Gemma 4) read the keys of earlier ones
            return
        free, moved = free.to(self.keys.device), moved.to(self.keys.device)
        for states in (self.keys, self.values):
            states[free, :, : self.length] = states[moved, :, : self.length]
        self.keys, self.values = self.keys[:count], self.values[:count]

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.is_initialized:
            # Zeros: what is masked is multiplied by 0, and has to be a number
            self.keys = keys.new_zeros(self.rows, keys.size(1), self.size, keys.size(3))
            self.values = values.new_zeros(self.rows, values.size(1), self.size, values.size(3))
            self.is_initialized = True


class FixedLayer(PreallocatedLayer):
    """
    A [`PreallocatedLayer`] whose shapes and addresses stay the same from step to step: a pass attends to all of its
    memory, where later columns are masked, and where it writes is a number on the device.

    Args:
        place (`torch.Tensor` of shape `(1,)`): the column that the next token goes to. All layers have the same.
    """

    is_compileable = True  # transformers (5.23) then masks by `place`, whatever it is

    def __init__(self, rows: int, size: int, place: torch.Tensor):
        super().__init__(rows, size)
        self.place, self._most = place, rows

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self._begin(key_states, value_states)
        place = self.place.to(self.keys.device)
        self.keys.index_copy_(2, place, key_states)
        self.values.index_copy_(2, place, value_states)
        return self.keys, self.values

    def restart(self, rows: int) -> None:
        """Begin with new rows, as many as there were or fewer, with nothing in memory."""
        self.rows = rows
        if self.is_initialized:
            self.keys, self.values = (states[:rows].zero_() for states in self._whole)

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.is_initialized:
            rows, self.rows = self.rows, self._most
            super()._begin(keys, values)
            self._whole = self.keys, self.values
            self.rows, self.keys, self.values = rows, self.keys[:rows], self.values[:rows]

    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        return self.place[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.size, 0

    def keep_rows(self, count: int, free: torch.Tensor, moved: torch.Tensor) -> None:
        self.length = self.size
        super().keep_rows(count, free, moved)


class _Storing(KeptLayer):
    """Layer of a pass over whole prompts: stores its keys and values in the room, and keeps nothing."""

    def __init__(self, room: PreallocatedLayer, rows: torch.Tensor, end: int):
        super().__init__()
        self._room, self._rows, self._end = room, rows, end

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self._room.put(self._rows, self._end - key_states.size(2), key_states, value_states)
        return key_states, value_states


class _Joining(RepeatedLayer):
    """
    Layer of a pass over what follows a shared prefix: stores the joined keys and values in the room. In the pass,
    padding is in front of the prefix and after the rest of a row; `source` `(R, W)` moves all of it to the left.
    """

    def __init__(
        self,
        kept: KeptLayer,
        index: torch.Tensor,
        room: PreallocatedLayer,
        rows: torch.Tensor,
        end: int,
        source: torch.Tensor,
    ):
        super().__init__(kept, index)
        self._room, self._rows, self._end, self._source = room, rows, end, source

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        joined = super().update(key_states, value_states)
        source = self._source.to(key_states.device)[:, None, :, None]
        aligned = [item.gather(2, source.expand(-1, item.size(1), -1, item.size(3))) for item in joined]
        self._room.put(self._rows, self._end - self._source.size(1), *aligned)
        return joined


class _Part(NamedTuple):
    """
    Prompts that go through the model together.

    Args:
        groups: what they share, by their place in `rows`; empty if that gains nothing.
    """

    rows: list[int]
    groups: list[Cluster]


def fill(cache: Cache, backbone: nn.Module, prompts: Sequence[list[int]], adapters: RowAdapters | None = None) -> None:
    """
    Fill a cache with the keys and values of all but the last token of prompts, padded on the left. Every layer stores
    its own at once, so that no copy of a whole cache is in memory.

    Args:
        prompts: token ids, none empty.
    """
    rows = [prompt[:-1] for prompt in prompts]
    width = max(map(len, rows))
    if width == 0:
        return
    for part in _parts(prompts, None if adapters is None else adapters.names):
        _fill_part(cache, backbone, rows, part, width, adapters)
    for layer in cache.layers:
        layer.length = width


def _parts(prompts: Sequence[list[int]], kinds: Sequence[str] | None) -> Iterator[_Part]:
    """Cut prompts into parts of about [`PREFILL_TOKENS`] tokens."""
    groups = plan_passes(prompts, [0] * len(prompts), kinds)
    if not groups:
        count = max(PREFILL_TOKENS // max(map(len, prompts)), 1)
        for start in range(0, len(prompts), count):
            yield _Part(list(range(start, min(start + count, len(prompts)))), [])
        return
    rows: list[int] = []
    taken: list[Cluster] = []
    tokens = 0
    for group in groups:
        rest = max(len(prompts[row]) - 1 - group.length for row in group.rows)
        most = max(PREFILL_TOKENS // max(rest, 1), 1)
        for start in range(0, len(group.rows), most):
            part_rows = group.rows[start : start + most]
            size = group.length + rest * len(part_rows)
            if rows and tokens + size > PREFILL_TOKENS:
                yield _Part(rows, taken)
                rows, taken, tokens = [], [], 0
            taken = [*taken, Cluster(group.length, tuple(range(len(rows), len(rows) + len(part_rows))))]
            rows, tokens = [*rows, *part_rows], tokens + size
    yield _Part(rows, taken)


def _fill_part(
    cache: Cache,
    backbone: nn.Module,
    all_rows: Sequence[list[int]],
    part: _Part,
    end: int,
    adapters: RowAdapters | None,
) -> None:
    rows, groups = [all_rows[row] for row in part.rows], part.groups
    where, width = torch.tensor(part.rows), max(map(len, rows))
    row_adapters = None if adapters is None else adapters._replace(names=[adapters.names[row] for row in part.rows])
    if width == 0:
        return
    if not groups:
        if row_adapters is not None:
            row_adapters.use(row_adapters.names)
        prefill(backbone, rows, Cache(layers=[_Storing(room, where, end) for room in cache.layers]))
        return
    if all(len(rows[row]) == group.length for group in groups for row in group.rows):  # nothing follows the prefixes
        if row_adapters is not None:
            row_adapters.use([row_adapters.names[group.rows[0]] for group in groups])
        kept, *_ = prefill(backbone, [rows[group.rows[0]] for group in groups])
        which = torch.tensor([number for number, group in enumerate(groups) for _ in group.rows])
        for room, layer in zip(cache.layers, kept.layers, strict=False):  # the last layers may keep nothing
            index = which.to(layer.keys.device)
            room.put(where, end - width, layer.keys.index_select(0, index), layer.values.index_select(0, index))
        return
    shared = max(group.length for group in groups)
    starts = [group.length for group in groups for _ in group.rows]
    ends = [shared + len(row) - start for row, start in zip(rows, starts, strict=True)]
    source = (torch.tensor(ends).unsqueeze(1) + torch.arange(-width, 0)).clamp(min=0)
    source = source.to(next(backbone.parameters()).device)
    rooms = iter(cache.layers)

    def joining(kept: KeptLayer, index: torch.Tensor) -> RepeatedLayer:
        return _Joining(kept, index, next(rooms), where, end, source)

    shared_pass(backbone, rows, groups, joining, row_adapters)
