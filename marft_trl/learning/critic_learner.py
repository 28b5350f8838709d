# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Values of turns and tokens, their scale, and the loss of the critic."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from ..algorithms import functional
from ..algorithms.critics import Critic
from ..algorithms.rows import MicroBatch, Row, Slice
from ..config.team_setup import RunContext, TeamSetup
from ..episodes.records import Episode, Feedback, Request, Seen, Turn
from ..rollout.rollouts import Rollout
from ..rollout.runner import EpisodeRunner
from ..system.processes import Processes
from .batching import MicroBatcher, TeamBatcher
from .log_probs import ModelPass


_SMALLEST = 0.1  # deviation of targets that differ less: where nothing is earned, they are the noise of the critic
_EARLIER_DECAY = 0.99  # in checkpoints that do not say it


class ValueScale:
    """
    Running mean and standard deviation of the value targets of each part of the critic; 0 and 1 if switched off.
    Values are read as `mean + deviation * output`, and the loss compares outputs with normalized targets. Both moments
    are exponential moving averages over generation batches, divided by `1 - decay^n` as in Adam.

    Source: `ValueNorm` of MAPPO (2103.01955): the statistics of PopArt (1602.07714) without the correction of the
    head's weights. MAPPO updates them with each minibatch of each epoch.
    """

    def __init__(self, is_on: bool, parts: Sequence[str], processes: Processes, decay: float = 0.99999):
        self.is_on, self._parts, self._processes, self._decay = is_on, list(parts), processes, decay
        # For each part the averages of returns and of their squares, and the weight of all batches so far
        self._moments = {part: [0.0, 0.0, 0.0] for part in self._parts}

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self._decay, "moments": {part: list(moment) for part, moment in self._moments.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        moments, decay = state.get("moments", state), state.get("decay", _EARLIER_DECAY)
        self._moments |= {part: self._rescaled(moment, decay) for part, moment in moments.items()}

    def _rescaled(self, moments: Sequence[float], decay: float) -> list[float]:
        """Moments with the weight that as many batches have under the present decay."""
        weight = moments[2]
        if decay == self._decay or not 0 < weight < 1:
            return list(moments)
        batches = math.log1p(-weight) / math.log(decay)
        return [moment * (1 - self._decay**batches) / weight for moment in moments]

    def get_moments(self, part: str) -> tuple[float, float]:
        """Mean and standard deviation of the value targets of a part; 0 and 1 before the first."""
        mean, square, weight = self._moments[part]
        if not self.is_on or not weight:
            return 0.0, 1.0
        mean, square = mean / weight, square / weight
        return mean, max(square - mean**2, _SMALLEST**2) ** 0.5

    def read(self, part: str, outputs: torch.Tensor) -> torch.Tensor:
        """Values from the outputs of a head, of any shape."""
        mean, deviation = self.get_moments(part)
        return outputs if (mean, deviation) == (0.0, 1.0) else mean + deviation * outputs

    def normalized(self, part: str, values: torch.Tensor) -> torch.Tensor:
        """The outputs of a head for values of any shape."""
        mean, deviation = self.get_moments(part)
        return values if (mean, deviation) == (0.0, 1.0) else (values - mean) / deviation

    def update(self, rows: Sequence[Row]) -> None:
        """Take in the value targets of the rows of a generation batch, of all processes."""
        if not self.is_on:
            return
        totals = torch.zeros(len(self._parts), 3, dtype=torch.float64)
        for index, part in enumerate(self._parts):
            if targets := [row.value_targets for row in rows if row.critic == part and row.num_value_targets]:
                totals[index] = functional.moments(torch.cat([target for target in targets if target is not None]))
        for part, (count, total, squares) in zip(self._parts, self._processes.sum(totals).tolist(), strict=True):
            if not count:
                continue
            pairs = zip(self._moments[part], (total / count, squares / count, 1.0), strict=True)
            self._moments[part] = [self._decay * old + (1 - self._decay) * new for old, new in pairs]


class ValueSums:
    """Of the micro-batches of a step: sum of the critic's losses, number of clipped values, number of values."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)

    def add(self, sums: torch.Tensor) -> None:
        self._sums = self._sums + sums.detach().double().cpu()

    def snapshot(self) -> Callable[[], None]:
        """Return a function that removes everything added after this call."""
        return functools.partial(setattr, self, "_sums", self._sums)

    def metrics(self, processes: Processes) -> dict[str, float]:
        """The metrics of all processes since the last call; none without a value."""
        loss, clipped, count = processes.sum(self._sums).tolist()
        self._sums = torch.zeros(3, dtype=torch.float64)
        return {"critic/value_loss": loss / count, "critic/clip_ratio": clipped / count} if count else {}


class CriticLearner:
    """Asks the critic for values and trains it."""

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        batcher: MicroBatcher | TeamBatcher,
        runner: EpisodeRunner,
        scale: ValueScale,
        passes: Mapping[str, ModelPass],  # by agent
    ):
        self._scale = scale
        self._critic = cast(Critic, team.critic)  # it is built for a team that has one
        self._batcher, self._runner, self._policies = batcher, runner, team.policies
        self._args, self._processes, self._passes = run.args, run.processes, passes

    def with_values(self, rollout: Rollout, rows: Sequence[Row]) -> list[Row]:
        """
        Rows, one for each turn, with `old_values` (and the features of a frozen critic), and with `last_value` where a
        horizon cut the episode: at the last turn, or, if each agent has its own return, at the last turn of each.
        """
        if self._args.critic_sees == "history":
            rows = self._with_histories(rollout, rows)
        beyond = self._rows_beyond_horizons(rollout, first_number=len(rows))
        filled = self._fill([*rows, *beyond.values()])
        filled, ahead = filled[: len(rows)], filled[len(rows) :]
        last_turns = {(row.episode, row.agent if rollout.has_own_returns else ""): row.number for row in filled}
        for (index, agent), row in zip(beyond, ahead, strict=True):
            place = last_turns.get((index, agent if rollout.has_own_returns else ""))
            if place is not None and row.old_values is not None:
                filled[place] = replace(filled[place], last_value=row.old_values[0].item())
        return filled

    def _with_histories(self, rollout: Rollout, rows: Sequence[Row]) -> list[Row]:
        """Rows, one for each turn, that the critic reads with all that had happened before their joint step."""
        requests = []
        for episode in rollout.episodes:
            steps = episode.joint_steps()
            for turn in episode.turns:
                before = episode.history[: episode.history.index(turn)]
                seen = [past for past in before if not isinstance(past, Turn) or steps[past.index] < steps[turn.index]]
                requests.append(Request(episode, turn.agent, _with_messages(episode, seen, turn)))
        prompts = [torch.tensor(observation.ids, dtype=torch.long) for observation in self._runner.observe(requests)]
        return [replace(row, critic_prompt_ids=prompt) for row, prompt in zip(rows, prompts, strict=True)]

    def num_features_of_reference(self, row: Row) -> int:
        """Number of hidden states of the reference's pass that the critic can use instead of a separate pass."""
        if self._args.critic_sees == "history":
            return 0  # the reference sees what the agent saw
        is_base = self._critic.reads_reference_pass and self._policies.base_is_reference(row.agent)
        return self._critic.num_values(len(row.completion_ids)) if is_base else 0

    def _rows_beyond_horizons(self, rollout: Rollout, first_number: int) -> dict[tuple[int, str], Row]:
        """By episode and agent, rows without a completion of what those who would have acted next would have seen."""
        count = None if rollout.has_own_returns else 1
        cut = [(index, value) for index, episode in enumerate(rollout.episodes) for value in episode.horizons[:count]]
        sees_all = self._args.critic_sees == "history"
        observations = self._runner.observe(
            Request(
                rollout.episodes[index],
                horizon.agent,
                _with_messages(rollout.episodes[index], rollout.episodes[index].history) if sees_all else horizon.seen,
                () if sees_all else horizon.functions,
            )
            for index, horizon in cut
        )
        return {
            (index, horizon.agent): Row(
                agent=horizon.agent,
                adapter=self._policies.get_adapter(horizon.agent),
                prompt_ids=torch.tensor(observation.ids, dtype=torch.long),
                completion_ids=torch.zeros(0, dtype=torch.long),
                critic=self._critic.get_part(horizon.agent),
                number=first_number + position,
                images=tuple(observation.images),
            )
            for position, ((index, horizon), observation) in enumerate(zip(cut, observations, strict=True))
        }

    @torch.no_grad()
    def _fill(self, rows: Sequence[Row]) -> list[Row]:
        originals = {row.number: row for row in rows}
        rows = self._as_seen(rows)
        known = [row for row in rows if row.features is not None]
        unknown = [row for row in rows if row.features is None]
        filled: dict[int, Row] = {}
        for batch in (*self._by_part(known), *self._by_part(unknown)):
            features = self._features(batch)
            outputs = self._critic.values(batch.agent, features, [row.agent for row in batch.rows]).cpu()
            read = self._scale.read(batch.agent, outputs)
            for row, raw, value, states in zip(batch.rows, outputs, read, features, strict=True):
                num_values = self._critic.num_values(len(row.completion_ids))
                is_kept = self._critic.reads_reference_pass
                filled[row.number] = replace(
                    originals[row.number],
                    old_values=value[:num_values].clone(),
                    old_outputs=raw[:num_values].clone() if self._scale.is_on else None,
                    features=states[:num_values].cpu().clone() if is_kept else row.features,
                )
        return [filled[row.number] for row in rows]

    @staticmethod
    def _as_seen(rows: Sequence[Row]) -> list[Row]:
        """Rows with the prompts of the critic instead of the observations of the agents."""
        return [
            row if row.critic_prompt_ids is None else replace(row, prompt_ids=row.critic_prompt_ids) for row in rows
        ]

    def _by_part(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        return self._batcher.cut(rows, key=lambda row: row.critic, keep_empty=True)

    def _features(self, batch: MicroBatch) -> torch.Tensor:
        """Hidden states `(B, V, H)` of the rows of a micro-batch for the head; kept ones are computed once."""
        if all(row.features is not None for row in batch.rows):
            return self._padded([row.features for row in batch.rows])
        prompts = [row.prompt_ids.tolist() for row in batch.rows]
        completions = [row.completion_ids.tolist() for row in batch.rows]
        passes, images = self._passes[batch.rows[0].agent], None
        if batch.has_images:
            images = functools.partial(cast(Any, passes.images).for_model, [row.images for row in batch.rows])
        return self._critic.features(batch.agent, prompts, completions, passes.share, images)

    def _padded(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.nn.utils.rnn.pad_sequence(present, batch_first=True).to(self._processes.device)

    def batches(self, rows: Sequence[Row]) -> list[MicroBatch]:
        """Micro-batches that the critic learns from, of rows with value targets."""
        return list(self._by_part([row for row in self._as_seen(rows) if row.num_value_targets]))

    def _old_outputs(self, row: Row) -> torch.Tensor | None:
        if row.old_outputs is not None or row.old_values is None or row.critic is None:
            return row.old_outputs
        return self._scale.normalized(row.critic, row.old_values)  # not normalized, or of an earlier version

    def compute_values(self, batch: MicroBatch) -> torch.Tensor:
        """The values `(B, V)` of one of [`~CriticLearner.batches`], with a gradient."""
        values = self._critic.values(batch.agent, self._features(batch), [row.agent for row in batch.rows])
        return values.to(self._processes.device)

    def loss(
        self, batch: MicroBatch, values: torch.Tensor, slice_: Slice, accumulation_steps: int, sums: ValueSums
    ) -> torch.Tensor:
        """Loss of values `(B, V)` of one part. Losses add up to a mean over all targets. `sums` gets their sums."""
        # Outputs, not values: the clip limits how far the head has moved, and the scale has moved, too
        old = self._padded([self._old_outputs(row) for row in batch.rows])
        targets = self._scale.normalized(batch.agent, self._padded([row.value_targets for row in batch.rows]))
        mask = self._padded([torch.ones(row.num_value_targets) for row in batch.rows])
        values = values[:, : mask.size(1)]
        clip = self._args.value_clip
        losses = functional.value_losses(values, old, targets, clip, self._args.value_loss) * mask
        clipped = ((values - old).abs() > (torch.inf if clip is None else clip)).float() * mask
        sums.add(torch.stack([losses.detach().sum(), clipped.sum(), mask.sum()]))
        share = self._processes.count / slice_.value_targets[batch.agent]
        return losses.sum() * share / accumulation_steps


def _with_messages(episode: Episode, seen: Sequence[Seen], turn: Turn | None = None) -> tuple[Seen, ...]:
    """What happened, with each text that a program wrote before turns once; of the next `turn`, only its messages."""
    found: list[Seen] = []
    prompt = [{"content": episode.prompt}] if isinstance(episode.prompt, str) else episode.prompt
    texts = {"", *(message["content"] for message in prompt if isinstance(message["content"], str))}
    for item in [*seen, *([turn] if turn is not None else [])]:
        requested_turn = episode.given[item.index] if isinstance(item, Turn) else None
        for message in requested_turn.messages if requested_turn is not None else ():
            text = message["content"]  # an earlier turn stands as itself
            if isinstance(text, str) and text not in texts:
                texts.add(text)
                found.append(Feedback(text, "application"))
        if item is not turn:
            found.append(item)
    return tuple(found)
