# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Micro-batches of several agents in one pass, where they are many and small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ..config.marft_config import MARFTConfig
from ..rules.rows import MicroBatch, Row
from ..seams.mixing import MixedLora
from ..shared_prefix.prefixes import plan_passes
from ..weights.policies import Policies
from .micro_batcher import MicroBatcher


# Trained adapters from which on passes are mixed by default. With fewer, there is little to gain
_FEWEST = 4
# Tokens of a micro-batch, averaged over those of a pass, up to which passes are mixed by default. Larger ones keep
# the device busy by themselves. Measured on one core of a CPU (docs/reports/performance.md). Counts, unlike a clock,
# are the same on every machine and in every run
_SMALL = 512
# Padding between rows of different lengths costs passes at most this much more tokens
_PADDING = 1.25


class MixedPasses:
    """
    Decides which micro-batches share a pass. Every row goes through the LoRA of its own adapter.

    Args:
        lora ([`MixedLora`]): lets rows of several adapters go through the model.
        batcher ([`MicroBatcher`]): the bound of tokens in a pass, and whether gradients are checkpointed.
        always (`bool`): whether large micro-batches share passes too (`mixed_passes=True`).
    """

    def __init__(self, lora: MixedLora, batcher: MicroBatcher, always: bool):
        self.lora, self._batcher, self._always = lora, batcher, always

    @classmethod
    def of(
        cls,
        model: nn.Module,
        policies: Policies,
        args: MARFTConfig,
        batcher: MicroBatcher,
        places_rows: bool,
        has_shards: bool,
    ) -> MixedPasses | None:
        """
        The mixed passes of a run, or `None` if every micro-batch has a pass of its own.

        Args:
            model (`nn.Module`): the model with the adapters, without wrappers.
            policies ([`Policies`]): the adapters.
            args ([`MARFTConfig`]): `mixed_passes`.
            batcher ([`MicroBatcher`]): cuts rows into micro-batches.
            places_rows (`bool`): whether passes give positions, which mixed ones do.
            has_shards (`bool`): whether the base is in shards.

        Raises:
            ValueError: `mixed_passes=True`, and rows cannot be mixed; the message has the reason.
        """
        why_not = _why_not(model, policies, args, places_rows, has_shards)
        if args.mixed_passes and why_not is not None:
            raise ValueError(
                f"`mixed_passes=True` lets the rows of several agents share a pass, but {why_not}. Leave it out: then "
                "rows are mixed where that is possible and saves time."
            )
        return None if why_not is not None else cls(MixedLora(model), batcher, bool(args.mixed_passes))

    def plan(self, batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        """
        Micro-batches that share a pass, each of another adapter, within the bound of tokens.

        Args:
            batches (`Sequence[MicroBatch]`): micro-batches of one agent each.
        """
        if self._batcher.is_checkpointing:  # passes would be run again, layer by layer
            return [[batch] for batch in batches]
        groups: list[tuple[list[MicroBatch], list[_Shape]]] = []
        for batch in sorted(batches, key=lambda one: max(row.length for row in one.rows)):
            shape = _Shape.of(batch.rows)
            for group, shapes in groups:
                if batch.adapter not in [one.adapter for one in group] and self._fit([*shapes, shape]):
                    group.append(batch)
                    shapes.append(shape)
                    break
            else:
                groups.append(([batch], [shape]))
        return [group for group, _ in groups]

    def _fit(self, shapes: Sequence[_Shape]) -> bool:
        """Whether micro-batches of these shapes may share a pass."""
        joined, apart = _Shape.tokens(shapes), sum(_Shape.tokens([shape]) for shape in shapes)
        most = self._batcher.max_tokens
        if joined > _PADDING * apart or (most is not None and joined > most):
            return False
        return self._always or apart <= _SMALL * len(shapes)


def _why_not(
    model: nn.Module, policies: Policies, args: MARFTConfig, places_rows: bool, has_shards: bool
) -> str | None:
    """Why rows are not mixed, or `None` if they may be."""
    trained = policies.trained
    if args.mixed_passes is False:
        return "`mixed_passes=False`"
    if len(trained) < (2 if args.mixed_passes else _FEWEST):
        return f"{len(trained)} adapters are trained"
    if has_shards:
        return "the base is in shards"
    if not places_rows:
        return "rows take the passes of `GRPOTrainer`"
    if args.gradient_checkpointing is True:
        return "gradients are checkpointed (`gradient_checkpointing=True`)"
    return MixedLora.why_not(model, trained)


class _Shape(NamedTuple):
    """Shape of the passes of a micro-batch: shared prefixes and the length of the longest, rows and their rests."""

    prefixes: int
    prefix: int
    rows: int
    rest: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _Shape:
        prompts = [row.prompt_ids.tolist() for row in rows]
        more = [max(len(row.completion_ids) - 1, 0) for row in rows]
        groups = plan_passes(prompts, more)
        starts = dict.fromkeys(range(len(rows)), 0) | {row: group.length for group in groups for row in group.rows}
        rest = max(len(prompts[row]) + more[row] - start for row, start in starts.items())
        return cls(len(groups), max((group.length for group in groups), default=0), len(rows), rest)

    @staticmethod
    def tokens(shapes: Sequence[_Shape]) -> int:
        """Number of tokens of a pass of several micro-batches, padding included."""
        prefixes = sum(one.prefixes for one in shapes) * max(one.prefix for one in shapes)
        return prefixes + sum(one.rows for one in shapes) * max(one.rest for one in shapes)
