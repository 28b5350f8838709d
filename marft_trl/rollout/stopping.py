# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Stop texts: a single rule for ending generation, cutting turns and deciding if a turn is truncated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from ..shared_prefix.decoding import LateCriterion


# Maximum number of tokens per character, and number of additional tokens to decode before a stop text. The margin is
# needed because a tokenizer may decode the first token of a sequence differently.
_TOKENS_OF_A_CHARACTER, _MARGIN = 4, 8


class StopTexts:
    """
    Rule for stop texts: a turn ends with the first of its own tokens after which the decoded turn contains a stop
    text. The prompt is ignored.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): decodes the turn, control tokens included.
            Not needed without stop texts.
        texts (`Sequence[str]`): the stop texts; may be empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, texts: Sequence[str]):
        self._tokenizer = tokenizer
        self.texts = tuple(texts)
        self._window = _TOKENS_OF_A_CHARACTER * max(map(len, self.texts), default=0) + _MARGIN

    def are_in(self, ids: Sequence[int]) -> bool:
        """Return `True` if the decoded tokens of a turn contain a stop text."""
        return bool(self.texts) and self._are_in_text(cast(Any, self._tokenizer).decode(list(ids)))

    def cut(self, ids: list[int]) -> list[int]:
        """Cut a turn after the token that completes its first stop text. The tokens after it are padding."""
        if not self.are_in(ids):
            return ids
        low, high = 0, len(ids)  # the first `high` tokens hold a stop text, the first `low` do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.are_in(ids[:middle]) else (middle, high)
        return ids[:high]

    def end(self, turns: Sequence[list[int]], new: int = 1) -> list[bool]:
        """Return, for each turn, `True` if it ends within its last `new` tokens. Called for all tokens of a turn."""
        # For most turns, decoding only their last tokens is enough
        window = self._window + new - 1
        recent = cast(Any, self._tokenizer).batch_decode([ids[-window:] for ids in turns])
        return [self._are_in_text(text) and self.are_in(ids) for text, ids in zip(recent, turns, strict=True)]

    def _are_in_text(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)


class EndAtStopText(LateCriterion):
    """
    Stopping criterion that applies [`StopTexts`] during one call of `generate`, whose prompts are padded to one width.

    `StopStringCriteria` of transformers reads prompt and completion as one text. There, a stop text that begins in the
    prompt could end a turn that does not contain it.
    """

    def __init__(self, stops: StopTexts):
        self._stops = stops
        self._width: int | None = None
        self._looked = 0

    def begin(self, width: int) -> None:
        self._width = self._looked = width

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        if self._width is None:  # in the loop of transformers the first call comes after the first token
            self.begin(input_ids.size(1) - 1)
        new, self._looked = input_ids.size(1) - self._looked, input_ids.size(1)
        ended = self._stops.end(input_ids[:, self._width :].tolist(), new)
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)
