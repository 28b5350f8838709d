# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""From dataset rows to training data: the story of a generation batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..algorithms.rows import Row, Slice
from ..config.marft_config import check_k, check_sampling
from ..config.team_setup import RunContext, TeamSetup, decoding
from ..episodes.records import Turn, unknown_agent
from ..learning.adapter_updates import Schedule
from ..learning.advantages import Estimated, Estimator
from ..learning.batching import MicroBatcher, Pools, count_rows, cut_slices, together, weigh
from ..learning.critic_learner import CriticLearner
from ..learning.log_probs import LogProbs
from ..learning.losses import TeamLoss
from ..reporting.reporter import Reporter
from ..reporting.transcripts import Advantage
from ..rollout.dynamic_sampling import DynamicSampling
from ..rollout.reward_scorer import RewardReach
from ..rollout.rollouts import Rollout, Rollouts
from ..rollout.runner import RunMode
from ..runs.collapse import Collapse


if TYPE_CHECKING:
    from ..extras.engines.vllm_generator import SamplingCorrection


class Evaluations:
    """
    Settings of evaluations: those of the training arguments, or of one call of `evaluate`.

    Args:
        agents: names of the agents.
        reporter: reports several episodes of a question.
        collapse: looks at evaluations of the trainer's own set.
    """

    def __init__(self, run: RunContext, agents: Sequence[str], reporter: Reporter, collapse: Collapse | None = None):
        self._args, self._settings, self._agents, self._reporter = run.args, run.settings, agents, reporter
        self._collapse = collapse
        self._silent: frozenset[str] = frozenset()
        self._sampling: Mapping[str, Any] | None = run.args.eval_sampling  # type: ignore[assignment]
        self._k: Sequence[int] | None = run.args.eval_k
        self._with_losses = True

    @contextlib.contextmanager
    def chosen(
        self,
        num_samples: int | None,
        sampling: Mapping[str, float] | None,
        k: Sequence[int] | None,
        is_other_set: bool = False,
    ) -> Iterator[None]:
        """
        Context manager: evaluations have these settings, where they are not `None`. May be nested: `evaluate` calls
        itself for each of several sets.

        Args:
            num_samples: episodes of each question.
            is_other_set: whether it is not the trainer's own set.

        Raises:
            ValueError: as the same settings of [`MARFTConfig`], or a batch would have parts of questions.
        """
        check_sampling(sampling, "sampling")
        self._check_samples(num_samples)
        self._check_size("num_samples" if num_samples else "num_generations_eval", num_samples)
        values = self._k if k is None else k
        check_k(values, num_samples or self._settings.group_size(training=False), "eval_k" if k is None else "k")
        # `evaluate` of several sets calls itself; inner calls go on with the settings of the outer one
        kept = self._sampling, self._k
        is_other = is_other_set or num_samples is not None or sampling is not None
        watch = (
            self._collapse.ignoring_evaluations(is_other) if self._collapse is not None else contextlib.nullcontext()
        )
        self._sampling, self._k = self._sampling if sampling is None else sampling, values
        try:
            with watch, self._settings.evaluating_with(num_samples), self._reporter.reporting_at(values):
                yield
        finally:
            self._sampling, self._k = kept

    @contextlib.contextmanager
    def without_losses(self) -> Iterator[None]:
        """Context manager: evaluations report no loss, which takes a pass through the model. Nothing else differs."""
        self._with_losses = False
        try:
            yield
        finally:
            self._with_losses = True

    def loss(self, losses: TeamLoss, *batch: Any) -> torch.Tensor | None:
        """The loss of an evaluation batch; `None` without losses. `batch` are the arguments of `in_evaluation`."""
        return losses.in_evaluation(*batch) if self._with_losses else None

    def _check_samples(self, num_samples: int | None) -> None:
        if num_samples is None:
            return
        if not isinstance(num_samples, int) or isinstance(num_samples, bool) or num_samples < 1:
            raise ValueError(f"`num_samples` must be an integer of at least 1, got {num_samples!r}.")

    def _check_size(self, name: str, num_samples: int | None) -> None:
        size = self._args.per_device_eval_batch_size * self._args.world_size
        num_samples = num_samples or self._settings.group_size(training=False)
        # pass@k needs all samples of a question in one batch
        if size % num_samples:
            raise ValueError(
                f"`{name}` ({num_samples}) must divide the episodes of an evaluation batch ({size}): "
                "`per_device_eval_batch_size` times the number of processes. Set `per_device_eval_batch_size` to a "
                f"multiple of {num_samples}."
            )

    @contextlib.contextmanager
    def silencing(self, *names: str) -> Iterator[None]:
        """Context manager: turns of these agents are empty, for teammates, environments and answers."""
        for name in names:
            if name not in self._agents:
                raise ValueError(unknown_agent(name, self._agents, "`silencing`"))
        kept, self._silent = self._silent, frozenset(names)
        try:
            yield
        finally:
            self._silent = kept

    @property
    def mode(self) -> RunMode:
        """How episodes are run."""
        return RunMode(decoding(self._sampling), silent=self._silent)

    def begin(self) -> None:
        """Forget the episodes of an evaluation that failed before its end."""
        self._reporter.begin_evaluation()

    def metrics(self, dataset: Any, prefix: str) -> dict[str, float]:
        """
        Metrics of the evaluation that has just run.

        Args:
            dataset: the evaluation set.
            prefix: what stands before the names, such as `"eval"`.
        """
        return {f"{prefix}_{name}": value for name, value in self._reporter.end_evaluation(dataset, prefix).items()}


