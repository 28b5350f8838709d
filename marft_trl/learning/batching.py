# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training rows, slices and micro-batches of one agent each, their loss weights, and rows without a gradient."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import pad

from ..algorithms.rows import Level, MicroBatch, Row, Slice
from ..config.marft_config import MARFTConfig
from ..config.team_setup import RunContext
from ..seams.libraries import get_logger
from ..seams.trl import CLIP_METRICS, LOSSES, OLD_LOGPS, SAMPLING_WEIGHTS
from ..shared_prefix.forward import Cluster, clusters, in_mode
from .log_probs import ModelPass
from .memory import (
    ActivationCost,
    count_bytes,
    free_memory,
    head_size,
    measure_activations,
    memory_of_server,
    optimizer_size,
)


logger = get_logger(__name__)

# Values of TRL's metrics for a row whose advantage is 0, which are known without a forward pass
ZERO_ADVANTAGE_METRICS: dict[str, list[float]] = {name: [0.0] for name in (*CLIP_METRICS, "cispo_clip_ratio")}
# Metric: fraction of an agent's rows that were skipped because they have no gradient
FRACTION_WITHOUT_SIGNAL = "frac_rows_without_signal"


def split_by_gradient(rows: Sequence[Row], run: RunContext) -> tuple[list[Row], list[Row]]:
    """
    Return the rows with a gradient and the rows without, each in order. TRL's losses (1.16) multiply each token's term
    by its advantage and by its mask. If all of them are 0, only the KL to the reference, an entropy bonus and the
    router loss of a mixture of experts remain; without them, the gradient of the row is exactly 0.
    """
    settings, state = run.settings, run.state
    # The router loss and the entropy quantile are computed over the tokens of all rows
    keeps_all = settings.aux_loss_enabled or settings.top_entropy_quantile < 1.0
    if keeps_all or not run.args.skip_rows_without_signal or not state.is_training:
        return list(rows), []
    keeps_counted = settings.beta != 0.0 or state.has_entropy_bonus
    with_gradient: list[Row] = []
    without_gradient: list[Row] = []
    for row in rows:
        is_nonzero = row.advantage.any() if isinstance(row.advantage, torch.Tensor) else row.advantage != 0.0
        has_advantage = row.factor != 0.0 and bool(is_nonzero)
        has_gradient = not len(row.completion_ids) or (row.counts and (keeps_counted or has_advantage))
        (with_gradient if has_gradient else without_gradient).append(row)
    return with_gradient, without_gradient


# Fraction of the free memory that micro-batches may use. The rest is for short-lived tensors and fragmentation
_MEMORY_FRACTION = 0.7


