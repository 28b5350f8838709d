# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Loss of an optimizer step: micro-batches of agents and critics, and out-of-memory retries."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers import TrainerCallback

from ..algorithms.rows import MicroBatch, Row, Slice
from ..config.team_setup import RunContext, TeamSetup
from ..seams.libraries import get_logger
from ..seams.trl import LOSSES, OLD_LOGPS, TrlLoss
from ..system.randomness import RandomStates
from ..system.run_metrics import StepMetrics
from . import batching, memory
from .adapter_updates import AdapterUpdates, DivergenceSums
from .batching import MicroBatcher, TeamBatcher
from .critic_learner import CriticLearner, ValueSums
from .log_probs import LogProbs


logger = get_logger(__name__)

# Maximum bytes of gradients that are copied before each micro-step after the first, so that it can be retried
_MAX_GRADIENT_COPY_BYTES = 2**30
# Returns a function that undoes everything recorded after the call
Snapshot = Callable[[], Callable[[], None]]
LossFunctions = list[Callable[[], torch.Tensor]]  # one for each micro-batch


class OutOfMemory:
    """
    Retries a training micro-step that ran out of memory: from the start, with the same random states and gradients, in
    micro-batches of half the size. `plan()` is shown if that fails; `release()` frees what generation keeps.
    """

    def __init__(
        self, run: RunContext, batcher: MicroBatcher | TeamBatcher, updates: AdapterUpdates, randomness: RandomStates
    ):
        self._state, self._processes = run.state, run.processes
        self._batcher, self._updates, self._randomness = batcher, updates, randomness
        self.plan: Callable[[], memory.MemoryPlan] | None = None
        self.release: Callable[[], None] | None = None

    def guard(
        self, work: Callable[[], torch.Tensor], rows: Sequence[Row], snapshots: Sequence[Snapshot], alone: bool
    ) -> torch.Tensor:
        """
        Run the passes of a micro-step, and return the loss. A retry needs `snapshots` of the objects that they write
        to, and no other process in the passes (`alone`). Raises `RuntimeError` if it is not possible or fails, too.
        """
        obstacle = None if alone else "other processes take part in the passes of the step"
        states, undo, problem = self._randomness.capture(), [snapshot() for snapshot in snapshots], ""
        gradients: list[tuple[Any, torch.Tensor | None]] = []
        try:
            if alone:
                gradients, obstacle = self._copy_gradients()
            return work()
        except torch.OutOfMemoryError as error:
            problem = _first_line(error)
        # Outside of `except`, because the exception keeps the tensors of the passes alive
        if self.release is not None:
            self.release()
        change = self._batcher.shrink(rows) if obstacle is None else None
        if obstacle is None and change is None:
            obstacle = "a single row is too long with the current `gradient_checkpointing` setting"
        elif obstacle is None:
            logger.warning(
                f"Step {self._state.optimizer_step + 1} ran out of memory ({problem}). The step is retried from "
                f"the start; from now on, {change}. Set `max_tokens_per_micro_batch` to choose the limit yourself.",
                main_process_only=False,
            )
            clear_device_cache(garbage_collection=True)
            self._randomness.restore(states)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for undo_changes in undo:
                undo_changes()
            try:
                return work()
            except torch.OutOfMemoryError as error:
                problem = _first_line(error)
        raise RuntimeError(self._error_message(problem, obstacle))

    def _copy_gradients(self) -> tuple[list[tuple[Any, torch.Tensor | None]], str | None]:
        """Copy the gradients of earlier micro-steps. Return the copies, and the reason if there are none."""
        adapters = self._updates.trained_parameters().values()
        trained = [parameter for parameters in adapters for parameter in parameters.values()]
        if memory.count_bytes([p.grad for p in trained if p.grad is not None]) > _MAX_GRADIENT_COPY_BYTES:
            return [], "the gradients of earlier micro-steps are too large to copy"
        return [(p, None if p.grad is None else p.grad.detach().clone()) for p in trained], None

    def _error_message(self, problem: str, obstacle: str | None) -> str:
        device, lines = self._processes.device, []
        if self.plan is not None:
            with contextlib.suppress(Exception):  # the plan measures a pass, which may run out of memory
                lines = ["Memory plan for turns of maximum length:", str(self.plan())]
        if device.type == "cuda":
            peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
            lines.append(f"Measured peak: {memory.readable(peak)} of {memory.readable(total)}.")
        outcome = "again with smaller micro-batches" if obstacle is None else f"and cannot be retried: {obstacle}"
        message = (
            f"Step {self._state.optimizer_step + 1} ran out of memory {outcome} ({problem}). Lower "
            "`max_tokens_per_micro_batch` or `max_completion_length`, set `gradient_checkpointing=True`, or load the "
            "base model in 4 bits."
        )
        return "\n".join([message, *lines])


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].split(". ")[0].rstrip(".")


