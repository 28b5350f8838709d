# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""From dataset rows to training data: the story of a generation batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..advantages.credit import CreditAssigner
from ..advantages.estimators import Estimator
from ..config.marft_config import MARFTConfig
from ..episodes.records import Turn
from ..learning.batching import Pools, count_rows, cut_slices, together, weigh
from ..learning.critic_learner import CriticLearner
from ..learning.log_probs import LogProbs
from ..learning.micro_batcher import MicroBatcher
from ..learning.schedules import Schedule
from ..reporting.reporter import Reporter
from ..reporting.transcripts import Advantage
from ..rollout.alternatives import Alternatives
from ..rollout.dynamic_sampling import DynamicSampling
from ..rollout.reach import RewardReach
from ..rollout.rollouts import Rollout
from ..rules.critic import Critic
from ..rules.rows import Row, Slice
from ..runs.collapse import Collapse
from ..seams.trl import TrlSettings
from ..servers.sampling_correction import SamplingCorrection
from ..system.processes import Processes
from ..system.run_metrics import Metrics
from ..weights.policies import Policies


class Evaluated(NamedTuple):
    """
    An evaluation batch.

    Args:
        rollout ([`Rollout`]): episodes with rewards.
        slice ([`Slice`]): their rows, for the loss.
        std (`torch.Tensor` of shape `(E,)`, *optional*): standard deviation in the group of each episode.
    """

    rollout: Rollout
    slice: Slice
    std: torch.Tensor | None


_OF_WEIGHTS = (
    "The weights have probably diverged, or overflow in the precision of the run: go on from an earlier checkpoint "
    "with a lower learning rate."
)
_OF_ADVANTAGES = "Look at the size of the rewards, of the values of the critic, and at `scale_rewards`."
_BEFORE_ADVANTAGES = dict.fromkeys(("old_per_token_logps", "ref_per_token_logps", "old_values"), _OF_WEIGHTS)


