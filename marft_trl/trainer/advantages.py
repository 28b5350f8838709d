# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer's part that turns rewards into advantages: credit, then a baseline or a critic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from ..configs import MARFTConfig
from ..episodes import Episode
from ..rewards import environment_reward
from ..transcripts import Advantage
from . import functional
from .batching import Row
from .rollouts import Rollout, TeamRollouts


class TeamAdvantages(TeamRollouts, GRPOTrainer):
    """Credit assignment and advantages. The arithmetic is in `functional`."""

    args: MARFTConfig
    _credited: set[str]

    # ---- Credit ----

    def _credit(self, rollout: Rollout) -> list[torch.Tensor]:
        """For each episode of this process what its turns get `(K,)`: rewards or returns, as `credit_kind` says."""
        args, as_rewards = self.args, self.args.credit_kind == "rewards"
        _, credit = self._rules
        episodes = rollout.episodes
        first = self.accelerator.process_index * len(episodes)
        rewards = rollout.rewards[first : first + len(episodes)].tolist()
        if credit == "counterfactual":
            others = self._counterfactual_rewards(episodes)
            return [functional.counterfactual_credit(r, other) for r, other in zip(rewards, others, strict=True)]
        # As a stream, and for turns scored by themselves, what an environment gave stays where it was earned.
        earned = [torch.zeros(len(episode.turns)) for episode in episodes]
        if as_rewards or credit == "per_step":
            earned = [self._earned(episode) for episode in episodes]
            rewards = [reward - its.sum().item() for reward, its in zip(rewards, earned, strict=True)]
        if credit == "step_discount":
            discounts = [args.credit_discount] * len(episodes)
            counts = [len(episode.turns) for episode in episodes]
            team = list(map(functional.step_discount_credit, rewards, counts, discounts))
        else:
            steps = [torch.tensor(episode.joint_steps()) for episode in episodes]
            team = [functional.equal_credit(r, its, as_rewards) for r, its in zip(rewards, steps, strict=True)]
        if credit == "per_step":
            weight = args.own_reward_weight
            own = self._own_rewards(episodes, as_rewards or self.workflow.earns)
            team = [weight * o + (1 - weight) * t if weight < 1 else o for o, t in zip(own, team, strict=True)]
        return [its + gained for its, gained in zip(team, earned, strict=True)]

    def _earned(self, episode: Episode) -> torch.Tensor:
        """What the environment gave for each turn `(K,)`, times the weight of [`environment_reward`]."""
        if not episode.earned:
            return torch.zeros(len(episode.turns))
        weight = self.reward_weights[self.reward_func_names.index(environment_reward.__name__)].item()
        return weight * torch.tensor([episode.earned[turn.index] for turn in episode.turns], dtype=torch.float32)

    def _own_rewards(self, episodes: Sequence[Episode], is_sum: bool) -> list[torch.Tensor]:
        pairs = [(episode, turn) for episode in episodes for turn in episode.turns]
        scores = self._turn_rewards.of_turns([episode for episode, _ in pairs], [turn for _, turn in pairs])
        for episode, its in zip(episodes, scores.split([len(one.turns) for one in episodes]), strict=True):
            episode.own_rewards = its.tolist()
        own_mean = self._mean_over_processes(scores)
        if own_mean is not None:
            self._metrics[self._mode]["own_reward"].append(own_mean)
        if is_sum:  # a turn that nothing scored adds nothing, and hides nothing of what it is added to
            scores = scores.nan_to_num(nan=0.0)
        return list(scores.split([len(episode.turns) for episode in episodes]))

    def _mean_over_processes(self, values: torch.Tensor) -> float | None:
        known = [value for value in gather_object(values.tolist()) if value == value]
        return sum(known) / len(known) if known else None

    # ---- Baselines ----

    def _baseline_advantages(self, rollout: Rollout, rows: Sequence[Sequence[Row]]) -> torch.Tensor:
        """
        Set the advantages of all rows by comparing returns.

        Args:
            rollout ([`Rollout`]): what happened.
            rows (`Sequence[Sequence[Row]]`): for each episode its rows: one per turn, or, with candidates, one per
                candidate of every node in turn.

        Returns: the standard deviation in the group of each episode `(E,)`, for the metrics.
        """
        group_size, scale, rewards = self._episodes_per_prompt, self.scale_rewards, rollout.rewards
        if self.multi_objective_aggregation == "normalize_then_sum":
            weights = self.reward_weights.to(rewards.device)
            rewards = functional.normalized_objectives(rollout.rewards_per_func, weights, group_size)
            group_size, scale = len(rewards), "group"  # then over the whole batch, as in TRL
        by_episode, std = functional.group_advantages(rewards, group_size, scale)
        first = self.accelerator.process_index * len(rollout.episodes)
        if self._is_one_advantage_for_all:
            for index, its_rows in enumerate(rows):  # TRL's own arithmetic, to the bit
                for row in its_rows:
                    row.advantage = by_episode[first + index].item()
            return std
        if self._rules[0] == "turn":
            returns = [torch.tensor([worth for node in its for worth in node.returns]) for its in _by_episode(rollout)]
        else:
            local = Rollout(rollout.episodes, rollout.rewards_per_func, rewards)
            returns = [self._returns_of(e, c) for e, c in zip(local.episodes, self._credit(local), strict=True)]
        samples = list(self._samples(rollout, rows, returns, first))
        everywhere = gather_object([sample for _, sample in samples])
        start = sum(gather_object([len(samples)])[: self.accelerator.process_index])
        advantages = self._compare(everywhere, group_size, scale)
        for (row, _), advantage in zip(samples, advantages[start : start + len(samples)].tolist(), strict=True):
            row.advantage = advantage
        return std

    @property
    def _is_one_advantage_for_all(self) -> bool:
        """Whether all turns of an episode have one return, and it is compared with those of its group: as in TRL."""
        return self._rules == ("group", "equal") and self.args.credit_kind == "returns"

    @property
    def _rules(self) -> tuple[str, str]:
        """The baseline and the credit; in evaluation those that need nothing but the episodes themselves."""
        advantage, credit = self.args.advantage, self.args.credit
        if self.model.training:
            return advantage, credit
        needs_more = credit in ("counterfactual", "per_step")  # re-runs, and columns that only training may have
        return "group" if advantage == "turn" else advantage, "equal" if needs_more else credit

    def _returns_of(self, episode: Episode, credit: torch.Tensor) -> torch.Tensor:
        if self.args.credit_kind == "returns":
            return credit
        return functional.returns_to_go(credit, torch.tensor(episode.joint_steps()), self.args.gamma)

    def _samples(self, rollout, rows, returns, first) -> Iterator[tuple[Row, tuple[Any, ...]]]:
        """Rows with what they are compared by: episode, agent, node and return."""
        names = list(self._specs)
        for index, (its_rows, its_returns) in enumerate(zip(rows, returns, strict=True)):
            nodes = (
                [number for number, node in enumerate(_by_episode(rollout)[index]) for _ in node.turns]
                if rollout.nodes
                else list(range(len(its_rows)))
            )
            for row, worth, node in zip(its_rows, its_returns.tolist(), nodes, strict=True):
                yield row, (first + index, names.index(row.agent), node, worth)

    def _compare(self, samples: Sequence[tuple[int, int, int, float]], group_size: int, scale: str) -> torch.Tensor:
        """Advantages `(N,)` of the turns of all processes."""
        if not samples:
            return torch.zeros(0)
        episodes, agents, nodes = (torch.tensor([sample[i] for sample in samples]) for i in range(3))
        returns = torch.tensor([sample[3] for sample in samples], dtype=torch.float32)
        alone = torch.ones_like(returns)
        scored = torch.bincount(episodes[~returns.isnan()], minlength=int(episodes.max()) + 1)
        per_episode = 1 / scored.clamp(min=1)[episodes].float()  # every episode counts once
        prompts, everything = episodes // group_size, torch.zeros_like(episodes)
        kind, _ = self._rules
        if kind == "none":
            return torch.nan_to_num(returns, nan=0.0)
        if kind == "leave_one_out":
            return functional.leave_one_out_advantages(returns, episodes, prompts, per_episode)
        if kind == "batch":
            return functional.cell_advantages(returns, everything, per_episode, everything)
        if kind == "group":
            cells, weights, pools = prompts, per_episode, everything
        elif kind == "agent":
            cells, weights, pools = prompts * len(self._specs) + agents, alone, agents
        else:
            cells, weights, pools = episodes * (int(nodes.max()) + 1) + nodes, alone, everything
        pools = {"group": cells, "batch": pools, "none": None}[scale]
        return functional.cell_advantages(returns, cells, weights, pools)

    # ---- Critic ----

    def _critic_advantages(
        self, rollout: Rollout, rows: Sequence[Sequence[Row]], last_values: Sequence[float]
    ) -> None:
        """Set advantages and value targets of all rows by GAE. They have their `old_values`, one row for each turn."""
        credits = self._credit(rollout)
        self._credited = self._agents_with_credit(rollout.episodes, credits)
        for episode, its_rows, credit, last_value in zip(rollout.episodes, rows, credits, last_values, strict=True):
            steps = torch.tensor(episode.joint_steps())
            if self.args.credit_kind == "returns":  # every turn is the last of an episode of its own
                for k, row in enumerate(its_rows):
                    self._estimate([row], credit[k : k + 1], steps[:1] * 0, 0.0)
            else:
                self._estimate(its_rows, credit, steps, last_value)
        self._log_values([row for its_rows in rows for row in its_rows])
        self._normalize([row for its_rows in rows for row in its_rows])

    def _agents_with_credit(self, episodes: Sequence[Episode], credits: Sequence[torch.Tensor]) -> set[str]:
        """Agents any of whose turns has a return that is not 0: a critic's noise makes advantages of nothing."""
        found = set()
        for episode, credit in zip(episodes, credits, strict=True):
            known = credit.nan_to_num(nan=0.0)
            if self.args.credit_kind == "rewards":
                known = functional.returns_to_go(known, torch.tensor(episode.joint_steps()), 1.0)
            found |= {turn.agent for turn, worth in zip(episode.turns, known.tolist(), strict=True) if worth}
        return found

    def _estimate(self, rows: Sequence[Row], rewards: torch.Tensor, steps: torch.Tensor, last_value: float) -> None:
        args = self.args
        if args.level == "action":
            values = torch.cat([row.old_values for row in rows])
            advantages, targets = functional.gae(rewards, values, steps, args.gamma, args.gae_lambda, last_value)
            for row, advantage, target in zip(rows, advantages, targets, strict=True):
                row.advantage, row.value_targets = advantage.item(), target.unsqueeze(0)
            return
        lengths = torch.tensor([len(row.old_values) for row in rows])
        values = torch.nn.utils.rnn.pad_sequence([row.old_values for row in rows], batch_first=True)
        factors = args.gamma, args.gae_lambda, args.token_gamma, args.token_gae_lambda
        advantages, targets = functional.token_gae(rewards, values, lengths, steps, *factors, last_value)
        for row, advantage, target, length in zip(rows, advantages, targets, lengths.tolist(), strict=True):
            row.advantage = advantage[: len(row.completion_ids)].clone()
            row.value_targets = target[:length].clone()

    def _normalize(self, rows: Sequence[Row]) -> None:
        """Standardize advantages over all positions that the policy loss counts; 0 where nothing scored a turn."""
        how = self.args.normalize_advantages
        names: list[Any] = list(self._specs) if how == "agent" else [None]
        totals = torch.zeros(len(names), 3, dtype=torch.float64)
        for index, name in enumerate(names):
            mine = [row for row in rows if name in (None, row.agent) and row.is_trained and row.num_loss_tokens]
            known = [a[~a.isnan()] for a in (torch.as_tensor(row.advantage).reshape(-1) for row in mine)]
            if known:
                totals[index] = functional.moments(torch.cat(known))
        totals = self._reduce(totals, "sum")
        for row in rows:
            advantage = torch.as_tensor(row.advantage, dtype=torch.float32)
            total = totals[names.index(row.agent) if how == "agent" else 0]
            if how != "none" and total[0] > 0:
                advantage = functional.standardized(advantage, total)
            advantage = advantage.nan_to_num(nan=0.0)
            row.advantage = advantage if self.args.level == "token" else advantage.item()

    def _log_values(self, rows: Sequence[Row]) -> None:
        known = [row for row in rows if row.num_value_targets]
        totals = torch.zeros(3, 3, dtype=torch.float64)
        if known:
            targets = torch.cat([row.value_targets for row in known])
            values = torch.cat([row.old_values for row in known])
            totals = torch.stack([functional.moments(one) for one in (targets, targets - values, values)])
        totals = self._reduce(totals, "sum")
        if totals[0, 0] == 0:
            return
        metrics = self._metrics[self._mode]
        metrics["critic/explained_variance"].append(functional.explained_variance(totals[0], totals[1]))
        metrics["critic/target_mean"].append((totals[0, 1] / totals[0, 0]).item())
        metrics["critic/value_mean"].append((totals[2, 1] / totals[2, 0]).item())

    def _advantages_by_turn(self, rollout: Rollout, rows: Sequence[Sequence[Row]]) -> list[list[Advantage]]:
        """For each episode the advantages of its turns, for people; `None` without a row."""
        by_turn: list[list[Advantage]] = []
        for episode, its_rows in zip(rollout.episodes, rows, strict=True):
            of_ids = {
                (row.agent, tuple(row.prompt_ids.tolist()), tuple(row.completion_ids.tolist())): row
                for row in its_rows
            }
            found = [
                of_ids.get((turn.agent, tuple(turn.prompt_ids), tuple(turn.completion_ids))) for turn in episode.turns
            ]
            by_turn.append([None if row is None else _plain(row.advantage) for row in found])
        return by_turn

    def _reduce(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
        raise NotImplementedError  # the trainer's part that reports has it


def _plain(advantage: float | torch.Tensor) -> float | list[float]:
    if isinstance(advantage, torch.Tensor):
        return advantage.tolist()
    return advantage


def _by_episode(rollout: Rollout) -> list[list]:
    nodes: list[list] = [[] for _ in rollout.episodes]
    for node in rollout.nodes:
        nodes[node.episode].append(node)
    return nodes
