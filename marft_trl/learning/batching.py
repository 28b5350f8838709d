# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""From episodes to training rows, slices and micro-batches of one agent each, with their loss weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from trl.trainer.utils import pad

from ..rules.levels import Level
from ..rules.rows import MicroBatch, Row, Slice
from ..seams.losses import LOSSES
from ..seams.trl import OLD_LOGPS, SAMPLING_WEIGHTS
from ..shared_prefix.prefixes import Cluster, clusters


def cut_slices(episodes: Sequence[list[Row]], order: torch.Tensor, size: int) -> list[list[Row]]:
    """
    Distribute episodes over slices. Every episode is in exactly one slice.

    Args:
        episodes (`Sequence[list[Row]]`): the rows of each episode.
        order (`torch.Tensor` of shape `(E,)`): permutation of the episodes.
        size (`int`): number of episodes per slice.
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
        adapters (`Sequence[str]`): names of the adapters.
        critics (`Sequence[str]`, *optional*): parts of the critic.
        agents (`Mapping[str, str]`, *optional*): adapter of each agent, if agents of an adapter have equal weight.
    """

    adapters: Sequence[str]
    critics: Sequence[str] = ()
    agents: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the pools, those of the critic last."""
        return [*(self.agents or self.adapters), *self.critics]

    def of(self, row: Row) -> str:
        """The pool of a row."""
        return row.agent if self.agents else row.adapter

    def adapter(self, pool: str) -> str:
        """The adapter of a pool."""
        return self.agents.get(pool, pool)

    def weights(self, rows: Mapping[str, int]) -> dict[str, float]:
        """Weight of each agent in the loss of its adapter, by its number of rows in the generation batch."""
        speakers = Counter(self.agents[agent] for agent in self.agents if rows[agent])
        return {agent: 1 / speakers[its] for agent, its in self.agents.items() if rows[agent]}


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
                counts[index, position[pools.of(row)], :3] += torch.tensor([1, row.num_loss_tokens, is_spoken])
            if row.critic is not None:
                counts[index, position[row.critic], 3] += row.num_value_targets
    return counts


def weigh(slices: Sequence[list[Row]], pools: Pools, counts: torch.Tensor) -> list[Slice]:
    """
    Make slices with the counts that their loss weights are computed from.

    Args:
        slices (`Sequence[list[Row]]`): rows of this process.
        pools ([`Pools`]): what the counts are of, in their order.
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
        groups (`Sequence[int]`): index of the group of each of the `E` items.

    Returns: a permutation `(E,)`.
    """
    members: dict[int, list[int]] = {}
    for index in order.tolist():
        members.setdefault(groups[index], []).append(index)
    return torch.tensor([index for its in members.values() for index in its], dtype=torch.long)


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
        rows (`Sequence[Row]`): rows of any agents.
        max_rows (`int`, *optional*): largest number of rows in a micro-batch.
        max_tokens (`int`, *optional*): largest number of tokens to compute, padding included. A longer row gets a
            micro-batch of its own.
        by (`Callable`, *optional*): function of a row. All rows of a micro-batch have the same value. Defaults to the
            row's agent.
        keep_empty (`bool`, *optional*, defaults to `False`): keep rows without completion tokens.
        repeat (`float`, *optional*): memory of a repeated token of a shared prefix, relative to that of a computed
            token. If `None`, no prefixes are shared.
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
    for name, of_row in fields.items():
        logps = [getattr(row, of_row) for row in rows]
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
        pad_token_id (`int`): token that fills rows up.
        pad_to_multiple_of (`int`, *optional*): widths are multiples of it.
        device (`torch.device`): device of the tensors.
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
        loss (`float`): factor that TRL's loss of the micro-batch is multiplied by.
        num_items_in_batch (`float`): TRL's normalizer for the loss types that divide by a token count.
        entropy (`float`): factor of `entropy_coef` that makes the bonus a mean over the adapter's tokens.
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
