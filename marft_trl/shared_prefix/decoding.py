# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Fast decoding loop, passed to `generate` of transformers as `custom_generate=`. `generate` does the preparation.

Differences from the loop of transformers, none of which changes the sampling distribution:

- The common prefix of several prompts goes through the model once. Its keys and values are repeated (see `forward`).
- The cache has its full size from the start, so that a step writes one column without copying the rest.
- Finished rows leave the batch, and the last rows take their places. This changes nothing for the other rows, since
  attention, logits processors, stopping criteria and draws are independent per row. If a logits processor is not known
  to be independent per row, finished rows stay.
"""

from __future__ import annotations

import torch
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMode, logits_process

from ..seams.models import pad_token_of
from .forward import RepeatedLayer, RowAdapters, prefill, shared_pass
from .prefixes import Cluster, plan_passes


# Finished rows leave the batch once they are at least 1/32 of it. On a CPU, moving rows costs as much as computing
# several rows of a step.
_LEAVING = 32

# Logits processors that treat each row independently and keep no state of the batch.
_BY_ROW = (
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.MinPLogitsWarper,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
)


def can_decode(config: GenerationConfig) -> bool:
    """Return `True` if [`decode`] supports a generation config."""
    return (
        config.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        and config.guidance_scale in (None, 1)
        and config.cache_implementation is None
        and config.use_cache is not False
        and not config.return_dict_in_generate
    )


class JoinedLayer(RepeatedLayer):
    """A [`RepeatedLayer`] that also stores the joined keys and values."""

    def update(self, *args, **kwargs):
        self.joined = super().update(*args, **kwargs)
        return self.joined


class RoomyLayer(DynamicLayer):
    """Cache layer with preallocated memory for `size` tokens."""

    is_initialized: bool

    def __init__(self, size: int):
        super().__init__()
        self.size, self.length = size, 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.keys = key_states.new_empty(*key_states.shape[:2], self.size, key_states.size(-1))
            self.values = value_states.new_empty(*value_states.shape[:2], self.size, value_states.size(-1))
            self.is_initialized = True
        start, self.length = self.length, self.length + key_states.size(-2)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length

    def keep_rows(self, count: int, free: torch.Tensor, moved: torch.Tensor) -> None:
        """Move the rows `moved` to the places `free`, then keep the first `count` rows."""
        for states in (self.keys, self.values):
            states[free, :, : self.length] = states[moved, :, : self.length]
        self.keys, self.values = self.keys[:count], self.values[:count]


class Recorder:
    """
    Records the log-probabilities of sampled tokens. They are recorded only if the sampling distribution equals the
    scoring distribution (temperature only, float32).
    """

    def __init__(self):
        self.logps: torch.Tensor | None = None  # (B, T), or `None` if they have to be computed later

    def start(self, shape: tuple[int, int], dtype: torch.dtype, processors: LogitsProcessorList) -> None:
        is_scored = all(isinstance(one, logits_process.TemperatureLogitsWarper) for one in processors)
        self.logps = torch.zeros(shape) if is_scored and dtype == torch.float32 else None

    def add(self, rows: torch.Tensor, step: int, logps: torch.Tensor) -> None:
        if self.logps is not None:
            self.logps[rows.cpu(), step] = logps.cpu()


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    recorder: Recorder | None = None,
    adapters: RowAdapters | None = None,
    **kwargs,
) -> torch.Tensor:
    """
    Decoding loop, called by `generate`.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config:
            Arguments as prepared by `generate`. The prompts `(B, P)` are padded on the left.
        recorder ([`Recorder`], *optional*): records the log-probabilities of sampled tokens.
        adapters ([`RowAdapters`], *optional*): of the rows, if they differ.
        kwargs: `attention_mask` `(B, P)`, if there is padding. Other arguments are ignored.

    Returns: prompts followed by completions `(B, P + T)`, padded on the right.
    """
    (batch, width), size = input_ids.shape, generation_config.max_length
    mask = kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    rows, lengths = torch.arange(batch, device=input_ids.device), mask.sum(dim=1)
    first = width - int(lengths.max())  # all columns before it are padding and are not in the cache
    is_padded = not bool(mask[:, first:].all())
    prompts = [ids[one.bool()].tolist() for ids, one in zip(input_ids, mask, strict=True)]
    cache = _filled(model, prompts, size - first, adapters)
    _use(adapters, rows)
    pad = pad_token_of(generation_config)
    result = input_ids.new_full((batch, size), 0 if pad is None else int(pad))
    result[:, :width] = input_ids
    tokens, mask = result.clone(), torch.cat([mask, mask.new_ones(batch, size - width)], dim=1)
    can_leave = all(type(one) in _BY_ROW for one in logits_processor)
    done = torch.zeros_like(rows, dtype=torch.bool)
    for end in range(width, size):
        output = model(
            input_ids=tokens[:, end - 1 : end],
            attention_mask=mask[:, first:end] if is_padded else None,
            position_ids=(lengths + (end - width - 1)).unsqueeze(1),
            past_key_values=cache,
            use_cache=True,
        )
        scores = logits_processor(tokens[:, :end], output.logits[:, -1].to(torch.float32, copy=True))
        if recorder is not None and end == width:
            recorder.start((batch, size - width), output.logits.dtype, logits_processor)
        chosen, logps = _choose(scores, generation_config.do_sample)
        if recorder is not None:
            recorder.add(rows, end - width, logps)
        tokens[:, end] = torch.where(done, tokens[:, end], chosen)  # finished rows get padding
        result[rows, end] = tokens[:, end]
        done = done | stopping_criteria(tokens[:, : end + 1], None)
        finished = int(done.sum())
        if finished == len(rows):
            return result[:, : end + 1]
        if can_leave and finished * _LEAVING >= len(rows):
            stay = _leave(cache, logits_processor, done, len(rows) - finished)
            tokens, mask, lengths, rows, done = (one[stay] for one in (tokens, mask, lengths, rows, done))
            _use(adapters, rows)
    return result


def _use(adapters: RowAdapters | None, rows: torch.Tensor) -> None:
    if adapters is not None:
        adapters.use([adapters.names[row] for row in rows.tolist()])


def _choose(scores: torch.Tensor, do_sample: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token for each row. Returns the tokens and their log-probabilities, each `(B,)`."""
    logps = scores.log_softmax(dim=-1)
    chosen = _draw(logps.exp()) if do_sample else scores.argmax(dim=-1, keepdim=True)
    return chosen.squeeze(1), logps.gather(1, chosen).squeeze(1)


