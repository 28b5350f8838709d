# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The loss of an optimizer step: micro-batches of agents and critics, mixed passes, and retries in less memory."""

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

from ..adapters.policies import Policies
from ..algorithms.rows import MicroBatch, Row, Slice
from ..config.marft_config import MARFTConfig
from ..config.team_setup import RunContext, TeamSetup
from ..seams.libraries import get_logger
from ..seams.lora_layers import MixedLora
from ..seams.trl import LOSSES, OLD_LOGPS, TrlLoss, TrlSettings
from ..shared_prefix.forward import plan_passes
from ..system.randomness import RandomStates
from ..system.run_metrics import StepMetrics
from .adapter_updates import AdapterUpdates, Divergence
from .batching import KNOWN_METRICS, WITHOUT_SIGNAL, Collator, MicroBatcher, ZeroGradientFilter, loss_weights
from .critic_learner import CriticLearner, ValueSums
from .log_probs import LogProbs
from .memory import MemoryPlan, readable, size_of


logger = get_logger(__name__)

# Trained adapters from which on passes are mixed by default. With fewer, there is little to gain
_FEWEST = 4
# Tokens of a micro-batch, averaged over those of a pass, up to which passes are mixed by default. Larger ones keep
# the device busy by themselves. Measured on one core of a CPU (docs/reports/performance.md). Counts, unlike a clock,
# are the same on every machine and in every run
_SMALL = 512
# Padding between rows of different lengths costs passes at most this much more tokens
_PADDING = 1.25


