# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Rewards of episodes, re-runs and single turns, by TRL's reward code."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from trl import is_conversational
from trl.trainer.utils import get_callable_name

from ..config.team_setup import RunContext
from ..episodes.records import Episode, Turn
from ..functional import team_rewards
from ..system.randomness import UserRandomness
from ..system.watchdog import time_limit
from .failures import Failures, OnFailure
from .reward_checks import checked_reward, numbered


class RewardFunctions(Protocol):
    """The reward functions of a trainer, see [`TrlRewards`]. `F` functions."""

    @property
    def weights(self) -> torch.Tensor:
        """Their weights, `(F,)`."""

    def __call__(self, rows, prompts, completions, completion_ids) -> torch.Tensor:
        """Rewards `(E, F)` of the completions of all processes."""

    def alone(self) -> AbstractContextManager[None]:
        """Context manager: rewards are those of this process."""

    def locally(self, functions: Sequence[Callable] | None = None) -> AbstractContextManager[None]:
        """Context manager: rewards are those of this process, by other functions if some are given."""


class TurnRewards(NamedTuple):
    """
    Rewards of `N` turns by the functions of their agents.

    Args:
        sums (`torch.Tensor` of shape `(N,)`): NaN where none applied.
        by_function (`list[dict[str, float]]`): for each turn the reward of each function by its name, NaN where it did
            not apply; empty for agents without functions, and for turns that another one stands for.
    """

    sums: torch.Tensor
    by_function: list[dict[str, float]]


# Seconds after which a blocked event loop is noticed, beyond the time limit of a call
_LATER = 5.0


