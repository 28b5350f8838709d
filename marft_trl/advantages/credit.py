# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Credit: the reward of an episode becomes rewards, or returns, of its turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import functional
from ..configs import MARFTConfig
from ..episodes.records import Episode
from ..processes import Processes
from ..rewards import environment_reward
from ..rollout.alternatives import Alternatives
from ..rollout.reward_scorer import RewardScorer
from ..rollout.rollouts import Rollout
from ..run_metrics import Metrics
from ..seams.trl import TrlRewards
from .credit_rules import CREDITS


class CreditAssigner:
    """
    Gives every turn its part of the team's reward.

    Args:
        alternatives ([`Alternatives`]): re-runs of counterfactual credit.
        scorer ([`RewardScorer`]): rewards of single turns.
        rewards ([`TrlRewards`]): names and weights of the reward functions.
        earns (`bool`): whether turns earn rewards in the workflow.
        args ([`MARFTConfig`]): the credit and its settings.
        metrics ([`Metrics`]): get the mean of the turns' own rewards.
        processes ([`Processes`]): the processes of the run.
    """

    def __init__(
        self,
        alternatives: Alternatives,
        scorer: RewardScorer,
        rewards: TrlRewards,
        earns: bool,
        args: MARFTConfig,
        metrics: Metrics,
        processes: Processes,
    ):
        self._alternatives, self._scorer, self._rewards, self._earns = alternatives, scorer, rewards, earns
        self._args, self._metrics, self._processes = args, metrics, processes
        self._own_rewards: list[list[float]] = []

    def take_own_rewards(self) -> list[list[float]]:
        """Take, for each episode of the last rollout, the own rewards of its turns; empty where there are none."""
        taken, self._own_rewards = self._own_rewards, []
        return taken

    def assign(self, rollout: Rollout, credit: str) -> list[torch.Tensor]:
        """
        For each episode of this process the credit of its turns `(K,)`: rewards or returns, as `credit_kind` says.

        Args:
            rollout ([`Rollout`]): episodes with rewards.
            credit (`str`): name of a rule in `CREDITS`.
        """
        args, as_rewards = self._args, self._args.credit_kind == "rewards"
        episodes, rewards = rollout.episodes, rollout.own_rewards
        rule = CREDITS[credit]
        if rule.reruns:
            others = self._alternatives.counterfactual_rewards(episodes)
            return [functional.counterfactual_credit(r, other) for r, other in zip(rewards, others, strict=True)]
        # As rewards, or with a rule that scores turns, earned rewards stay with the turns that earned them
        earned = [torch.zeros(len(episode.turns)) for episode in episodes]
        if as_rewards or rule.scores_turns:
            earned = [self._earned(episode) for episode in episodes]
            rewards = [reward - its.sum().item() for reward, its in zip(rewards, earned, strict=True)]
        team = [
            rule.share(reward, one.turns, torch.tensor(one.joint_steps()), args.credit_discount, as_rewards)
            for reward, one in zip(rewards, episodes, strict=True)
        ]
        if rule.scores_turns:
            weight = args.own_reward_weight
            own = self._of_turns(episodes, as_rewards or self._earns)
            team = [weight * o + (1 - weight) * t if weight < 1 else o for o, t in zip(own, team, strict=True)]
        return [its + gained for its, gained in zip(team, earned, strict=True)]

    def _earned(self, episode: Episode) -> torch.Tensor:
        """Reward that each turn earned in the workflow `(K,)`, times the weight of [`environment_reward`]."""
        if not any(episode.earned):
            return torch.zeros(len(episode.turns))
        weight = self._rewards.weights[self._rewards.names.index(environment_reward.__name__)].item()
        return weight * torch.tensor(episode.earned, dtype=torch.float32)

    def _of_turns(self, episodes: Sequence[Episode], is_sum: bool) -> list[torch.Tensor]:
        """Own rewards of turns `(K,)`. `is_sum`: they are added to other rewards."""
        pairs = [(episode, turn) for episode in episodes for turn in episode.turns]
        scores = self._scorer.of_turns([episode for episode, _ in pairs], [turn for _, turn in pairs])
        counts = [len(episode.turns) for episode in episodes]
        self._own_rewards = [its.tolist() for its in scores.split(counts)]
        known = [value for value in self._processes.gather(scores.tolist()) if value == value]
        if known:
            self._metrics.add("own_reward", sum(known) / len(known))
        if is_sum:  # NaN (unscored) counts as 0, so that it does not erase the other rewards
            scores = scores.nan_to_num(nan=0.0)
        return list(scores.split(counts))
