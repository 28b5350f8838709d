# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Credit of turns, and advantages of rows by a baseline, or by GAE with a critic. The arithmetic: `functional`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from ..algorithms import functional
from ..algorithms.baselines import BASELINES, CREDITS, Baseline, RunningBaselines, TurnReturns
from ..algorithms.rows import Discounts, Row
from ..config.marft_config import MARFTConfig
from ..config.team_setup import RunContext, TeamSetup
from ..episodes.records import Episode, Turn
from ..rollout.alternatives import Alternatives, Node
from ..rollout.reward_scorer import AgentReturns, RewardScorer
from ..rollout.rollouts import Rollout
from ..seams.trl import TrlRewards
from .critic_learner import ValueScale


# ---- Credit: from the reward of an episode to rewards, or returns, of its turns ----


class CreditAssigner:
    """Assigns to every turn its share of the team's reward."""

    def __init__(
        self,
        run: RunContext,
        scorer: RewardScorer,
        own: AgentReturns,
        earns: bool,
        alternatives: Alternatives | None = None,
    ):
        self._alternatives, self._scorer, self._earns = alternatives, scorer, earns
        self._args, self._metrics, self._processes, self._own = run.args, run.metrics, run.processes, own
        self._own_rewards: list[list[dict[str, float]]] = []

    def take_own_rewards(self) -> list[list[dict[str, float]]]:
        """Return and clear the last rollout's own rewards of turns, by function: one list per episode, or none."""
        taken, self._own_rewards = self._own_rewards, []
        return taken

    def assign(self, rollout: Rollout, credit: str) -> list[torch.Tensor]:
        """The credit of turns `(K,)` for each episode of this process, as rewards or returns (`credit_kind`)."""
        # Credit rules see one episode; values that need all processes are computed first
        args, as_rewards = self._args, self._args.credit_kind == "rewards"
        episodes, rewards = rollout.episodes, rollout.local_rewards
        rule = CREDITS[credit]
        if rule.reruns:
            rerun_rewards = cast(Alternatives, self._alternatives).counterfactual_rewards(episodes)
            pairs = zip(rewards, rerun_rewards, episodes, strict=True)
            return [functional.counterfactual_credit(self._by_turn(r, pair), other) for r, other, pair in pairs]
        if rollout.has_own_returns and not as_rewards:
            return self._own_returns(rollout, credit)
        # As rewards, or with a rule that scores turns, earned rewards stay with the turns that earned them
        earned = [torch.zeros(len(episode.turns)) for episode in episodes]
        if as_rewards or rule.scores_turns:
            earned = [self._earned(episode) for episode in episodes]
            # Subtract earned rewards from the rewards of the team, so that they are not counted twice
            rewards = [reward - gained.sum().item() for reward, gained in zip(rewards, earned, strict=True)]
        team = [
            rule.share(reward, episode.turns, torch.tensor(episode.joint_steps()), args.credit_discount, as_rewards)
            for reward, episode in zip(rewards, episodes, strict=True)
        ]
        if rule.scores_turns:
            weight, own = args.own_reward_weight, self._own_turn_rewards(rollout, as_rewards or self._earns)
            both = zip(own, team, strict=True)
            team = [weight * scores + (1 - weight) * t if weight < 1 else scores for scores, t in both]
        return [value + gained for value, gained in zip(team, earned, strict=True)]

    def streams(self, rollout: Rollout, credit: str) -> list[dict[str, torch.Tensor]]:
        """
        For each episode of this process and each of its agents, the rewards that the agent received after every turn
        `(K,)`, whoever took it: the rewards of the team, divided by a credit rule, plus those of this agent alone.
        """
        rule, args, streams = CREDITS[credit], self._args, []
        scores = self._own_turn_rewards(rollout, is_sum=True) if rule.scores_turns else None
        for index, (episode, reward) in enumerate(zip(rollout.episodes, rollout.local_rewards, strict=True)):
            steps, earned = torch.tensor(episode.joint_steps()), self._own.weight * sum(episode.earned)
            # The rule divides the rewards of all agents, but not the rewards of agents by name
            team_rewards = rule.share(reward - earned, episode.turns, steps, args.credit_discount, True)
            if scores is not None:
                team_rewards = team_rewards * (1 - args.own_reward_weight)
            team_rewards = team_rewards + self._own.shared_rewards(episode)
            agent_rewards = {}
            for agent in dict.fromkeys(turn.agent for turn in episode.turns):
                agent_rewards[agent] = team_rewards + self._own.named_rewards(episode, agent)
                if scores is not None:
                    is_own_turn = torch.tensor([float(turn.agent == agent) for turn in episode.turns])
                    agent_rewards[agent] = agent_rewards[agent] + args.own_reward_weight * scores[index] * is_own_turn
            streams.append(agent_rewards)
        return streams

    def _own_returns(self, rollout: Rollout, credit: str) -> list[torch.Tensor]:
        """For each episode here, the return of every turn `(K,)`: what its agent received, divided by a rule."""
        rule, args, weight = CREDITS[credit], self._args, self._args.own_reward_weight
        scores = self._own_turn_rewards(rollout, self._earns) if rule.scores_turns else None
        found = []
        for index, (episode, reward) in enumerate(zip(rollout.episodes, rollout.local_rewards, strict=True)):
            returns, steps = torch.zeros(len(episode.turns)), torch.tensor(episode.joint_steps())
            earned = self._own.weight * sum(episode.earned)
            for agent in dict.fromkeys(turn.agent for turn in episode.turns):
                # Only the agent's own turns: otherwise the discount would depend on the turns of other agents
                indices = [turn.index for turn in episode.turns if turn.agent == agent]
                turns = [episode.turns[k] for k in indices]
                received = self._own.get_agent_reward(earned, episode, agent)
                total = reward - earned if rule.scores_turns else reward - earned + received
                agent_returns = rule.share(total, turns, steps[indices], args.credit_discount, False)
                if scores is not None:
                    agent_returns = (1 - weight) * agent_returns if weight < 1 else torch.zeros(len(indices))
                    agent_returns = agent_returns + weight * scores[index][indices] + received
                returns[indices] = agent_returns
            found.append(returns)
        return found

    def _by_turn(self, reward: float, episode: Episode) -> float | torch.Tensor:
        """Return the reward of an episode for the agent of each turn `(K,)`, or a number if it is the same for all."""
        if not episode.own:
            return reward
        return torch.tensor([self._own.get_agent_reward(reward, episode, turn.agent) for turn in episode.turns])

    def _earned(self, episode: Episode) -> torch.Tensor:
        """Reward that each turn earned in the workflow `(K,)`, times the weight of [`environment_reward`]."""
        if not any(episode.earned):
            return torch.zeros(len(episode.turns))
        # Earned rewards do not go through the reward functions, so their weight is applied here
        return self._own.weight * torch.tensor(episode.earned, dtype=torch.float32)

    def _own_turn_rewards(self, rollout: Rollout, is_sum: bool) -> list[torch.Tensor]:
        """Compute the own rewards of turns `(K,)`. Unscored turns are NaN, or 0 with `is_sum` (to be added up)."""
        episodes = rollout.episodes
        pairs = [(episode, turn) for episode in episodes for turn in episode.turns]
        scores, by_function = self._scorer.score_turns([episode for episode, _ in pairs], [turn for _, turn in pairs])
        counts = [len(episode.turns) for episode in episodes]
        sums, rewards_by_function = list(scores.split(counts)), iter(by_function)
        self._own_rewards = [[next(rewards_by_function) for _ in range(count)] for count in counts]
        # Average over all turns, since processes have different numbers of turns
        scored = [
            OwnReward(turn.agent, (rollout.first + episode.index, turn.agent), value, function_rewards)
            for (episode, turn), value, function_rewards in zip(pairs, scores.tolist(), by_function, strict=True)
        ]
        for name, value in own_reward_metrics(self._processes.gather(scored), not rollout.has_own_returns).items():
            self._metrics.add(name, value)
        # In a sum, NaN (unscored) counts as 0, so that it does not erase the other rewards
        return [own_rewards.nan_to_num(nan=0.0) for own_rewards in sums] if is_sum else sums