class RewardScorer:
    """
    Scores episodes, and single turns outside of the one call per generation batch.

    Args:
        run ([`RunContext`]): the run that trains it.
        rewards ([`RewardFunctions`]): the reward functions of the team.
        of_agents (`Mapping[str, Sequence[Callable]]`): for each agent, the functions that score its own turns.
        randomness ([`UserRandomness`]): random states of users' code.
        failures ([`Failures`]): gets what was skipped.
    """

    def __init__(
        self,
        run: RunContext,
        rewards: RewardFunctions,
        of_agents: Mapping[str, Sequence[Callable]],
        randomness: UserRandomness,
        failures: Failures,
    ):
        self._rewards, self._randomness, self._processes = rewards, randomness, run.processes
        self._policy = policy = OnFailure.of(run.args)
        self._of_agents = {
            name: [checked_reward(func, policy, failures) for func in its] for name, its in of_agents.items()
        }
        self._names = {agent: numbered([get_callable_name(one) for one in its]) for agent, its in of_agents.items()}

    def of_batch(self, episodes: Sequence[Episode]) -> torch.Tensor:
        """Rewards `(E, F)` of a generation batch, of all processes; NaN where a function does not apply."""
        if self._processes is None:
            return self._of_scorable(episodes)
        with self._processes.together(), self._rewards.alone():
            own = self._of_scorable(episodes)
        return self._processes.join(own)

    def _of_scorable(self, episodes: Sequence[Episode]) -> torch.Tensor:
        """Rewards of the episodes; NaN for those that were skipped."""
        kept = [index for index, episode in enumerate(episodes) if episode.failure is None]
        if not kept:
            return torch.full((len(episodes), len(self._rewards.weights)), torch.nan)
        some = [episodes[index] for index in kept]
        scores = self._score([as_row(episode) for episode in some], [_answer_of(episode) for episode in some])
        if len(kept) == len(episodes):
            return scores
        rewards = scores.new_full((len(episodes), scores.size(1)), torch.nan)
        rewards[kept] = scores
        return rewards

    def of_team(self, per_func: torch.Tensor) -> torch.Tensor:
        """Weighted sum `(E,)` of rewards `(E, F)`, NaN where nothing scored an episode."""
        return team_rewards(per_func, self._rewards.weights.to(per_func.device))

    def of_episodes(self, episodes: Sequence[Episode]) -> torch.Tensor:
        """The team's reward `(E,)` for episodes of this process, NaN where nothing scored one."""
        if not episodes:
            return torch.zeros(0)
        with self._rewards.locally():
            return self.of_team(self._of_scorable(episodes)).cpu()

    def of_turns(self, episodes: Sequence[Episode], turns: Sequence[Turn]) -> TurnRewards:
        """
        Reward of each turn: the sum of its agent's functions. A turn that called tools is scored by the final turn
        that came of it, not by its call.

        Args:
            episodes (`Sequence[Episode]`): the episode of each turn.
            turns (`Sequence[Turn]`): turns of these episodes, or candidates for one.
        """
        rewards = TurnRewards(torch.full((len(turns),), torch.nan), [{} for _ in turns])
        finals = [episode.final_turn_of(turn) for episode, turn in zip(episodes, turns, strict=True)]
        for agent, functions in self._of_agents.items():
            mine = {i: turn for i, turn in enumerate(finals) if turn is not None and turn.agent == agent}
            if not mine or not functions:
                continue
            rows = [_turn_row(episodes[index], turn) for index, turn in mine.items()]
            with self._rewards.locally(functions):
                per_func = self._score(rows, list(mine.values()))
            ones = torch.ones(len(functions), device=per_func.device)
            rewards.sums[list(mine)] = team_rewards(per_func, ones).cpu()
            for index, values in zip(mine, per_func.tolist(), strict=True):
                rewards.by_function[index] = dict(zip(self._names[agent], values, strict=True))
        return rewards

    def as_answers(self, episodes: Sequence[Episode], turns: Sequence[Turn]) -> torch.Tensor:
        """
        The team's reward `(N,)` for each turn as if it were the answer of its episode, which is not completed.

        Args:
            episodes (`Sequence[Episode]`): the episode of each turn.
            turns (`Sequence[Turn]`): candidates for a turn of these episodes.
        """
        pairs = zip(episodes, turns, strict=True)
        rows = [{**as_row(episode), "turns": [*episode.turns, turn]} for episode, turn in pairs]
        with self._rewards.locally():
            return self.of_team(self._score(rows, turns)).cpu()

    def _score(self, rows: Sequence[dict[str, Any]], answers: Sequence[Turn]) -> torch.Tensor:
        """Rewards `(N, F)` of turns as answers to the prompts of dataset rows."""
        prompts = [row["prompt"] for row in rows]
        completions: list[Any] = [turn.text for turn in answers]
        if is_conversational({"prompt": prompts[0]}):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        total = None if self._policy.timeout is None else self._policy.timeout + _LATER
        with self._randomness.theirs(), time_limit(total, functools.partial(_blocked, total)):
            try:
                return self._rewards(rows, prompts, completions, [list(turn.completion_ids) for turn in answers])
            except concurrent.futures.CancelledError as error:
                if getattr(error, "__notes__", None):  # of the function that it names
                    raise
                raise RuntimeError(
                    "An asynchronous reward function has cancelled tasks that it did not start. Cancel only your own: "
                    "`asyncio.all_tasks()` has those of the trainer too."
                ) from error


def as_row(episode: Episode) -> dict[str, Any]:
    """The dataset row of an episode, and the columns `turns`, `earned` and `environments` for reward functions."""
    own = {"turns": list(episode.turns), "earned": sum(episode.earned, 0.0), "environments": episode.environment}
    return {**episode.row, **own}


def _turn_row(episode: Episode, turn: Turn) -> dict[str, Any]:
    has_ended = turn in episode.turns  # else a candidate
    turns = list(episode.turns) if has_ended else [*episode.turns, turn]
    return {**as_row(episode), "turns": turns, "turn": turn, "answer_turn": episode.answer if has_ended else None}


def _answer_of(episode: Episode) -> Turn:
    if episode.answer is None:
        raise ValueError(f"Episode {episode.index} has no turn that could be scored.")
    return episode.answer


def _blocked(seconds: float | None, where: str) -> str:
    return (
        f"The reward functions have not returned for {seconds:g} seconds ({where} is running). An asynchronous one "
        "may block the event loop: await what takes long, or set a larger `reward_timeout`."
    )
