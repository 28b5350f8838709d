# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Baselines: the turns that the return of a turn is compared with.

To add one, write a function of [`Samples`] and give it a name in `BASELINES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import functional
from .running import RunningBaselines


@dataclass(frozen=True, eq=False)
class Samples:
    """
    The turns of all processes with their returns. `N` turns.

    Args:
        episodes (`torch.Tensor` of shape `(N,)`): index of the episode of each turn.
        agents (`torch.Tensor` of shape `(N,)`): index of the agent of each turn.
        nodes (`torch.Tensor` of shape `(N,)`): index, inside the episode, of the turn or of the set of candidates.
        returns (`torch.Tensor` of shape `(N,)`): return of each turn; NaN where nothing scored it.
        group_size (`int`): `G`, episodes of a prompt; groups are consecutive episodes.
        num_agents (`int`): number of agents of the team.
        by_agent (`bool`, *optional*, defaults to `False`): whether every agent has its own return, so that the turns
            of different agents are not compared.
        running (`torch.Tensor` of shape `(N,)`, *optional*): running baseline of each turn.
    """

    episodes: torch.Tensor
    agents: torch.Tensor
    nodes: torch.Tensor
    returns: torch.Tensor
    group_size: int
    num_agents: int
    by_agent: bool = False
    running: torch.Tensor | None = None

    def _apart(self, index: torch.Tensor) -> torch.Tensor:
        return index * self.num_agents + self.agents if self.by_agent else index

    @property
    def prompts(self) -> torch.Tensor:
        """Index of the prompt of each turn, or of the prompt and its agent, `(N,)`."""
        return self._apart(self.episodes // self.group_size)

    @property
    def runs(self) -> torch.Tensor:
        """Index of the episode of each turn, or of the episode and its agent, `(N,)`."""
        return self._apart(self.episodes)

    @property
    def per_episode(self) -> torch.Tensor:
        """Weights by which every episode counts once, whatever its number of scored turns, `(N,)`."""
        scored = torch.bincount(self.runs[~self.returns.isnan()], minlength=int(self.runs.max()) + 1)
        return 1 / scored.clamp(min=1)[self.runs].float()

    @property
    def per_turn(self) -> torch.Tensor:
        """Weights by which every turn counts once, `(N,)`."""
        return torch.ones_like(self.returns)

    @property
    def all_alike(self) -> torch.Tensor:
        """One index for all turns, or for those of each agent, `(N,)`."""
        return self._apart(torch.zeros_like(self.episodes))


@dataclass(frozen=True)
class Baseline:
    """
    A baseline.

    Args:
        name (`str`):
            The value of `MARFTConfig.advantage` that chooses it.
        function (`Callable`):
            `function(samples, scale)` returns advantages `(N,)`, 0 where nothing scored a turn. `scale` is
            `scale_rewards`: `"group"`, `"batch"` or `"none"`.
        needs_group (`bool`, *optional*, defaults to `False`):
            Whether it compares episodes of a prompt, so that `num_generations` has to be at least 2.
        scales (`bool`, *optional*, defaults to `False`):
            Whether it divides by the deviation that `scale_rewards` names.
        uses_candidates (`bool`, *optional*, defaults to `False`):
            Whether it compares candidates for one turn, which the trainer then samples.
        completes (`bool`, *optional*, defaults to `True`):
            Whether candidates are worth the episodes that are completed from them, and not themselves as answers.
        goes_on (`str`, *optional*, defaults to `"best"`):
            Value of `continue_from` if none is set.
        takes_normalized_objectives (`bool`, *optional*, defaults to `False`):
            Whether it works with `multi_objective_aggregation="normalize_then_sum"`.
        state (`Callable`, *optional*):
            `state(args)` makes the state of a baseline that remembers earlier batches: [`RunningBaselines`], or a
            class with its methods.
        reads (`tuple[str, ...]`, *optional*):
            Fields of the training arguments that it alone reads.
        by_episode (`Callable`, *optional*):
            `by_episode(rewards, group_size, scale)` returns advantages and deviations `(E,)` of whole episodes, for
            turns that all have the return of their episode. Without it the function is asked turn by turn.
        in_evaluation (`str`, *optional*):
            Name of the baseline that takes its place in evaluation. Defaults to the baseline itself.
    """

    name: str
    function: Callable[[Samples, str], torch.Tensor]
    needs_group: bool = False
    scales: bool = False
    uses_candidates: bool = False
    completes: bool = True
    goes_on: str = "best"
    takes_normalized_objectives: bool = False
    state: Callable[[Any], RunningBaselines] | None = None
    reads: tuple[str, ...] = ()
    by_episode: Callable[[torch.Tensor, int, str], tuple[torch.Tensor, torch.Tensor]] | None = None
    in_evaluation: str | None = None

    @property
    def settings(self) -> frozenset[str]:
        """Fields of the training arguments that only such a baseline reads."""
        of_candidates = ("turn_candidates", "candidate_samples", "continue_from") if self.uses_candidates else ()
        return frozenset([*self.reads, *of_candidates])


def _cells(
    samples: Samples, scale: str, cells: torch.Tensor, weights: torch.Tensor, batch_pools: torch.Tensor
) -> torch.Tensor:
    """Advantages in cells; the deviation is that of the cell, or of a pool of the whole batch."""
    pools = {"group": cells, "batch": batch_pools, "none": None}[scale]
    return functional.cell_advantages(samples.returns, cells, weights, pools)


def _group(samples: Samples, scale: str) -> torch.Tensor:
    return _cells(samples, scale, samples.prompts, samples.per_episode, samples.all_alike)


def _agent(samples: Samples, scale: str) -> torch.Tensor:
    cells = samples.prompts * samples.num_agents + samples.agents
    return _cells(samples, scale, cells, samples.per_turn, samples.agents)


def _turn(samples: Samples, scale: str) -> torch.Tensor:
    cells = samples.episodes * (int(samples.nodes.max()) + 1) + samples.nodes
    return _cells(samples, scale, cells, samples.per_turn, samples.all_alike)


def _leave_one_out(samples: Samples, scale: str) -> torch.Tensor:
    return functional.leave_one_out_advantages(samples.returns, samples.runs, samples.prompts, samples.per_episode)


def _c3(samples: Samples, scale: str) -> torch.Tensor:
    cells = samples.episodes * (int(samples.nodes.max()) + 1) + samples.nodes
    each = torch.arange(len(cells))
    return functional.leave_one_out_advantages(samples.returns, each, cells, samples.per_turn)


def _batch(samples: Samples, scale: str) -> torch.Tensor:
    return functional.cell_advantages(samples.returns, samples.all_alike, samples.per_episode, samples.all_alike)


def _rae(samples: Samples, scale: str) -> torch.Tensor:
    return torch.nan_to_num(samples.returns - samples.running, nan=0.0)


def _none(samples: Samples, scale: str) -> torch.Tensor:
    return torch.nan_to_num(samples.returns, nan=0.0)


BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        Baseline(
            "group",
            _group,
            needs_group=True,
            scales=True,
            takes_normalized_objectives=True,
            by_episode=functional.group_advantages,
        ),
        Baseline("agent", _agent, needs_group=True, scales=True, takes_normalized_objectives=True),
        Baseline("turn", _turn, scales=True, uses_candidates=True, in_evaluation="group"),
        Baseline("turn_itself", _turn, scales=True, uses_candidates=True, completes=False, in_evaluation="group"),
        Baseline("c3", _c3, uses_candidates=True, goes_on="sampled", in_evaluation="leave_one_out"),
        Baseline("leave_one_out", _leave_one_out, needs_group=True),
        Baseline("batch", _batch),
        Baseline("rae", _rae, state=RunningBaselines.of_args, reads=("rae_decay", "rae_column")),
        Baseline("none", _none),
    )
}