class Experience:
    """
    Makes slices of training rows out of dataset rows.

    Args:
        rollouts ([`DynamicSampling`]): episodes with rewards.
        collapse ([`Collapse`]): may restore adapters once it has seen the rewards.
        alternatives ([`Alternatives`]): counts what was generated beside the episodes.
        credit ([`CreditAssigner`]): has the rewards of single turns.
        estimator ([`Estimator`]): advantages.
        log_probs ([`LogProbs`]): log-probabilities.
        batcher ([`MicroBatcher`]): bounds micro-batches by the memory that is free.
        critic ([`Critic`], *optional*): which part values an agent.
        learner ([`CriticLearner`], *optional*): values.
        policies ([`Policies`]): adapters.
        reporter ([`Reporter`]): reports rollouts.
        reach ([`RewardReach`]): watches whether rewards reach the agents.
        schedule ([`Schedule`]): trained adapters.
        args ([`MARFTConfig`]): episodes of a slice.
        settings ([`TrlSettings`]): KL, truncated turns, sizes of groups.
        needs_old (`bool`): whether rows need log-probabilities of the policy that sampled.
        share (`bool`): whether rows share what they have in common, so that groups stay together.
        processes ([`Processes`]): the processes of the run.
        correction ([`SamplingCorrection`], *optional*): compares and weighs turns that servers sampled.
        metrics ([`Metrics`]): forget those of episodes that are not trained on.
    """

    def __init__(
        self,
        rollouts: DynamicSampling,
        collapse: Collapse,
        alternatives: Alternatives,
        credit: CreditAssigner,
        estimator: Estimator,
        log_probs: LogProbs,
        batcher: MicroBatcher,
        critic: Critic | None,
        learner: CriticLearner | None,
        policies: Policies,
        reporter: Reporter,
        reach: RewardReach,
        schedule: Schedule,
        args: MARFTConfig,
        settings: TrlSettings,
        needs_old: bool,
        share: bool,
        processes: Processes,
        correction: SamplingCorrection | None,
        metrics: Metrics,
    ):
        self._rollouts, self._collapse, self._alternatives = rollouts, collapse, alternatives
        self._credit, self._estimator = credit, estimator
        self._log_probs, self._batcher, self._critic, self._learner = log_probs, batcher, critic, learner
        self._policies, self._reporter, self._reach, self._schedule = policies, reporter, reach, schedule
        self._args, self._settings, self._needs_old, self._share = args, settings, needs_old, share
        self._processes, self._correction, self._metrics = processes, correction, metrics

    def for_training(self, inputs: Sequence[dict[str, Any]]) -> list[Slice]:
        """Episodes for the dataset rows of a generation batch, as slices of training rows."""
        before = self._metrics.mark()
        rollout = self._rollouts.run(inputs, training=True)
        after = self._metrics.mark()
        if self._collapse.is_undone(rollout, inputs):
            self._metrics.drop(before, after)
            self._reporter.forget(rollout, self._alternatives.take_generated().get("tokens", 0))
            rollout = self._rollouts.run(inputs, training=True)
        rows, std, credited = self._estimated(rollout, training=True)
        self._reach.note_advantages(self._have_advantages(credited))
        advantages = advantages_by_turn(rollout, rows)
        own_rewards, generated = self._credit.take_own_rewards(), self._alternatives.take_generated()
        self._reporter.rollout(rollout, std, advantages, own_rewards, generated)
        order = torch.randperm(len(rows))  # the one draw that TRL makes here
        if self._share:
            first, size = self._processes.index * len(rows), self._settings.group_size(training=True)
            order = together(order, [(first + index) // size for index in range(len(rows))])
        return self._weighed(cut_slices(rows, order, self._args.per_device_train_batch_size))

    def for_evaluation(self, inputs: Sequence[dict[str, Any]]) -> Evaluated:
        """Episodes for the dataset rows of an evaluation batch, as one slice, under the rules of training."""
        rollout = self._rollouts.run(inputs, training=False)
        rows, std, _ = self._estimated(rollout, training=False)
        (slice_,) = self._weighed([[row for its_rows in rows for row in its_rows]])
        return Evaluated(rollout, slice_, std if self._settings.group_size(training=False) > 1 else None)

    def _estimated(self, rollout: Rollout, training: bool) -> tuple[list[list[Row]], torch.Tensor | None, set[str]]:
        """The rows of each episode with all that their losses need, in the order of the steps that fill them."""
        turns = self._estimator.turns(rollout, training)
        rows = self._rows(rollout, turns, training)
        last_values: list[dict[str, float]] = []
        if training:
            self._batcher.fit([row for row in rows if row.is_trained or row.critic is not None])
        may_keep = training and self._learner is not None and self._learner.may_keep_passes
        with self._log_probs.scoring():
            if self._needs_old and training:
                rows = self._with_old(rows)
            if self._settings.beta != 0.0 and self._learner is not None:
                rows = self._log_probs.with_reference(rows, self._learner.num_features_of_reference)
            elif self._settings.beta != 0.0:
                rows = self._log_probs.with_reference(rows)
            if self._learner is not None:
                rows, last_values = self._learner.with_values(rollout, rows, may_keep)
        filled = iter(rows)
        by_episode = [[next(filled) for _ in its] for its in turns]
        if not training:
            return self._estimator.estimate(rollout, by_episode, training, last_values)
        with self._processes.together():
            check_finite(rows, _BEFORE_ADVANTAGES)
        estimated = self._estimator.estimate(rollout, by_episode, training, last_values)
        if self._learner is not None:
            self._learner.note_targets([row for its in estimated.rows for row in its])
        with self._processes.together():
            check_finite([row for its in estimated[0] for row in its], {"advantage": _OF_ADVANTAGES})
        return estimated

    def _with_old(self, rows: list[Row]) -> list[Row]:
        """Rows with the log-probabilities of the policies as they are; of servers' turns, also what tokens weigh."""
        if self._correction is None:
            return self._log_probs.with_old(rows)
        with self._log_probs.without_dropout():  # as on a server
            rows = self._log_probs.with_old(rows)
        return self._correction.corrected(rows)

    def _rows(self, rollout: Rollout, turns: Sequence[Sequence[Any]], training: bool) -> list[Row]:
        """A training row for each turn or candidate, in the order of the episodes."""
        rows: list[Row] = []
        for index, (episode, its_turns) in enumerate(zip(rollout.episodes, turns, strict=True)):
            joint_actions = episode.joint_actions()
            for turn in its_turns:
                is_spoken = turn.index < len(episode.turns) and episode.turns[turn.index] is turn
                rows.append(
                    Row(
                        agent=turn.agent,
                        adapter=self._policies.adapter_of(turn.agent),
                        prompt_ids=torch.tensor(turn.prompt_ids, dtype=torch.long),
                        completion_ids=torch.tensor(turn.completion_ids, dtype=torch.long),
                        counts=not (self._settings.mask_truncated_completions and turn.truncated),
                        episode=index,
                        is_trained=self._policies.is_trained(turn.agent),
                        joint_action=joint_actions[turn.index] if is_spoken else 0,  # a candidate is in none
                        number=len(rows),
                        words=max(len(turn.text.split()), 1),
                        critic=self._critic.part_of(turn.agent) if self._critic is not None else None,
                        sampled_by=turn.sampled_by,
                        **_recorded(turn, training),
                    )
                )
        return rows

    def _have_advantages(self, credited: set[str]) -> dict[str, bool]:
        """For each trained agent whether one of its turns, on any process, is credited."""
        names = [name for adapter in self._schedule.adapters for name in self._policies.agents_of(adapter)]
        flags = self._processes.max(torch.tensor([name in credited for name in names], dtype=torch.float64))
        return dict(zip(names, (flags > 0).tolist(), strict=True))

    def _weighed(self, slices: list[list[Row]]) -> list[Slice]:
        names, parts = self._policies.names, self._critic.parts if self._critic is not None else []
        by_agent = self._args.agent_weight == "equal"
        agents = {agent: name for name in names for agent in self._policies.agents_of(name)} if by_agent else {}
        pools = Pools(names, parts, agents)
        counts = self._processes.sum(count_rows(slices, pools))
        return weigh(slices, pools, counts)


def _recorded(turn: Turn, training: bool) -> dict[str, torch.Tensor]:
    """Log-probabilities that were recorded when a turn was sampled, under the name that they have in a row."""
    if not training or turn.logps is None:
        return {}
    logps = torch.tensor(turn.logps, dtype=torch.float32)
    return {"old_per_token_logps": logps} if turn.sampled_by is None else {"sampling_logps": logps}


def check_finite(rows: Sequence[Row], fields: Mapping[str, str]) -> None:
    """
    Raise if a number that training would use is not finite.

    Args:
        rows (`Sequence[Row]`): training rows.
        fields (`Mapping[str, str]`): fields of rows, and what to look at if one is not finite.

    Raises:
        FloatingPointError: the message has the agent, the episode and the field.
    """
    for field, advice in fields.items():
        values = [(row, torch.as_tensor(its)) for row in rows if (its := getattr(row, field)) is not None]
        if not values or torch.cat([its.reshape(-1) for _, its in values]).isfinite().all():
            continue
        row = next(row for row, its in values if not its.isfinite().all())
        raise FloatingPointError(
            f"`{field}` of a turn of {row.agent!r} (episode {row.episode} of this process) is not finite, so nothing "
            f"was trained on its batch. {advice}"
        )


def advantages_by_turn(rollout: Rollout, rows: Sequence[Sequence[Row]]) -> list[list[Advantage]]:
    """For each episode the advantages of its turns, for people; `None` without a row."""
    by_turn: list[list[Advantage]] = []
    for episode, its_rows in zip(rollout.episodes, rows, strict=True):
        # The turns of an agent have rows in their order; of candidates, only one has the tokens of the turn
        left: dict[tuple, list[Row]] = {}
        for row in its_rows:
            key = row.agent, tuple(row.prompt_ids.tolist()), tuple(row.completion_ids.tolist())
            left.setdefault(key, []).append(row)
        found = [left.get((t.agent, tuple(t.prompt_ids), tuple(t.completion_ids)), []) for t in episode.turns]
        by_turn.append([_plain(rows.pop(0).advantage) if rows else None for rows in found])
    return by_turn


def _plain(advantage: float | torch.Tensor) -> float | list[float]:
    return advantage.tolist() if isinstance(advantage, torch.Tensor) else advantage
