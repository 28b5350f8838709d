# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Episodes -> rows -> slices -> micro-batches of one agent each, bounded in tokens, and the loss weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.utils import pad

from ..shared_prefix.prefixes import Cluster, clusters
from .data import MicroBatch, Row, Slice
from .levels import Level


def cut_slices(episodes: Sequence[list[Row]], order: torch.Tensor, size: int) -> list[list[Row]]:
    """
    Distribute episodes over slices; no episode is split and none is left out.

    Args:
        episodes (`Sequence[list[Row]]`): the rows of each episode.
        order (`torch.Tensor` of shape `(E,)`): permutation of the episodes.
        size (`int`): episodes in a slice.
    """
    shuffled = [episodes[index] for index in order.tolist()]
    return [
        [row for rows in shuffled[start : start + size] for row in rows] for start in range(0, len(shuffled), size)
    ]


def count_rows(slices: Sequence[list[Row]], adapters: Sequence[str], critics: Sequence[str] = ()) -> torch.Tensor:
    """
    Rows, loss tokens, rows that are not empty, and value targets, per slice and adapter: `(S, A, 4)`. Summed over
    processes they are what [`weigh`] needs. The parts of the critic come after the adapters and have value targets
    alone.
    """
    names = [*adapters, *critics]
    counts = torch.zeros(len(slices), len(names), 4, dtype=torch.long)
    position = {name: index for index, name in enumerate(names)}
    for index, rows in enumerate(slices):
        for row in rows:
            if row.is_trained:
                is_spoken = len(row.completion_ids) > 0
                counts[index, position[row.adapter], :3] += torch.tensor([1, row.num_loss_tokens, is_spoken])
            if row.critic is not None:
                counts[index, position[row.critic], 3] += row.num_value_targets
    return counts


def weigh(
    slices: Sequence[list[Row]], adapters: Sequence[str], counts: torch.Tensor, critics: Sequence[str] = ()
) -> list[Slice]:
    """
    Attach to each slice what the weights of its losses need.

    Args:
        slices (`Sequence[list[Row]]`): rows of this process.
        adapters (`Sequence[str]`): names of the adapters, in the order of `counts`.
        counts (`torch.Tensor` of shape `(S, A, 4)`): [`count_rows`], summed over all processes.
        critics (`Sequence[str]`, *optional*): parts of the critic, after the adapters in the order of `counts`.
    """
    average = counts.double().mean(dim=0).tolist()  # (A, 4)
    first = len(adapters)
    weighed = []
    for s, rows in enumerate(slices):
        targets = {critic: int(counts[s, first + c, 3]) for c, critic in enumerate(critics)}
        spoken = [adapter for a, adapter in enumerate(adapters) if counts[s, a, 2] > 0]
        weighed.append(
            Slice(
                rows=rows,
                rows_per_slice={adapter: average[a][0] for a, adapter in enumerate(adapters)},
                tokens_per_slice={adapter: average[a][1] for a, adapter in enumerate(adapters)},
                tokens={adapter: int(counts[s, a, 1]) for a, adapter in enumerate(adapters)},
                adapters=frozenset([*spoken, *(critic for critic, count in targets.items() if count)]),
                value_targets={critic: average[first + c][3] for c, critic in enumerate(critics)},
            )
        )
    return weighed


def together(order: torch.Tensor, groups: Sequence[int]) -> torch.Tensor:
    """
    Bring the members of groups together in a permutation, each group where its first member is.

    Args:
        order (`torch.Tensor` of shape `(E,)`): a permutation.
        groups (`Sequence[int]`): the group of each of the `E` items.
    """
    members: dict[int, list[int]] = {}
    for index in order.tolist():
        members.setdefault(groups[index], []).append(index)
    return torch.tensor([index for its in members.values() for index in its], dtype=torch.long)


