# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Rollouts: the episodes of a batch with their rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..algorithms.baselines import CREDITS
from ..config.checks import uses_candidates
from ..config.dataset_checks import check_prompts
from ..config.team_setup import RunContext
from ..episodes.records import Episode
from ..rewards import environment_reward
from ..seams.libraries import get_logger
from ..seams.trl import TrlRewards
from ..system.event_loop import finished
from ..system.processes import exiting_forked_children
from ..workflows import Workflow
from .alternatives import Alternatives, Node
from .failures import Failures, run_episodes
from .reward_scorer import AgentReturns, RewardReachChecker, RewardScorer
from .runner import EpisodeRunner, RunMode


if TYPE_CHECKING:
    from ..extras.engines.prefetch import Prefetcher


logger = get_logger(__name__)


class Drawn(NamedTuple):
    """All `D` episodes of all processes that were sampled for a batch whose groups are chosen by their rewards."""

    rewards: torch.Tensor  # (D,)
    rewards_per_func: torch.Tensor  # (D, F)
    without_signal: float  # share of the groups that teach nothing
    tokens: int  # of this process, beyond those of the batch
    generated: int  # those of `tokens` that were generated


@dataclass(frozen=True, eq=False)
class Rollout:
    """Episodes of this process with the rewards of all `E` episodes of all processes, by `F` reward functions."""

    episodes: list[Episode]
    rewards_per_func: torch.Tensor  # (E, F), NaN where a function does not apply
    rewards: torch.Tensor  # (E,), NaN where nothing scored the episode
    first: int = 0  # position of the first episode of this process among the `E`
    nodes: list[Node] = field(default_factory=list)  # candidates, where several are sampled for a turn
    has_own_returns: bool = False  # whether every agent learns from its own return
    drawn: Drawn | None = None  # what the episodes were chosen from; `None` if they are all

    @property
    def local_rewards(self) -> list[float]:
        return self.rewards[self.first : self.first + len(self.episodes)].tolist()


