# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Turn dataset rows into training data: sample episodes, compute advantages and cut slices of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..algorithms.rows import Row, Slice
from ..config.team_setup import RunContext, TeamSetup
from ..learning.adapter_updates import Schedule
from ..learning.advantages import Estimated, Estimator
from ..learning.batching import (
    MicroBatcher,
    Pools,
    TeamBatcher,
    count_rows,
    cut_slices,
    make_groups_adjacent,
    make_slices,
)
from ..learning.critic_learner import CriticLearner
from ..learning.log_probs import LogProbs
from ..reporting.reporter import Reporter
from ..reporting.transcripts import Advantage
from ..rollout.dynamic_sampling import DynamicSampling
from ..rollout.reward_scorer import RewardReachChecker
from ..rollout.rollouts import Rollout, Rollouts
from ..rollout.runner import RunMode
from ..runs.collapse import Collapse


if TYPE_CHECKING:
    from ..extras.engines.vllm_generator import SamplingCorrection


_WEIGHTS_ADVICE = (
    "The weights have probably diverged or overflowed. Resume from an earlier checkpoint with a lower learning rate."
)
_ADVANTAGES_ADVICE = "Check the magnitude of the rewards and of the critic's values, and the setting `scale_rewards`."
_MODEL_OUTPUT_ADVICE = dict.fromkeys(("old_per_token_logps", "ref_per_token_logps", "old_values"), _WEIGHTS_ADVICE)


@dataclass(frozen=True, eq=False)
class ModelOutputs:
    """Adds to rows what passes through the model give: log-probabilities of the policies that matter, and values."""

    log_probs: LogProbs
    needs_old: bool
    needs_reference: bool
    learner: CriticLearner | None
    correction: SamplingCorrection | None

    def add(self, rollout: Rollout, rows: list[Row], training: bool) -> list[Row]:
        """Add old and reference log-probabilities, then values. Later ones use what earlier ones add."""
        log_probs, learner, correction = self.log_probs, self.learner, self.correction
        if training and self.needs_old:
            with log_probs.scoring(dropout=correction is None):  # servers sample without dropout
                rows = log_probs.with_old(rows)
            rows = rows if correction is None else correction.corrected(rows)
        if self.needs_reference:
            kept = [] if learner is None else [learner.num_features_of_reference]
            with log_probs.scoring():
                rows = log_probs.with_reference(rows, *kept)
        if learner is not None:
            with log_probs.scoring():
                rows = learner.with_values(rollout, rows)
        return rows


