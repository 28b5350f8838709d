# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Credit: the reward of an episode becomes rewards, or returns, of its turns."""

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
from ..rollout.reward_scorer import OwnReturns, RewardScorer
from ..rollout.rollouts import Rollout
from ..seams.trl import TrlRewards


class CreditAssigner:
    """
    Gives every turn its part of the team's reward.

    Args:
        earns (`bool`): whether turns earn rewards in the workflow.
        alternatives ([`Alternatives`], *optional*): re-runs of counterfactual credit.
    """

    def __init__(
        self,
        run: RunContext,
        scorer: RewardScorer,
        rewards: TrlRewards,
        own: OwnReturns,
        earns: bool,
        alternatives: Alternatives | None = None,
    ):
        self._alternatives, self._scorer, self._rewards, self._earns = alternatives, scorer, rewards, earns
        self._args, self._metrics, self._processes, self._own = run.args, run.metrics, run.processes, own
        self._own_rewards: list[list[dict[str, float]]] = []

    def take_own_rewards(self) -> list[list[dict[str, float]]]:
        """
        Take, for each episode of the last rollout, the own rewards of its turns by the name of their function; empty
        where there are none.
        """
        taken, self._own_rewards = self._own_rewards, []
        return taken

    def assign(self, rollout: Rollout, credit: str) -> list[torch.Tensor]:
        """
        For each episode of this process the credit of its turns `(K,)`: rewards or returns, as `credit_kind` says.
        """
        # Rules speak of one episode; what all processes have in common is computed before
        args, as_rewards = self._args, self._args.credit_kind == "rewards"
        episodes, rewards = rollout.episodes, rollout.own_rewards
        rule = CREDITS[credit]
        if rule.reruns:
            others = cast(Alternatives, self._alternatives).counterfactual_rewards(episodes)
            pairs = zip(rewards, others, episodes, strict=True)
            return [functional.counterfactual_credit(self._by_turn(r, pair), other) for r, other, pair in pairs]
        # As rewards, or with a rule that scores turns, earned rewards stay with the turns that earned them
        earned = [torch.zeros(len(episode.turns)) for episode in episodes]
        if as_rewards or rule.scores_turns:
            earned = [self._earned(episode) for episode in episodes]
            # What was earned must not be counted again in what the team received
            rewards = [reward - entry.sum().item() for reward, entry in zip(rewards, earned, strict=True)]
        team = [
            rule.share(reward, item.turns, torch.tensor(item.joint_steps()), args.credit_discount, as_rewards)
            for reward, item in zip(rewards, episodes, strict=True)
        ]
        if rule.scores_turns:
            weight = args.own_reward_weight
            own = self._of_turns(rollout, as_rewards or self._earns)
            team = [weight * o + (1 - weight) * t if weight < 1 else o for o, t in zip(own, team, strict=True)]
        return [value + gained for value, gained in zip(team, earned, strict=True)]

    def streams(self, rollout: Rollout, credit: str) -> list[dict[str, torch.Tensor]]:
        """
        For each episode of this process and each of its agents, the rewards that the agent received after every turn
        `(K,)`, whoever took it: rewards of all by a rule of credit, and the agent's own.
        """
        rule, args, found = CREDITS[credit], self._args, []
        scores = self._of_turns(rollout, is_sum=True) if rule.scores_turns else None
        for index, (episode, reward) in enumerate(zip(rollout.episodes, rollout.own_rewards, strict=True)):
            steps, earned = torch.tensor(episode.joint_steps()), self._own.weight * sum(episode.earned)
            # What everybody receives, by the rule; then what was received by name, which no rule divides
            of_all = rule.share(reward - earned, episode.turns, steps, args.credit_discount, True)
            if scores is not None:
                of_all = of_all * (1 - args.own_reward_weight)
            of_all = of_all + self._own.shared(episode)
            its = {}
            for agent in dict.fromkeys(turn.agent for turn in episode.turns):
                its[agent] = of_all + self._own.received(episode, agent)
                if scores is not None:
                    mine = torch.tensor([float(turn.agent == agent) for turn in episode.turns])
                    its[agent] = its[agent] + args.own_reward_weight * scores[index] * mine
            found.append(its)
        return found

    def own_returns(self, rollout: Rollout, credit: str) -> list[torch.Tensor]:
        """
        For each episode of this process the return of every turn `(K,)`: all that its agent received in the episode,
        by a rule of credit over the agent's own turns.
        """
        rule, args = CREDITS[credit], self._args
        weight = args.own_reward_weight if rule.scores_turns else 0.0
        scores = self._of_turns(rollout, self._earns) if rule.scores_turns else None
        found = []
        for index, (episode, reward) in enumerate(zip(rollout.episodes, rollout.own_rewards, strict=True)):
            credits, steps = torch.zeros(len(episode.turns)), torch.tensor(episode.joint_steps())
            earned = self._own.weight * sum(episode.earned)
            for agent in dict.fromkeys(turn.agent for turn in episode.turns):
                # The rule sees the agent's own turns alone: a discount over turns of others would depend on them
                own = [turn.index for turn in episode.turns if turn.agent == agent]
                turns, received = [episode.turns[k] for k in own], self._own.of_agent(earned, episode, agent)
                whole = reward - earned if rule.scores_turns else reward - earned + received
                its = rule.share(whole, turns, steps[own], args.credit_discount, False)
                if scores is not None:
                    its = (1 - weight) * its if weight < 1 else torch.zeros(len(own))
                    its = its + weight * scores[index][own] + received
                credits[own] = its
            found.append(credits)
        return found

    def _by_turn(self, reward: float, episode: Episode) -> float | torch.Tensor:
        """The reward of an episode for the agent of each turn `(K,)`; a number where it is the same for all."""
        if not episode.own:
            return reward
        return torch.tensor([self._own.of_agent(reward, episode, turn.agent) for turn in episode.turns])

    def _earned(self, episode: Episode) -> torch.Tensor:
        """Reward that each turn earned in the workflow `(K,)`, times the weight of [`environment_reward`]."""
        if not any(episode.earned):
            return torch.zeros(len(episode.turns))
        # Earned rewards reach turns past the reward functions, so their weight is applied here
        weight = self._rewards.weights[self._rewards.names.index(environment_reward.__name__)].item()
        return weight * torch.tensor(episode.earned, dtype=torch.float32)

    def _of_turns(self, rollout: Rollout, is_sum: bool) -> list[torch.Tensor]:
        """Own rewards of turns `(K,)`. `is_sum`: they are added to other rewards."""
        episodes = rollout.episodes
        pairs = [(episode, turn) for episode in episodes for turn in episode.turns]
        scores, by_function = self._scorer.of_turns([item for item, _ in pairs], [turn for _, turn in pairs])
        counts = [len(episode.turns) for episode in episodes]
        sums, named = list(scores.split(counts)), iter(by_function)
        self._own_rewards = [[next(named) for _ in range(count)] for count in counts]
        # Means over all turns, not over processes with different numbers of them
        scored = [
            OwnReward(turn.agent, (rollout.first + episode.index, turn.agent), value, pair)
            for (episode, turn), value, pair in zip(pairs, scores.tolist(), by_function, strict=True)
        ]
        metrics = own_reward_metrics(self._processes.gather(scored), returns=not rollout.has_own_returns)
        for name, value in metrics.items():
            self._metrics.add(name, value)
        if is_sum:  # NaN (unscored) counts as 0, so that it does not erase the other rewards
            sums = [entry.nan_to_num(nan=0.0) for entry in sums]
        return sums


