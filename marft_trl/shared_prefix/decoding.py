# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Fast decoding loop, passed to `generate` of transformers as `custom_generate=`. `generate` does the preparation.

Differences from the loop of transformers, none of which changes the sampling distribution:

- The common prefix of several prompts goes through the model once. Its keys and values are repeated (see `forward`).
- The cache has its full size from the start, so that a step writes one column without copying the rest (see
  [`PreallocatedLayer`]).
- Finished rows leave the batch, and the last rows take their places. This changes nothing for the other rows, since
  attention, logits processors, stopping criteria and draws are independent per row. If a logits processor is not known
  to be independent per row, finished rows stay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMode, StoppingCriteria, logits_process

from ..seams.generation import GraphMemory, captured, find_capture_obstacle, get_pad_token, masks_what_comes_later
from ..seams.libraries import get_logger
from .forward import Cluster, KeptLayer, RepeatedLayer, RowAdapters, plan_passes, prefill, shared_pass, use_adapters


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
    Steps that attend to what is in the cache so far, with the mask `(B, size)` and the lengths `(B,)` of prompts.
    Finished rows leave once they are at least 1/32 of the batch: on a CPU, moving rows costs as much as several rows.
    """

    every = 1  # steps from one look whether rows have finished to the next
    _LEAVING = 32

    def __init__(self, model: PreTrainedModel, size: int, mask: torch.Tensor, lengths: torch.Tensor, is_padded: bool):
        self._model, self._is_padded, self._mask = model, is_padded, mask
        layers = model.config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[PreallocatedLayer(mask.size(0), size) for _ in range(layers)])
        for layer in self.cache.layers:
            # With padding there is always a mask. transformers (5.23) would look in every step whether it is needed,
            # and wait for the device
            layer.is_compileable = is_padded
        self._positions = (lengths - 1).unsqueeze(1)
        self._end = size

    def begin(self, column: int) -> None:
        """The first step is that of the token in a column; the cache has all before it."""
        self._end = column + 1

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `(R, V)` after the next tokens `(R, 1)` of the rows."""
        logits = self._pass(tokens, self._mask[:, : self._end] if self._is_padded else None)
        self._positions, self._end = self._positions + 1, self._end + 1
        return logits

    def count_after(self, count: int, finished: int) -> int:
        """Number of rows, of `count`, that stay when some have finished."""
        return count - finished if finished * self._LEAVING >= count else count

    def keep_rows(self, stay: torch.Tensor, free: torch.Tensor, moved: torch.Tensor) -> None:
        """Go on with the rows `stay`: the first of them, where the rows `moved` have taken the places `free`."""
        for layer in self.cache.layers:
            layer.keep_rows(len(stay), free, moved)
        self._mask, self._positions = self._mask[stay], self._positions[stay]

    def _pass(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        state = {"position_ids": self._positions, "past_key_values": self.cache, "use_cache": True}
        return self._model(input_ids=tokens, attention_mask=mask, **state).logits[:, -1]


class FixedSteps(GrowingSteps):
    """
    Steps whose shapes and addresses stay the same until rows leave, so that a GPU can replay them from a captured
    graph: launching a step kernel by kernel takes longer than a small batch takes to compute. Finished rows are
    checked every eighth step, and rows leave only in the steps of `SIZES`. Tokens are those of [`GrowingSteps`]. A
    step that cannot be captured runs kernel by kernel. The memory, for at most `rows` rows, and the graphs can be used
    for many calls of `generate`, see [`StepStore`].
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
        self.obstacle = find_capture_obstacle(model)
        self._graphs: dict[tuple[Hashable, int], Callable[[], torch.Tensor]] = {}  # the latest last
        self._memory = GraphMemory.create(device)

    def start(self, mask: torch.Tensor, lengths: torch.Tensor, key: Hashable | None = None) -> None:
        """
        Begin with new rows, given the mask `(B, W)` and lengths `(B,)` of prompts. `key` is what graphs depend on
        besides the number of rows. If it is `None`, the graphs of earlier rows are dropped.
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
        super().keep_rows(stay, free, moved)
        mask, positions = self._mask, self._positions
        self._use(len(stay))
        self._mask.copy_(mask)
        self._positions.copy_(positions)

    def _use(self, count: int) -> None:
        parts = (self._all_tokens, self._all_positions, self._all_masks)
        self._tokens, self._positions, self._mask = (part[:count] for part in parts)
        self._taken = 0  # steps with the present rows

    def _forward(self) -> torch.Tensor:
        return self._pass(self._tokens, self._mask)

    def _run(self) -> torch.Tensor:
        key = (self._key, len(self._tokens))
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._graphs[key] = graph
            if self._taken or key not in self._kept:
                return graph()
        elif self._taken < _BEFORE_CAPTURE or self.obstacle is not None:
            return self._forward()
        # A graph is compared with the step that it stands for when it is new, and once in each later call
        expected = self._forward().clone()
        try:
            graph = graph or captured(self._forward, cast(GraphMemory, self._memory))
            found = graph()
            gap = (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-6)
            if not gap <= (1e-4 if expected.dtype == torch.float32 else 0.02):
                raise ValueError(f"the logits of the graph differ by {gap:.1e}")
        except Exception as problem:
            self.obstacle = f"{type(problem).__name__}: {problem}"
            self._graphs.clear()
            logger.warning(f"Decoding continues without CUDA graphs: {self.obstacle}.")
            return expected
        self._graphs[key] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return found


class StepStore:
    """Keeps fixed steps from one call of `generate` to the next, with their memory and their graphs."""

    def __init__(self) -> None:
        self._kept: FixedSteps | None = None
        self._obstacle: str | None = None  # why steps could not be captured: what has failed is not tried again

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
            kept.obstacle = kept.obstacle or self._obstacle
        kept.start(mask, lengths, key)
        return kept

    def clear(self) -> None:
        if self._kept is not None:
            self._obstacle = self._obstacle or self._kept.obstacle
        self._kept = None


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
    return (
        config.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        and config.guidance_scale in (None, 1)
        and config.cache_implementation in (None, "static", "dynamic")
        and config.use_cache is not False
        and not config.return_dict_in_generate
    )


class Recorder:
    """Records log-probabilities of sampled tokens if those of scoring are the same (temperature only, float32)."""

    def __init__(self):
        self.logps: torch.Tensor | None = None  # (B, T), or `None` if they have to be computed later

    def start(self, shape: tuple[int, int], logits: torch.Tensor, processors: LogitsProcessorList) -> None:
        is_scored = all(isinstance(processor, logits_process.TemperatureLogitsWarper) for processor in processors)
        is_exact = logits.dtype == torch.float32
        self.logps = torch.zeros(shape, device=logits.device) if is_scored and is_exact else None

    def add(self, rows: torch.Tensor, step: int, logps: torch.Tensor) -> None:
        if self.logps is not None:
            self.logps[rows, step] = logps


class LateCriterion(StoppingCriteria):
    """A stopping criterion that reads tokens on the host. It may be called after several new tokens."""

    def begin(self, width: int) -> None:
        """The completions of a call begin at this column."""


class RowFollower(Protocol):
    """Follows the rows of a call of [`decode`] while it runs."""

    # (B, T), from 0 to 1, or `None` for torch's generator. Rows with their own numbers do not depend on other rows
    draws: torch.Tensor | None
    turns: Sequence[Any]  # by row; with `is_gone=True`, the row is to end
    reads_tokens: bool  # whether `look` is needed for each token, and not only for rows that are to end

    def look(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], done: Sequence[bool]) -> list[bool] | None:
        """
        Take the newest tokens of the remaining rows, which are indices among all `B`, from time to time and at the
        end. Padding follows the end of a row. Returns which rows are to end here, or `None` for none.
        """


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    recorder: Recorder | None = None,
    adapters: RowAdapters | None = None,
    is_fixed: bool = False,
    store: StepStore | None = None,
    key: Hashable | None = None,
    watch: RowFollower | None = None,
    **kwargs,
) -> torch.Tensor:
    """
    Decoding loop, called by `generate` with prompts `(B, P)` padded on the left. `watch` may end rows, `is_fixed`
    selects [`FixedSteps`]; of `kwargs`, only the `attention_mask` `(B, P)` is read. Returns prompts and completions
    `(B, P + T)`, padded on the right. Raises `ValueError` if logits are not finite.
    """
    (batch, width), size = input_ids.shape, generation_config.max_length
    mask = torch.ones_like(input_ids) if kwargs.get("attention_mask") is None else kwargs["attention_mask"]
    prompts = [list(compress(*pair)) for pair in zip(input_ids.tolist(), mask.tolist(), strict=True)]
    longest = max(map(len, prompts))
    first = width - longest  # all columns before it are padding and are not in the cache
    rows, lengths = torch.arange(batch, device=input_ids.device), mask.sum(dim=1)
    seen = torch.cat([mask[:, first:], mask.new_ones(batch, size - width)], dim=1)
    steps: GrowingSteps
    if is_fixed and masks_what_comes_later(model):
        steps = (store or StepStore()).start(model, seen, lengths, key)
    else:
        steps = GrowingSteps(model, size - first, seen, lengths, is_padded=int(lengths.min()) < longest)
    # Those that wait until the host looks at the tokens anyway
    late = [item for item in stopping_criteria if steps.every > 1 and isinstance(item, LateCriterion)]
    for criterion in late:
        criterion.begin(width)
    stopping_criteria = StoppingCriteriaList([item for item in stopping_criteria if item not in late])
    fill(steps.cache, model.base_model, prompts, adapters)
    steps.begin(longest - 1)
    use_adapters(adapters, range(batch))
    pad = get_pad_token(generation_config)
    result = input_ids.new_full((batch, size), 0 if pad is None else int(pad))
    result[:, :width] = input_ids
    tokens = result.clone()
    can_leave = all(type(item) in _BY_ROW for item in logits_processor)
    done = torch.zeros_like(rows, dtype=torch.bool)
    failed = torch.zeros_like(rows[:1], dtype=torch.bool)
    draws, looked = watch.draws if watch is not None else None, width
    for end in range(width, size):
        logits = steps.logits(tokens[:, end - 1 : end])
        scores = logits_processor(tokens[:, :end], logits.to(torch.float32, copy=True))
        if recorder is not None and end == width:
            recorder.start((batch, size - width), logits, logits_processor)
        step_draws = None if draws is None else draws[rows, end - width].unsqueeze(1)
        logps = scores.log_softmax(dim=-1)
        chosen = draw(logps.exp(), step_draws) if generation_config.do_sample else scores.argmax(dim=-1, keepdim=True)
        chosen, logps = chosen.squeeze(1), logps.gather(1, chosen).squeeze(1)
        failed = failed | ~logps.isfinite().all()  # no token can be sampled from NaN logits
        if recorder is not None:
            recorder.add(rows, end - width, logps)
        tokens[:, end] = torch.where(done, tokens[:, end], chosen)  # finished rows get padding
        result[rows, end] = tokens[:, end]
        done = done | stopping_criteria(tokens[:, : end + 1], None)
        if (end - width + 1) % steps.every and end < size - 1:
            continue
        for criterion in late:
            done = done | criterion(tokens[:, : end + 1], None)
        if watch is not None and (watch.reads_tokens or any(watch.turns[row].is_gone for row in rows.tolist())):
            leaves = watch.look(rows.tolist(), tokens[:, looked : end + 1].tolist(), done.tolist())
            done = done if leaves is None else done | torch.tensor(leaves, device=done.device)
            looked = end + 1
        finished, has_failed = torch.stack([done.sum(), failed[0].long()]).tolist()  # waits for the device once
        if has_failed:
            raise ValueError(
                "The model's logits are NaN or infinite, so no token can be sampled. The weights have diverged, or "
                "the precision overflows. Lower the learning rate, or use bfloat16 instead of float16."
            )
        if finished == len(rows):
            return result[:, : end + 1]
        count = steps.count_after(len(rows), finished) if can_leave else len(rows)
        if count < len(rows):
            stay, free, moved = _leave(logits_processor, done, count)
            steps.keep_rows(stay, free, moved)
            tokens, rows, done = (value[stay] for value in (tokens, rows, done))
            use_adapters(adapters, rows.tolist())
    return result


