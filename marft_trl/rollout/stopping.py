# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Stop texts: one rule for what ends generation, where a turn is cut, and whether it counts as truncated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria


# Tokens that a character may take, and tokens more that are decoded in front of a stop text, since a tokenizer may
# write the first token of what it is given differently.
_TOKENS_OF_A_CHARACTER, _MARGIN = 4, 8


class StopTexts:
    """
    The rule: a turn ends with the first of its own tokens after which the decoded turn holds a stop text. The prompt
    plays no part.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): decodes the turn, control tokens included.
        texts (`Sequence[str]`): the stop texts; may be empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]):
        self._tokenizer = tokenizer
        self.texts = tuple(texts)
        self._window = _TOKENS_OF_A_CHARACTER * max(map(len, self.texts), default=0) + _MARGIN

    def are_in(self, ids: Sequence[int]) -> bool:
        """Whether the decoded tokens of a turn hold a stop text."""
        return bool(self.texts) and self._are_in_text(self._tokenizer.decode(list(ids)))

    def cut(self, ids: list[int]) -> list[int]:
        """A turn up to the token that completes its first stop text: what follows is padding of a batch."""
        if not self.are_in(ids):
            return ids
        low, high = 0, len(ids)  # the first `high` tokens hold a stop text, the first `low` do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.are_in(ids[:middle]) else (middle, high)
        return ids[:high]

    def end(self, turns: Sequence[list[int]]) -> list[bool]:
        """For each turn, asked after every token of it, whether it ends here."""
        # Most turns are told by their last tokens alone
        recent = self._tokenizer.batch_decode([ids[-self._window :] for ids in turns])
        return [self._are_in_text(text) and self.are_in(ids) for text, ids in zip(recent, turns, strict=True)]

    def _are_in_text(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)


class EndAtStopText(StoppingCriteria):
    """
    The rule of [`StopTexts`] for one call of `generate`, whose rows are prompts of one width and what was sampled.

    transformers' own `StopStringCriteria` reads prompt and completion as one text, so that a stop text which begins in
    the prompt ends a turn that does not hold it.
    """

    def __init__(self, stops: StopTexts):
        self._stops = stops
        self._width: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        if self._width is None:  # the first call comes after the first token
            self._width = input_ids.size(1) - 1
        ended = self._stops.end(input_ids[:, self._width :].tolist())
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)