class MicroBatcher:
    """Cuts rows into micro-batches that fit into the memory of the device."""

    def __init__(
        self,
        passes: ModelPass,
        activate: Callable[[], None],  # an adapter of the base, if possible one that is trained
        args: MARFTConfig,
        get_parameters: Callable[[], Mapping[str, Mapping[str, nn.Parameter]]],  # that are trained, by adapter
        get_optimizer: Callable[[], Any],
    ):
        self._passes, self._activate, self._args, self.share = passes, activate, args, passes.share
        self._get_parameters, self._get_optimizer = get_parameters, get_optimizer
        self.cost: ActivationCost | None = None  # measured for the first rows
        self.max_tokens = args.max_tokens_per_micro_batch
        self._free_bytes = math.inf
        self._reduced_max_tokens = math.inf  # limit after running out of memory

    def cut(self, rows: Sequence[Row], **options: Any) -> Iterator[MicroBatch]:
        """Cut rows into micro-batches of one agent each. `options` are arguments of [`micro_batches`]."""
        repeat = 0.0 if self.share else None
        if self.share and self.cost is not None:
            repeat = self.cost.per_repeat / self.cost.bytes_per_token(self._passes.is_checkpointing)
        # The time of a pass on a GPU hardly depends on the number of rows, so a token limit alone is enough
        limits_rows = not self.joins_slices or self.max_tokens is None
        max_rows = self._args.per_device_train_batch_size if limits_rows else None
        with_images = [row for row in rows if row.images]
        if with_images:  # TRL's passes take them, and share no prefixes
            rows = [row for row in rows if not row.images]
            most = self._args.per_device_train_batch_size
            yield from micro_batches(with_images, most, self.max_tokens, **options)
        yield from micro_batches(rows, max_rows, self.max_tokens, repeat=repeat, **options)

    @property
    def joins_slices(self) -> bool:
        """
        `True` if a micro-batch may have rows of several slices: not with TRL's passes, which rows with images take, so
        that sums have TRL's order; not with its quantile, which is per slice; not if the value scale changes within an
        optimizer step.
        """
        args = self._args
        several_batches = args.steps_per_generation * args.num_iterations < args.gradient_accumulation_steps
        keeps_slices = args.top_entropy_quantile < 1.0 or (args.normalize_values and several_batches)
        return self._passes.give_positions and not keeps_slices and self._passes.images is None

    def fit(self, rows: Sequence[Row]) -> None:
        """Set the token limit from the free memory, or checkpoint gradients if a row does not fit. Settings stay."""
        longest = max((row.length for row in rows), default=0)
        if not longest:
            return
        if self.cost is None:
            self.cost = self.measure(longest)
            num_scored = sum(len(row.completion_ids) for row in rows)
            self._free_bytes = self.free_for_activations(num_scored, self.cost.fixed)
        limit, checkpointing = self.compute_limits(longest, self.cost, self._free_bytes)
        if checkpointing and not self._passes.is_checkpointing:
            logger.warning(
                f"Rows of {longest:,} tokens do not fit into the {self._free_bytes / 1e9:.1f} GB that are free for "
                "activations. Gradient checkpointing is now on."
            )
            self._passes.checkpoint_gradients()
        if self.max_tokens is None or checkpointing:
            self.max_tokens = int(min(limit, self._reduced_max_tokens))

    def shrink(self, rows: Sequence[Row]) -> str | None:
        """
        After running out of memory, halve the micro-batches, or checkpoint gradients if the longest row does not fit
        alone. Returns a description for messages, or `None` if nothing is left to change.
        """
        longest = max((row.length for row in rows), default=0)
        largest = max((batch.num_tokens for batch in self.cut(rows)), default=0)
        if largest > longest:
            self.max_tokens = self._reduced_max_tokens = max(int(largest / 2), longest)
            return f"micro-batches have at most {self.max_tokens:,} tokens"
        if self._passes.is_checkpointing or self._args.gradient_checkpointing is not None:
            return None
        self._passes.checkpoint_gradients()
        return "gradients are checkpointed"

    def measure(self, length: int) -> ActivationCost:
        """Cost per token for rows of this length, measured on short rows. Collective if the base is sharded."""
        base, device = self._passes.base, self._passes.device
        self._activate()  # a frozen adapter saves no activations
        with (
            in_mode(base, training=True),
            self._passes.without_checkpointing(),
            self._passes.autocast(),
            # Dropout must not advance the random state of training
            torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
        ):
            return measure_activations(base, self.share).at(length)

    def compute_limits(self, longest: int, cost: ActivationCost, free_bytes: float) -> tuple[int, bool]:
        """Return the maximum tokens of a micro-batch, and whether the longest row needs gradient checkpointing."""
        limit = self._args.max_tokens_per_micro_batch
        checkpointing = self._passes.is_checkpointing
        if self._args.gradient_checkpointing is None and not checkpointing:
            checkpointing = max(longest, limit or 0) * cost.per_token > free_bytes
        if limit is None:
            # A pass of frozen adapters keeps nothing
            num_fitting = max(free_bytes / (cost.bytes_per_token(checkpointing) or 1.0), 1)
            # A power of 2, so that other programs on the device rarely change how rows are cut
            limit = max(2 ** int(math.log2(num_fitting)), longest)
        return limit, checkpointing

    def free_for_activations(self, num_scored: int, fixed: float = 0.0) -> float:
        """Bytes that are free for tensors that grow with the tokens of a pass, besides its `fixed` bytes."""
        device, vocabulary = self._passes.device, self._passes.base.config.get_text_config().vocab_size
        trained = [parameter for part in self._get_parameters().values() for parameter in part.values()]
        optim, optimizer = str(getattr(self._args.optim, "value", self._args.optim)), self._get_optimizer()
        # Gradients and optimizer state that are not allocated yet
        has_state = optimizer is not None and bool(optimizer.state)
        reserved = 0 if has_state else count_bytes(trained) + optimizer_size(trained, optim)
        free = free_memory(device) - memory_of_server(self._args, device)
        return max(_MEMORY_FRACTION * (free - reserved) - head_size(vocabulary, num_scored, device) - fixed, 1.0)


