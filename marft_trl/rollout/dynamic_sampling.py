# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Dynamic sampling: groups that teach nothing are replaced by groups of further prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset

from ..algorithms import functional
from ..config.checks import uses_candidates
from ..config.team_setup import RunContext
from ..episodes.records import Episode
from .alternatives import Node
from .reward_scorer import AgentReturns
from .rollouts import Drawn, Rollout, Rollouts
from .runner import RunMode


# Prompts drawn for a generation batch at most, by its own prompts. Beyond it, groups that teach nothing stay in it
MOST_PROMPTS = 3.0


class DynamicSampling:
    """
    Fills generation batches with groups that have a signal: episodes of a prompt whose rewards differ, or, where
    candidates for a turn are compared, episodes with candidates whose returns differ.

    Further prompts come from a separate permutation, so the order of the dataset does not change. Every round draws as
    many prompts as are expected to fill the batch. Excess groups are dropped; at the limit, groups without a signal
    stay. DAPO (2503.14476) draws whole batches until one is full instead.
    """

    def __init__(self, run: RunContext, rollouts: Rollouts, dataset: Callable[[], Dataset], own: AgentReturns):
        self._rollouts, self._dataset, self._own, self._args = rollouts, dataset, own, run.args
        self._uses_candidates, self._settings, self._state = uses_candidates(run.args), run.settings, run.state
        self._metrics, self._processes = run.metrics, run.processes
        self._drawn = 0  # prompts of the permutation that were used

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]

    def run(self, rows: Sequence[dict[str, Any]], training: bool, mode: RunMode | None = None) -> Rollout:
        """Like [`Rollouts.run`]; in training, groups without a signal are replaced."""
        rollout = self._rollouts.run(rows, training, mode=mode)
        if not training:
            return rollout
        size = self._settings.group_size(training)
        batch = _Batch(rollout, self._columns(rollout), size)
        found = self._have_signal(rollout, size)
        batch.open = [place for place, has in enumerate(found) if not has]
        total = len(found)
        drawn, used, rounds = total, sum(found), [rollout]
        while batch.open and (count := self._next_round(len(batch.open), used, drawn, total, size)):
            further = self._rollouts.run(self._rows(count, size), training, further=True)
            columns, has_signal = self._columns(further), self._have_signal(further, size)
            drawn, used = drawn + count, used + sum(has_signal)
            rounds.append(further)
            self._replace(batch, further, columns, [group for group, has in enumerate(has_signal) if has])
        self._state.set_user_columns(batch.user_columns())
        self._metrics.add("dynamic_sampling/prompts", drawn / total)
        self._metrics.add("dynamic_sampling/with_signal", used / drawn)
        self._metrics.add("dynamic_sampling/filled", 1 - len(batch.open) / total)
        return batch.rollout(rounds, used / drawn)

    def take_generated(self) -> dict[str, int]:
        return self._rollouts.take_generated()

    def _have_signal(self, rollout: Rollout, size: int) -> list[bool]:
        """For each group of all processes, whether something can be learned from it."""
        own_names = sorted({name for episode in rollout.episodes for name in episode.own})
        branching = {node.episode for node in rollout.nodes if _differ(node.returns)}
        facts = []
        for index, (episode, reward) in enumerate(zip(rollout.episodes, rollout.local_rewards, strict=True)):
            received = {name: self._own.get_agent_reward(reward, episode, name) for name in own_names}
            # Equal sums that were earned at different turns teach something if a turn is worth what follows it
            when = self._to_go(episode, reward) if self._args.credit_kind == "rewards" else {}
            facts.append((received if rollout.has_own_returns else {}, index in branching, when))
        everywhere = self._processes.gather(facts)
        by_function = self._settings.multi_objective_aggregation == "normalize_then_sum"
        scores = rollout.rewards_per_func if by_function else rollout.rewards.unsqueeze(1)
        found = []
        for start in range(0, len(everywhere), size):
            group = everywhere[start : start + size]
            if self._uses_candidates:
                found.append(any(has for _, has, _ in group))
                continue
            names = {name for received, _, _ in group for name in received}
            columns = [*scores[start : start + size].T.tolist()]
            columns += [[received.get(name, math.nan) for received, _, _ in group] for name in names]
            agents = {agent for _, _, when in group for agent in when}
            columns += [[value for _, _, when in group for value in when.get(agent, ())] for agent in agents]
            found.append(any(_differ(column) for column in columns))
        return found

    def _to_go(self, episode: Episode, reward: float) -> dict[str, list[float]]:
        """Returns from each turn on, by agent where the turns of different agents are not compared."""
        rewards = torch.tensor(episode.earned, dtype=torch.float32)
        found: dict[str, list[float]] = {}
        if len(rewards):
            rewards[-1] += reward - rewards.sum()
            worth = functional.returns_to_go(rewards, torch.tensor(episode.joint_steps()), self._args.gamma)
            for turn, value in zip(episode.turns, worth.tolist(), strict=True):
                found.setdefault(turn.agent if self._args.advantage == "agent" else "", []).append(value)
        return found

    def _next_round(self, missing: int, used: int, drawn: int, total: int, size: int) -> int:
        """Number of prompts of the next round; 0 if the limit is reached. Episodes divide evenly over processes."""
        unit = self._processes.count // math.gcd(self._processes.count, size)
        wanted = min(math.ceil(missing * drawn / max(used, 1)), total)
        left = int(MOST_PROMPTS * total - drawn) // unit * unit
        return min(math.ceil(wanted / unit) * unit, left)

    def _rows(self, count: int, size: int) -> list[dict[str, Any]]:
        """Rows of this process in a round of `count` prompts, which are the next of the permutation."""
        dataset = self._dataset()
        indices: list[int] = []
        while len(indices) < count:
            passes, place = divmod(self._drawn, len(dataset))
            generator = torch.Generator().manual_seed(self._args.seed + passes)
            chunk = torch.randperm(len(dataset), generator=generator)[place : place + count - len(indices)]
            indices, self._drawn = [*indices, *chunk.tolist()], self._drawn + len(chunk)
        each = count * size // self._processes.count
        first = self._processes.index * each
        return [dataset[indices[place // size]] for place in range(first, first + each)]

    def _columns(self, rollout: Rollout) -> list[dict[str, Any]]:
        """For each episode of this process the values that reward functions passed to `log_extra`."""
        columns = self._state.take_user_columns()
        count = len(rollout.episodes)
        if any(len(values) != count for values in columns.values()):
            self._state.set_user_columns(columns)  # the reporter says what is wrong
            return [{} for _ in range(count)]
        return [{name: values[index] for name, values in columns.items()} for index in range(count)]

    def _replace(
        self, batch: _Batch, further: Rollout, columns: Sequence[Mapping[str, Any]], groups: Sequence[int]
    ) -> None:
        pairs = list(zip(groups, batch.open, strict=False))
        batch.open = batch.open[len(pairs) :]
        size, place_of = batch.size, dict(pairs)
        moved: list[tuple[int, Episode, list[Node], dict[str, Any]]] = []
        for index, episode in enumerate(further.episodes):
            group, member = divmod(further.first + index, size)
            if group in place_of:
                nodes = [node for node in further.nodes if node.episode == index]
                if self._processes.count > 1:  # it may be another process that trains on it
                    episode = replace(episode, environment=None)
                moved.append((place_of[group] * size + member, episode, nodes, dict(columns[index])))
        for item in self._processes.gather(moved):
            batch.put(*item)
        for group, place in pairs:
            batch.score(place, further, group)


class _Batch:
    """A generation batch while groups are replaced. `columns` has what reward functions logged, by local episode."""

    def __init__(self, rollout: Rollout, columns: Sequence[Mapping[str, Any]], size: int):
        self._first, self.size = rollout, size
        self._episodes, self._columns = list(rollout.episodes), [dict(column) for column in columns]
        self._nodes = [[node for node in rollout.nodes if node.episode == index] for index in range(len(columns))]
        self._rewards, self._per_func = rollout.rewards.clone(), rollout.rewards_per_func.clone()
        self.open: list[int] = []  # groups without a signal

    def put(self, position: int, episode: Episode, nodes: Sequence[Node], columns: dict[str, Any]) -> None:
        index = position - self._first.first
        if 0 <= index < len(self._episodes):
            self._episodes[index] = replace(episode, index=index)
            self._nodes[index] = [replace(node, episode=index) for node in nodes]
            self._columns[index] = columns

    def score(self, place: int, further: Rollout, group: int) -> None:
        to, of = (slice(value * self.size, (value + 1) * self.size) for value in (place, group))
        self._rewards[to], self._per_func[to] = further.rewards[of], further.rewards_per_func[of]

    def user_columns(self) -> dict[str, list]:
        names = dict.fromkeys(name for column in self._columns for name in column)
        return {name: [column.get(name) for column in self._columns] for name in names}

    def rollout(self, rounds: Sequence[Rollout], with_signal: float) -> Rollout:
        """The batch that is trained on. `with_signal` is the share of all sampled groups that have a signal."""
        everything = [episode for rollout in rounds for episode in rollout.episodes]
        spare = [count(everything) - count(self._episodes) for count in (_tokens, _generated)]
        rewards = torch.cat([rollout.rewards for rollout in rounds])
        drawn = Drawn(rewards, torch.cat([rollout.rewards_per_func for rollout in rounds]), 1 - with_signal, *spare)
        return replace(
            self._first,
            episodes=self._episodes,
            rewards=self._rewards,
            rewards_per_func=self._per_func,
            nodes=[node for nodes in self._nodes for node in nodes],
            has_own_returns=any(rollout.has_own_returns for rollout in rounds),
            drawn=drawn,
        )


def _tokens(episodes: Sequence[Episode]) -> int:
    return _generated(episodes) + sum(len(turn.prompt_ids) for episode in episodes for turn in episode.turns)


def _generated(episodes: Sequence[Episode]) -> int:
    return sum(len(turn.completion_ids) for episode in episodes for turn in episode.turns)


def _differ(values: Sequence[float]) -> bool:
    """`True` if some of the numbers, apart from NaN, differ by more than rounding."""
    numbers = torch.tensor(values, dtype=torch.float32)
    return not functional.are_equal(numbers, torch.zeros(len(numbers), dtype=torch.long)).all()
