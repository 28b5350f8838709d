# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Baselines and credit rules. To add another, write a function and list it in `BASELINES` or `CREDITS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..episodes.records import Turn
from . import functional


class RunningBaselines:
    """
    Exponential moving averages of returns, separate for each kind of task (`column`), and for each agent if agents
    have different returns. The baseline of a generation batch is the average over earlier batches, so that it does not
    depend on the batch. As in Adam, the average is divided by `1 - decay^n` after `n` batches.

    Source: role-conditioned advantage estimation of SPIRAL (2506.24119), which updates after each episode.
    """

    def __init__(self, decay: float, column: str | None = None):
        self._decay, self._column = decay, column
        self._averages: dict[str, tuple[float, int]] = {}  # before bias correction; number of batches

    @classmethod
    def from_args(cls, args: Any) -> RunningBaselines:
        return cls(args.rae_decay, args.rae_column)

    def key(self, agent: str, row: Mapping[str, Any], is_own: bool) -> str:
        """Key of the average that is the baseline of a turn. `is_own`: every agent has an individual return."""
        kind = "" if self._column is None else str(row[self._column])
        return f"{agent}/{kind}" if is_own else kind

    def state_dict(self) -> dict[str, Any]:
        return {key: list(value) for key, value in self._averages.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averages = {key: (average, count) for key, (average, count) in state.items()}

    def lookup(self, keys: Sequence[str]) -> torch.Tensor:
        """Return the baselines `(N,)` of these keys, 0 for keys without earlier returns."""
        found = [self._averages.get(key, (0.0, 0)) for key in keys]
        return torch.tensor([average / (1 - self._decay**count) if count else average for average, count in found])

    def update(self, keys: Sequence[str], returns: torch.Tensor, weights: torch.Tensor) -> None:
        """Update the averages with the returns `(N,)` of a batch, NaN where unscored, weighted by `weights` `(N,)`."""
        for key in sorted(set(keys)):
            selected = torch.tensor([item == key for item in keys]) & ~returns.isnan()
            if not selected.any():
                continue
            weight, value = weights[selected].double(), returns[selected].double()
            average, count = self._averages.get(key, (0.0, 0))
            mean = ((weight * value).sum() / weight.sum()).item()
            self._averages[key] = (self._decay * average + (1 - self._decay) * mean, count + 1)


@dataclass(frozen=True, eq=False)
class TurnReturns:
    """The `N` turns of all processes, with their returns."""

    episodes: torch.Tensor  # (N,), index of the episode
    agents: torch.Tensor  # (N,), index of the agent
    nodes: torch.Tensor  # (N,), index of the turn, or of the set of candidates, in the episode
    returns: torch.Tensor  # (N,), NaN where nothing scored the turn
    group_size: int  # consecutive episodes per prompt
    num_agents: int
    by_agent: bool = False  # agents have individual returns, so turns of different agents are not compared
    running: torch.Tensor | None = None  # (N,), running baseline

    def _by_agent(self, index: torch.Tensor) -> torch.Tensor:
        return index * self.num_agents + self.agents if self.by_agent else index

    @property
    def prompts(self) -> torch.Tensor:
        """Index of the prompt of each turn, or of the prompt and its agent, `(N,)`."""
        return self._by_agent(self.episodes // self.group_size)

    @property
    def episode_groups(self) -> torch.Tensor:
        """Index of the episode of each turn, or of the episode and its agent, `(N,)`."""
        return self._by_agent(self.episodes)

    @property
    def per_episode(self) -> torch.Tensor:
        """Weights `(N,)` that sum to 1 over the scored turns of every episode."""
        groups = self.episode_groups
        scored = torch.bincount(groups[~self.returns.isnan()], minlength=int(groups.max()) + 1)
        return 1 / scored.clamp(min=1)[groups].float()

    @property
    def batch_group(self) -> torch.Tensor:
        """The same index `(N,)` for all turns, or for all turns of an agent."""
        return self._by_agent(torch.zeros_like(self.episodes))


@dataclass(frozen=True)
class Baseline:
    """How advantages are computed from returns, for one value of `advantage`."""

    name: str  # value of `MARFTConfig.advantage`
    # `function(samples, scale)` returns advantages `(N,)`, 0 where nothing scored a turn. `scale` is `scale_rewards`:
    # "group", "batch" or "none"
    function: Callable[[TurnReturns, str], torch.Tensor]
    needs_group: bool = False  # it compares episodes of a prompt, so `num_generations` is at least 2
    scales: bool = False  # `scale_rewards` selects the standard deviation that divides advantages
    uses_candidates: bool = False  # it compares several sampled candidates for a turn
    # The return of a candidate comes from completed episodes, else from the candidate itself
    completes_episodes: bool = True
    default_continue_from: str = "best"
    takes_normalized_objectives: bool = False  # supports `multi_objective_aggregation="normalize_then_sum"`
    # `state(args)` makes the state of a baseline that depends on earlier batches
    state: Callable[[Any], RunningBaselines] | None = None
    own_settings: tuple[str, ...] = ()  # training arguments that only this baseline reads
    # `by_episode(rewards, group_size, scale)` returns advantages and standard deviations `(E,)` of whole episodes, for
    # turns that all have the return of their episode. Without it, `function` computes advantages of single turns
    by_episode: Callable[[torch.Tensor, int, str], tuple[torch.Tensor, torch.Tensor]] | None = None
    in_evaluation: str | None = None  # name of the baseline in evaluation; by default the baseline itself

    @property
    def settings(self) -> frozenset[str]:
        """Fields of the training arguments that have an effect only with this baseline or similar baselines."""
        of_candidates = ("turn_candidates", "candidate_samples", "continue_from")
        return frozenset([*self.own_settings, *(of_candidates if self.uses_candidates else ())])


def _cells(
    samples: TurnReturns, scale: str, cells: torch.Tensor, weights: torch.Tensor, batch_pools: torch.Tensor
) -> torch.Tensor:
    """Return advantages within cells. The standard deviation is that of the cell, or of a pool of the batch."""
    pools = {"group": cells, "batch": batch_pools, "none": None}[scale]
    return functional.cell_advantages(samples.returns, cells, weights, pools)


def _group(samples: TurnReturns, scale: str) -> torch.Tensor:
    return _cells(samples, scale, samples.prompts, samples.per_episode, samples.batch_group)


def _agent(samples: TurnReturns, scale: str) -> torch.Tensor:
    cells = samples.prompts * samples.num_agents + samples.agents
    return _cells(samples, scale, cells, torch.ones_like(samples.returns), samples.agents)


def _turn(samples: TurnReturns, scale: str) -> torch.Tensor:
    cells = samples.episodes * (int(samples.nodes.max()) + 1) + samples.nodes
    return _cells(samples, scale, cells, torch.ones_like(samples.returns), samples.batch_group)


def _leave_one_out(samples: TurnReturns, scale: str) -> torch.Tensor:
    groups = samples.episode_groups
    return functional.leave_one_out_advantages(samples.returns, groups, samples.prompts, samples.per_episode)


def _c3(samples: TurnReturns, scale: str) -> torch.Tensor:
    cells = samples.episodes * (int(samples.nodes.max()) + 1) + samples.nodes
    each, weights = torch.arange(len(cells)), torch.ones_like(samples.returns)
    return functional.leave_one_out_advantages(samples.returns, each, cells, weights)


def _batch(samples: TurnReturns, scale: str) -> torch.Tensor:
    return functional.cell_advantages(samples.returns, samples.batch_group, samples.per_episode, samples.batch_group)


def _rae(samples: TurnReturns, scale: str) -> torch.Tensor:
    return torch.nan_to_num(samples.returns - samples.running, nan=0.0)


def _none(samples: TurnReturns, scale: str) -> torch.Tensor:
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
        Baseline(
            "turn_itself", _turn, scales=True, uses_candidates=True, completes_episodes=False, in_evaluation="group"
        ),
        Baseline("c3", _c3, uses_candidates=True, default_continue_from="sampled", in_evaluation="leave_one_out"),
        Baseline("leave_one_out", _leave_one_out, needs_group=True),
        Baseline("batch", _batch),
        Baseline("rae", _rae, state=RunningBaselines.from_args, own_settings=("rae_decay", "rae_column")),
        Baseline("none", _none),
    )
}


