# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer's part that runs episodes, branches of episodes, and scores them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from trl import GRPOTrainer

from ..agents import AgentSpec
from ..configs import MARFTConfig
from ..episodes import EndOfEpisode, Episode, Turn
from ..rewards import environment_reward
from ..rollout.collector import Request
from ..rollout.replay import Replay
from ..rollout.runner import EpisodeRunner
from ..rollout.transformers_generator import Sampling
from ..transcripts import Advantage
from ..workflows import Workflow
from .adapters import Policies
from .functional import team_rewards
from .reach import RewardReach
from .turn_rewards import TurnRewards, as_row, score
from .validation import check_prompts


@dataclass(eq=False)
class Node:
    """
    The candidates for one turn.

    Args:
        episode (`int`): position of the episode on this process.
        turns (`list[Turn]`): candidates, sampled from one observation; the episode went on from one of them.
        returns (`list[float]`): what each was worth; NaN where nothing scored it.
    """

    episode: int
    turns: list[Turn]
    returns: list[float]


@dataclass(eq=False)
class Rollout:
    """
    Episodes of this process with the rewards of all processes. `E` episodes in all, `F` reward functions.

    Args:
        episodes (`list[Episode]`): of this process.
        rewards_per_func (`torch.Tensor` of shape `(E, F)`): NaN where a function does not apply.
        rewards (`torch.Tensor` of shape `(E,)`): NaN where nothing scored the episode.
        nodes (`list[Node]`): candidates, where the trainer samples several for a turn.
        advantages (`list[list]`, *optional*): for each episode of this process the advantage of its turns: a number,
            one for each token, or `None` where there is no training row.
    """

    episodes: list[Episode]
    rewards_per_func: torch.Tensor
    rewards: torch.Tensor
    nodes: list[Node] = field(default_factory=list)
    advantages: list[list[Advantage]] | None = None