class TeamBatcher:
    """Cuts rows of agents with different bases. `batchers` has the [`MicroBatcher`] of each agent's base."""

    def __init__(self, batchers: Mapping[str, MicroBatcher]):
        self._by_agent = batchers
        self._batchers = list(dict.fromkeys(batchers.values()))

    def _split(self, rows: Sequence[Row]) -> Iterator[tuple[MicroBatcher, list[Row]]]:
        for batcher in self._batchers:
            own = [row for row in rows if self._by_agent[row.agent] is batcher]
            if own:
                yield batcher, own

    def cut(self, rows: Sequence[Row], **options: Any) -> Iterator[MicroBatch]:
        for batcher, own in self._split(rows):
            yield from batcher.cut(own, **options)

    @property
    def share(self) -> bool:
        return any(batcher.share for batcher in self._batchers)

    @property
    def joins_slices(self) -> bool:
        return all(batcher.joins_slices for batcher in self._batchers)

    def fit(self, rows: Sequence[Row]) -> None:
        for batcher, own in self._split(rows):
            batcher.fit(own)

    def shrink(self, rows: Sequence[Row]) -> str | None:
        return next(filter(None, [batcher.shrink(own) for batcher, own in self._split(rows)]), None)


def cut_slices(episodes: Sequence[list[Row]], order: torch.Tensor, size: int) -> list[list[Row]]:
    """Distribute episodes, in the order `(E,)`, over slices of `size` episodes."""
    indices = order.tolist()
    parts = [indices[start : start + size] for start in range(0, len(indices), size)]
    return [[row for index in part for row in episodes[index]] for part in parts]


@dataclass(frozen=True)
class Pools:
    """Sets of rows that losses are averaged over: one pool per adapter, or per agent if agents have equal weight."""

    adapters: Sequence[str]  # of the agents
    critics: Sequence[str] = ()  # parts of the critic
    agents: Mapping[str, str] = field(default_factory=dict)  # adapter of each agent with `agent_weight="equal"`

    @property
    def names(self) -> list[str]:
        """Names of the pools. The pools of the critic come last."""
        return [*(self.agents or self.adapters), *self.critics]


def count_rows(slices: Sequence[list[Row]], pools: Pools) -> torch.Tensor:
    """
    Counts `(S, A, 4)` per slice and pool: rows, loss tokens, rows with a token, and value targets. The pools of the
    critic come last and only have value targets. [`make_slices`] takes the counts summed over processes.
    """
    counts = torch.zeros(len(slices), len(pools.names), 4, dtype=torch.long)
    position = {name: index for index, name in enumerate(pools.names)}
    for index, rows in enumerate(slices):
        for row in rows:
            if row.is_trained:
                has_tokens = len(row.completion_ids) > 0
                pool = row.agent if pools.agents else row.adapter
                counts[index, position[pool], :3] += torch.tensor([1, row.num_loss_tokens, has_tokens])
            if row.critic is not None:
                counts[index, position[row.critic], 3] += row.num_value_targets
    return counts