class MixedPass:
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
    ) -> MixedPass | None:
        """
        The mixed passes of a run, or `None` if every micro-batch has a pass of its own.

        Args:
            model (`nn.Module`): the model with the adapters, without wrappers.
            places_rows (`bool`): whether passes give positions, which mixed ones do.

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
                if batch.adapter not in [item.adapter for item in group] and self._fit([*shapes, shape]):
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
        prefixes = sum(shape.prefixes for shape in shapes) * max(item.prefix for item in shapes)
        return prefixes + sum(value.rows for value in shapes) * max(entry.rest for entry in shapes)


# Bytes of gradients that are copied before each micro-step but the first, so that it can be taken again
_MOST_COPIED = 2**30
# Returns a function that takes back what was noted since
Snapshot = Callable[[], Callable[[], None]]


class OutOfMemory:
    """
    Takes a micro-step of training again that has failed for lack of memory: from its start, with the same random
    numbers and gradients, in micro-batches of half the size.

    Args:
        batcher ([`MicroBatcher`]): its limit is halved, and stays so.

    Attributes:
        plan (`Callable`, *optional*): `plan()` returns the [`MemoryPlan`] that a second failure is shown beside.
        release (`Callable`, *optional*): `release()` gives back what generation keeps for its next call.
    """

    def __init__(self, run: RunContext, batcher: MicroBatcher, updates: AdapterUpdates, randomness: RandomStates):
        self._state, self._processes = run.state, run.processes
        self._batcher, self._updates, self._randomness = batcher, updates, randomness
        self.plan: Callable[[], MemoryPlan] | None = None
        self.release: Callable[[], None] | None = None

    def guard(
        self, work: Callable[[], torch.Tensor], rows: Sequence[Row], notes: Sequence[Snapshot], alone: bool
    ) -> torch.Tensor:
        """
        Run the forward and backward passes of a micro-step.

        Args:
            work (`Callable`): `work()` runs them, and returns the loss.
            notes (`Sequence[Snapshot]`): of what they write down.
            alone (`bool`): whether other processes take no part in them, so that this one can begin anew.

        Raises:
            RuntimeError: memory is still too small, or the step cannot be taken again, with the plan beside what was
                measured.
        """
        why_not = None if alone else "other processes take part in its passes"
        states, undo, problem = self._randomness.capture(), [snapshot() for snapshot in notes], ""
        gradients: list[tuple[Any, torch.Tensor | None]] = []
        try:
            if alone:
                gradients, why_not = self._gradients()
            return work()
        except torch.OutOfMemoryError as error:
            problem = _first_line(error)
        # Here, and not where it was caught: until then the error holds the tensors of the passes
        if self.release is not None:
            self.release()
        if why_not is None and not self._smaller(rows, problem):
            why_not = "a single row is too long, with gradient checkpointing as it is set"
        elif why_not is None:
            clear_device_cache(garbage_collection=True)
            self._randomness.restore(states)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for take_back in undo:
                take_back()
            try:
                return work()
            except torch.OutOfMemoryError as error:
                problem = _first_line(error)
        raise RuntimeError(self._described(problem, why_not))

    def _gradients(self) -> tuple[list[tuple[Any, torch.Tensor | None]], str | None]:
        """Copies of what earlier micro-steps have added to gradients, and why there are none, if so."""
        trained = [
            item
            for trained_parameter in self._updates.trained_parameters().values()
            for item in trained_parameter.values()
        ]
        if size_of([entry.grad for entry in trained if entry.grad is not None]) > _MOST_COPIED:
            return [], "the gradients of the micro-steps before it are too large for a copy"
        return [(value, None if value.grad is None else value.grad.detach().clone()) for value in trained], None

    def _smaller(self, rows: Sequence[Row], problem: str) -> bool:
        """Halve micro-batches, or checkpoint gradients where a single row is too long; `False` if neither is left."""
        change = self._batcher.shrink(rows)
        if change is not None:
            logger.warning(
                f"Step {self._state.optimizer_step + 1} ran out of memory ({problem}). It is taken again from its "
                f"start, and from now on {change}. To set the limit yourself: `max_tokens_per_micro_batch`.",
                main_process_only=False,
            )
        return change is not None

    def _described(self, problem: str, why_not: str | None) -> str:
        device, lines = self._processes.device, []
        if self.plan is not None:
            with contextlib.suppress(Exception):  # it measures a pass, for which there may be no memory left
                lines = ["What was planned for turns of maximum length:", str(self.plan())]
        if device.type == "cuda":
            most, whole = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
            lines.append(f"Measured: {readable(most)} at once, of {readable(whole)}.")
        what = "again, in smaller micro-batches too" if why_not is None else f"and cannot be taken again: {why_not}"
        return "\n".join(
            [
                f"Step {self._state.optimizer_step + 1} ran out of memory {what} ({problem}). Set "
                "`max_tokens_per_micro_batch` lower, `gradient_checkpointing=True`, shorter turns "
                "(`max_completion_length`), or load the base in 4 bit.",
                *lines,
            ]
        )


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].split(". ")[0].rstrip(".")


class Part(NamedTuple):
    """
    A part of the loss of a slice.

    Args:
        agents (`Sequence[str]`): whose rows it is about; empty for the critic.
    """

    agents: Sequence[str]
    loss: Callable[[], torch.Tensor]


class Notes:
    """
    Metrics and sums that the losses of a step collect.

    Args:
        divergence ([`Divergence`], *optional*, defaults to a new one): sums that stop or steer the update.
    """

    def __init__(self, agents: Sequence[str], divergence: Divergence | None = None, critic: Any = None):
        self.metrics = StepMetrics(agents)
        self.divergence = divergence or Divergence()
        self.values: Any = ValueSums() if critic is not None else None


@dataclass(eq=False)
class _Waiting:
    """
    A slice that waits for its passes.

    Args:
        learning (`frozenset[str]`): adapters and parts of the critic that learn from it.
        notes ([`Notes`]): what its losses collect.
        thresholds (`Mapping[str, torch.Tensor]`): see [`~LogProbs.high_entropy_thresholds`].
    """

    slice: Slice
    learning: frozenset[str]
    notes: Notes
    thresholds: Mapping[str, torch.Tensor] = field(default_factory=dict)


class _Piece(NamedTuple):
    """The rows of a micro-batch that one slice has, and their places in it."""

    owner: _Waiting
    batch: MicroBatch
    places: list[int]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its rows of a tensor `(B, ...)` of the micro-batch."""
        whole = self.places == list(range(len(tensor)))
        return tensor if whole else tensor[self.places]