@dataclass(eq=False)
class _PendingSlice:
    """A slice whose forward and backward passes are pending, and what its losses collect."""

    slice: Slice
    learning: frozenset[str]  # adapters and parts of the critic
    metrics: StepMetrics
    divergence: DivergenceSums
    values: Any  # [`ValueSums`]; `None` without a critic
    thresholds: Mapping[str, torch.Tensor] = field(default_factory=dict)  # see [`~LogProbs.high_entropy_thresholds`]


class _SliceRows(NamedTuple):
    """The rows of a micro-batch that belong to one slice, with their indices in the micro-batch."""

    owner: _PendingSlice
    batch: MicroBatch
    places: list[int]

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """Select the rows of this piece from a tensor `(B, ...)` of the micro-batch."""
        is_whole = self.places == list(range(len(tensor)))
        return tensor if is_whole else tensor[self.places]


class TeamLoss(TrainerCallback):
    """Computes the losses of slices, which share passes where possible. Each has its own call of TRL's loss."""

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        trl_loss: TrlLoss,
        log_probs: LogProbs,
        batcher: MicroBatcher | TeamBatcher,
        collate: Callable[[Sequence[Row]], dict[str, torch.Tensor]],
        critic: CriticLearner | None,
        updates: AdapterUpdates,
        out_of_memory: OutOfMemory,
    ):
        self._trl_loss, self._log_probs, self._batcher, self._collate = trl_loss, log_probs, batcher, collate
        self._critic, self._updates, self._policies, self._level = critic, updates, team.policies, team.level
        self._samplings, self._agents = team.samplings, team.names
        self._args, self._state, self._metrics, self._processes = run.args, run.state, run.metrics, run.processes
        self.out_of_memory = out_of_memory
        self._run, self._settings = run, run.settings
        self._waiting: list[_PendingSlice] = []  # slices of the current optimizer step whose passes are pending
        self._unlogged: list[_PendingSlice] = []
        has_sequence_ratio = (team.level.ratio or run.args.importance_sampling_level) == "sequence"
        self._row_metrics = {"vespo/phi_seq_mean", *(batching.ZERO_ADVANTAGE_METRICS if has_sequence_ratio else ())}

    def slice_loss(
        self, model: nn.Module, slice_: Slice, learning: frozenset[str], backward: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """
        Add a slice to those that wait, and with the last slice of an optimizer step, run the forward and backward
        passes of all of them. `learning` has the adapters and parts of the critic that are trained.
        """
        self._updates.active_adapters |= slice_.adapters & learning
        self._waiting.append(self._pending(slice_, learning, self._updates.divergence))
        self._policies.has_pending_rows = self._batcher.joins_slices and not self._state.is_update
        if self._policies.has_pending_rows:
            return torch.zeros((), device=self._processes.device, requires_grad=True)
        waiting, self._waiting = self._waiting, []

        def learn() -> torch.Tensor:
            total = torch.zeros((), device=self._processes.device)
            for compute in self._losses(model, waiting):
                loss = compute()
                backward(loss)
                total += loss.detach().to(total.device)
            return total.requires_grad_()  # the Trainer calls `backward` on it, which has nothing left to do

        self._unlogged += waiting
        recorders = [part for pending in waiting for part in (pending.metrics, pending.values) if part is not None]
        snapshots = [recorder.snapshot for recorder in (*recorders, self._updates.divergence)]
        # Losses gather thresholds from all processes, and every pass through a sharded model needs all processes
        is_local = not self._processes.is_base_sharded
        is_local &= self._processes.count == 1 or self._settings.top_entropy_quantile >= 1.0
        rows = dict.fromkeys(row for pending in waiting for row in pending.slice.rows)
        if self._critic is None:  # a critic runs passes over all rows
            rows = dict.fromkeys(batching.split_by_gradient([row for row in rows if row.is_trained], self._run)[0])
        return self.out_of_memory.guard(learn, list(rows), snapshots, is_local)

    def on_train_begin(self, args, state, control, **kwargs):
        # Discard an optimizer step that an earlier call of `train` did not finish
        self._waiting, self._unlogged, self._policies.has_pending_rows = [], [], False
        self._updates.forget()
        if self._state.slices is not None:  # from a checkpoint; new rows are fitted into memory after sampling
            self._batcher.fit([row for slice_ in self._state.slices for row in slice_.rows])
            self._processes.wait()

    def on_step_end(self, args, state, control, **kwargs):
        self._updates.clear_gradients()

    @torch.no_grad()
    def evaluation_loss(self, model: nn.Module, slice_: Slice, learning: frozenset[str]) -> torch.Tensor:
        """Compute the loss of an evaluation batch, without an effect on the statistics of training."""
        pending = self._pending(slice_, learning, DivergenceSums())
        total = torch.zeros((), device=self._processes.device)
        for compute in self._losses(model, [pending]):
            total += compute().to(total.device)
        self._log(pending)
        self._policies.activate_first()
        return total

    def _pending(self, slice_: Slice, learning: frozenset[str], divergence: DivergenceSums) -> _PendingSlice:
        values = None if self._critic is None else ValueSums()
        return _PendingSlice(slice_, learning, StepMetrics(self._agents), divergence, values)

    def end_step(self, is_update: bool) -> None:
        """End a micro-step and report its metrics. `is_update`: whether it ends an optimizer step."""
        for pending in self._unlogged:
            self._log(pending)
        self._unlogged = []
        self._policies.activate_first()  # leave an agent's adapter active, not the critic's
        if self._state.has_entropy_bonus and is_update and not self._args.use_adaptive_entropy:
            self._metrics.add("entropy_coef", self._state.entropy_coef)

    def _log(self, pending: _PendingSlice) -> None:
        # Names of the metrics that TRL's loss adds with these settings, the same on every process
        names = ["entropy", batching.FRACTION_WITHOUT_SIGNAL]
        names += ["kl"] if self._settings.beta != 0.0 else []
        names += ["policy_loss"] if self._state.has_entropy_bonus else []
        names += ["aux_loss"] if self._settings.aux_loss_enabled else []
        names += LOSSES[self._settings.loss_type].metrics
        metrics = pending.metrics.join(names, self._processes)
        if pending.values is not None:
            metrics |= pending.values.metrics(self._processes)
        for name, value in metrics.items():
            self._metrics.add(name, value)

    def _losses(self, model: nn.Module, waiting: Sequence[_PendingSlice]) -> LossFunctions:
        """Return the losses of the micro-batches of slices, which are computed one after another."""
        # The critic comes first, so that its saved activations are freed before the policies need memory
        losses = self._critic_losses(self._critic, waiting) if self._critic is not None else []
        rows_by_slice, quantile = [], self._settings.top_entropy_quantile
        for owner in waiting:
            trained = [row for row in owner.slice.rows if row.is_trained and row.adapter in owner.learning]
            owner.thresholds = self._log_probs.high_entropy_thresholds(trained, quantile, self._processes)
            trained, others = batching.split_by_gradient(trained, self._run)
            self._record_skipped_rows(model, owner, trained, others)
            rows_by_slice.append((owner, trained))
        # An optimizer step may train on the same rows several times
        for entries in _group_by_key(rows_by_slice, key=lambda row: row):
            for batch in self._batcher.cut([row for row, _ in entries.values()]):
                pieces = _split_rows(batch, [entries[row][1] for row in batch.rows])
                loss = functools.partial(self._shared_pass_loss, model, batch, pieces)
                if len(pieces) == 1:  # TRL's loss runs the pass
                    loss = functools.partial(self._batch_loss, model, pieces[0].batch, pieces[0].owner)
                losses.append(loss)
        return losses

    def _critic_losses(self, critic: CriticLearner, waiting: Sequence[_PendingSlice]) -> LossFunctions:
        terms: LossFunctions = []
        steps = self._state.accumulation_steps
        learned = [(owner, [row for row in owner.slice.rows if row.critic in owner.learning]) for owner in waiting]
        # Rows are numbered within a generation batch, and an optimizer step may span several batches
        for entries in _group_by_key(learned, key=lambda row: row.number):
            for batch in critic.batches([row for row, _ in entries.values()]):
                slice_rows = _split_rows(batch, [entries[row.number][1] for row in batch.rows])

                def loss(batch: MicroBatch = batch, slice_rows: Sequence[_SliceRows] = slice_rows) -> torch.Tensor:
                    values = critic.compute_values(batch)
                    losses = [
                        critic.loss(rows.batch, rows.select(values), rows.owner.slice, steps, rows.owner.values)
                        for rows in slice_rows
                    ]
                    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

                terms.append(loss)
        return terms

    def _shared_pass_loss(self, model: nn.Module, batch: MicroBatch, slice_rows: Sequence[_SliceRows]) -> torch.Tensor:
        """Compute the sum of the losses of several slices whose rows share a pass."""
        hidden, losses = self._log_probs.compute_states(batch), []
        for piece in slice_rows:
            with self._log_probs.reading(piece.select(hidden)):
                losses.append(self._batch_loss(model, piece.batch, piece.owner))
        return torch.stack(losses).sum()

    def _record_skipped_rows(
        self, model: nn.Module, owner: _PendingSlice, trained: Sequence[Row], others: Sequence[Row]
    ) -> None:
        """Count the rows without a gradient, and record their metrics; only `target_kl` needs a forward pass."""
        for rows, value in ((trained, 0.0), (others, 1.0)):
            for agent, count in Counter(row.agent for row in rows if len(row.completion_ids)).items():
                owner.metrics.add(agent, {batching.FRACTION_WITHOUT_SIGNAL: [value]}, count)
        if others and self._args.target_kl is not None:
            with self._log_probs.scoring():
                for batch in self._batcher.cut(others):
                    self._batch_loss(model, batch, owner)
            return
        for agent in dict.fromkeys(row.agent for row in others):
            skipped = MicroBatch(agent, [row for row in others if row.agent == agent])
            self._add_metrics(owner.metrics, skipped, batching.ZERO_ADVANTAGE_METRICS)

    def _batch_loss(self, model: nn.Module, batch: MicroBatch, owner: _PendingSlice) -> torch.Tensor:
        """TRL's loss for the rows of one agent, weighted so that losses add up over micro-batches and processes."""
        args, steps = self._args, self._args.steps_per_generation if self._state.is_training else 1
        loss_type, threshold = self._settings.loss_type, owner.thresholds.get(batch.agent)
        weights = batching.loss_weights(batch, owner.slice, loss_type, self._processes.count, steps, self._level)
        tensors = self._collate(batch.rows)
        if not args.use_policy_ratio:  # TRL then assumes that the current policy sampled: ratio 1
            tensors.pop(OLD_LOGPS, None)
        num_items = torch.tensor(weights.num_items_in_batch, device=tensors["prompt_ids"].device)
        tensors["num_items_in_batch"] = num_items
        self._log_probs.activate(batch.agent)

        def transform(logps: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Log-probabilities and entropies `(B, T)` for TRL's loss, at the level of the policy ratio."""
            seen = self._level.seen_by_loss(logps, entropies, tensors, batch.rows)
            owner.divergence.add(batch.adapter, seen.log_ratios, entropies[tensors["completion_mask"].bool()])
            if seen.old_logps is not None:
                tensors[OLD_LOGPS] = seen.old_logps  # TRL reads them after this
            return logps, seen.entropies

        with self._log_probs.transformed(transform):
            loss, metrics = self._trl_loss(
                model,
                tensors,
                entropy_coef=self._updates.get_entropy_coef(batch.adapter) * weights.entropy,
                max_completion_length=self._samplings[batch.agent].max_completion_length,
                entropy_mask=None if threshold is None else functools.partial(_mask_above, threshold),
            )
        self._add_metrics(owner.metrics, batch, metrics)
        return loss * weights.loss

    def _add_metrics(self, found: StepMetrics, batch: MicroBatch, metrics: Mapping[str, list[float]]) -> None:
        """Record metrics, weighted by what TRL's loss averaged over: rows, or tokens and turns."""
        by_rows = {name: values for name, values in metrics.items() if name in self._row_metrics}
        others = {name: values for name, values in metrics.items() if name not in self._row_metrics}
        found.add(batch.agent, by_rows, len(batch.rows))
        found.add(batch.agent, others, self._level.weight(batch))


def _group_by_key(
    learned: Sequence[tuple[_PendingSlice, Sequence[Row]]], key: Callable[[Row], Hashable]
) -> list[dict[Hashable, tuple[Row, _PendingSlice]]]:
    """Group trained rows, with their slices, so that each key occurs once in a group."""
    groups: list[dict[Hashable, tuple[Row, _PendingSlice]]] = [{}]
    for owner, rows in learned:
        entries = {key(row): (row, owner) for row in rows}
        if entries.keys() & groups[-1].keys():
            groups.append({})
        groups[-1] |= entries
    return groups


def _split_rows(batch: MicroBatch, entries: Sequence[_PendingSlice]) -> list[_SliceRows]:
    """Split a micro-batch by slice, given the slice of each row."""
    places: dict[_PendingSlice, list[int]] = {}
    for place, owner in enumerate(entries):
        places.setdefault(owner, []).append(place)
    parts = {owner: MicroBatch(batch.agent, [batch.rows[place] for place in own]) for owner, own in places.items()}
    return [_SliceRows(owner, batch if len(places) == 1 else parts[owner], own) for owner, own in places.items()]


def _mask_above(known: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor, _threshold: float) -> torch.Tensor:
    """Mask tokens whose entropy is at least a fixed threshold, instead of the one that TRL finds per micro-batch."""
    return (entropies * mask.float() >= known.to(entropies.device)) & mask.bool()
