# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Steps of decoding: the logits of the next token, over what is in the cache so far or over memory of fixed shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import cast

import torch
from transformers import Cache, PreTrainedModel

from ..seams.graphs import GraphMemory, captured, why_not_captured
from ..seams.logs import get_logger
from .room import FixedLayer, RoomyLayer


logger = get_logger(__name__)

# Numbers of rows that steps of a fixed shape are taken with. Finished rows stay until the next smaller one is enough
SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
# Steps with the same rows before they are captured: a graph costs about as much as so many
_BEFORE_CAPTURE = 4
# Graphs that are kept, of adapters and numbers of rows
_MOST_GRAPHS = 16
# Rooms of steps that are kept are multiples of this many tokens, and at most this many times as large as is needed
ROOM, _WIDEST = 64, 2


class GrowingSteps:
    """
    Steps that attend to what is in the cache so far. Finished rows leave once they are at least 1/32 of the batch. On
    a CPU, moving rows costs as much as computing several rows of a step.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model with its head.
        size (`int`): tokens of a row that the cache has room for.
        mask (`torch.Tensor` of shape `(B, size)`): 0 for padding.
        lengths (`torch.Tensor` of shape `(B,)`): tokens of each prompt.
    """

    every = 1  # steps from one look whether rows have finished to the next
    _LEAVING = 32

    def __init__(self, model: PreTrainedModel, size: int, mask: torch.Tensor, lengths: torch.Tensor, is_padded: bool):
        self._model, self._is_padded, self._mask = model, is_padded, mask
        rows, layers = mask.size(0), model.config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[self._layer(rows, size) for _ in range(layers)])
        self._positions = (lengths - 1).unsqueeze(1)
        self._end = size

    def begin(self, column: int) -> None:
        """The first step is that of the token in a column; the cache has all before it."""
        self._end = column + 1

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `(R, V)` after the next tokens `(R, 1)` of the rows."""
        output = self._model(
            input_ids=tokens,
            attention_mask=self._mask[:, : self._end] if self._is_padded else None,
            position_ids=self._positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self._positions, self._end = self._positions + 1, self._end + 1
        return output.logits[:, -1]

    def count_after(self, count: int, finished: int) -> int:
        """How many of `count` rows stay when some have finished."""
        return count - finished if finished * self._LEAVING >= count else count

    def keep_rows(self, stay: torch.Tensor, free: torch.Tensor, moved: torch.Tensor) -> None:
        """Go on with the rows `stay`: the first of them, where the rows `moved` have taken the places `free`."""
        for layer in self.cache.layers:
            layer.keep_rows(len(stay), free, moved)
        self._mask, self._positions = self._mask[stay], self._positions[stay]

    def _layer(self, rows: int, size: int) -> RoomyLayer:
        layer = RoomyLayer(rows, size)
        # With padding there is always a mask. transformers (5.23) would look in every step whether it is needed, and
        # wait for the device
        layer.is_compileable = self._is_padded
        return layer


class FixedSteps(GrowingSteps):
    """
    Steps whose shapes and addresses stay the same until rows leave, so that a GPU can replay them from a captured
    graph: launching a step kernel by kernel takes longer than a small batch takes to compute. Every eighth step is
    followed by a look whether rows have finished, and rows leave only in steps, see `SIZES`. Tokens are those of
    [`GrowingSteps`]. Where a step cannot be captured, it is run kernel by kernel.

    The memory and the graphs can be used for many calls of `generate`, see [`StepStore`].

    Args:
        model ([`~transformers.PreTrainedModel`]): the model with its head.
        rows (`int`): largest number of rows.
        size (`int`): tokens of a row that the cache has room for.
        device (`torch.device`): device of the tokens.
    """

    every = 8

    def __init__(self, model: PreTrainedModel, rows: int, size: int, device: torch.device):
        self._model, self.rows, self.size = model, rows, size
        self._place = torch.zeros(1, dtype=torch.long, device=device)
        # The first rows of these are those of a step
        self._all_tokens, self._all_positions = torch.zeros(2, rows, 1, dtype=torch.long, device=device)
        self._all_masks = torch.zeros(rows, size, dtype=torch.long, device=device)
        layers = model.config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[FixedLayer(rows, size, self._place) for _ in range(layers)])
        self.why_not = why_not_captured(model)
        self._graphs: dict[tuple[Hashable, int], Callable[[], torch.Tensor]] = {}  # the latest last
        self._memory = GraphMemory.of(device)

    def start(self, mask: torch.Tensor, lengths: torch.Tensor, key: Hashable | None = None) -> None:
        """
        Begin with new rows.

        Args:
            mask (`torch.Tensor` of shape `(B, W)`): 0 for padding. There may be more room than for these.
            lengths (`torch.Tensor` of shape `(B,)`): tokens of each prompt.
            key (`Hashable`, *optional*): what graphs depend on besides the number of rows. If `None`, those of earlier
                rows are forgotten.
        """
        self._all_masks.zero_()
        self._all_masks[: mask.size(0), : mask.size(1)] = mask
        self._all_positions[: mask.size(0)] = (lengths - 1).unsqueeze(1)
        for layer in self.cache.layers:
            layer.restart(mask.size(0))
        if key is None:
            self._graphs.clear()
        self._key, self._kept = key, frozenset(self._graphs)
        self._use(mask.size(0))

    def begin(self, column: int) -> None:
        self._place.fill_(column)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        self._tokens.copy_(tokens)
        logits = self._run()
        self._positions.add_(1)
        self._place.add_(1)
        self._taken += 1
        return logits

    def count_after(self, count: int, finished: int) -> int:
        return min([size for size in SIZES if count - finished <= size < count], default=count)

    def keep_rows(self, stay: torch.Tensor, free: torch.Tensor, moved: torch.Tensor) -> None:
        for layer in self.cache.layers:
            layer.keep_rows(len(stay), free, moved)
        mask, positions = self._mask[stay], self._positions[stay]
        self._use(len(stay))
        self._mask.copy_(mask)
        self._positions.copy_(positions)

    def _use(self, count: int) -> None:
        """Go on with the first rows."""
        parts = (self._all_tokens, self._all_positions, self._all_masks)
        self._tokens, self._positions, self._mask = (one[:count] for one in parts)
        self._taken = 0  # steps with the present rows

    def _forward(self) -> torch.Tensor:
        output = self._model(
            input_ids=self._tokens,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _run(self) -> torch.Tensor:
        key = (self._key, len(self._tokens))
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._graphs[key] = graph
        if graph is not None and (self._taken or key not in self._kept):
            return graph()
        if graph is None and (self._taken < _BEFORE_CAPTURE or self.why_not is not None):
            return self._forward()
        # A graph is compared with the step that it stands for when it is new, and once in each later call
        expected = self._forward().clone()
        try:
            graph = graph or captured(self._forward, cast(GraphMemory, self._memory))
            found = graph()
            gap = (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-6)
            if not gap <= (1e-4 if expected.dtype == torch.float32 else 0.02):
                raise ValueError(f"its logits are others ({gap:.1e})")
        except Exception as problem:
            self.why_not = f"{type(problem).__name__}: {problem}"
            self._graphs.clear()
            logger.warning(f"Turns are decoded without a captured graph: {self.why_not}.")
            return expected
        self._graphs[key] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return found


class StepStore:
    """Keeps fixed steps from one call of `generate` to the next, with their memory and their graphs."""

    def __init__(self) -> None:
        self._kept: FixedSteps | None = None
        self._why_not: str | None = None  # why steps could not be captured: what has failed is not tried again

    def start(
        self, model: PreTrainedModel, mask: torch.Tensor, lengths: torch.Tensor, key: Hashable | None
    ) -> FixedSteps:
        """Steps that have begun with new rows, see [`~FixedSteps.start`]."""
        (rows, size), kept = mask.shape, self._kept
        size = -(-size // ROOM) * ROOM
        if kept is None or rows > kept.rows or not size <= kept.size <= _WIDEST * size:
            if kept is not None and kept.size <= _WIDEST * size:  # for agents that take turns
                rows, size = max(rows, kept.rows), max(size, kept.size)
            self.clear()  # before new memory is taken
            kept = None
            self._kept = kept = FixedSteps(model, rows, size, mask.device)
            kept.why_not = kept.why_not or self._why_not
        kept.start(mask, lengths, key)
        return kept

    def clear(self) -> None:
        """Give the memory back."""
        if self._kept is not None:
            self._why_not = self._why_not or self._kept.why_not
        self._kept = None
