# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Steps of decoding: the logits of the next token, over what is in the cache so far or over memory of fixed shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import Cache, PreTrainedModel

from ..seams.graphs import captured, why_not_captured
from ..seams.logs import get_logger
from .room import FixedLayer, RoomyLayer


logger = get_logger(__name__)

# Numbers of rows that steps of a fixed shape are taken with. Finished rows stay until the next smaller one is enough
SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
# Steps with the same rows before they are captured: a graph costs about as much as so many
_BEFORE_CAPTURE = 4


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
    graph: launching a step kernel by kernel takes longer than a small batch takes to compute. It is looked only every
    eighth step whether rows have finished, and rows leave only in steps, see `SIZES`. Tokens are those of
    [`GrowingSteps`]. Where a step cannot be captured, it is run as it is.
    """

    every = 8

    def __init__(self, model: PreTrainedModel, size: int, mask: torch.Tensor, lengths: torch.Tensor, is_padded: bool):
        self._place = torch.zeros(1, dtype=torch.long, device=mask.device)
        self._tokens = torch.zeros(mask.size(0), 1, dtype=torch.long, device=mask.device)
        super().__init__(model, size, mask, lengths, is_padded)
        self._why_not = why_not_captured(mask.device)
        self._run: Callable[[], torch.Tensor] = self._forward
        self._taken = 0  # steps with the present rows

    def begin(self, column: int) -> None:
        self._place.fill_(column)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        self._tokens.copy_(tokens)
        if self._taken == _BEFORE_CAPTURE and self._why_not is None:
            self._run = self._captured()
        logits = self._run()
        self._positions.add_(1)
        self._place.add_(1)
        self._taken += 1
        return logits

    def count_after(self, count: int, finished: int) -> int:
        return min([size for size in SIZES if count - finished <= size < count], default=count)

    def keep_rows(self, stay: torch.Tensor, free: torch.Tensor, moved: torch.Tensor) -> None:
        self._run, self._taken = self._forward, 0
        super().keep_rows(stay, free, moved)
        self._tokens = self._tokens[: len(stay)]

    def _layer(self, rows: int, size: int) -> RoomyLayer:
        return FixedLayer(rows, size, self._place)

    def _forward(self) -> torch.Tensor:
        output = self._model(
            input_ids=self._tokens,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _captured(self) -> Callable[[], torch.Tensor]:
        """The step as a graph, or as it is where that fails or gives other logits."""
        expected = self._forward().clone()
        try:
            run = captured(self._forward)
            gap = (run() - expected).abs().max().item() / max(expected.abs().max().item(), 1e-6)
            if not gap <= (1e-4 if expected.dtype == torch.float32 else 0.05):
                raise ValueError(f"its logits are others ({gap:.1e})")
        except Exception as problem:
            self._why_not = f"{type(problem).__name__}: {problem}"
            logger.warning(f"Turns are decoded without a captured graph: {self._why_not}.")
            return self._forward
        return run