class BatchMaker:
    """Samples episodes for dataset rows and turns them into slices of training rows."""

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        schedule: Schedule,
        rollouts: Rollouts | DynamicSampling,
        outputs: ModelOutputs,
        estimator: Estimator,
        batcher: MicroBatcher | TeamBatcher,
        reporter: Reporter,
        reach: RewardReachChecker,
        collapse: Collapse | None,
    ):
        self._policies, self._critic, self._schedule = team.policies, team.critic, schedule
        self._args, self._settings, self._metrics, self._processes = run.args, run.settings, run.metrics, run.processes
        self._rollouts, self._estimator, self._batcher = rollouts, estimator, batcher
        self._outputs = outputs
        self._reporter, self._reach, self._collapse = reporter, reach, collapse

    def for_training(self, inputs: Sequence[dict[str, Any]]) -> list[Slice]:
        if self._collapse is not None:
            self._collapse.undo()  # restores adapters if an evaluation has found a collapse
        rollout = self._rollouts.run(inputs, training=True)
        rows, std, credited, own_rewards = self._estimate_rows(rollout, training=True)
        self._reach.note_advantages(self._find_credited(credited))
        advantages, generated = advantages_by_turn(rollout, rows), self._rollouts.take_generated()
        self._reporter.rollout(rollout, std, advantages, own_rewards, generated)
        order = torch.randperm(len(rows))  # TRL draws exactly this permutation here
        # Groups that stay together share prefixes. Where slices of a step are joined, they share them in any order,
        # and the order decides only which episodes are in which step, as in TRL
        args = self._args
        decides_steps = args.steps_per_generation > args.gradient_accumulation_steps
        are_joined = self._batcher.joins_slices or args.gradient_accumulation_steps == 1
        if self._batcher.share and not (are_joined and decides_steps):
            # Groups may span processes, so the group index counts the rows of all processes
            first, size = self._processes.index * len(rows), self._settings.group_size(training=True)
            order = make_groups_adjacent(order, [(first + index) // size for index in range(len(rows))])
        return self._make_slices(cut_slices(rows, order, self._args.per_device_train_batch_size))

    def for_evaluation(
        self, inputs: Sequence[dict[str, Any]], mode: RunMode
    ) -> tuple[Rollout, Slice, torch.Tensor | None]:
        """As in training, in one slice, with the standard deviation `(E,)` of the rewards in each episode's group."""
        rollout = self._rollouts.run(inputs, training=False, mode=mode)
        rows, std, *_ = self._estimate_rows(rollout, training=False)
        (slice_,) = self._make_slices([[row for episode_rows in rows for row in episode_rows]])
        return rollout, slice_, std if self._settings.group_size(training=False) > 1 else None

    def _estimate_rows(self, rollout: Rollout, training: bool) -> Estimated:
        # Baselines that compare candidates need the rows of all candidates, other baselines only those of the turns
        turns = self._estimator.turns(rollout, training)
        rows = self._rows(rollout, turns, training)
        if training:
            # Before the first pass over the rows, so that no pass needs more memory than is free
            self._batcher.fit([row for row in rows if row.is_trained or row.critic is not None])
        rows = self._outputs.add(rollout, rows, training)
        # Forward passes take all rows in one list, but estimators need them by episode
        filled = iter(rows)
        by_episode = [[next(filled) for _ in episode_turns] for episode_turns in turns]
        if not training:
            return self._estimator.estimate(rollout, by_episode, training)
        # Checked in two steps, so that the error names the first value that is wrong
        with self._processes.failing_together():
            check_finite(rows, _MODEL_OUTPUT_ADVICE)
        estimated = self._estimator.estimate(rollout, by_episode, training)
        with self._processes.failing_together():
            check_finite([row for value in estimated.rows for row in value], {"advantage": _ADVANTAGES_ADVICE})
        return estimated

    def _rows(self, rollout: Rollout, turns: Sequence[Sequence[Any]], training: bool) -> list[Row]:
        rows: list[Row] = []
        leaves_out_truncated = self._settings.mask_truncated_completions
        for index, (episode, episode_turns) in enumerate(zip(rollout.episodes, turns, strict=True)):
            # Turns of a joint action share an importance factor in sequential updates
            joint_actions = episode.joint_actions()
            for turn in episode_turns:
                is_episode_turn = turn.index < len(episode.turns) and episode.turns[turn.index] is turn
                has_logps = training and turn.logps is not None
                field = "old_per_token_logps" if turn.sampled_by is None else "sampling_logps"
                rows.append(
                    Row(
                        agent=turn.agent,
                        adapter=self._policies.get_adapter(turn.agent),
                        prompt_ids=torch.tensor(turn.prompt_ids, dtype=torch.long),
                        completion_ids=torch.tensor(turn.completion_ids, dtype=torch.long),
                        counts=not (leaves_out_truncated and turn.truncated),
                        episode=index,
                        is_trained=self._policies.is_trained(turn.agent),
                        joint_action=joint_actions[turn.index] if is_episode_turn else 0,  # candidates have none
                        number=len(rows),
                        words=max(len(turn.text.split()), 1),
                        critic=self._critic.get_part(turn.agent) if self._critic is not None else None,
                        sampled_by=turn.sampled_by,
                        images=turn.images,
                        **({field: torch.tensor(turn.logps, dtype=torch.float32)} if has_logps else {}),
                    )
                )
        return rows

    def _find_credited(self, credited: set[str]) -> dict[str, bool]:
        """Return, for each trained agent, whether any of its turns on any process received credit."""
        names = [name for adapter in self._schedule.adapters for name in self._policies.get_agents(adapter)]
        # A process without turns of an agent contributes `False`
        flags = self._processes.max(torch.tensor([name in credited for name in names], dtype=torch.float64))
        return dict(zip(names, (flags > 0).tolist(), strict=True))

    def _make_slices(self, slices: list[list[Row]]) -> list[Slice]:
        # Counts are summed over processes, so that the weight of a row does not depend on its process
        names, parts = self._policies.names, self._critic.parts if self._critic is not None else []
        by_agent = self._args.agent_weight == "equal"
        agents = {agent: name for name in names for agent in self._policies.get_agents(name)} if by_agent else {}
        pools = Pools(names, parts, agents)
        # One collective for all slices. Processes without rows take part in it too
        counts = self._processes.sum(count_rows(slices, pools))
        return make_slices(slices, pools, counts)


def check_finite(rows: Sequence[Row], fields: Mapping[str, str]) -> None:
    """Raise `FloatingPointError`, with the advice of the field, if a value that training would use is not finite."""
    for field, advice in fields.items():
        # Check all values at once, and search for the row only if a value is not finite
        values = [(row, torch.as_tensor(data)) for row in rows if (data := getattr(row, field)) is not None]
        if not values or torch.cat([item.reshape(-1) for _, item in values]).isfinite().all():
            continue
        row = next(row for row, value in values if not value.isfinite().all())
        raise FloatingPointError(
            f"`{field}` of a turn of {row.agent!r} (episode {row.episode} of this process) is not finite, so its "
            f"batch was not used for training. {advice}"
        )


def advantages_by_turn(rollout: Rollout, rows: Sequence[Sequence[Row]]) -> list[list[Advantage]]:
    """Return the advantages of the turns of each episode, for transcripts. `None` marks turns without a row."""
    by_turn: list[list[Advantage]] = []
    for episode, episode_rows in zip(rollout.episodes, rows, strict=True):
        # Rows of an agent are in the order of its turns. Of several candidates, only one has the tokens of the turn
        remaining: dict[tuple, list[Row]] = {}
        for row in episode_rows:
            key = row.agent, tuple(row.prompt_ids.tolist()), tuple(row.completion_ids.tolist())
            remaining.setdefault(key, []).append(row)
        found = [remaining.get((t.agent, tuple(t.prompt_ids), tuple(t.completion_ids)), []) for t in episode.turns]
        advantages = [rows.pop(0).advantage if rows else None for rows in found]
        by_turn.append([item.tolist() if isinstance(item, torch.Tensor) else item for item in advantages])
    return by_turn
