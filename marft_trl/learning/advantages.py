# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Advantages of training rows: by a baseline, or by GAE with a critic. The arithmetic is in `functional`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from ..algorithms import functional
from ..algorithms.baselines import BASELINES, CREDITS, Baseline, RunningBaselines, TurnReturns
from ..algorithms.levels import Discounts
from ..algorithms.rows import Row
from ..config.marft_config import MARFTConfig
from ..config.team_setup import RunContext, TeamSetup
from ..episodes.records import Episode, Turn
from ..rollout.alternatives import Node
from ..rollout.rollouts import Rollout
from ..seams.trl import TrlRewards, TrlSettings
from .credit import CreditAssigner


class Estimated(NamedTuple):
    """
    Rows with advantages.

    Args:
        std (`torch.Tensor` of shape `(E,)`, *optional*): standard deviation in the group of each episode, for the
            metrics; `None` with a critic.
        credited: agents of this process with an advantage, or with a critic a return, other than 0.
        own_rewards: for each episode the own rewards of its turns by function; empty where there are none.
    """

    rows: list[list[Row]]
    std: torch.Tensor | None
    credited: set[str]
    own_rewards: list[list[dict[str, float]]]


class Scale(Protocol):
    """Follows the value targets of generation batches."""

    def update(self, rows: Sequence[Row]) -> None:
        """Take in the rows of a generation batch."""


class Estimator(Protocol):
    """Estimates advantages."""

    def turns(self, rollout: Rollout, training: bool) -> list[list[Turn]]:
        """For each episode the turns, or candidates for turns, that need a row."""

    def estimate(self, rollout: Rollout, rows: Sequence[Sequence[Row]], training: bool) -> Estimated:
        """
        Args:
            rows: rows of each episode: one per turn, or, with candidates, one per candidate of every node in turn.
            training: whether the rows are trained on; else they are evaluated.
        """


def credit_rule(args: MARFTConfig, training: bool) -> str:
    """Name of the credit rule. In evaluation, rules that need re-runs or training columns are replaced."""
    rule = CREDITS[args.credit]
    return rule.name if training or rule.in_evaluation is None else rule.in_evaluation


