# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Micro-batches of several agents in one pass, where that is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from torch import nn

from ..config.marft_config import MARFTConfig
from ..rules.rows import MicroBatch, Row
from ..seams.mixing import MixedLora
from ..shared_prefix.prefixes import plan_passes
from ..system.processes import Processes
from ..weights.policies import Policies
from .micro_batcher import MicroBatcher


logger = get_logger(__name__)

# Trained adapters from which on a trial is made. With fewer, there is little to gain
_FEWEST = 4
# Mixed passes have to take less than this share of the time of separate ones
_FASTER = 0.9
_REPEATS = 2
# Padding between rows of different lengths costs passes at most this much more tokens
_PADDING = 1.25


class MixedPasses:
    """
    Decides which micro-batches share a pass. Every row goes through the LoRA of its own adapter.

    Args:
        model (`nn.Module`): the model with the adapters, without wrappers.
        policies ([`Policies`]): the adapters.
        args ([`MARFTConfig`]): `mixed_passes`.
        batcher ([`MicroBatcher`]): the bound of tokens in a pass, and whether gradients are checkpointed.
        places_rows (`bool`): whether passes give positions, which mixed ones do.
        processes ([`Processes`]): they decide together.
    """

    def __init__(
        self,
        model: nn.Module,
        policies: Policies,
        args: MARFTConfig,
        batcher: MicroBatcher,
        places_rows: bool,
        processes: Processes,
    ):
        self._model, self._policies, self._args, self._batcher = model, policies, args, batcher
        self._processes = processes
        self.why_not = self._reason(places_rows)
        self.lora = MixedLora(model) if self.why_not is None else None
        self._is_faster: bool | None = None

    def _reason(self, places_rows: bool) -> str | None:
        """Why rows are not mixed, or `None` if they may be."""
        trained = self._policies.trained
        if self._args.mixed_passes is False:
            return "`mixed_passes=False`"
        if len(trained) < (2 if self._args.mixed_passes else _FEWEST):
            return f"{len(trained)} adapters are trained"
        if self._processes.have_shards:
            return "the base is in shards"
        if not places_rows:
            return "rows take the passes of `GRPOTrainer`"
        if self._args.mixed_passes and self._args.gradient_checkpointing is True:
            return "gradients are checkpointed (`gradient_checkpointing=True`)"
        return MixedLora.why_not(self._model, trained)

    def check(self) -> None:
        """
        Raise if rows are to be mixed and cannot be.

        Raises:
            ValueError: `mixed_passes=True`; the message has the reason.
        """
        if self._args.mixed_passes and self.why_not is not None:
            raise ValueError(
                f"`mixed_passes=True` lets the rows of several agents share a pass, but {self.why_not}. Leave it out: "
                "then rows are mixed where that is possible and faster."
            )

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {"is_faster": self._is_faster}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._is_faster = state["is_faster"]

    @property
    def are_on(self) -> bool:
        """`True` if rows are mixed now."""
        if self.lora is None or self._batcher.is_checkpointing:
            return False
        return bool(self._args.mixed_passes or self._is_faster)

    @property
    def are_open(self) -> bool:
        """`True` if a trial would tell whether to mix. The same on all processes, which decide together."""
        undecided = self._args.mixed_passes is None and self._is_faster is None
        return self.lora is not None and undecided and self._args.gradient_checkpointing is not True

    def plan(self, batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        """
        Micro-batches that share a pass, each of another adapter, within the bound of tokens.

        Args:
            batches (`Sequence[MicroBatch]`): micro-batches of one agent each.
        """
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
        together, apart = _Shape.tokens(shapes), sum(_Shape.tokens([one]) for one in shapes)
        most = self._batcher.max_tokens
        return together <= _PADDING * apart and (most is None or together <= most)

    def decide(self, batches: Sequence[MicroBatch], run: Callable[[bool], None]) -> None:
        """
        Try both kinds of passes on micro-batches, on all processes. Gradients and random numbers stay as they are.

        Args:
            batches (`Sequence[MicroBatch]`): micro-batches of this process.
            run (`Callable`): `run(is_mixed)` runs their forward and backward passes.
        """
        # Each process knows for itself whether its rows fit without checkpoints of gradients
        shares = not self._batcher.is_checkpointing and len(self.plan(batches)) < len(batches)
        times = torch.zeros(2, dtype=torch.float64)
        if shares:
            times = torch.tensor([min(self._timed(run, mixed)) for mixed in (False, True)], dtype=torch.float64)
        separate, mixed = self._processes.sum(times).tolist()
        if separate:
            self._is_faster = mixed < _FASTER * separate
            verb = "share passes" if self._is_faster else "have passes of their own"
            logger.info(f"Micro-batches of the agents {verb}: mixed ones take {mixed / separate:.2f} of the time.")

    def _timed(self, run: Callable[[bool], None], is_mixed: bool) -> list[float]:
        """Seconds of some runs, after one that is not counted."""
        parameters = [p for name in self._policies.trained for p in self._policies.parameters(name).values()]
        kept = [parameter.grad for parameter in parameters]
        seconds = []
        with torch.random.fork_rng():
            for _ in range(_REPEATS + 1):
                for parameter in parameters:
                    parameter.grad = None
                self._wait_for_device()
                begin = time.perf_counter()
                run(is_mixed)
                self._wait_for_device()
                seconds.append(time.perf_counter() - begin)
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
        return seconds[1:]

    def _wait_for_device(self) -> None:
        if self._processes.device.type == "cuda":
            torch.cuda.synchronize(self._processes.device)


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
