# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Memory of turns that are sampled together."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..learning.memory import cache_size, free_memory


# Part of the free memory that turns may take
_PART = 0.5
# Bytes of a logit on its way to a token: in float32, its probability, and sums in double precision
_OF_LOGIT = 24


def turns_that_fit(model: PreTrainedModel, tokens: int) -> int:
    """
    How many turns may be sampled together, with their keys and values in memory.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): samples them.
        tokens (`int`): tokens of an observation and a turn together.

    Returns: at least 1.
    """
    config = model.config.get_text_config()
    window = getattr(config, "max_position_embeddings", None) or tokens
    of_cache = cache_size(config, 1, min(tokens, window), model.dtype.itemsize)
    return max(int(_PART * free_memory(model.device) / (of_cache + _OF_LOGIT * config.vocab_size)), 1)