class BaselineEstimator:
    """
    Advantages by comparing returns.

    Args:
        rewards: weights of the reward functions.
        running: what the baseline remembers of earlier batches.
    """

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        credit: CreditAssigner,
        rewards: TrlRewards,
        running: RunningBaselines | None = None,
    ):
        self._running = running
        self._credit, self._rewards, self._args, self._processes = credit, rewards, run.args, run.processes
        self._names, self._policies, self._settings = team.names, team.policies, run.settings

    def turns(self, rollout: Rollout, training: bool) -> list[list[Turn]]:
        if self.baseline(training).uses_candidates:
            return [[turn for node in value for turn in node.turns] for value in _by_episode(rollout)]
        if self.gives_one_advantage_to_all(training) and not rollout.has_own_returns:
            is_trained = self._policies.is_trained
            return [[turn for turn in episode.turns if is_trained(turn.agent)] for episode in rollout.episodes]
        return [list(episode.turns) for episode in rollout.episodes]

    def baseline(self, training: bool) -> Baseline:
        """The baseline; in evaluation one that needs nothing but the episodes."""
        # Candidates, for instance, are not sampled in evaluation
        baseline = BASELINES[self._args.advantage]
        return baseline if training or baseline.in_evaluation is None else BASELINES[baseline.in_evaluation]

    def gives_one_advantage_to_all(self, training: bool) -> bool:
        """`True` if all turns of an episode have one return, which is compared with other episodes, as in TRL."""
        # Then one number for an episode is enough, which is TRL's own case
        by_episode = self.baseline(training).by_episode is not None
        return by_episode and credit_rule(self._args, training) == "equal" and self._args.credit_kind == "returns"

    def estimate(self, rollout: Rollout, rows: Sequence[Sequence[Row]], training: bool) -> Estimated:
        group_size, scale = self._settings.group_size(training), self._settings.scale_rewards
        rewards = rollout.rewards
        if rollout.has_own_returns:
            _check_own_returns(self._settings)
        if self._settings.multi_objective_aggregation == "normalize_then_sum":
            weights = self._rewards.weights.to(rewards.device)
            to_the_bit = not self._args.share_prefixes
            rewards = functional.normalized_objectives(rollout.rewards_per_func, weights, group_size, to_the_bit)
            group_size, scale = len(rewards), "group"  # then over the whole batch, as in TRL
        # The deviation is logged whatever the baseline is, as in TRL
        by_episode, std = functional.group_advantages(rewards, group_size, scale)
        baseline = self.baseline(training)
        is_one = self.gives_one_advantage_to_all(training) and not rollout.has_own_returns
        if is_one and baseline.by_episode is not None:
            by_episode, std = baseline.by_episode(rewards, group_size, scale)  # TRL's own arithmetic, to the bit
            if self._args.share_prefixes:  # else its rounding too
                groups = torch.arange(len(rewards), device=rewards.device) // group_size
                is_equal = functional.are_equal(rewards, groups)
                by_episode = by_episode.masked_fill(is_equal, 0.0)
                std = std if scale == "batch" else std.masked_fill(is_equal, 0.0)
            own = by_episode[rollout.first : rollout.first + len(rows)].tolist()
            pairs = zip(rows, own, strict=True)
            filled = [[replace(row, advantage=advantage) for row in its_rows] for its_rows, advantage in pairs]
        else:
            filled = self._compare(replace(rollout, rewards=rewards), rows, baseline, group_size, scale, training)
        # For the warning that no reward reaches an agent; a baseline may make all of them 0
        credited = {row.agent for its_rows in filled for row in its_rows if torch.as_tensor(row.advantage).any()}
        return Estimated(filled, std, credited, self._credit.take_own_rewards())

    def _compare(
        self,
        rollout: Rollout,
        rows: Sequence[Sequence[Row]],
        baseline: Baseline,
        group_size: int,
        scale: str,
        training: bool,
    ) -> list[list[Row]]:
        """Compare the returns of the turns of all processes."""
        nodes = _by_episode(rollout)
        if baseline.uses_candidates:
            returns = [torch.tensor([worth for node in value for worth in node.returns]) for value in nodes]
        else:
            returns = self._returns(rollout, credit_rule(self._args, training))
        samples = list(self._samples(rollout, rows, returns, nodes))
        # Processes have different numbers of turns, so each has to find its own among those of all
        counts = self._processes.gather([len(samples)])
        everywhere = self._processes.gather(samples)
        start = sum(counts[: self._processes.index])
        advantages = torch.zeros(0)
        if everywhere:
            episodes, agents, places = (torch.tensor([sample[i] for sample in everywhere]) for i in range(3))
            # In float32, as TRL's rewards: a second precision would make ties differ
            worth = torch.tensor([sample[3] for sample in everywhere], dtype=torch.float32)
            table = TurnReturns(episodes, agents, places, worth, group_size, len(self._names), rollout.has_own_returns)
            if self._running is not None:
                table = replace(table, running=self._running.lookup(keys := [sample[4] for sample in everywhere]))
                if training:
                    # After it was read: the baseline of a batch must not depend on the batch
                    self._running.update(keys, worth, table.per_episode)
            advantages = baseline.function(table, scale)
        own = iter(advantages[start : start + len(samples)].tolist())
        return [[replace(row, advantage=next(own)) for row in its_rows] for its_rows in rows]

    def _returns(self, rollout: Rollout, credit: str) -> list[torch.Tensor]:
        gamma, as_returns = self._args.gamma, self._args.credit_kind == "returns"
        if rollout.has_own_returns and as_returns and not CREDITS[credit].reruns:
            return self._credit.own_returns(rollout, credit)
        if rollout.has_own_returns and not as_returns:
            streams = self._credit.streams(rollout, credit)
            # Streams of an agent go on while others act, so its turns are discounted by joint steps
            return [
                own_returns_to_go(episode, value, gamma)
                for episode, value in zip(rollout.episodes, streams, strict=True)
            ]
        credits = self._credit.assign(rollout, credit)
        if as_returns:
            return credits
        pairs = zip(rollout.episodes, credits, strict=True)
        return [functional.returns_to_go(c, torch.tensor(e.joint_steps()), gamma) for e, c in pairs]

    def _samples(
        self,
        rollout: Rollout,
        rows: Sequence[Sequence[Row]],
        returns: Sequence[torch.Tensor],
        nodes: Sequence[Sequence[Node]],
    ) -> Iterator[tuple[int, int, int, float, str]]:
        """Episode, agent, node and return of each row, and the key of its running baseline."""
        for index, (its_rows, its_returns) in enumerate(zip(rows, returns, strict=True)):
            places = (
                [number for number, node in enumerate(nodes[index]) for _ in node.turns]
                if rollout.nodes
                else list(range(len(its_rows)))
            )
            for row, worth, place in zip(its_rows, its_returns.tolist(), places, strict=True):
                key = ""
                if self._running is not None:
                    key = self._running.key(row.agent, rollout.episodes[index].row, rollout.has_own_returns)
                yield rollout.first + index, self._names.index(row.agent), place, worth, key