class OwnReward(NamedTuple):
    """Reward of a turn from its agent's own reward functions, in the form that processes gather."""

    agent: str
    played: tuple[int, str]  # index of the episode among all processes, and the agent
    value: float  # sum over the functions; NaN where none applied
    by_function: Mapping[str, float]


def own_reward_metrics(scored: Sequence[OwnReward], returns: bool) -> dict[str, float]:
    """Compute metrics of own reward functions. `returns` adds `agents/<name>/return`, the mean sum per episode."""
    valid = [reward for reward in scored if reward.value == reward.value]
    if not valid:
        return {}
    metrics = {"own_reward": sum(reward.value for reward in valid) / len(valid)}
    for agent in dict.fromkeys(reward.agent for reward in valid):
        agent_rewards = [reward for reward in valid if reward.agent == agent]
        for function in dict.fromkeys(name for reward in agent_rewards for name in reward.by_function):
            values = torch.tensor([reward.by_function[function] for reward in agent_rewards])
            metrics[f"agents/{agent}/rewards/{function}/mean"] = torch.nanmean(values).item()
            metrics[f"agents/{agent}/rewards/{function}/std"] = functional.nan_std(values).item()
        if returns:
            num_episodes = len({reward.played for reward in agent_rewards})
            metrics[f"agents/{agent}/return"] = sum(reward.value for reward in agent_rewards) / num_episodes
    return metrics