def make_slices(slices: Sequence[list[Row]], pools: Pools, counts: torch.Tensor) -> list[Slice]:
    """Make slices from the counts `(S, A, 4)` of [`count_rows`], summed over processes, in the order of `pools`."""
    average = counts.double().mean(dim=0).tolist()  # (A, 4)
    num_policy_pools = len(pools.names) - len(pools.critics)
    names, critics = pools.names[:num_policy_pools], pools.critics
    num_rows = dict(zip(names, counts[:, :, 0].sum(dim=0).tolist(), strict=False))
    # Of each agent in the loss of its adapter: 1 / number of the adapter's agents with rows
    num_agents = Counter(adapter for agent, adapter in pools.agents.items() if num_rows[agent])
    weights = {agent: 1 / num_agents[adapter] for agent, adapter in pools.agents.items() if num_rows[agent]}
    weighted = []
    for s, rows in enumerate(slices):
        num_targets = {critic: int(counts[s, num_policy_pools + c, 3]) for c, critic in enumerate(critics)}
        with_tokens = [pools.agents.get(name, name) for a, name in enumerate(names) if counts[s, a, 2] > 0]
        weighted.append(
            Slice(
                rows=rows,
                rows_per_slice={name: average[a][0] for a, name in enumerate(names)},
                tokens_per_slice={name: average[a][1] for a, name in enumerate(names)},
                tokens={name: int(counts[s, a, 1]) for a, name in enumerate(names)},
                adapters=frozenset([*with_tokens, *(critic for critic, count in num_targets.items() if count)]),
                value_targets={critic: average[num_policy_pools + c][3] for c, critic in enumerate(critics)},
                weights=weights,
            )
        )
    return weighted


def make_groups_adjacent(order: torch.Tensor, groups: Sequence[int]) -> torch.Tensor:
    """Reorder a permutation `(E,)` so that groups are adjacent, each at the position of its first member."""
    members: dict[int, list[int]] = {}
    for index in order.tolist():
        members.setdefault(groups[index], []).append(index)
    return torch.tensor([index for indices in members.values() for index in indices], dtype=torch.long)


def micro_batches(
    rows: Sequence[Row],
    max_rows: int | None,
    max_tokens: int | None,
    key: Callable[[Row], Any] = lambda row: row.agent,
    keep_empty: bool = False,
    repeat: float | None = None,
) -> Iterator[MicroBatch]:
    """
    Cut rows into micro-batches of one agent (or `key`) each. A row longer than `max_tokens`, which counts padding,
    gets one of its own. Rows of an agent that fit into one keep their order; others are sorted by length to reduce
    padding. If prefixes are shared (`repeat`: memory of a repeated token, relative to a computed one), rows with a
    common prefix stay together. Rows without completion tokens are left out (unless `keep_empty`), but still count in
    the loss weights.
    """
    rows_by_key: dict[str, list[Row]] = {}
    for row in rows:
        if len(row.completion_ids) or keep_empty:
            rows_by_key.setdefault(key(row), []).append(row)
    for agent, agent_rows in rows_by_key.items():
        if repeat is not None:
            groups = clusters([row.prompt_ids.tolist() for row in agent_rows])
        else:
            groups = [Cluster(0, (index,)) for index in range(len(agent_rows))]
        groups.sort(key=lambda group: max(agent_rows[index].length for index in group.rows))
        batches = list(_cut(groups, agent_rows, max_rows or len(agent_rows), max_tokens, repeat or 0.0))
        if len(batches) == 1:
            batches = [(agent_rows, batches[0][1])]
        yield from (MicroBatch(agent, batch, num_tokens) for batch, num_tokens in batches)


@dataclass(frozen=True)
class _Size:
    """Size of a micro-batch; lengths are maxima over its rows, in tokens."""

    num_rows: int = 0
    prompt: int = 0
    completion: int = 0
    groups: frozenset[int] = frozenset()  # indices of the groups of rows with a shared prefix
    prefix: int = 0
    suffix: int = 0  # after the shared prefix

    def with_row(self, row: Row, group: int, prefix: int) -> _Size:
        return _Size(
            self.num_rows + 1,
            max(self.prompt, len(row.prompt_ids)),
            max(self.completion, len(row.completion_ids)),
            self.groups | {group},
            max(self.prefix, prefix),
            max(self.suffix, row.length - prefix),
        )

    def count_tokens(self, repeat: float) -> float:
        """Return the number of tokens to compute, plus `repeat` for each repeated token."""
        unshared = self.num_rows * (self.prompt + self.completion)
        shared = len(self.groups) * self.prefix + self.num_rows * (self.suffix + repeat * self.prefix)
        return min(unshared, shared) if self.prefix else unshared