class TeamLoss(TrainerCallback):
    """
    The losses of slices. Where it can be, the slices of an optimizer step go through the model together, so that the
    number of passes does not depend on how many slices there are. Each still has its own call of TRL's loss, with its
    own weights and metrics.

    Args:
        trl_loss ([`TrlLoss`]): TRL's loss of a micro-batch.
        log_probs ([`LogProbs`]): computes log-probabilities and passes them to TRL's loss.
        critic ([`CriticLearner`], *optional*): has losses of its own.
        updates ([`AdapterUpdates`]): coefficients of entropy bonuses.
        mixing ([`MixedPass`], *optional*): which micro-batches share a pass.
        out_of_memory ([`OutOfMemory`]): takes a micro-step again that does not fit.
    """

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        trl_loss: TrlLoss,
        log_probs: LogProbs,
        batcher: MicroBatcher,
        collate: Collator,
        critic: CriticLearner | None,
        updates: AdapterUpdates,
        mixing: MixedPass | None,
        out_of_memory: OutOfMemory,
    ):
        self._trl_loss, self._log_probs, self._batcher, self._collate = trl_loss, log_probs, batcher, collate
        self._critic, self._updates, self._policies, self._level = critic, updates, team.policies, team.level
        self._samplings, self._agents = team.samplings, team.names
        self._args, self._state, self._metrics, self._processes = run.args, run.state, run.metrics, run.processes
        self.mixing, self.out_of_memory = mixing, out_of_memory
        self._settings, self._signal = run.settings, ZeroGradientFilter(run.args, run.settings, run.state)
        self._waiting: list[_Waiting] = []  # of the present optimizer step, until they have had their passes
        self._unlogged: list[Notes] = []
        has_one_ratio = (team.level.ratio or run.args.importance_sampling_level) == "sequence"
        self._of_rows = {"vespo/phi_seq_mean", *(KNOWN_METRICS if has_one_ratio else ())}

    def of_slice(
        self,
        model: nn.Module,
        slice_: Slice,
        learning: frozenset[str],
        backward: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        """
        The loss of a slice, or of all slices of an optimizer step with the last of them. Their micro-batches have had
        their backward pass when it returns.

        Args:
            learning (`frozenset[str]`): adapters and parts of the critic that learn now.
            backward (`Callable`): `backward(loss)` runs a backward pass.
        """
        self._updates.note_adapters(slice_.adapters & learning)
        self._waiting.append(_Waiting(slice_, learning, Notes(self._agents, self._updates.divergence, self._critic)))
        self._policies.rows_wait = self._batcher.joins_slices and not self._state.is_update
        if self._policies.rows_wait:
            return torch.zeros((), device=self._processes.device, requires_grad=True)
        waiting, self._waiting = self._waiting, []

        def learn() -> torch.Tensor:
            total = torch.zeros((), device=self._processes.device)
            for part in self._parts(model, waiting):
                self._updates.shares.begin(part.agents)
                loss = part.loss()
                backward(loss)
                total += loss.detach()
            return total.requires_grad_()  # the Trainer runs a backward pass of it, in which nothing is left to do

        self._unlogged += (notes := [item.notes for item in waiting])
        kept = [kept for note in notes for kept in (note.metrics, note.values) if kept is not None]
        snapshots = [it.snapshot for it in (*kept, self._updates.divergence, self._updates.shares)]
        # Thresholds are gathered within, and passes through shards are those of all processes
        alone = not self._processes.have_shards
        alone &= self._processes.count == 1 or self._settings.top_entropy_quantile >= 1.0
        rows = dict.fromkeys(row for value in waiting for row in value.slice.rows)
        if self._critic is None:  # else it has passes over all of them
            rows = dict.fromkeys(self._signal.split([row for row in rows if row.is_trained])[0])
        return self.out_of_memory.guard(learn, list(rows), snapshots, alone)

    def on_train_begin(self, args, state, control, **kwargs):
        # An optimizer step that an earlier call of `train` has left before its end is forgotten
        self._waiting, self._unlogged, self._policies.rows_wait = [], [], False
        self._updates.forget()
        if self._state.slices is not None:  # of a checkpoint: rows that are sampled are fitted into memory then
            self._batcher.fit([row for slice_ in self._state.slices for row in slice_.rows])
            self._processes.wait()

    @torch.no_grad()
    def in_evaluation(self, model: nn.Module, slice_: Slice, learning: frozenset[str]) -> torch.Tensor:
        """The loss of an evaluation batch, apart from what training takes note of."""
        notes = Notes(self._agents, critic=self._critic)
        total = torch.zeros((), device=self._processes.device)
        for part in self._parts(model, [_Waiting(slice_, learning, notes)]):
            total += part.loss()
        self._log(notes)
        self._policies.activate_first()
        return total

    def end_step(self, is_update: bool) -> None:
        """End a micro-step and report its metrics. `is_update`: whether it ends an optimizer step."""
        self._updates.shares.begin([])
        for notes in self._unlogged:
            self._log(notes)
        self._unlogged = []
        self._policies.activate_first()  # whoever uses the model next gets an agent, not the critic
        if self._state.has_entropy_bonus and is_update and not self._args.use_adaptive_entropy:
            self._metrics.add("entropy_coef", self._state.entropy_coef)

    def _log(self, notes: Notes) -> None:
        found = notes.metrics.join(loss_metrics(self._settings, self._state.has_entropy_bonus), self._processes)
        if notes.values is not None:
            found |= notes.values.metrics(self._processes)
        for name, value in found.items():
            self._metrics.add(name, value)

    def _parts(self, model: nn.Module, waiting: Sequence[_Waiting]) -> list[Part]:
        """The losses of the micro-batches of slices, to be computed one after the other."""
        # The critic comes first: its kept passes are gone before the policies need memory
        parts = self._of_critic(self._critic, waiting) if self._critic is not None else []
        learned = []
        for item in waiting:
            trained = [row for row in item.slice.rows if row.is_trained and row.adapter in item.learning]
            item.thresholds = self._log_probs.high_entropy_thresholds(
                trained, self._settings.top_entropy_quantile, self._processes
            )
            trained, others = self._signal.split(trained)
            self._note_without_signal(model, item.slice, trained, others, item.notes)
            learned.append((item, trained))
        # An optimizer step may train on the same rows several times
        for owners in _grouped(learned, key=lambda row: row):
            batches = list(self._batcher.cut([row for row, _ in owners.values()]))
            for group in self.mixing.plan(batches) if self.mixing is not None else [[batch] for batch in batches]:
                pieces = [_pieces(batch, [owners[row][1] for row in batch.rows]) for batch in group]
                loss = functools.partial(self._together, model, group, pieces)
                if len(group) == len(pieces[0]) == 1:  # a pass within TRL's loss
                    loss = functools.partial(self._of_piece, model, pieces[0][0])
                parts.append(Part([batch.agent for batch in group], loss))
        return parts

    def _of_critic(self, critic: CriticLearner, waiting: Sequence[_Waiting]) -> list[Part]:
        """The losses of the micro-batches of the critic."""
        parts, steps = [], self._state.accumulation_steps
        learned = [(item, [row for row in item.slice.rows if row.critic in item.learning]) for item in waiting]
        # The critic knows rows by their numbers in a generation batch, and an optimizer step may have several
        for owners in _grouped(learned, key=lambda row: row.number):
            for batch in critic.batches([row for row, _ in owners.values()]):
                pieces = _pieces(batch, [owners[row.number][1] for row in batch.rows])

                def loss(batch: MicroBatch = batch, pieces: Sequence[_Piece] = pieces) -> torch.Tensor:
                    values = critic.values_of(batch)
                    losses = [
                        critic.loss(piece.batch, piece.of(values), piece.owner.slice, steps, piece.owner.notes.values)
                        for piece in pieces
                    ]
                    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

                parts.append(Part([], loss))
        return parts

    def _together(
        self, model: nn.Module, batches: Sequence[MicroBatch], pieces: Sequence[Sequence[_Piece]]
    ) -> torch.Tensor:
        """The sum of the losses of the pieces of micro-batches that share a pass."""
        lora = self.mixing.lora if self.mixing is not None and len(batches) > 1 else None
        losses = []
        for hidden, value in zip(self._log_probs.states_of(batches, lora), pieces, strict=True):
            for piece in value:
                with self._log_probs.reading(piece.of(hidden)):
                    losses.append(self._of_piece(model, piece))
        return torch.stack(losses).sum()

    def _of_piece(self, model: nn.Module, piece: _Piece) -> torch.Tensor:
        owner, threshold = piece.owner, piece.owner.thresholds.get(piece.batch.agent)
        return self._of_batch(model, piece.batch, owner.slice, threshold, owner.notes)

    def _note_without_signal(
        self, model: nn.Module, slice_: Slice, trained: Sequence[Row], others: Sequence[Row], notes: Notes
    ) -> None:
        """Count the rows that have no gradient, and take note of what is known or needed of them."""
        for rows, value in ((trained, 0.0), (others, 1.0)):
            for agent, count in Counter(row.agent for row in rows if len(row.completion_ids)).items():
                notes.metrics.add(agent, {WITHOUT_SIGNAL: [value]}, count)
        if others and self._signal.needs_divergence:
            with self._log_probs.scoring():
                for batch in self._batcher.cut(others):
                    self._of_batch(model, batch, slice_, None, notes)
            return
        for agent in dict.fromkeys(row.agent for row in others):
            its = MicroBatch(agent, [row for row in others if row.agent == agent])
            self._note(notes, its, KNOWN_METRICS)

    def _of_batch(
        self,
        model: nn.Module,
        batch: MicroBatch,
        slice_: Slice,
        threshold: torch.Tensor | None,
        notes: Notes,
    ) -> torch.Tensor:
        """TRL's loss of the rows of one agent, with the weight that makes micro-batches and processes add up."""
        args, steps = self._args, self._args.steps_per_generation if self._state.is_training else 1
        weights = loss_weights(batch, slice_, self._settings.loss_type, self._processes.count, steps, self._level)
        tensors = self._collate(batch.rows)
        if not args.use_policy_ratio:  # then TRL takes the present policy for the one that sampled: a ratio of 1
            tensors.pop(OLD_LOGPS, None)
        tensors["num_items_in_batch"] = torch.tensor(weights.num_items_in_batch, device=self._processes.device)
        self._log_probs.activate(batch.agent)
        with self._log_probs.transformed(functools.partial(self._seen_by_trl, batch, tensors, notes.divergence)):
            loss, metrics = self._trl_loss(
                model,
                tensors,
                entropy_coef=self._updates.entropy_coef_of(batch.adapter) * weights.entropy,
                max_completion_length=self._samplings[batch.agent].max_completion_length,
                entropy_mask=None if threshold is None else functools.partial(_mask_above, threshold),
            )
        self._note(notes, batch, metrics)
        return loss * weights.loss

    def _note(self, notes: Notes, batch: MicroBatch, metrics: Mapping[str, list[float]]) -> None:
        """Take note of metrics with the weight of what TRL's loss has averaged: rows, or tokens and turns."""
        by_rows = {name: values for name, values in metrics.items() if name in self._of_rows}
        others = {name: values for name, values in metrics.items() if name not in self._of_rows}
        notes.metrics.add(batch.agent, by_rows, len(batch.rows))
        notes.metrics.add(batch.agent, others, self._level.weight(batch))

    def _seen_by_trl(
        self,
        batch: MicroBatch,
        inputs: dict[str, torch.Tensor],
        divergence: Divergence,
        logps: torch.Tensor,
        entropies: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies `(B, T)` for TRL's loss, at the level of the policy ratio."""
        seen = self._level.seen_by_loss(logps, entropies, inputs, batch.rows)
        divergence.add(batch.adapter, seen.log_ratios, entropies[inputs["completion_mask"].bool()])
        if seen.old_logps is not None:
            inputs[OLD_LOGPS] = seen.old_logps  # TRL reads them after this
        return logps, seen.entropies


def _grouped(
    learned: Sequence[tuple[_Waiting, Sequence[Row]]], key: Callable[[Row], Hashable]
) -> list[dict[Hashable, tuple[Row, _Waiting]]]:
    """The rows that are learned from, with their slices, by key: in groups in which each key occurs once."""
    groups: list[dict[Hashable, tuple[Row, _Waiting]]] = [{}]
    for item, rows in learned:
        found = {key(row): (row, item) for row in rows}
        if found.keys() & groups[-1].keys():
            groups.append({})
        groups[-1].update(found)
    return groups


def _pieces(batch: MicroBatch, owners: Sequence[_Waiting]) -> list[_Piece]:
    """The pieces of a micro-batch, given the slice of each row."""
    places: dict[_Waiting, list[int]] = {}
    for place, owner in enumerate(owners):
        places.setdefault(owner, []).append(place)
    if len(places) == 1:
        return [_Piece(owners[0], batch, list(range(len(owners))))]
    return [
        _Piece(owner, MicroBatch(batch.agent, [batch.rows[place] for place in value]), value)
        for owner, value in places.items()
    ]


def _mask_above(known: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor, _threshold: float) -> torch.Tensor:
    """Mask of the tokens whose entropy is above a known threshold, in place of TRL's, over the micro-batch."""
    return (entropies * mask.float() >= known) & mask.bool()


def loss_metrics(settings: TrlSettings, has_entropy_bonus: bool) -> list[str]:
    """Names of the metrics that TRL's loss adds under these settings, the same on every process."""
    names = ["entropy", WITHOUT_SIGNAL]
    names += ["kl"] if settings.beta != 0.0 else []
    names += ["policy_loss"] if has_entropy_bonus else []
    names += ["aux_loss"] if settings.aux_loss_enabled else []
    return [*names, *LOSSES[settings.loss_type].metrics]