class Estimated(NamedTuple):
    rows: list[list[Row]]  # of each episode, with advantages
    std: torch.Tensor | None  # (E,), in the group of each episode, for metrics; `None` with a critic
    credited: set[str]  # agents of this process with an advantage, or with a critic a return, other than 0
    # For each episode, the own rewards of its turns by function; empty if there are none
    own_rewards: list[list[dict[str, float]]]


def credit_rule(args: MARFTConfig, training: bool) -> str:
    """Name of the credit rule. In evaluation, rules that need re-runs or training columns are replaced."""
    rule = CREDITS[args.credit]
    return rule.name if training or rule.in_evaluation is None else rule.in_evaluation


class BaselineEstimator:
    """Advantages by comparing returns."""

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
        """For each episode, the turns, or candidates for turns, that need a row."""
        if self.baseline(training).uses_candidates:
            return [[turn for node in value for turn in node.turns] for value in _by_episode(rollout)]
        if self.gives_one_advantage_to_all(training) and not rollout.has_own_returns:
            is_trained = self._policies.is_trained
            return [[turn for turn in episode.turns if is_trained(turn.agent)] for episode in rollout.episodes]
        return [list(episode.turns) for episode in rollout.episodes]

    def baseline(self, training: bool) -> Baseline:
        """The baseline; in evaluation, where candidates are not sampled, one that needs nothing but the episodes."""
        baseline = BASELINES[self._args.advantage]
        return baseline if training or baseline.in_evaluation is None else BASELINES[baseline.in_evaluation]

    def gives_one_advantage_to_all(self, training: bool) -> bool:
        """`True` if all turns of an episode have one return, which is compared with other episodes, as in TRL."""
        by_episode = self.baseline(training).by_episode is not None
        return by_episode and credit_rule(self._args, training) == "equal" and self._args.credit_kind == "returns"

    def estimate(self, rollout: Rollout, rows: Sequence[Sequence[Row]], training: bool) -> Estimated:
        """Take the rows of each episode: one per turn, or, with candidates, one per candidate of each node in turn."""
        group_size, scale = self._settings.group_size(training), self._settings.scale_rewards
        rewards = rollout.rewards
        if self._settings.multi_objective_aggregation == "normalize_then_sum":
            if rollout.has_own_returns:
                raise ValueError(
                    "`multi_objective_aggregation='normalize_then_sum'` normalizes the rewards of whole episodes, but "
                    "the agents are rewarded by name, and each learns from its own return. Use 'sum_then_normalize', "
                    "or `returns='team'`."
                )
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
            pairs = zip(rows, by_episode[rollout.first : rollout.first + len(rows)].tolist(), strict=True)
            filled = [[replace(row, advantage=advantage) for row in its_rows] for its_rows, advantage in pairs]
        else:
            filled = self._compare(replace(rollout, rewards=rewards), rows, group_size, scale, training)
        # For the warning that no reward reaches an agent; a baseline may make all of them 0
        credited = {row.agent for its_rows in filled for row in its_rows if torch.as_tensor(row.advantage).any()}
        return Estimated(filled, std, credited, self._credit.take_own_rewards())

    def _compare(
        self, rollout: Rollout, rows: Sequence[Sequence[Row]], group_size: int, scale: str, training: bool
    ) -> list[list[Row]]:
        """Compare the returns of the turns of all processes."""
        nodes, baseline = _by_episode(rollout), self.baseline(training)
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
        if rollout.has_own_returns and not as_returns:
            # Streams of an agent go on while others act, so its turns are discounted by joint steps
            pairs = zip(rollout.episodes, self._credit.streams(rollout, credit), strict=True)
            return [own_returns_to_go(episode, streams, gamma) for episode, streams in pairs]
        credits = self._credit.assign(rollout, credit)
        if as_returns:
            return credits
        steps = [torch.tensor(episode.joint_steps()) for episode in rollout.episodes]
        return [functional.returns_to_go(*pair, gamma) for pair in zip(credits, steps, strict=True)]

    def _samples(
        self,
        rollout: Rollout,
        rows: Sequence[Sequence[Row]],
        returns: Sequence[torch.Tensor],
        nodes: Sequence[Sequence[Node]],
    ) -> Iterator[tuple[int, int, int, float, str]]:
        """Episode, agent, node and return of each row, and the key of its running baseline."""
        for index, (its_rows, its_returns) in enumerate(zip(rows, returns, strict=True)):
            places = [number for number, node in enumerate(nodes[index]) for _ in node.turns]
            places = places if rollout.nodes else list(range(len(its_rows)))
            for row, worth, place in zip(its_rows, its_returns.tolist(), places, strict=True):
                key = ""
                if self._running is not None:
                    key = self._running.key(row.agent, rollout.episodes[index].row, rollout.has_own_returns)
                yield rollout.first + index, self._names.index(row.agent), place, worth, key