class OwnReward(NamedTuple):
    """
    Reward of a turn by the functions of its agent, as processes exchange it.

    Args:
        played (`tuple[int, str]`): its episode, among those of all processes, and the agent.
        value (`float`): sum over the functions; NaN where none applied.
    """

    agent: str
    played: tuple[int, str]
    value: float
    by_function: Mapping[str, float]


def own_reward_metrics(scored: Sequence[OwnReward], returns: bool) -> dict[str, float]:
    """
    Metrics of turns that were scored by functions of their agents.

    Returns: `own_reward`, the mean over all of them; for each agent and function
    `agents/<name>/rewards/<function>/mean` and `std`; and with `returns` `agents/<name>/return`, the mean over its
    episodes of what the agent's turns received from them.
    """
    known = [item for item in scored if item.value == item.value]
    if not known:
        return {}
    metrics = {"own_reward": sum(one.value for one in known) / len(known)}
    for agent in dict.fromkeys(value.agent for value in known):
        mine = [entry for entry in known if entry.agent == agent]
        for function in dict.fromkeys(name for one in mine for name in one.by_function):
            values = torch.tensor([one.by_function[function] for one in mine])
            metrics[f"agents/{agent}/rewards/{function}/mean"] = torch.nanmean(values).item()
            metrics[f"agents/{agent}/rewards/{function}/std"] = functional.nan_std(values).item()
        if returns:
            played = len({one.played for one in mine})
            metrics[f"agents/{agent}/return"] = sum(one.value for one in mine) / played
    return metrics
