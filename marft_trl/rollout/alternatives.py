# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Generation beyond the episodes themselves: candidates for a turn, and re-runs with one turn changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..algorithms.baselines import CREDITS
from ..config.checks import completes_candidates
from ..config.team_setup import RunContext, TeamSetup
from ..episodes.records import EndOfEpisode, Episode, Request, Turn
from ..episodes.rerun import Rerun, make_keys, observation_key
from .reward_scorer import AgentReturns, RewardScorer
from .runner import EpisodeRunner, turn_key


@dataclass(frozen=True, eq=False)
class Node:
    """The candidates for one turn, sampled from one observation. The episode went on from one of them."""

    episode: int  # position on this process
    turns: list[Turn]
    returns: list[float]  # NaN where nothing scored a candidate


class Alternatives:
    def __init__(
        self, team: TeamSetup, run: RunContext, runner: EpisodeRunner, scorer: RewardScorer, own: AgentReturns
    ):
        self._runner, self._scorer, self._own, self._policies = runner, scorer, own, team.policies
        self._args, self._processes = run.args, run.processes
        self._nodes: list[Node] = []
        self._generated: Counter[str] = Counter()

    def take_nodes(self) -> list[Node]:
        nodes, self._nodes = self._nodes, []
        return nodes

    def take_generated(self) -> dict[str, int]:
        """Take the counts since the last call: `turns`, `tokens`, `reruns`, and `lost` re-runs without their turn."""
        generated, self._generated = dict(self._generated), Counter()
        return generated

    async def answer_with_candidates(self, requests: Sequence[Request], key: tuple) -> list[Turn | EndOfEpisode]:
        """Sample several candidates for each turn of a trained agent and go on from one; all are kept as nodes."""
        learns = [self._policies.is_trained(request.agent) for request in requests]
        counts = [self._args.turn_candidates if learn else 1 for learn in learns]
        repeated = [request for request, count in zip(requests, counts, strict=True) for _ in range(count)]
        completions = iter(await self._runner.answer(repeated, key))
        drawn = [[next(completions) for _ in range(count)] for count in counts]
        candidates = [[completion for completion in group if isinstance(completion, Turn)] for group in drawn]
        branching = [index for index, learn in enumerate(learns) if learn and candidates[index]]
        turns: dict[int, list[Turn]] = {}  # scored as if their agents went no further
        for index in branching:
            position = len(requests[index].episode.turns)
            turns[index] = [replace(candidate, index=position, audience=None) for candidate in candidates[index]]
        returns = await self._returns(requests, candidates, turns, key)
        chosen = [group[0] for group in drawn]
        for index in branching:
            self._nodes.append(Node(requests[index].episode.index, turns[index], returns[index]))
            self._count(candidates[index][1:])
            if self._args.continue_from == "best":
                worth = torch.tensor(returns[index]).nan_to_num(nan=-torch.inf)
                chosen[index] = candidates[index][int(worth.argmax())]
        return chosen

    async def _returns(
        self, requests: Sequence[Request], candidates: Sequence[list[Turn]], turns: dict[int, list[Turn]], key: tuple
    ) -> dict[int, list[float]]:
        """Return of each candidate, by request: the mean reward of episodes completed from it, its own, or a mix."""
        jobs = [(index, place) for index in turns for place in range(len(turns[index]))]
        own_weight = self._args.own_reward_weight if CREDITS[self._args.credit].scores_turns else 0.0
        worth = torch.zeros(len(jobs))
        records = {index: requests[index].episode.record() for index in turns}
        keys = {index: make_keys(record) for index, record in records.items()}
        episodes, flat = [records[index] for index, _ in jobs], [turns[index][place] for index, place in jobs]
        if own_weight < 1 and not completes_candidates(self._args):
            worth = (1 - own_weight) * self._scorer.score_as_answers(episodes, flat)
        elif own_weight < 1:
            skips, samples = _pending_before(requests), self._args.candidate_samples
            repeated = [job for job in jobs for _ in range(samples)]
            reruns = []
            for index, place in repeated:
                candidate = requests[index], candidates[index][place]
                reruns.append(Rerun(records[index], candidate=candidate, skip=skips[index], keys=keys[index]))
            rows = [records[index].row for index, _ in repeated]
            rerun_key = (*turn_key(requests[0], key), 0)
            completed = await self._runner.run_again(rows, reruns, rerun_key, self._counted)
            agents = [requests[index].agent for index, _ in repeated]
            rewards = self._rewards(completed, agents, reruns).view(len(jobs), samples)
            worth = (1 - own_weight) * (rewards.squeeze(1) if samples == 1 else rewards.nanmean(dim=1))
        if own_weight > 0:
            worth = worth + own_weight * self._scorer.score_turns(episodes, flat).sums
        values = iter(worth.tolist())  # in the order of `jobs`
        return {index: [next(values) for _ in candidates_of] for index, candidates_of in turns.items()}

    def counterfactual_rewards(self, episodes: Sequence[Episode]) -> list[torch.Tensor]:
        """
        Rewards `(K, M)` for each episode, of `M` re-runs in which turn `k` is sampled from the agent's reference
        policy, or empty (`credit="removed"`), and everything that depends on it is generated again. NaN for frozen
        agents and lost re-runs.
        """
        samples = self._args.counterfactual_samples
        rewards = [torch.full((len(episode.turns), samples), torch.nan) for episode in episodes]
        jobs = [
            (index, turn.index)
            for index, episode in enumerate(episodes)
            for turn in episode.turns
            if self._policies.is_trained(turn.agent)
        ]
        keys = [make_keys(episode) for episode in episodes]
        counts = self._processes.gather([len(jobs)])
        first = sum(counts[: self._processes.index])
        removes = CREDITS[self._args.credit].removes
        for sample in range(samples if sum(counts) else 0):
            reruns = [
                Rerun(episodes[index], None if removes else k, k if removes else None, keys=keys[index])
                for index, k in jobs
            ]
            rows = [episodes[index].row for index, _ in jobs]
            completed = self._runner.run(rows, self._counted, reruns, first=first)
            agents = [episodes[index].turns[k].agent for index, k in jobs]
            for (index, k), reward in zip(jobs, self._rewards(completed, agents, reruns), strict=True):
                rewards[index][k, sample] = reward
        return rewards

    def _rewards(self, episodes: Sequence[Episode], agents: Sequence[str], reruns: Sequence[Rerun]) -> torch.Tensor:
        """Reward `(N,)` of each re-run for an agent, NaN where nothing scored it, and without the turn it is for."""
        rewards = self._scorer.score_episodes(episodes)
        for index, (episode, agent) in enumerate(zip(episodes, agents, strict=True)):
            if episode.own:
                rewards[index] = self._own.get_agent_reward(rewards[index].item(), episode, agent)
        lost = torch.tensor([not rerun.holds_turn for rerun in reruns], dtype=torch.bool)
        self._generated.update(reruns=len(reruns), lost=int(lost.sum()))
        return rewards.masked_fill(lost, torch.nan)

    async def _counted(self, requests: Sequence[Request], key: tuple) -> list[Turn | EndOfEpisode]:
        completions = await self._runner.answer(requests, key)
        self._count(completions)
        return completions

    def _count(self, completions: Sequence[Turn | EndOfEpisode]) -> None:
        generated = [completion for completion in completions if isinstance(completion, Turn)]
        self._generated["turns"] += len(generated)
        self._generated["tokens"] += sum(len(turn.completion_ids) for turn in generated)


def _pending_before(requests: Sequence[Request]) -> list[int]:
    """For each request, the number of earlier ones, of parallel branches, that show the same agent the same."""
    seen: Counter[tuple] = Counter()
    counts = []
    for request in requests:
        place = request.episode.index, observation_key(request.agent, request.seen, request.requested_turn)
        counts.append(seen[place])
        seen[place] += 1
    return counts