def own_returns_to_go(episode: Episode, streams: Mapping[str, torch.Tensor], gamma: float) -> torch.Tensor:
    """Return of each turn `(K,)`: the discounted sum, from its joint step on, of what `streams` has for its agent."""
    steps = torch.tensor(episode.joint_steps())
    agent_returns = {agent: functional.returns_to_go(stream, steps, gamma) for agent, stream in streams.items()}
    return torch.stack([agent_returns[turn.agent][turn.index] for turn in episode.turns])


class CriticEstimator:
    """Advantages and value targets by GAE. Rows have their `old_values`, one row for each turn."""

    def __init__(self, team: TeamSetup, run: RunContext, credit: CreditAssigner, scale: ValueScale):
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
            returns = [own_returns_to_go(*pair, 1.0) for pair in zip(rollout.episodes, streams, strict=True)]
            return self._normalized_all(rollout, filled, returns, training)
        credits = self._credit.assign(rollout, rule)
        filled, returns = [], []
        for episode, its_rows, credit in zip(rollout.episodes, rows, credits, strict=True):
            steps = torch.tensor(episode.joint_steps())
            if is_stream:
                filled.append(self._gae(its_rows, credit, steps, its_rows[-1].last_value if its_rows else 0.0))
                returns.append(functional.returns_to_go(credit.nan_to_num(nan=0.0), steps, 1.0))
            else:  # returns do not accumulate: each turn is an episode with one turn
                zero = steps[:1] * 0
                filled.append([self._gae([row], credit[k : k + 1], zero, 0.0)[0] for k, row in enumerate(its_rows)])
                returns.append(credit)
        return self._normalized_all(rollout, filled, returns, training)

    def _normalized_all(
        self, rollout: Rollout, filled: Sequence[Sequence[Row]], returns: Sequence[torch.Tensor], training: bool
    ) -> Estimated:
        """Rows with normalized advantages, given also the returns of the turns of each episode `(K,)`."""
        credited = set()  # advantages do not tell: errors of a critic make them non-zero
        for episode, value in zip(rollout.episodes, returns, strict=True):
            pairs = zip(episode.turns, value.nan_to_num(nan=0.0).tolist(), strict=True)
            credited |= {turn.agent for turn, worth in pairs if worth}
        # Logged before they are standardized: afterwards their mean is 0 by construction
        everything = [row for its_rows in filled for row in its_rows]
        self._log(everything)
        totals = self._moments(everything)
        if training:
            self._scale.update(everything)
        rows = [[self._normalized(row, totals) for row in its_rows] for its_rows in filled]
        return Estimated(rows, None, credited, self._credit.take_own_rewards())

    def _own_gae(self, episode: Episode, rows: Sequence[Row], streams: Mapping[str, torch.Tensor]) -> list[Row]:
        """Rows of an episode, where every agent goes from each of its turns to its next one."""
        steps, filled = torch.tensor(episode.joint_steps()), dict[int, Row]()
        for agent, received in streams.items():
            own = torch.tensor([turn.index for turn in episode.turns if turn.agent == agent])
            own_rewards = functional.own_steps(received, steps, own, self._args.gamma)
            discounts = replace(self._discounts, gamma=own_rewards.discounts)
            agent_rows = [rows[index] for index in own.tolist()]
            done = self._gae(agent_rows, own_rewards.rewards, own_rewards.steps, agent_rows[-1].last_value, discounts)
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
        filled = zip(rows, advantages, targets, strict=True)
        return [replace(row, advantage=advantage, value_targets=target) for row, advantage, target in filled]

    def _moments(self, rows: Sequence[Row]) -> torch.Tensor:
        """Moments `(N, 3)` of the advantages that the policy loss counts, of all agents or of each."""
        by_agent = self._args.normalize_advantages == "agent"
        names: list[Any] = list(self._names) if by_agent else [None]
        totals = torch.zeros(len(names), 3, dtype=torch.float64)
        for index, name in enumerate(names):
            # Rows that the loss leaves out must not move the mean of the others
            trained = [row for row in rows if name in (None, row.agent) and row.is_trained and row.num_loss_tokens]
            if trained:
                values = torch.cat([torch.as_tensor(self._get_advantage(row)).reshape(-1) for row in trained])
                totals[index] = functional.moments(values[~values.isnan()])
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
        scored = [row for row in rows if row.num_value_targets]
        totals = torch.zeros(3, 3, dtype=torch.float64)
        if scored:
            targets = torch.cat([row.value_targets for row in scored if row.value_targets is not None])
            values = torch.cat([row.old_values for row in scored if row.old_values is not None])
            totals = torch.stack([functional.moments(kind) for kind in (targets, targets - values, values)])
        totals = self._processes.sum(totals)
        if totals[0, 0] == 0:
            return
        self._metrics.add("critic/explained_variance", functional.explained_variance(totals[0], totals[1]))
        self._metrics.add("critic/target_mean", (totals[0, 1] / totals[0, 0]).item())
        self._metrics.add("critic/value_mean", (totals[2, 1] / totals[2, 0]).item())


Estimator = BaselineEstimator | CriticEstimator


def _by_episode(rollout: Rollout) -> list[list[Node]]:
    nodes: list[list[Node]] = [[] for _ in rollout.episodes]
    for node in rollout.nodes:
        nodes[node.episode].append(node)
    return nodes