# Fills in what rows need of a model: `fill(rollout, rows, training)` returns the rows with it
Fill = Callable[[Rollout, list[Row], bool], list[Row]]


def fills_of(
    run: RunContext,
    log_probs: LogProbs,
    learner: CriticLearner | None,
    correction: SamplingCorrection | None,
    needs_old: bool,
) -> list[Fill]:
    """
    What the rows of a run need, in order. A later fill may use what an earlier one has computed: weights of servers'
    tokens come from the old log-probabilities, a frozen critic reads the pass of the reference.

    Args:
        run: whether there is a KL to a reference.
        correction: compares and weighs turns that servers sampled.
        needs_old: whether rows need log-probabilities of the policy that sampled.
    """

    def old(rollout: Rollout, rows: list[Row], training: bool) -> list[Row]:
        with log_probs.scoring():
            return log_probs.with_old(rows) if training else rows

    def old_and_weights(rollout: Rollout, rows: list[Row], training: bool) -> list[Row]:
        if not training or correction is None:
            return rows
        with log_probs.scoring(dropout=False):  # as on a server
            rows = log_probs.with_old(rows)
        return correction.corrected(rows)

    def reference(rollout: Rollout, rows: list[Row], training: bool) -> list[Row]:
        with log_probs.scoring():
            if learner is None:
                return log_probs.with_reference(rows)
            return log_probs.with_reference(rows, learner.num_features_of_reference)

    def values(rollout: Rollout, rows: list[Row], training: bool) -> list[Row]:
        if learner is None:
            return rows
        may_keep = training and learner.may_keep_passes  # asked before `scoring` takes checkpointing back
        with log_probs.scoring():
            return learner.with_values(rollout, rows, may_keep)

    fills: list[Fill] = []
    if needs_old:
        fills.append(old if correction is None else old_and_weights)
    if run.settings.beta != 0.0:
        fills.append(reference)
    if learner is not None:
        fills.append(values)
    return fills