class TeamRollouts(GRPOTrainer):
    """Runs the workflow on dataset rows, with TRL's generation and TRL's rewards (checked against TRL 1.16)."""

    args: MARFTConfig
    agents: list[AgentSpec]
    policies: Policies
    workflow: Workflow
    _specs: dict[str, AgentSpec]
    _samplings: dict[str, Sampling]
    _runner: EpisodeRunner
    _reach: RewardReach
    _turn_rewards: TurnRewards
    _uses_tools: bool

    @property
    def _mode(self) -> str:
        """Whether metrics are those of training or of evaluation, as TRL tells."""
        return "train" if self.model.training else "eval"

    @property
    def _episodes_per_prompt(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _prepare_counters(self) -> None:
        self._unscored_in_a_row = 0
        self._extra: Counter[str] = Counter()
        self._nodes: list[Node] = []
        self._counted: dict[str, set[str]] = {"train": set(), "eval": set()}  # what workflows have counted so far

    # ---- Episodes ----

    def _roll_out(self, inputs: list[dict[str, Any]]) -> Rollout:
        check_prompts(inputs, "the dataset")
        self._runner.dropped_turns = 0
        self._extra.clear()
        self._nodes = []
        branches = self.args.advantage == "turn" and self.model.training
        episodes = self._runner.run(inputs, self._answer_with_candidates if branches else None)
        self._log_episodes(episodes)
        if not self.workflow.earns and any(any(episode.earned.values()) for episode in episodes):
            raise ValueError(
                f"Turns earned rewards inside the workflow `{type(self.workflow).__name__}`, but nothing would count "
                "them, since its `earns` is False. Set `earns = True` on the class."
            )
        if self.workflow.earns and self.model.training and self.args.credit != "per_step":
            weights = zip(self.reward_func_names, self.reward_weights.tolist(), strict=True)
            others = [name for name, weight in weights if weight and name != environment_reward.__name__]
            earned = gather_object([_earned_by_agent(episode) for episode in episodes])
            self._reach.check_earned(earned, is_all=not others)
        rows = [as_row(episode) for episode in episodes]
        rewards_per_func = score(self, rows, [episode.answer for episode in episodes])
        self._check_rewards(rewards_per_func)
        rewards = team_rewards(rewards_per_func, self.reward_weights.to(rewards_per_func.device))
        return Rollout(episodes, rewards_per_func, rewards, nodes=self._nodes)

    def _log_episodes(self, episodes: Sequence[Episode]) -> None:
        """What workflows counted, and what did not fit the window."""
        counts: Counter[str] = Counter()
        for episode in episodes:
            counts.update({f"workflow/{name}": value for name, value in episode.counts.items()})
        ended = sum(episode.overflowed for episode in episodes)
        if self._uses_tools:
            counts.update({"workflow/tools/calls": 0, "workflow/tools/failures": 0})
        everywhere = gather_object([(dict(counts), self._runner.dropped_turns, ended, len(episodes))])
        metrics = self._metrics[self._mode]
        metrics["context/dropped_turns"].append(float(sum(dropped for _, dropped, _, _ in everywhere)))
        if self.args.context_overflow == "end_episode":
            metrics["context/ended_episodes"].append(float(sum(ended for _, _, ended, _ in everywhere)))
        total: Counter[str] = Counter()
        for its_counts, *_ in everywhere:
            total.update(its_counts)
        count = sum(number for *_, number in everywhere)
        self._counted[self._mode] |= set(total)
        for name in sorted(self._counted[self._mode]):  # 0 where it did not happen this time
            metrics[name].append(total[name] / count)
        if self._uses_tools:  # under TRL's names
            calls, failures = total["workflow/tools/calls"], total["workflow/tools/failures"]
            metrics["tools/call_frequency"].append(calls / count)
            metrics["tools/failure_frequency"].append(failures / calls if calls else 0.0)

    def _tokenize_fresh(self, prompts: list, functions: Sequence[Any] = ()) -> list[list[int]]:
        """TRL's tokenization of prompts, in which no model has a word yet."""
        self.tools = list(functions)  # TRL renders them
        try:
            return self._tokenize_prompts(prompts)[0]
        finally:
            self.tools = []

    def _check_rewards(self, rewards_per_func: torch.Tensor) -> None:
        for index, (func, name) in enumerate(zip(self.reward_funcs, self.reward_func_names, strict=True)):
            if isinstance(func, nn.Module) and not rewards_per_func[:, index].isfinite().all():
                raise ValueError(
                    f"The reward model `{name}` returned a score that is NaN or infinite. Training on it would "
                    "destroy the weights or silence its group. Check its input length and dtype."
                )
        if not self.model.training:  # an evaluation says nothing of the batches of training
            return
        self._unscored_in_a_row = self._unscored_in_a_row + 1 if torch.isnan(rewards_per_func).all() else 0
        most = self.args.max_unscored_batches
        if most is not None and self._unscored_in_a_row >= most:
            raise ValueError(
                f"Every reward function ({', '.join(self.reward_func_names)}) returned None for all "
                f"{len(rewards_per_func)} episodes of {most} generation batches in a row (`max_unscored_batches`), so "
                "there is nothing to learn from. At least one has to return a number for some of them."
            )

    # ---- Branches: episodes that are run again from a turn on ----

    def _answer_with_candidates(self, requests: Sequence[Request]) -> list[Turn | EndOfEpisode]:
        """Several candidates for each turn of a trained agent, of which one is spoken; all are kept as nodes."""
        count = self.args.turn_candidates
        learns = [self.policies.adapter_of(request.agent) in self.policies.trained for request in requests]
        asked = [request for request, its in zip(requests, learns, strict=True) for _ in range(count if its else 1)]
        turns = iter(self._runner.answer(asked))
        drawn = [[next(turns) for _ in range(count if its else 1)] for its in learns]
        candidates = [[turn for turn in its if isinstance(turn, Turn)] for its in drawn]
        branching = [index for index, its in enumerate(learns) if its and candidates[index]]
        returns = self._candidate_returns(requests, candidates, branching)
        chosen = [its[0] for its in drawn]
        for index in branching:
            self._nodes.append(Node(requests[index].episode.index, candidates[index], returns[index]))
            self._count_extra(candidates[index][1:])
            if self.args.continue_from == "best":
                worth = torch.tensor(returns[index]).nan_to_num(nan=-torch.inf)
                chosen[index] = candidates[index][int(worth.argmax())]
        return chosen

    def _candidate_returns(
        self, requests: Sequence[Request], candidates: Sequence[list[Turn]], branching: Sequence[int]
    ) -> dict[int, list[float]]:
        """What each candidate is worth: the reward of the episode completed from it, its own reward, or a mixture."""
        jobs = [(index, turn) for index in branching for turn in candidates[index]]
        own_weight = self.args.own_reward_weight if self.args.credit == "per_step" else 0.0
        worth = torch.zeros(len(jobs))
        episodes, turns = [requests[index].episode for index, _ in jobs], [turn for _, turn in jobs]
        if own_weight < 1 and self.args.candidate_reward == "turn":
            worth = (1 - own_weight) * self._turn_rewards.as_answers(episodes, turns)
        elif own_weight < 1:
            skips = _pending_before(requests)
            replays = []
            for index, turn in jobs:
                request = requests[index]
                replays.append(
                    Replay(request.episode, candidate=(request.agent, request.seen, turn), skip=skips[index])
                )
            branches = self._branch([episode.row for episode in episodes], replays)
            worth = (1 - own_weight) * self._turn_rewards.of_episodes(branches)
        if own_weight > 0:
            worth = worth + own_weight * self._turn_rewards.of_turns(episodes, turns)
        returns: dict[int, list[float]] = {index: [] for index in branching}
        for (index, _), value in zip(jobs, worth.tolist(), strict=True):
            returns[index].append(value)
        return returns

    def _counterfactual_rewards(self, episodes: Sequence[Episode]) -> list[torch.Tensor]:
        """
        For each episode the rewards `(K, M)` of `M` re-runs in which turn `k` is sampled anew from the reference of
        its agent and what depends on it is generated again; NaN for the turns of frozen agents.
        """
        samples = self.args.counterfactual_samples
        rewards = [torch.full((len(episode.turns), samples), torch.nan) for episode in episodes]
        jobs = [
            (index, turn.index)
            for index, episode in enumerate(episodes)
            for turn in episode.turns
            if self.policies.adapter_of(turn.agent) in self.policies.trained
        ]
        for sample in range(samples if jobs else 0):
            replays = [Replay(episodes[index], changed=k) for index, k in jobs]
            branches = self._branch([episodes[index].row for index, _ in jobs], replays)
            for (index, k), reward in zip(jobs, self._turn_rewards.of_episodes(branches), strict=True):
                rewards[index][k, sample] = reward
        return rewards

    def _branch(self, rows: Sequence[dict[str, Any]], replays: Sequence[Replay]) -> list[Episode]:
        def answer(requests: Sequence[Request]) -> list[Turn | EndOfEpisode]:
            turns = self._runner.answer(requests)
            self._count_extra(turns)
            return turns

        return self._runner.run(rows, answer, replays)

    def _count_extra(self, turns: Sequence[Turn | EndOfEpisode]) -> None:
        """Generation beyond the episodes themselves, for the metrics."""
        spoken = [turn for turn in turns if isinstance(turn, Turn)]
        self._extra["turns"] += len(spoken)
        self._extra["tokens"] += sum(len(turn.completion_ids) for turn in spoken)


def _earned_by_agent(episode: Episode) -> dict[str, float]:
    earned: Counter[str] = Counter()
    for index, reward in episode.earned.items():
        earned[episode.turns[index].agent] += reward  # type: ignore[assignment]  # a Counter of floats
    return dict(earned)


def _pending_before(requests: Sequence[Request]) -> list[int]:
    """For each request, how many before it ask for the same turn of the same episode."""
    seen: Counter[tuple] = Counter()
    counts = []
    for request in requests:
        place = request.episode.index, request.agent, tuple((type(item), item.index) for item in request.seen)
        counts.append(seen[place])
        seen[place] += 1
    return counts