def micro_batches(
    rows: Sequence[Row],
    max_rows: int,
    max_tokens: int | None,
    by: Callable[[Row], Any] = lambda row: row.agent,
    keep_empty: bool = False,
    repeat: float | None = None,
) -> Iterator[MicroBatch]:
    """
    Cut rows into micro-batches of one agent each.

    Rows keep their order where they all fit into one micro-batch; otherwise they are sorted by length, so that little
    is padded; where rows share what they have in common, those with a common beginning stay together. Rows without a
    completion token have no loss and are left out here; they still count as rows.

    Args:
        rows (`Sequence[Row]`): rows of any agents.
        max_rows (`int`): largest number of rows in a micro-batch.
        max_tokens (`int`, *optional*): largest number of tokens that are computed, padding included; a longer row goes
            alone.
        by (`Callable`, *optional*): what all rows of a micro-batch have in common; their agent unless given.
        keep_empty (`bool`, *optional*, defaults to `False`): keep rows without a completion token too.
        repeat (`float`, *optional*): common beginnings of prompts are computed once, and for each row behind it a
            shared token takes so much of the memory of a computed one. Nothing is shared unless given.
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
        batches = list(_cut(groups, its_rows, max_rows, max_tokens, repeat or 0.0))
        if len(batches) == 1:
            batches = [(its_rows, batches[0][1])]
        yield from (MicroBatch(agent, batch, tokens) for batch, tokens in batches)


@dataclass(frozen=True)
class _Size:
    """What a micro-batch computes: lengths are the longest of its rows and groups."""

    rows: int = 0
    prompt: int = 0
    completion: int = 0
    groups: frozenset[int] = frozenset()
    prefix: int = 0
    rest: int = 0

    def with_row(self, row: Row, number: int, prefix: int) -> _Size:
        """With one more row, of the group of this number."""
        return _Size(
            self.rows + 1,
            max(self.prompt, len(row.prompt_ids)),
            max(self.completion, len(row.completion_ids)),
            self.groups | {number},
            max(self.prefix, prefix),
            max(self.rest, row.length - prefix),
        )

    def tokens(self, repeat: float) -> float:
        """Tokens that are computed, those that are repeated counted in part."""
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
    Rows as the tensors that TRL's loss takes: prompts padded on the left, completions on the right. `B` rows, prompts
    up to `P`, completions up to `T` tokens.

    Returns: `prompt_ids`, `prompt_mask` `(B, P)`; `completion_ids`, `completion_mask`, `completion_attention`
    `(B, T)`, `advantages` `(B,)` or `(B, T)` and, where the rows have them, `old_per_token_logps` and
    `ref_per_token_logps` `(B, T)`. Masks: 1 counts; in `completion_attention` also tokens that the loss leaves out.
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
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        logps = [getattr(row, name) for row in rows]
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
    How one micro-batch enters the loss of its adapter, given that TRL's loss of the micro-batch is multiplied by
    `loss`.

    Args:
        loss (`float`): factor of TRL's loss.
        num_items_in_batch (`float`): TRL's normalizer for the loss types that divide by a token count.
        entropy (`float`): factor of `entropy_coef`, so that the bonus becomes a mean over the adapter's tokens.
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
    The weights that make the micro-batches of an adapter add up, over micro-batches and processes, to the loss that
    TRL would compute on all of its rows at once, averaged over processes.

    - `grpo`, `sapo`, `luspo`, `dr_grpo` average over rows: every row of the generation batch weighs the same.
    - `bnpo` averages over the tokens of a slice, as its definition says.
    - `dapo`, `cispo`, `vespo` divide a sum over tokens by the tokens of the generation batch.

    The entropy bonus is a mean over the tokens of a slice for every loss type, and over its turns at action level.
    """
    adapter = batch.adapter
    token_share = num_processes * batch.num_loss_tokens / max(slice_.tokens[adapter], 1)
    num_items = slice_.tokens_per_slice[adapter] * steps_per_generation
    if loss_type in ("grpo", "sapo", "luspo", "dr_grpo"):
        row_share = num_processes * len(batch.rows) / slice_.rows_per_slice[adapter]
        bonus = level.entropy_weight(token_share, row_share)
        return LossWeights(loss=row_share, num_items_in_batch=num_items, entropy=bonus)
    return LossWeights(loss=token_share, num_items_in_batch=num_items * token_share, entropy=1.0)
