# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Scores single turns and branches of episodes with TRL's `_calculate_rewards`, on this process alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from trl import GRPOTrainer, is_conversational
from trl.trainer import grpo_trainer
from trl.trainer.utils import get_callable_name

from ..episodes import Episode, Turn
from .functional import team_rewards
from .validation import checked_reward


class TurnRewards:
    """
    Reward functions outside of the one call per generation batch.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Does the scoring.
        functions (`dict[str, Sequence[Callable]]`):
            For each agent, the functions that score its own turns.
    """

    def __init__(self, trainer: GRPOTrainer, functions: dict[str, Sequence[Callable]]):
        self._trainer = trainer
        self._functions = {name: [checked_reward(func) for func in its] for name, its in functions.items()}

    def of_episodes(self, episodes: Sequence[Episode]) -> torch.Tensor:
        """The team's reward for each episode `(E,)`, NaN where nothing scored it."""
        if not episodes:
            return torch.zeros(0)
        rows = [as_row(episode) for episode in episodes]
        with self._locally():
            per_func = score(self._trainer, rows, [episode.answer for episode in episodes])
        return team_rewards(per_func, self._trainer.reward_weights.to(per_func.device)).cpu()

    def of_turns(self, episodes: Sequence[Episode], turns: Sequence[Turn]) -> torch.Tensor:
        """
        Each turn's own reward `(N,)`: the sum of its agent's functions, NaN where none applied or the agent has none.
        A turn that called tools is scored by the word that came of it, not by its call.

        Args:
            episodes (`Sequence[Episode]`): the episode of each turn.
            turns (`Sequence[Turn]`): turns of these episodes, or candidates for one.
        """
        rewards = torch.full((len(turns),), torch.nan)
        words = [episode.word_of(turn) for episode, turn in zip(episodes, turns, strict=True)]
        for agent, functions in self._functions.items():
            mine = [index for index, word in enumerate(words) if word is not None and word.agent == agent]
            if not mine or not functions:
                continue
            said = [word for word in (words[index] for index in mine) if word is not None]
            rows = [self._row(episodes[index], word) for index, word in zip(mine, said, strict=True)]
            with self._locally(), self._swapped(functions):
                per_func = score(self._trainer, rows, said)
            rewards[mine] = team_rewards(per_func, torch.ones(len(functions), device=per_func.device)).cpu()
        return rewards

    def as_answers(self, episodes: Sequence[Episode], turns: Sequence[Turn]) -> torch.Tensor:
        """
        The team's reward for each turn as if it were the answer of its episode, which is not completed: `(N,)`.

        Args:
            episodes (`Sequence[Episode]`): the episode of each turn.
            turns (`Sequence[Turn]`): candidates for a turn of these episodes.
        """
        rows = [
            {**as_row(episode), "turns": [*episode.turns, turn]} for episode, turn in zip(episodes, turns, strict=True)
        ]
        with self._locally():
            per_func = score(self._trainer, rows, turns)
        return team_rewards(per_func, self._trainer.reward_weights.to(per_func.device)).cpu()

    @staticmethod
    def _row(episode: Episode, turn: Turn) -> dict[str, Any]:
        has_ended = turn in episode.turns  # else a candidate
        turns = episode.turns if has_ended else [*episode.turns, turn]
        return {**as_row(episode), "turns": turns, "turn": turn, "answer_turn": episode.answer if has_ended else None}

    @contextlib.contextmanager
    def _swapped(self, functions: list[Callable]) -> Iterator[None]:
        trainer = self._trainer
        names = ("reward_funcs", "reward_func_names", "reward_processing_classes")
        outer = [getattr(trainer, name) for name in names]
        own = functions, [get_callable_name(func) for func in functions], [None] * len(functions)
        for name, value in zip(names, own, strict=True):
            setattr(trainer, name, value)
        try:
            yield
        finally:
            for name, value in zip(names, outer, strict=True):
                setattr(trainer, name, value)

    @contextlib.contextmanager
    def _locally(self) -> Iterator[None]:
        """
        Within, TRL (1.16) does not gather the rewards: processes score different numbers of turns. What functions log
        here is left out, since it does not belong to an episode of the batch.
        """
        trainer = self._trainer
        gather, metrics, extra = grpo_trainer.gather, trainer._pending_metrics, trainer._pending_extra_logs
        grpo_trainer.gather = lambda tensor: tensor
        trainer._pending_metrics, trainer._pending_extra_logs = type(metrics)(list), type(extra)(list)
        try:
            yield
        finally:
            grpo_trainer.gather = gather
            trainer._pending_metrics, trainer._pending_extra_logs = metrics, extra


def as_row(episode: Episode) -> dict[str, Any]:
    """What reward functions get of an episode beside its answer."""
    own = {"turns": episode.turns, "earned": sum(episode.earned.values(), 0.0), "environments": episode.environment}
    return {**episode.row, **own}


def score(trainer: GRPOTrainer, rows: Sequence[dict[str, Any]], answers: Sequence[Any]) -> torch.Tensor:
    """
    Rewards of turns as answers to the prompts of dataset rows, by TRL's `_calculate_rewards`: `(N, F)`.

    Args:
        trainer ([`~trl.GRPOTrainer`]): has the reward functions.
        rows (`Sequence[dict]`): dataset rows, with what else the functions are to get.
        answers (`Sequence[Turn]`): the turn of each.
    """
    prompts = [row["prompt"] for row in rows]
    completions: list[Any] = [turn.text for turn in answers]
    if is_conversational({"prompt": prompts[0]}):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    ids = [list(turn.completion_ids) for turn in answers]
    with trainer._runner.randomness.theirs():
        return trainer._calculate_rewards(rows, prompts, completions, ids)
