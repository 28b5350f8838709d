# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer's part that asks the critic for values and trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from trl import GRPOTrainer

from ..configs import MARFTConfig
from ..rollout.runner import EpisodeRunner
from . import functional
from .adapters import Policies
from .batching import MicroBatch, Row, Slice
from .rollouts import Rollout
from .schedules import Schedule


class TeamValues(GRPOTrainer):
    """Values of turns and tokens, and the loss of the critic."""

    args: MARFTConfig
    critic: Any  # `Critic`, or `None`
    policies: Policies
    schedule: Schedule
    _runner: EpisodeRunner
    _shares_prefixes: bool
    _is_checkpointing: bool
    _max_tokens: int | None
    _micro_batches: Callable[..., Iterator[MicroBatch]]

    def _prepare_values(self) -> None:
        # Of the present step: sum of losses, of clipped values, and their number
        self._value_sums = torch.zeros(3, dtype=torch.float64)
        # Micro-batches whose values await the critic's update
        self._kept_values: list[tuple[MicroBatch, torch.Tensor]] = []
        if self.critic is not None:
            self.critic.heads.to(self.accelerator.device)

    def _value_rollout(self, rollout: Rollout, rows: Sequence[Row], may_keep: bool = False) -> list[float]:
        """
        Fill in `old_values` of all rows, which the critic may keep to learn from. Returns, for each episode, the value
        of what would have been seen next where a horizon cut it, else 0.
        """
        beyond = [
            (index, *episode.horizon) for index, episode in enumerate(rollout.episodes) if episode.horizon is not None
        ]
        observations = self._runner.observe(
            (self._specs[agent], rollout.episodes[index].prompt, seen, functions)
            for index, agent, seen, functions in beyond
        )
        next_rows = [
            Row(
                agent=agent,
                adapter=self.policies.adapter_of(agent),
                prompt_ids=torch.tensor(observation.ids, dtype=torch.long),
                completion_ids=torch.zeros(0, dtype=torch.long),
                critic=self.critic.part_of(agent),
            )
            for (_, agent, *_), observation in zip(beyond, observations, strict=True)
        ]
        self._fill_values([*rows, *next_rows], may_keep)
        last_values = [0.0] * len(rollout.episodes)
        for (index, *_), row in zip(beyond, next_rows, strict=True):
            last_values[index] = row.old_values[0].item()
        return last_values

    def _fill_values(self, rows: Sequence[Row], may_keep: bool) -> None:
        known = [row for row in rows if row.features is not None]
        unknown = [row for row in rows if row.features is None]
        batches = [
            *self._batches_by_part(known, keep_empty=True),
            *self._batches_by_part(unknown, keep_empty=True),
        ]
        keeps_values = may_keep and self._fits(batches)
        self._kept_values.clear()
        for batch in batches:
            with torch.set_grad_enabled(keeps_values):
                features = self._features(batch)
                values = self.critic.values(batch.agent, features, [row.agent for row in batch.rows])
            for row, its in zip(batch.rows, values.detach().cpu(), strict=True):
                row.old_values = its[: self._num_values(row)].clone()
            if keeps_values:
                self._kept_values.append((batch, values))
            if self.critic.kind == "frozen":
                self._keep_features(batch, features)

    @property
    def _may_keep_values(self) -> bool:
        """
        Whether the critic may learn from the very values that advantages are made of. Where rows serve one update, its
        weights are then still those that gave the values, so a second pass would give the same. Not where memory is
        short, or where turns are generated or scored between the values and the update.
        """
        if self.critic is None or self.critic.kind == "frozen" or self._is_checkpointing or not self.model.training:
            return False
        return self.schedule.generate_every == 1 and self.args.credit not in ("counterfactual", "per_step")

    def _fits(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether what backward needs of all micro-batches fits where that of one micro-batch fits."""
        return self._max_tokens is not None and sum(batch.num_tokens for batch in batches) <= self._max_tokens

    def _num_values(self, row: Row) -> int:
        return max(len(row.completion_ids), 1) if self.critic.level == "token" else 1

    def _batches_by_part(self, rows: Sequence[Row], keep_empty: bool = False) -> Iterator[MicroBatch]:
        return self._micro_batches(rows, by=lambda row: row.critic, keep_empty=keep_empty)

    def _value_batches(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        """Micro-batches that the critic learns from; those whose values were kept are cut as they were."""
        if self.critic is None:
            return iter(())
        rows = [row for row in rows if row.num_value_targets]
        kept = [its for its in self._kept_values if any(row.num_value_targets for row in its[0].rows)]
        is_all = {id(row) for batch, _ in kept for row in batch.rows if row.num_value_targets} == set(map(id, rows))
        self._kept_values = kept if is_all else []
        return iter([batch for batch, _ in kept]) if is_all else self._batches_by_part(rows)

    def _features(self, batch: MicroBatch) -> torch.Tensor:
        """What the head sees of the rows of a micro-batch `(B, V, H)`; frozen features are computed once."""
        known = [row.features for row in batch.rows]
        if all(features is not None for features in known):
            return torch.nn.utils.rnn.pad_sequence(known, batch_first=True).to(self.accelerator.device)
        prompts = [row.prompt_ids.tolist() for row in batch.rows]
        completions = [row.completion_ids.tolist() for row in batch.rows]
        return self.critic.features(batch.agent, prompts, completions, self._shares_prefixes)

    def _keep_features(self, batch: MicroBatch, hidden: torch.Tensor) -> None:
        """Leave the frozen critic its features `(B, V, H)`, from a pass of the bare base."""
        for row, its in zip(batch.rows, hidden, strict=True):
            row.features = its[: self._num_values(row)].cpu().clone()

    def _wants_features(self, agent: str) -> bool:
        """Whether a pass of the reference of an agent is also the frozen critic's."""
        return self.critic is not None and self.critic.kind == "frozen" and self.policies.starts_as_base(agent)

    def _value_loss(self, model, batch: MicroBatch, slice_: Slice) -> torch.Tensor:
        """Every value target of a part weighs the same, whichever slice or process has it; a mean over all of them."""
        part, device = batch.agent, self.accelerator.device
        rows = [row for row in batch.rows if row.num_value_targets]

        def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)

        values = self._values_of(batch)
        old, targets = padded([row.old_values for row in rows]), padded([row.value_targets for row in rows])
        mask = padded([torch.ones(len(row.value_targets)) for row in rows])
        values = values[:, : mask.size(1)]
        clip = self.args.value_clip
        losses = functional.value_losses(values, old, targets, clip, self.args.value_loss) * mask
        moved = ((values - old).abs() > (torch.inf if clip is None else clip)).float() * mask
        sums = [losses.detach().sum(), moved.sum(), mask.sum()]
        self._value_sums += torch.stack(sums).double().cpu()
        share = self.accelerator.num_processes / slice_.value_targets[part]
        return losses.sum() * share / (self.current_gradient_accumulation_steps if self.model.training else 1)

    def _values_of(self, batch: MicroBatch) -> torch.Tensor:
        """The values `(B, V)` of the rows of a micro-batch that have targets, connected to the critic's weights."""
        kept = next((index for index, (its, _) in enumerate(self._kept_values) if its is batch), None)
        if kept is None:
            return self.critic.values(batch.agent, self._features(batch), [row.agent for row in batch.rows])
        values = self._kept_values.pop(kept)[1]
        have_targets = [index for index, row in enumerate(batch.rows) if row.num_value_targets]
        return values[have_targets]

    def _log_value_losses(self) -> None:
        if self.critic is None:
            return
        loss, moved, count = self._reduce(self._value_sums, "sum").tolist()
        self._value_sums = torch.zeros(3, dtype=torch.float64)
        if count:
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["critic/value_loss"].append(loss / count)
            self._metrics[mode]["critic/clip_ratio"].append(moved / count)