def draw(probabilities: torch.Tensor, draws: torch.Tensor | None = None) -> torch.Tensor:
    """
    Draw one token `(B, 1)` from each row of probabilities `(B, V)`, by inverse transform sampling with `draws` `(B,
    1)` or torch's generator: one random number per row, while `torch.multinomial` needs one per token of the
    vocabulary. Double precision keeps the sums exact enough for rare tokens.
    """
    sums = probabilities.double().cumsum(dim=-1)
    if draws is None:
        draws = torch.rand(len(sums), 1, dtype=torch.double, device=sums.device)
    return torch.searchsorted(sums, draws * sums[:, -1:], right=True).clamp(max=sums.size(1) - 1)


def _leave(
    processors: LogitsProcessorList, done: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Let finished rows leave, until `count` remain: the last unfinished ones take their places, and only these are
    copied. Returns indices of the remaining rows in their new order, and the places and rows of which some move.
    """
    stay = torch.arange(count, device=done.device)
    moved = (~done[count:]).nonzero().squeeze(1) + count
    free = done[:count].nonzero().squeeze(1)[: len(moved)]
    stay[free] = moved
    for processor in processors:
        if isinstance(processor, logits_process.RepetitionPenaltyLogitsProcessor):
            ignored = processor.prompt_ignore_length
            processor.prompt_ignore_length = ignored[stay] if isinstance(ignored, torch.Tensor) else ignored
    return stay, free, moved


# ---- The cache: memory for all tokens from the start, filled with the keys and values of prompts ----


# Tokens that go through the model together while a cache is filled: more take memory and do not make a device faster
PREFILL_TOKENS = 2**14


class PreallocatedLayer(DynamicLayer):
    """Cache layer with memory for `rows` sequences of `size` tokens, of which a pass attends to those so far."""

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
    A [`PreallocatedLayer`] whose shapes and addresses stay the same from step to step. A pass attends to all of its
    memory, where later columns are masked. `place` `(1,)`, the same for all layers, is the column of the next token.
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
    """Layer of a pass over whole prompts: hands its keys and values to `store`, and keeps nothing."""

    def __init__(self, store: Callable[[torch.Tensor, torch.Tensor], None]):
        super().__init__()
        self._store = store

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self._store(key_states, value_states)
        return key_states, value_states


class _Joining(RepeatedLayer):
    """
    Layer of a pass over what follows a shared prefix: hands the joined keys and values to `store`. In the pass,
    padding is in front of the prefix and after the rest of a row; `source` `(R, W)` moves all of it to the left.
    """

    def __init__(self, kept: KeptLayer, index: torch.Tensor, store: Callable[..., None], source: torch.Tensor):
        super().__init__(kept, index)
        self._store, self._source = store, source

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        joined = super().update(key_states, value_states)
        source = self._source.to(key_states.device)[:, None, :, None]
        self._store(*(item.gather(2, source.expand(-1, item.size(1), -1, item.size(3))) for item in joined))
        return joined


# Prompts that go through the model together, and their shared prefixes by place among them; none if that gains nothing
_Part = tuple[list[int], list[Cluster]]


def fill(cache: Cache, backbone: nn.Module, prompts: Sequence[list[int]], adapters: RowAdapters | None = None) -> None:
    """Fill a cache with all but the last tokens of prompts, padded on the left, each layer at once, without copies."""
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
            yield list(range(start, min(start + count, len(prompts)))), []
        return
    rows, taken, tokens = list[int](), list[Cluster](), 0
    for group in groups:
        rest = max(len(prompts[row]) - 1 - group.length for row in group.rows)
        most = max(PREFILL_TOKENS // max(rest, 1), 1)
        for start in range(0, len(group.rows), most):
            part_rows = group.rows[start : start + most]
            size = group.length + rest * len(part_rows)
            if rows and tokens + size > PREFILL_TOKENS:
                yield rows, taken
                rows, taken, tokens = [], [], 0
            taken = [*taken, Cluster(group.length, tuple(range(len(rows), len(rows) + len(part_rows))))]
            rows, tokens = [*rows, *part_rows], tokens + size
    yield rows, taken


def _fill_part(
    cache: Cache, backbone: nn.Module, prompts: list[list[int]], part: _Part, end: int, adapters: RowAdapters | None
) -> None:
    numbers, groups = part
    rows = [prompts[row] for row in numbers]
    width = max(map(len, rows))
    row_adapters = None if adapters is None else adapters._replace(names=[adapters.names[row] for row in numbers])
    if width == 0:
        return
    stores = [partial(room.put, torch.tensor(numbers), end - width) for room in cache.layers]
    if not groups:
        use_adapters(row_adapters, range(len(rows)))
        prefill(backbone, rows, Cache(layers=[_Storing(store) for store in stores]))
        return
    if all(len(rows[row]) == group.length for group in groups for row in group.rows):  # nothing follows the prefixes
        use_adapters(row_adapters, (group.rows[0] for group in groups))
        kept, *_ = prefill(backbone, [rows[group.rows[0]] for group in groups])
        which = torch.tensor([number for number, group in enumerate(groups) for _ in group.rows])
        for store, layer in zip(stores, kept.layers, strict=False):  # the last layers may keep nothing
            index = which.to(layer.keys.device)
            store(layer.keys.index_select(0, index), layer.values.index_select(0, index))
        return
    shared = max(group.length for group in groups)
    starts = [group.length for group in groups for _ in group.rows]
    ends = [shared + len(row) - start for row, start in zip(rows, starts, strict=True)]
    source = (torch.tensor(ends).unsqueeze(1) + torch.arange(-width, 0)).clamp(min=0)
    source = source.to(next(backbone.parameters()).device)
    following = iter(stores)

    def joining(kept: KeptLayer, index: torch.Tensor) -> RepeatedLayer:
        return _Joining(kept, index, next(following), source)

    shared_pass(backbone, rows, groups, joining, row_adapters)