@dataclass(frozen=True)
class CreditRule:
    """How turns share the reward of an episode, for one value of `credit`."""

    name: str  # value of `MARFTConfig.credit`
    # `share(reward, turns, steps, discount, as_rewards)` returns the credit `(K,)` of the turns of an episode at joint
    # steps `(K,)`: rewards, which are summed later, or returns
    share: Callable[[float, Sequence[Turn], torch.Tensor, float, bool], torch.Tensor]
    reruns: bool = False  # subtracts the mean reward of re-runs without the turn; `share` is not called
    removes: bool = False  # re-runs have an empty turn, else one that the reference policy samples
    scores_turns: bool = False  # adds rewards of single turns from the reward functions of agents
    discounts: bool = False
    in_evaluation: str | None = None  # name of the rule in evaluation; by default the rule itself

    @property
    def settings(self) -> frozenset[str]:
        """Fields of the training arguments that have an effect only with this rule or similar rules."""
        flags = {
            "counterfactual_samples": self.reruns,
            "own_reward_weight": self.scores_turns,
            "credit_discount": self.discounts,
        }
        return frozenset(name for name, is_read in flags.items() if is_read)

    @property
    def uses_references(self) -> bool:
        return self.reruns and not self.removes


def _equal(
    reward: float, turns: Sequence[Turn], steps: torch.Tensor, discount: float, as_rewards: bool
) -> torch.Tensor:
    return functional.equal_credit(reward, steps, as_rewards)


def _step_discount(
    reward: float, turns: Sequence[Turn], steps: torch.Tensor, discount: float, as_rewards: bool
) -> torch.Tensor:
    return functional.step_discount_credit(reward, len(turns), discount)


CREDITS: dict[str, CreditRule] = {
    rule.name: rule
    for rule in (
        CreditRule("equal", _equal),
        CreditRule("step_discount", _step_discount, discounts=True),
        CreditRule("per_step", _equal, scores_turns=True, in_evaluation="equal"),
        CreditRule("counterfactual", _equal, reruns=True, in_evaluation="equal"),
        CreditRule("removed", _equal, reruns=True, removes=True, in_evaluation="equal"),
    )
}
