# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Credit assignment: divide the reward of an episode into rewards, or returns, of its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch

from ..algorithms import functional
from ..algorithms.baselines import CREDITS
from ..config.team_setup import RunContext
from ..episodes.records import Episode
from ..rewards import environment_reward
from ..rollout.alternatives import Alternatives
from ..rollout.reward_scorer import AgentReturns, RewardScorer
from ..rollout.rollouts import Rollout
from ..seams.trl import TrlRewards


class CreditAssigner:
    """
    Assigns to every turn its share of the team's reward.

    Args:
        earns: whether turns earn rewards in the workflow (`Workflow.earns`).
        alternatives: runs the re-runs for counterfactual credit.
    """

    def __init__(
        self,
        run: RunContext,
        scorer: RewardScorer,
        rewards: TrlRewards,
        own: AgentReturns,
        earns: bool,
        alternatives: Alternatives | None = None,
    ):
        self._alternatives, self._scorer, self._rewards, self._earns = alternatives, scorer, rewards, earns
        self._args, self._metrics, self._processes, self._own = run.args, run.metrics, run.processes, own
        self._own_rewards: list[list[dict[str, float]]] = []

    def take_own_rewards(self) -> list[list[dict[str, float]]]:
        """
        Return and clear the own rewards of the last rollout: for each episode, the own rewards of its turns by
        function name. Empty if there are none.
        """
        taken, self._own_rewards = self._own_rewards, []
        return taken

    def assign(self, rollout: Rollout, credit: str) -> list[torch.Tensor]:
        """
        Compute the credit of turns `(K,)` for each episode of this process: rewards or returns, depending on
        `credit_kind`.
        """
        # Credit rules see one episode; values that need all processes are computed first
        args, as_rewards = self._args, self._args.credit_kind == "rewards"
        episodes, rewards = rollout.episodes, rollout.local_rewards
        rule = CREDITS[credit]
        if rule.reruns:
            rerun_rewards = cast(Alternatives, self._alternatives).counterfactual_rewards(episodes)
            pairs = zip(rewards, rerun_rewards, episodes, strict=True)
            return [functional.counterfactual_credit(self._by_turn(r, pair), other) for r, other, pair in pairs]
        # As rewards, or with a rule that scores turns, earned rewards stay with the turns that earned them
        earned = [torch.zeros(len(episode.turns)) for episode in episodes]
        if as_rewards or rule.scores_turns:
            earned = [self._earned(episode) for episode in episodes]
            # Subtract earned rewards from the rewards of the team, so that they are not counted twice
            rewards = [reward - entry.sum().item() for reward, entry in zip(rewards, earned, strict=True)]
        team = [
            rule.share(reward, item.turns, torch.tensor(item.joint_steps()), args.credit_discount, as_rewards)
            for reward, item in zip(rewards, episodes, strict=True)
        ]
        if rule.scores_turns:
            weight = args.own_reward_weight
            own = self._own_turn_rewards(rollout, as_rewards or self._earns)
            team = [
                weight * own_rewards + (1 - weight) * t if weight < 1 else own_rewards
                for own_rewards, t in zip(own, team, strict=True)
            ]
        return [value + gained for value, gained in zip(team, earned, strict=True)]

    def streams(self, rollout: Rollout, credit: str) -> list[dict[str, torch.Tensor]]:
        """
        Return, for each episode of this process and each of its agents, the rewards that the agent received after
        every turn `(K,)`, whichever agent took the turn: the rewards of the whole team, divided by a credit rule, plus
        the rewards of this agent alone.
        """
        rule, args, streams = CREDITS[credit], self._args, []
        scores = self._own_turn_rewards(rollout, is_sum=True) if rule.scores_turns else None
        for index, (episode, reward) in enumerate(zip(rollout.episodes, rollout.local_rewards, strict=True)):
            steps, earned = torch.tensor(episode.joint_steps()), self._own.weight * sum(episode.earned)
            # The rewards of all agents, divided by the rule; then the rewards given to agents by name, which no rule
            # divides
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

    def own_returns(self, rollout: Rollout, credit: str) -> list[torch.Tensor]:
        """
        Return, for each episode of this process, the return of every turn `(K,)`: everything that the turn's agent
        received in the episode, divided by a credit rule over the turns of this agent.
        """
        rule, args = CREDITS[credit], self._args
        weight = args.own_reward_weight if rule.scores_turns else 0.0
        scores = self._own_turn_rewards(rollout, self._earns) if rule.scores_turns else None
        found = []
        for index, (episode, reward) in enumerate(zip(rollout.episodes, rollout.local_rewards, strict=True)):
            returns, steps = torch.zeros(len(episode.turns)), torch.tensor(episode.joint_steps())
            earned = self._own.weight * sum(episode.earned)
            for agent in dict.fromkeys(turn.agent for turn in episode.turns):
                # Pass only the agent's own turns to the rule: otherwise its discount would depend on the turns of
                # other agents
                indices = [turn.index for turn in episode.turns if turn.agent == agent]
                turns, received = (
                    [episode.turns[k] for k in indices],
                    self._own.get_agent_reward(earned, episode, agent),
                )
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
        weight = self._rewards.weights[self._rewards.names.index(environment_reward.__name__)].item()
        return weight * torch.tensor(episode.earned, dtype=torch.float32)

    def _own_turn_rewards(self, rollout: Rollout, is_sum: bool) -> list[torch.Tensor]:
        """
        Compute the own rewards of turns `(K,)`. `is_sum`: whether unscored turns count as 0, to be added to other
        rewards.
        """
        episodes = rollout.episodes
        pairs = [(episode, turn) for episode in episodes for turn in episode.turns]
        scores, by_function = self._scorer.score_turns([item for item, _ in pairs], [turn for _, turn in pairs])
        counts = [len(episode.turns) for episode in episodes]
        sums, rewards_by_function = list(scores.split(counts)), iter(by_function)
        self._own_rewards = [[next(rewards_by_function) for _ in range(count)] for count in counts]
        # Average over all turns, since processes have different numbers of turns
        scored = [
            OwnReward(turn.agent, (rollout.first + episode.index, turn.agent), value, function_rewards)
            for (episode, turn), value, function_rewards in zip(pairs, scores.tolist(), by_function, strict=True)
        ]
        metrics = own_reward_metrics(self._processes.gather(scored), returns=not rollout.has_own_returns)
        for name, value in metrics.items():
            self._metrics.add(name, value)
        if is_sum:  # NaN (unscored) counts as 0, so that it does not erase the other rewards
            sums = [entry.nan_to_num(nan=0.0) for entry in sums]
        return sums