def _check_own_returns(settings: TrlSettings) -> None:
    if settings.multi_objective_aggregation == "normalize_then_sum":
        raise ValueError(
            "`multi_objective_aggregation='normalize_then_sum'` normalizes the rewards of whole episodes, but the "
            "agents are rewarded by name, and each learns from its own return. Use 'sum_then_normalize', or "
            "`returns='team'`."
        )


def own_returns_to_go(episode: Episode, streams: Mapping[str, torch.Tensor], gamma: float) -> torch.Tensor:
    """
    Return of each turn of an episode `(K,)`: the discounted sum of what its agent receives from its joint step on.

    Args:
        streams: for each agent, what it received after every turn `(K,)`.
        gamma: discount per joint step.
    """
    steps = torch.tensor(episode.joint_steps())
    agent_returns = {agent: functional.returns_to_go(stream, steps, gamma) for agent, stream in streams.items()}
    return torch.stack([agent_returns[turn.agent][turn.index] for turn in episode.turns])


class CriticEstimator:
    """
    Advantages and value targets by GAE. Rows have their `old_values`, one row for each turn.

    Args:
        scale: follows value targets, where values are normalized.
    """

    def __init__(self, team: TeamSetup, run: RunContext, credit: CreditAssigner, scale: Scale | None = None):
        args = run.args
        self._credit, self._level, self._args, self._scale = credit, team.level, args, scale
        self._metrics, self._processes, self._names = run.metrics, run.processes, team.names
        self._discounts = Discounts(args.gamma, args.gae_lambda, args.token_gamma, args.token_gae_lambda)

    def turns(self, rollout: Rollout, training: bool) -> list[list[Turn]]:
        return [list(episode.turns) for episode in rollout.episodes]

    def estimate(self, rollout: Rollout, rows: Sequence[Sequence[Row]], training: bool) -> Estimated:
        rule, is_stream = credit_rule(self._args, training), self._args.credit_kind == "rewards"
        if rollout.has_own_returns and is_stream:
            streams = self._credit.streams(rollout, rule)
            filled = [self._own_gae(*value) for value in zip(rollout.episodes, rows, streams, strict=True)]
            gone = [own_returns_to_go(item, entry, 1.0) for item, entry in zip(rollout.episodes, streams, strict=True)]
            return self._normalized_all(filled, self._credited(rollout, gone), training)
        if rollout.has_own_returns and not CREDITS[rule].reruns:
            credits = self._credit.own_returns(rollout, rule)
        else:
            credits = self._credit.assign(rollout, rule)
        filled = []
        for episode, its_rows, credit in zip(rollout.episodes, rows, credits, strict=True):
            steps = torch.tensor(episode.joint_steps())
            # Returns are worth of turns already: nothing is accumulated over them
            if not is_stream:  # every turn is the last of an episode of its own
                alone = [self._gae([row], credit[k : k + 1], steps[:1] * 0, 0.0) for k, row in enumerate(its_rows)]
                filled.append([row for single in alone for row in single])
            else:
                filled.append(self._gae(its_rows, credit, steps, its_rows[-1].last_value if its_rows else 0.0))
        if is_stream:
            pairs = zip(rollout.episodes, credits, strict=True)
            credits = [
                functional.returns_to_go(credit.nan_to_num(nan=0.0), torch.tensor(episode.joint_steps()), 1.0)
                for episode, credit in pairs
            ]
        return self._normalized_all(filled, self._credited(rollout, credits), training)

    def _normalized_all(self, filled: Sequence[Sequence[Row]], credited: set[str], training: bool) -> Estimated:
        """Rows with normalized advantages. They are logged before."""
        # Logged before they are standardized: afterwards their mean is 0 by construction
        everything = [row for its_rows in filled for row in its_rows]
        self._log(everything)
        totals = self._moments(everything)
        if training and self._scale is not None:
            self._scale.update(everything)
        rows = [[self._normalized(row, totals) for row in its_rows] for its_rows in filled]
        return Estimated(rows, None, credited, self._credit.take_own_rewards())

    def _credited(self, rollout: Rollout, returns: Sequence[torch.Tensor]) -> set[str]:
        """Agents with a turn whose return is not 0. Advantages do not tell: errors of a critic make them non-zero."""
        found = set()
        for episode, value in zip(rollout.episodes, returns, strict=True):
            pairs = zip(episode.turns, value.nan_to_num(nan=0.0).tolist(), strict=True)
            found |= {turn.agent for turn, worth in pairs if worth}
        return found

    def _own_gae(self, episode: Episode, rows: Sequence[Row], streams: Mapping[str, torch.Tensor]) -> list[Row]:
        """Rows of an episode, where every agent goes from each of its turns to its next one."""
        steps, filled = torch.tensor(episode.joint_steps()), dict[int, Row]()
        for agent, received in streams.items():
            own = torch.tensor([turn.index for turn in episode.turns if turn.agent == agent])
            mine = functional.own_steps(received, steps, own, self._args.gamma)
            discounts = replace(self._discounts, gamma=mine.discounts)
            agent_rows = [rows[index] for index in own.tolist()]
            done = self._gae(agent_rows, mine.rewards, mine.steps, agent_rows[-1].last_value, discounts)
            filled |= dict(zip(own.tolist(), done, strict=True))
        return [filled[index] for index in range(len(rows))]

    def _gae(
        self,
        rows: Sequence[Row],
        rewards: torch.Tensor,
        steps: torch.Tensor,
        last_value: float,
        discounts: Discounts | None = None,
    ) -> list[Row]:
        """Rows with advantages before normalization, one per value, and with value targets."""
        # Of the time of sampling, as in PPO: targets must not follow the critic that learns them
        values = [row.old_values for row in rows if row.old_values is not None]
        advantages, targets = self._level.estimate(rewards, values, steps, discounts or self._discounts, last_value)
        return [
            replace(row, advantage=advantage, value_targets=target)
            for row, advantage, target in zip(rows, advantages, targets, strict=True)
        ]

    def _moments(self, rows: Sequence[Row]) -> torch.Tensor:
        """Moments `(N, 3)` of the advantages that the policy loss counts, of all agents or of each."""
        by_agent = self._args.normalize_advantages == "agent"
        names: list[Any] = list(self._names) if by_agent else [None]
        totals = torch.zeros(len(names), 3, dtype=torch.float64)
        for index, name in enumerate(names):
            # Rows that the loss leaves out must not move the mean of the others
            mine = [row for row in rows if name in (None, row.agent) and row.is_trained and row.num_loss_tokens]
            values = [torch.as_tensor(self._get_advantage(row)).reshape(-1) for row in mine]
            known = [value[~value.isnan()] for value in values]
            if known:
                totals[index] = functional.moments(torch.cat(known))
        return self._processes.sum(totals)

    def _normalized(self, row: Row, totals: torch.Tensor) -> Row:
        """A row whose advantage is standardized; 0 where nothing scored the turn."""
        how = self._args.normalize_advantages
        advantage = torch.as_tensor(self._get_advantage(row), dtype=torch.float32)
        total = totals[self._names.index(row.agent) if how == "agent" else 0]
        if how != "none" and total[0] > 0:
            advantage = functional.standardized(advantage, total)
        advantage = advantage.nan_to_num(nan=0.0)
        return replace(row, advantage=advantage if advantage.dim() else advantage.item())

    def _get_advantage(self, row: Row) -> float | torch.Tensor:
        return self._level.advantage(torch.as_tensor(row.advantage), len(row.completion_ids))

    def _log(self, rows: Sequence[Row]) -> None:
        known = [row for row in rows if row.num_value_targets]
        totals = torch.zeros(3, 3, dtype=torch.float64)
        if known:
            targets = torch.cat([row.value_targets for row in known if row.value_targets is not None])
            values = torch.cat([row.old_values for row in known if row.old_values is not None])
            totals = torch.stack([functional.moments(item) for item in (targets, targets - values, values)])
        totals = self._processes.sum(totals)
        if totals[0, 0] == 0:
            return
        self._metrics.add("critic/explained_variance", functional.explained_variance(totals[0], totals[1]))
        self._metrics.add("critic/target_mean", (totals[0, 1] / totals[0, 0]).item())
        self._metrics.add("critic/value_mean", (totals[2, 1] / totals[2, 0]).item())


def _by_episode(rollout: Rollout) -> list[list[Node]]:
    nodes: list[list[Node]] = [[] for _ in rollout.episodes]
    for node in rollout.nodes:
        nodes[node.episode].append(node)
    return nodes