class Rollouts:
    """Runs the team on dataset rows and scores the episodes. `ahead` begins episodes while training runs."""

    def __init__(
        self,
        run: RunContext,
        runner: EpisodeRunner,
        workflow: Workflow,
        scorer: RewardScorer,
        rewards: TrlRewards,
        own: AgentReturns,
        reach: RewardReachChecker,
        failures: Failures | None,
        alternatives: Alternatives | None = None,
        ahead: Prefetcher | None = None,
    ):
        self._ahead, self._failures = ahead, failures
        self._failed: dict[str, set[str]] = {"train": set(), "eval": set()}  # names that were counted so far
        self._runner, self._alternatives, self._scorer, self._rewards = runner, alternatives, scorer, rewards
        self._workflow, self._own, self._reach, self._args = workflow, own, reach, run.args
        self._uses_candidates = uses_candidates(run.args)
        self._metrics, self._processes = run.metrics, run.processes
        self._has_told_of_unscored = False
        self._counted: dict[str, set[str]] = {"train": set(), "eval": set()}  # by workflows

    def state_dict(self) -> dict[str, Any]:
        counted = {mode: sorted(names) for mode, names in self._counted.items()}
        failed = {mode: sorted(names) for mode, names in self._failed.items()}
        return {"counted": counted, "failed": failed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counted = {mode: set(names) for mode, names in state["counted"].items()}
        self._failed = {mode: set(names) for mode, names in state.get("failed", self._failed).items()}

    def run(
        self, rows: Sequence[dict[str, Any]], training: bool, further: bool = False, mode: RunMode | None = None
    ) -> Rollout:
        """
        Run and score one episode for each row. Limits on failures do not apply to `further` rows, which are a part of
        a batch. Raises `ValueError` for a row that cannot be used, or rewards that nothing could be learned from.
        """
        check_prompts(rows, "the dataset")
        self._runner.dropped_turns = 0
        runner = self._runner if mode is None else self._runner.changed(mode)
        others = self._alternatives
        answer: Any = None
        if others is not None:
            others.take_nodes()
            answer = others.answer_with_candidates if self._uses_candidates and training else None
        if training and self._ahead is not None:
            episodes = self._ahead.episodes(rows)
        else:
            self._runner.generator.publish()
            with self._processes.failing_together(), exiting_forked_children():
                episodes = self._run(runner, answer, rows)
        self._log(episodes, runner.dropped_turns, training)
        has_own_returns = self._own.note(episodes)
        self._check_earned(episodes, training)
        per_func = self._scorer.score_batch(episodes)
        self._check_rewards(per_func)
        if self._failures is not None:
            self._check_skipped(self._failures, per_func.size(0), 1.0 if further else self._args.max_skipped_share)
        first = self._processes.index * len(rows)
        nodes = others.take_nodes() if others is not None else []
        return Rollout(episodes, per_func, self._scorer.combine_rewards(per_func), first, nodes, has_own_returns)

    def take_generated(self) -> dict[str, int]:
        return self._alternatives.take_generated() if self._alternatives is not None else {}

    def close(self) -> None:
        """Abandon active episodes, and remove the published weights from servers."""
        if self._ahead is not None:
            self._ahead.close()
        self._runner.generator.close()

    def _run(self, runner: EpisodeRunner, answer: Any, rows: Sequence[dict[str, Any]]) -> list[Episode]:
        if self._failures is None:
            return runner.run(rows, answer, first=self._processes.index * len(rows))

        async def run(rows: Sequence[dict[str, Any]], errors: dict) -> list[Episode]:
            return runner.run(rows, answer, failures=errors, first=self._processes.index * len(rows))

        return finished(run_episodes(run, rows, self._failures))

    def _check_skipped(self, failures: Failures, count: int, most: float) -> None:
        everywhere = self._processes.gather([failures.take()])
        total = self._add_rates(self._failed, [counts for counts, _ in everywhere], count)
        for name, number in total.items():
            if name.endswith("/skipped") and number > most * count:
                last = next(error for _, error in everywhere if error)
                raise self._processes.mark_shared(
                    RuntimeError(
                        f"`{name}`: {number} of {count} episodes of a generation batch were skipped, more than "
                        f"`max_skipped_share={self._args.max_skipped_share:g}` allows. The latest error: {last}"
                    )
                )

    def _check_earned(self, episodes: Sequence[Episode], training: bool) -> None:
        if not self._workflow.earns and any(any(episode.earned) for episode in episodes):
            raise ValueError(
                f"Turns earned rewards in the workflow `{type(self._workflow).__name__}`, but these rewards would be "
                "ignored, since its `earns` is False. Set `earns = True` on the class."
            )
        if not (self._workflow.earns and training) or CREDITS[self._args.credit].scores_turns:
            return
        weights = zip(self._rewards.names, self._rewards.weights.tolist(), strict=True)
        others = [name for name, weight in weights if weight and name != environment_reward.__name__]
        if self._own.are_per_agent:
            own = [{name: sum(value) for name, value in episode.own.items()} for episode in episodes]
            has_more = bool(others) or any(self._own.shared_rewards(episode).any() for episode in episodes)
            agents = {turn.agent for episode in episodes for turn in episode.turns}
            everywhere = self._processes.gather([(own, has_more, agents)])
            if not any(has_more for _, has_more, _ in everywhere):
                acted = sorted({name for *_, names in everywhere for name in names})
                self._reach.check_rewarded_by_name([entry for own, *_ in everywhere for entry in own], acted)
            return
        earned = self._processes.gather([_earned_by_agent(episode) for episode in episodes])
        self._reach.check_opposed(earned, no_other_rewards=not others)

    def _log(self, episodes: Sequence[Episode], dropped_turns: int, training: bool) -> None:
        counts: Counter[str] = Counter()
        for episode in episodes:
            counts.update({f"workflow/{name}": value for name, value in episode.counts.items()})  # type: ignore[arg-type]
        ended = sum(episode.overflowed for episode in episodes)
        if self._runner.uses_tools:
            counts.update({"workflow/tools/calls": 0, "workflow/tools/failures": 0})
        acted = sorted({turn.agent for episode in episodes for turn in episode.turns})
        everywhere = self._processes.gather([(dict(counts), dropped_turns, ended, acted, len(episodes))])
        self._metrics.add("context/dropped_turns", float(sum(dropped for _, dropped, *_ in everywhere)))
        if self._args.context_overflow == "end_episode":
            self._metrics.add("context/ended_episodes", float(sum(ended for _, _, ended, *_ in everywhere)))
        if training:
            self._reach.check_acted({name for *_, item, _ in everywhere for name in item})
        count = sum(number for *_, number in everywhere)
        total = self._add_rates(self._counted, [process_counts for process_counts, *_ in everywhere], count)
        if self._runner.uses_tools:  # under TRL's names
            calls, failures = total["workflow/tools/calls"], total["workflow/tools/failures"]
            self._metrics.add("tools/call_frequency", calls / count)
            self._metrics.add("tools/failure_frequency", failures / calls if calls else 0.0)

    def _add_rates(self, known: dict[str, set[str]], counts: Sequence[dict[str, int]], count: int) -> Counter[str]:
        """Log the counts of all processes per episode, 0 for names of earlier batches. Return their sums."""
        total: Counter[str] = Counter()
        for process_counts in counts:
            total.update(process_counts)
        names = known[self._metrics.mode]
        names |= set(total)
        for name in sorted(names):
            self._metrics.add(name, total[name] / count)
        return total

    def _check_rewards(self, per_func: torch.Tensor) -> None:
        for index, (func, name) in enumerate(zip(self._rewards.functions, self._rewards.names, strict=True)):
            if isinstance(func, nn.Module) and not per_func[:, index].isfinite().all():
                raise ValueError(
                    f"The reward model `{name}` returned a score that is NaN or infinite. Training on it would "
                    "ruin the weights or zero the advantages of its group. Check the model's input length and dtype."
                )
        unscored = int(torch.isnan(per_func).all(dim=1).sum()) if len(per_func) else 0
        if unscored and not self._has_told_of_unscored:
            self._has_told_of_unscored = True
            logger.warning(
                # TRL's warning shows the whole row, but not everyone who reads logs may see the dataset
                f"All reward functions returned None for {unscored} of {len(per_func)} episodes (skipped episodes "
                "included). Agents learn nothing from these episodes. The metric `frac_unscored` logs their share. "
                "This warning is logged once."
            )


def _earned_by_agent(episode: Episode) -> dict[str, float]:
    """Rewards that agents earned: by name, whoever acted, or by their turns."""
    earned: Counter[str] = Counter({name: sum(value) for name, value in episode.own.items()})  # type: ignore[arg-type]
    for k, (turn, reward) in enumerate(zip(episode.turns, episode.earned, strict=True)):
        earned[turn.agent] += reward - sum(item[k] for item in episode.own.values())  # type: ignore[assignment]
    return {name: reward for name, reward in earned.items() if abs(reward) > 1e-9}