def _draw(probabilities: torch.Tensor) -> torch.Tensor:
    """
    Draw one token `(B, 1)` from each row of probabilities `(B, V)`, by inverse transform sampling. It needs one random
    number per row, while `torch.multinomial` needs one per token of the vocabulary, which would dominate the time of a
    step on a CPU. Double precision keeps the cumulative sums exact enough for rare tokens.
    """
    sums = probabilities.double().cumsum(dim=-1)
    if not bool(((sums[:, -1] > 0) & sums[:, -1].isfinite()).all()):
        raise ValueError(
            "The model's logits are NaN or infinite, so there is no token to draw. Its weights have diverged, or its "
            "precision overflows: lower the learning rate, or use bfloat16 in place of float16."
        )
    place = torch.rand(len(sums), 1, dtype=torch.double, device=sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, place, right=True).clamp(max=sums.size(1) - 1)


def _leave(cache: Cache, processors: LogitsProcessorList, done: torch.Tensor, count: int) -> torch.Tensor:
    """
    Remove finished rows. The last unfinished rows take their places, so that only these rows are copied. `count` rows
    remain.

    Returns: indices of the remaining rows, in their new order.
    """
    stay = torch.arange(count, device=done.device)
    free, moved = done[:count].nonzero().squeeze(1), (~done[count:]).nonzero().squeeze(1) + count
    stay[free] = moved
    for layer in cache.layers:
        layer.keep_rows(count, free, moved)
    for processor in processors:
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):
            ignored = processor.prompt_ignore_length
            processor.prompt_ignore_length = ignored[stay] if isinstance(ignored, torch.Tensor) else ignored
    return stay


def _filled(model: PreTrainedModel, prompts: list[list[int]], size: int, adapters: RowAdapters | None = None) -> Cache:
    """Return a cache with room for `size` tokens, filled with all but the last token of the left-padded prompts."""
    width = max(map(len, prompts)) - 1
    cache = Cache(layers=[RoomyLayer(size) for _ in range(model.config.get_text_config().num_hidden_layers)])
    if width == 0:
        return cache
    groups = plan_passes([*prompts], [0] * len(prompts), None if adapters is None else adapters.names)
    if not groups:
        if adapters is not None:
            adapters.use(adapters.names)
        kept, *_ = prefill(model.base_model, [prompt[:-1] for prompt in prompts])
        found = [(layer.keys, layer.values) for layer in kept.layers]
    else:
        found = _shared(model, prompts, groups, width, adapters)
    for room, (keys, values) in zip(cache.layers, found, strict=True):
        room.update(keys, values)
    return cache


def _shared(
    model: PreTrainedModel,
    prompts: list[list[int]],
    groups: list[Cluster],
    width: int,
    adapters: RowAdapters | None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return, per layer, keys and values `(B, heads, W, D)` of all but the last token, padded on the left."""
    rows = [prompt[:-1] for prompt in prompts]
    rest = [len(rows[row]) - group.length for group in groups for row in group.rows]
    if not any(rest):
        if adapters is not None:
            adapters.use([adapters.names[group.rows[0]] for group in groups])
        kept, *_ = prefill(model.base_model, [rows[group.rows[0]] for group in groups])
        which = torch.empty(len(rows), dtype=torch.long)
        for number, group in enumerate(groups):
            which[list(group.rows)] = number
        which = which.to(model.device)
        return [(layer.keys.index_select(0, which), layer.values.index_select(0, which)) for layer in kept.layers]
    _, starts, shared, cache = shared_pass(model.base_model, rows, groups, JoinedLayer, adapters)
    # In the second pass, padding is in front of the prefix and after the rest of a row: move all of it to the left
    ends = [shared + len(row) - start for row, start in zip(rows, starts, strict=True)]
    source = torch.tensor(ends, device=model.device).unsqueeze(1) + torch.arange(-width, 0, device=model.device)
    source = source.clamp(min=0)[:, None, :, None]

    def aligned(states: torch.Tensor) -> torch.Tensor:
        return states.gather(2, source.expand(-1, states.size(1), -1, states.size(3)))

    return [tuple(map(aligned, layer.joined)) for layer in cache.layers]
