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

from ..adapters.policies import Policies
from ..algorithms.levels import Level
from ..algorithms.rows import MicroBatch, Row, Slice
from ..config.marft_config import MARFTConfig
from ..seams.libraries import get_logger
from ..seams.trl import LOSSES, OLD_LOGPS, SAMPLING_WEIGHTS, TrlSettings, TrlState
from ..shared_prefix.forward import Cluster, clusters
from .memory import (
    ActivationCost,
    count_bytes,
    free_memory,
    head_size,
    measure_activations,
    memory_of_server,
    optimizer_size,
)
from .passes import ModelPass


logger = get_logger(__name__)

# TRL's metrics of a row whose advantage is 0 that are known without a pass
_KNOWN = ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
KNOWN_METRICS: dict[str, list[float]] = {f"clip_ratio/{name}": [0.0] for name in _KNOWN} | {"cispo_clip_ratio": [0.0]}
# Share of the rows of an agent that took no pass
WITHOUT_SIGNAL = "frac_rows_without_signal"


class ZeroGradientFilter:
    """
    Tells rows that have a gradient from those that have none.

    TRL's losses (TRL 1.16) multiply each token's term by its advantage and by its mask. If all advantages of a row are
    0, only the KL to the reference, an entropy bonus and the loss of a mixture's routers are left. If none of them is
    on, the gradient of the row is exactly 0. The same holds for a row whose tokens do not count.

    Args:
        args: `skip_rows_without_signal`, `target_kl`.
        settings: what else is in the loss.
        state: whether training runs, and whether there is an entropy bonus.
    """

    def __init__(self, args: MARFTConfig, settings: TrlSettings, state: TrlState):
        self._args, self._settings, self._state = args, settings, state

    @property
    def needs_divergence(self) -> bool:
        """`True` if rows without a gradient take a forward pass, because the divergence of all rows is watched."""
        return self._args.target_kl is not None

    def split(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """The rows that have a gradient, and those that have none, in their order."""
        with_gradient: list[Row] = []
        without: list[Row] = []
        for row in rows:
            (with_gradient if self._has_gradient(row) else without).append(row)
        return with_gradient, without

    def _has_gradient(self, row: Row) -> bool:
        settings, state = self._settings, self._state
        if not self._args.skip_rows_without_signal or not state.is_training or not len(row.completion_ids):
            return True
        # The routers' loss is over all tokens, and the highest entropies are found among those of all rows
        if settings.aux_loss_enabled or settings.top_entropy_quantile < 1.0:
            return True
        if not row.counts:
            return False
        if settings.beta != 0.0 or state.has_entropy_bonus:
            return True
        advantage = row.advantage
        return row.factor != 0.0 and bool(advantage.any() if isinstance(advantage, torch.Tensor) else advantage)


# Share of the free memory that micro-batches may use. The rest is for short-lived tensors and fragmentation.
_FILLED = 0.7


class MicroBatcher:
    """
    Cuts rows into micro-batches that fit into the memory of the device.

    Args:
        args: limits of micro-batches, gradient checkpointing, the optimizer.
        has_optimizer_state: `has_optimizer_state()` tells whether the optimizer has its memory already.
    """

    def __init__(
        self,
        passes: ModelPass,
        policies: Policies,
        args: MARFTConfig,
        trained: Callable[[], Sequence[nn.Parameter]],
        has_optimizer_state: Callable[[], bool],
    ):
        self._passes, self._policies, self._args, self.share = passes, policies, args, passes.share
        self._trained, self._has_optimizer_state = trained, has_optimizer_state
        self.cost: ActivationCost | None = None  # of the first rows
        self.max_tokens = args.max_tokens_per_micro_batch
        self._room, self._proven = math.inf, math.inf  # tokens that have fitted, where more have not

    def cut(self, rows: Sequence[Row], **options: Any) -> Iterator[MicroBatch]:
        """Micro-batches of one agent each; `options` are those of [`micro_batches`]."""
        repeat = None
        if self.share:
            repeat = (
                0.0 if self.cost is None else self.cost.per_repeat / self.cost.bytes_per_token(self.is_checkpointing)
            )
        # Once memory has been measured, it decides alone: each pass costs a GPU much the same, whatever it holds
        is_free = self.joins_slices and self.max_tokens is not None
        most = None if is_free else self._args.per_device_train_batch_size
        return micro_batches(rows, most, self.max_tokens, repeat=repeat, **options)

    @property
    def joins_slices(self) -> bool:
        """
        `True` if rows of several slices go through the model together. In TRL's own passes each slice stays apart, so
        that sums have TRL's order. So does each if only tokens of high entropy are trained, which TRL finds by slice,
        and if the scale of values moves from one slice to the next.
        """
        args = self._args
        several = args.steps_per_generation * args.num_iterations < args.gradient_accumulation_steps
        is_apart = args.top_entropy_quantile < 1.0 or (args.normalize_values and several)
        return self._passes.give_positions and not is_apart

    @property
    def is_checkpointing(self) -> bool:
        """`True` if gradients are checkpointed."""
        return self._passes.is_checkpointing

    def fit(self, rows: Sequence[Row]) -> None:
        """
        Bound micro-batches by the memory that is free, before rows are trained on for the first time, and checkpoint
        gradients if not even the longest row fits without. Settings of the training arguments stay as they are.
        """
        longest = max((row.length for row in rows), default=0)
        if not longest:
            return
        if self.cost is None:
            self.cost = self.measure(longest)
            self._room = self.free_for_activations(sum(len(row.completion_ids) for row in rows), self.cost.fixed)
        limit, checkpointing = self.limits(longest, self.cost, self._room)
        if checkpointing and not self.is_checkpointing:
            logger.warning(
                f"Rows of {longest:,} tokens do not fit into the {self._room / 1e9:.1f} GB that are free for "
                "activations, so gradients are checkpointed from now on."
            )
            self._passes.checkpoint_gradients()
        if self.max_tokens is None or checkpointing:
            self.max_tokens = int(min(limit, self._proven))

    def shrink(self, rows: Sequence[Row]) -> str | None:
        """
        Halve the micro-batches of these rows, and of all later ones, or checkpoint gradients where the longest row is
        too long alone.

        Returns: what was changed, in words; `None` if nothing is left to change.
        """
        longest = max((row.length for row in rows), default=0)
        largest = max((batch.num_tokens for batch in self.cut(rows)), default=0)
        if largest > longest:
            self.max_tokens = self._proven = max(int(largest / 2), longest)
            return f"micro-batches have at most {self.max_tokens:,} tokens"
        if self.is_checkpointing or self._args.gradient_checkpointing is not None:
            return None
        self._passes.checkpoint_gradients()
        return "gradients are checkpointed"

    def measure(self, length: int) -> ActivationCost:
        """Cost of the tokens of rows of this length, measured on short rows, on all processes with a sharded base."""
        model, base, device = self._passes.model, self._passes.base, self._passes.device
        was_training = model.training
        self._policies.activate_adapter(self._policies.trained[0])  # a frozen one keeps nothing for a backward pass
        base.train()
        try:
            # Dropout must not change the random numbers of training
            with (
                self._passes.without_checkpointing(),
                self._passes.autocast(),
                torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
            ):
                return measure_activations(base, self.share).at(length)
        finally:
            base.train(was_training)

    def limits(self, longest: int, cost: ActivationCost, room: float) -> tuple[int, bool]:
        """
        Tokens of a micro-batch, and whether gradients have to be checkpointed.

        Args:
            cost: bytes of a token.
            room: bytes that are free for activations.
        """
        limit = self._args.max_tokens_per_micro_batch
        checkpointing = self.is_checkpointing
        if self._args.gradient_checkpointing is None and not checkpointing:
            checkpointing = max(longest, limit or 0) * cost.per_token > room
        if limit is None:
            fitting = max(room / cost.bytes_per_token(checkpointing), 1)
            # A power of 2, so that other tenants of the device rarely change how rows are cut
            limit = max(2 ** int(math.log2(fitting)), longest)
        return limit, checkpointing

    def free_for_activations(self, scored: int, fixed: float = 0.0) -> float:
        """
        Bytes that are free for what grows with the tokens of a pass.

        Args:
            scored: tokens that are scored at once.
            fixed: bytes of a pass, whatever its size.
        """
        device, vocabulary = self._passes.device, self._passes.base.config.get_text_config().vocab_size
        trained, optim = self._trained(), str(getattr(self._args.optim, "value", self._args.optim))
        awaited = 0 if self._has_optimizer_state() else count_bytes(trained) + optimizer_size(trained, optim)
        free = free_memory(device) - memory_of_server(self._args, device)
        return max(_FILLED * (free - awaited) - head_size(vocabulary, scored, device) - fixed, 1.0)


def cut_slices(episodes: Sequence[list[Row]], order: torch.Tensor, size: int) -> list[list[Row]]:
    """
    Distribute episodes over slices. Every episode is in exactly one slice.

    Args:
        order (`torch.Tensor` of shape `(E,)`): permutation of the episodes.
        size: number of episodes per slice.
    """
    shuffled = [episodes[index] for index in order.tolist()]
    return [
        [row for rows in shuffled[start : start + size] for row in rows] for start in range(0, len(shuffled), size)
    ]


@dataclass(frozen=True)
class Pools:
    """
    Sets of rows over which losses are means: those of each adapter, or of each agent.

    Args:
        agents: adapter of each agent, if agents of an adapter have equal weight.
    """

    adapters: Sequence[str]
    critics: Sequence[str] = ()
    agents: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the pools, those of the critic last."""
        return [*(self.agents or self.adapters), *self.critics]

    def get_pool(self, row: Row) -> str:
        """The pool of a row."""
        return row.agent if self.agents else row.adapter

    def adapter(self, pool: str) -> str:
        """The adapter of a pool."""
        return self.agents.get(pool, pool)

    def weights(self, rows: Mapping[str, int]) -> dict[str, float]:
        """Weight of each agent in the loss of its adapter, by its number of rows in the generation batch."""
        speakers = Counter(self.agents[agent] for agent in self.agents if rows[agent])
        return {agent: 1 / speakers[value] for agent, value in self.agents.items() if rows[agent]}


def count_rows(slices: Sequence[list[Row]], pools: Pools) -> torch.Tensor:
    """
    Counts `(S, A, 4)` per slice and pool: rows, loss tokens, rows with at least one token, and value targets. The
    parts of the critic come last and only have value targets. [`weigh`] takes the counts summed over processes.
    """
    counts = torch.zeros(len(slices), len(pools.names), 4, dtype=torch.long)
    position = {name: index for index, name in enumerate(pools.names)}
    for index, rows in enumerate(slices):
        for row in rows:
            if row.is_trained:
                is_spoken = len(row.completion_ids) > 0
                counts[index, position[pools.get_pool(row)], :3] += torch.tensor([1, row.num_loss_tokens, is_spoken])
            if row.critic is not None:
                counts[index, position[row.critic], 3] += row.num_value_targets
    return counts


def weigh(slices: Sequence[list[Row]], pools: Pools, counts: torch.Tensor) -> list[Slice]:
    """
    Make slices with the counts that their loss weights are computed from.

    Args:
        pools: what the counts are of, in their order.
        counts (`torch.Tensor` of shape `(S, A, 4)`): [`count_rows`], summed over all processes.
    """
    average = counts.double().mean(dim=0).tolist()  # (A, 4)
    first = len(pools.names) - len(pools.critics)
    names, critics = pools.names[:first], pools.critics
    weights = pools.weights(dict(zip(names, counts[:, :, 0].sum(dim=0).tolist(), strict=False)))
    weighed = []
    for s, rows in enumerate(slices):
        targets = {critic: int(counts[s, first + c, 3]) for c, critic in enumerate(critics)}
        spoken = [pools.adapter(name) for a, name in enumerate(names) if counts[s, a, 2] > 0]
        weighed.append(
            Slice(
                rows=rows,
                rows_per_slice={name: average[a][0] for a, name in enumerate(names)},
                tokens_per_slice={name: average[a][1] for a, name in enumerate(names)},
                tokens={name: int(counts[s, a, 1]) for a, name in enumerate(names)},
                adapters=frozenset([*spoken, *(critic for critic, count in targets.items() if count)]),
                value_targets={critic: average[first + c][3] for c, critic in enumerate(critics)},
                weights=weights,
            )
        )
    return weighed


def together(order: torch.Tensor, groups: Sequence[int]) -> torch.Tensor:
    """
    Reorder a permutation so that the members of a group are adjacent, at the place of the group's first member.

    Args:
        order (`torch.Tensor` of shape `(E,)`): a permutation.
        groups: index of the group of each of the `E` items.

    Returns: a permutation `(E,)`.
    """
    members: dict[int, list[int]] = {}
    for index in order.tolist():
        members.setdefault(groups[index], []).append(index)
    return torch.tensor([index for member in members.values() for index in member], dtype=torch.long)


def micro_batches(
    rows: Sequence[Row],
    max_rows: int | None,
    max_tokens: int | None,
    by: Callable[[Row], Any] = lambda row: row.agent,
    keep_empty: bool = False,
    repeat: float | None = None,
) -> Iterator[MicroBatch]:
    """
    Cut rows into micro-batches of one agent each.

    If all rows of an agent fit into one micro-batch, they keep their order. Otherwise, they are sorted by length to
    reduce padding. If prefixes are shared, rows with a common prefix stay together. Rows without completion tokens
    have no loss and are left out here, but they still count in the loss weights.

    Args:
        max_rows: largest number of rows in a micro-batch.
        max_tokens: largest number of tokens to compute, padding included. A longer row gets a micro-batch of its own.
        by: function of a row. All rows of a micro-batch have the same value. Defaults to the row's agent.
        keep_empty: keep rows without completion tokens.
        repeat: memory of a repeated token of a shared prefix, relative to that of a computed token. If `None`, no
            prefixes are shared.
    """
    by_agent: dict[str, list[Row]] = {}
    for row in rows:
        if len(row.completion_ids) or keep_empty:
            by_agent.setdefault(by(row), []).append(row)
    for agent, its_rows in by_agent.items():
        if repeat is not None:
            groups = clusters([row.prompt_ids.tolist() for row in its_rows])
        else:
            groups = [Cluster(0, (index,)) for index in range(len(its_rows))]
        groups.sort(key=lambda group: max(its_rows[index].length for index in group.rows))
        batches = list(_cut(groups, its_rows, max_rows or len(its_rows), max_tokens, repeat or 0.0))
        if len(batches) == 1:
            batches = [(its_rows, batches[0][1])]
        yield from (MicroBatch(agent, batch, tokens) for batch, tokens in batches)


@dataclass(frozen=True)
class _Size:
    """Size of a micro-batch. The lengths are those of its longest prompt, completion, shared prefix and rest."""

    rows: int = 0
    prompt: int = 0
    completion: int = 0
    groups: frozenset[int] = frozenset()
    prefix: int = 0
    rest: int = 0

    def with_row(self, row: Row, number: int, prefix: int) -> _Size:
        """The size with one more row, which belongs to the group `number`."""
        return _Size(
            self.rows + 1,
            max(self.prompt, len(row.prompt_ids)),
            max(self.completion, len(row.completion_ids)),
            self.groups | {number},
            max(self.prefix, prefix),
            max(self.rest, row.length - prefix),
        )

    def tokens(self, repeat: float) -> float:
        """Number of tokens to compute, plus `repeat` for each repeated token."""
        plain = self.rows * (self.prompt + self.completion)
        shared = len(self.groups) * self.prefix + self.rows * (self.rest + repeat * self.prefix)
        return min(plain, shared) if self.prefix else plain


def _cut(
    groups: Sequence[Cluster], rows: Sequence[Row], max_rows: int, max_tokens: int | None, repeat: float
) -> Iterator[tuple[list[Row], float]]:
    batch: list[Row] = []
    size = _Size()
    for number, group in enumerate(groups):
        for index in group.rows:
            larger = size.with_row(rows[index], number, group.length)
            if batch and (larger.rows > max_rows or (max_tokens is not None and larger.tokens(repeat) > max_tokens)):
                yield batch, size.tokens(repeat)
                batch, larger = [], _Size().with_row(rows[index], number, group.length)
            batch.append(rows[index])
            size = larger
    yield batch, size.tokens(repeat)


def collate(
    rows: Sequence[Row], pad_token_id: int, pad_to_multiple_of: int | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """
    Collate `B` rows into the tensors that TRL's loss takes. Prompts are padded on the left to `P` tokens, completions
    on the right to `T` tokens.

    Returns: `prompt_ids`, `prompt_mask` `(B, P)`; `completion_ids`, `completion_mask`, `completion_attention`
    `(B, T)`; `advantages` `(B,)` or `(B, T)`; and `old_per_token_logps`, `ref_per_token_logps`,
    `sampling_per_token_logps` and `importance_sampling_ratio` `(B, T)` if all rows have them. `completion_mask` is 1
    for tokens that count in the loss, `completion_attention` for all tokens.
    """

    def padded(tensors: list[torch.Tensor], value: float, side: str) -> torch.Tensor:
        return pad(tensors, padding_value=value, padding_side=side, pad_to_multiple_of=pad_to_multiple_of).to(device)

    prompts = [row.prompt_ids for row in rows]
    completions = [row.completion_ids for row in rows]
    masks = [torch.full_like(row.completion_ids, int(row.counts)) for row in rows]
    batch = {
        "prompt_ids": padded(prompts, pad_token_id, "left"),
        "prompt_mask": padded([torch.ones_like(ids) for ids in prompts], 0, "left"),
        "completion_ids": padded(completions, pad_token_id, "right"),
        "completion_mask": padded(masks, 0, "right"),
        "completion_attention": padded([torch.ones_like(ids) for ids in completions], 0, "right"),
        "advantages": _advantages(rows, padded, device),
    }
    fields = {
        **{OLD_LOGPS: "old_per_token_logps", "ref_per_token_logps": "ref_per_token_logps"},
        **{"sampling_per_token_logps": "sampling_logps", SAMPLING_WEIGHTS: "sampling_weights"},
    }
    for name, row_field in fields.items():
        logps = [getattr(row, row_field) for row in rows]
        if all(row_logps is not None for row_logps in logps):
            batch[name] = padded(logps, 0.0, "right")
    return batch


def _advantages(rows: Sequence[Row], padded, device: torch.device) -> torch.Tensor:
    if isinstance(rows[0].advantage, torch.Tensor):
        return padded([row.advantage * row.factor for row in rows], 0.0, "right")
    return torch.tensor([row.advantage * row.factor for row in rows], dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Collator:
    """
    [`collate`] with the settings of a run.

    Args:
        pad_token_id: token that fills rows up.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None
    device: torch.device

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        return collate(rows, self.pad_token_id, self.pad_to_multiple_of, self.device)


@dataclass(frozen=True)
class LossWeights:
    """
    Weights with which one micro-batch enters the loss of its adapter.

    Args:
        loss: factor that TRL's loss of the micro-batch is multiplied by.
        num_items_in_batch: TRL's normalizer for the loss types that divide by a token count.
        entropy: factor of `entropy_coef` that makes the bonus a mean over the adapter's tokens.
    """

    loss: float
    num_items_in_batch: float
    entropy: float


def loss_weights(
    batch: MicroBatch,
    slice_: Slice,
    loss_type: str,
    num_processes: int,
    steps_per_generation: int,
    level: Level,
) -> LossWeights:
    """
    Compute the weights of a micro-batch in the loss. With these weights, the losses of an adapter's micro-batches,
    added over micro-batches and averaged over processes, equal the loss that TRL would compute on all rows of the
    adapter at once.

    - `grpo`, `sapo`, `luspo` and `dr_grpo` average over rows. Every row of the generation batch has the same weight.
    - `bnpo` averages over the tokens of a slice.
    - `dapo`, `cispo` and `vespo` divide a sum over tokens by the number of tokens of the generation batch.

    For every loss type, the entropy bonus is a mean over the tokens of a slice; at action level, over its turns.

    If agents have equal weight, all of this holds for the rows of each agent, and the loss of an adapter is the mean
    over its agents.
    """
    pool = batch.agent if slice_.weights else batch.adapter
    weight = slice_.weights.get(pool, 1.0)
    token_share = num_processes * batch.num_loss_tokens / max(slice_.tokens[pool], 1)
    num_items = slice_.tokens_per_slice[pool] * steps_per_generation
    if LOSSES[loss_type].by_rows:
        row_share = num_processes * len(batch.rows) / slice_.rows_per_slice[pool]
        bonus = level.entropy_weight(token_share, row_share)
        return LossWeights(loss=weight * row_share, num_items_in_batch=num_items, entropy=bonus)
    return LossWeights(loss=weight * token_share, num_items_in_batch=num_items * token_share, entropy=1.0)