class OwnReward(NamedTuple):
    """
    Reward of a turn from its agent's own reward functions, in the form that processes gather.

    Args:
        played: index of the episode among all processes, and name of the agent.
        value: sum over the functions; NaN where none applied.
    """

    agent: str
    played: tuple[int, str]
    value: float
    by_function: Mapping[str, float]


def own_reward_metrics(scored: Sequence[OwnReward], returns: bool) -> dict[str, float]:
    """
    Compute metrics of turns that were scored by the own reward functions of their agents.

    Returns: `own_reward`, the mean over all scored turns; for each agent and function
    `agents/<name>/rewards/<function>/mean` and `std`; and with `returns` also `agents/<name>/return`, the mean per
    episode of the summed own rewards of the agent's turns.
    """
    valid = [item for item in scored if item.value == item.value]
    if not valid:
        return {}
    metrics = {"own_reward": sum(reward.value for reward in valid) / len(valid)}
    for agent in dict.fromkeys(value.agent for value in valid):
        agent_rewards = [entry for entry in valid if entry.agent == agent]
        for function in dict.fromkeys(name for reward in agent_rewards for name in reward.by_function):
            values = torch.tensor([reward.by_function[function] for reward in agent_rewards])
            metrics[f"agents/{agent}/rewards/{function}/mean"] = torch.nanmean(values).item()
            metrics[f"agents/{agent}/rewards/{function}/std"] = functional.nan_std(values).item()
        if returns:
            num_episodes = len({reward.played for reward in agent_rewards})
            metrics[f"agents/{agent}/return"] = sum(reward.value for reward in agent_rewards) / num_episodes
    return metrics