class Evaluated(NamedTuple):
    """
    An evaluation batch.

    Args:
        slice: their rows, for the loss.
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


class BatchMaker:
    """
    Makes slices of training rows out of dataset rows.

    Args:
        fills: what rows need before they have advantages, in order.
        batcher: bounds micro-batches by the memory that is free.
        collapse: restores adapters before episodes are sampled.
    """

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        schedule: Schedule,
        rollouts: Rollouts | DynamicSampling,
        fills: Sequence[Fill],
        estimator: Estimator,
        batcher: MicroBatcher,
        reporter: Reporter,
        reach: RewardReach,
        collapse: Collapse | None = None,
    ):
        self._policies, self._critic, self._schedule = team.policies, team.critic, schedule
        self._args, self._settings, self._metrics, self._processes = run.args, run.settings, run.metrics, run.processes
        self._rollouts, self._fills, self._estimator, self._batcher = rollouts, fills, estimator, batcher
        self._reporter, self._reach, self._collapse = reporter, reach, collapse

    def for_training(self, inputs: Sequence[dict[str, Any]]) -> list[Slice]:
        """Episodes for the dataset rows of a generation batch, as slices of training rows."""
        if self._collapse is not None:
            self._collapse.undo()
        rollout = self._rollouts.run(inputs, training=True)
        rows, std, credited, own_rewards = self._estimated(rollout, training=True)
        self._reach.note_advantages(self._have_advantages(credited))
        advantages, generated = advantages_by_turn(rollout, rows), self._rollouts.take_generated()
        self._reporter.rollout(rollout, std, advantages, own_rewards, generated)
        order = torch.randperm(len(rows))  # the one draw that TRL makes here
        if self._batcher.share:  # a group that stays together computes its prefixes once
            # Groups may reach over processes, so positions are those among all rows
            first, size = self._processes.index * len(rows), self._settings.group_size(training=True)
            order = together(order, [(first + index) // size for index in range(len(rows))])
        return self._weighed(cut_slices(rows, order, self._args.per_device_train_batch_size))

    def for_evaluation(self, inputs: Sequence[dict[str, Any]], mode: RunMode) -> Evaluated:
        """Episodes for the dataset rows of an evaluation batch, as one slice, under the rules of training."""
        rollout = self._rollouts.run(inputs, training=False, mode=mode)
        rows, std, *_ = self._estimated(rollout, training=False)
        (slice_,) = self._weighed([[row for its_rows in rows for row in its_rows]])
        return Evaluated(rollout, slice_, std if self._settings.group_size(training=False) > 1 else None)

    def _estimated(self, rollout: Rollout, training: bool) -> Estimated:
        """The rows of each episode with all that their losses need, in the order of the steps that fill them."""
        # Baselines that compare candidates need their rows too, others the spoken turns alone
        turns = self._estimator.turns(rollout, training)
        rows = self._rows(rollout, turns, training)
        if training:
            # Before the first pass over the rows, so that no pass is larger than what fits
            self._batcher.fit([row for row in rows if row.is_trained or row.critic is not None])
        for fill in self._fills:
            rows = fill(rollout, rows, training)
        # Fills take rows as one list, because passes do not care for episodes; estimators do
        filled = iter(rows)
        by_episode = [[next(filled) for _ in its_turns] for its_turns in turns]
        if not training:
            return self._estimator.estimate(rollout, by_episode, training)
        # Looked at in two steps, so that the error names what was wrong first
        with self._processes.together():
            check_finite(rows, _BEFORE_ADVANTAGES)
        estimated = self._estimator.estimate(rollout, by_episode, training)
        with self._processes.together():
            check_finite([row for value in estimated.rows for row in value], {"advantage": _OF_ADVANTAGES})
        return estimated

    def _rows(self, rollout: Rollout, turns: Sequence[Sequence[Any]], training: bool) -> list[Row]:
        """A training row for each turn or candidate, in the order of the episodes."""
        rows: list[Row] = []
        for index, (episode, its_turns) in enumerate(zip(rollout.episodes, turns, strict=True)):
            # Turns of one joint action share a factor in sequential updates
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
        # A process without a turn of an agent says nothing of it
        flags = self._processes.max(torch.tensor([name in credited for name in names], dtype=torch.float64))
        return dict(zip(names, (flags > 0).tolist(), strict=True))

    def _weighed(self, slices: list[list[Row]]) -> list[Slice]:
        # Counts of all processes: a row weighs the same, whichever process has it
        names, parts = self._policies.names, self._critic.parts if self._critic is not None else []
        by_agent = self._args.agent_weight == "equal"
        agents = {agent: name for name in names for agent in self._policies.agents_of(name)} if by_agent else {}
        pools = Pools(names, parts, agents)
        # One collective for all slices: every process makes it, also one without rows
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
        fields: fields of rows, and what to look at if one is not finite.

    Raises:
        FloatingPointError: the message has the agent, the episode and the field.
    """
    for field, advice in fields.items():
        # One look at all numbers; which row it was is only asked if one is not finite
        values = [(row, torch.as_tensor(its)) for row in rows if (its := getattr(row, field)) is not None]
        if not values or torch.cat([item.reshape(-1) for _, item in values]).isfinite().all():
            continue
        row = next(row for row, value in values if not value.isfinite().all())
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