def _cut(
    groups: Sequence[Cluster], rows: Sequence[Row], max_rows: int, max_tokens: int | None, repeat: float
) -> Iterator[tuple[list[Row], float]]:
    batch: list[Row] = []
    size = _Size()
    for group_index, group in enumerate(groups):
        for index in group.rows:
            larger = size.with_row(rows[index], group_index, group.length)
            is_too_long = max_tokens is not None and larger.count_tokens(repeat) > max_tokens
            if batch and (larger.num_rows > max_rows or is_too_long):
                yield batch, size.count_tokens(repeat)
                batch, larger = [], _Size().with_row(rows[index], group_index, group.length)
            batch.append(rows[index])
            size = larger
    yield batch, size.count_tokens(repeat)


def collate(
    rows: Sequence[Row], pad_token_id: int, pad_to_multiple_of: int | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """
    Collate `B` rows into the tensors that TRL's loss takes. Prompts are padded on the left to `P` tokens, completions
    on the right to `T` tokens. Fields `(B, T)` that not all rows have are left out. `completion_mask` is 1 for tokens
    that count in the loss, `completion_attention` for all tokens.
    """

    def padded(tensors: list[torch.Tensor], value: float, side: str) -> torch.Tensor:
        return pad(tensors, padding_value=value, padding_side=side, pad_to_multiple_of=pad_to_multiple_of).to(device)

    prompts, completions = [row.prompt_ids for row in rows], [row.completion_ids for row in rows]
    advantages: list[Any] = [row.advantage * row.factor for row in rows]
    masks = [torch.full_like(row.completion_ids, int(row.counts)) for row in rows]
    batch = {
        "prompt_ids": padded(prompts, pad_token_id, "left"),
        "prompt_mask": padded([torch.ones_like(ids) for ids in prompts], 0, "left"),
        "completion_ids": padded(completions, pad_token_id, "right"),
        "completion_mask": padded(masks, 0, "right"),
        "completion_attention": padded([torch.ones_like(ids) for ids in completions], 0, "right"),
        "advantages": padded(advantages, 0.0, "right")
        if isinstance(rows[0].advantage, torch.Tensor)
        else torch.tensor(advantages, dtype=torch.float32, device=device),
    }
    optional_fields = {
        OLD_LOGPS: "old_per_token_logps",
        "ref_per_token_logps": "ref_per_token_logps",
        "sampling_per_token_logps": "sampling_logps",
        SAMPLING_WEIGHTS: "sampling_weights",
    }
    for name, row_field in optional_fields.items():
        values = [getattr(row, row_field) for row in rows]
        if all(value is not None for value in values):
            batch[name] = padded(values, 0.0, "right")
    return batch


@dataclass(frozen=True)
class LossWeights:
    """Weights with which one micro-batch enters the loss of its adapter."""

    loss: float  # factor of TRL's loss of the micro-batch
    num_items_in_batch: float  # TRL's normalizer for the loss types that divide by a token count
    entropy: float  # factor of `entropy_coef`, so that the bonus is a mean over the adapter's tokens


def loss_weights(
    batch: MicroBatch, slice_: Slice, loss_type: str, num_processes: int, steps_per_generation: int, level: Level
) -> LossWeights:
    """
    Weights with which the losses of an adapter's micro-batches, summed over micro-batches and averaged over processes,
    equal the loss that TRL would compute on all rows of the adapter at once.

    - `grpo`, `sapo`, `luspo` and `dr_grpo` average over rows. Every row of the generation batch has the same weight.
    - `bnpo` averages over the tokens of a slice.
    - `dapo`, `cispo` and `vespo` divide a sum over tokens by the number of tokens of the generation batch.

    For every loss type, the entropy bonus is a mean over the tokens of a slice; at action level, over its turns. If
    agents have equal weight, this applies to the rows of each agent, and the loss of an adapter is their mean.
    """
    pool = batch.agent if slice_.weights else batch.adapter
    weight = slice_.weights.get(pool, 1.0)
    token_share = num_processes * batch.num_loss_tokens / max(slice_.tokens[pool], 1)
    num_items = slice_.tokens_per_slice[pool] * steps_per_generation
    if LOSSES[loss_type].is_row_mean:
        row_share = num_processes * len(batch.rows) / slice_.rows_per_slice[pool]
        bonus = level.entropy_weight(token_share, row_share)
        return LossWeights(loss=weight * row_share, num_items_in_batch=num_items, entropy=bonus)
    return LossWeights(loss=weight * token_share, num_items_in_batch=num_items * token_share, entropy=1.0)
