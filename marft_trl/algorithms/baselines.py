# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Baselines and credit rules. To add one, write a function and name it in `BASELINES` or `CREDITS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..episodes.records import Turn
from . import functional


class RunningBaselines:
    """
    Exponential moving averages of returns, one for each kind of task, and for each agent where agents have returns of
    their own.

    The baseline of a generation batch is the average before it, so that it does not depend on the batch. As in Adam,
    the average is divided by `1 - decay^n` after `n` batches: after the first one it is the mean of that batch.

    Args:
        decay: weight of the average so far, in `[0, 1)`.
        column: dataset column whose values have averages of their own.

    Source: role-conditioned advantage estimation of SPIRAL (2506.24119), there updated after each episode.
    """

    def __init__(self, decay: float, column: str | None = None):
        self._decay, self._column = decay, column
        self._averages: dict[str, tuple[float, int]] = {}  # before correction, and number of batches

    @classmethod
    def of_args(cls, args: Any) -> RunningBaselines:
        """Those of `rae_decay` and `rae_column`."""
        return cls(args.rae_decay, args.rae_column)

    def key(self, agent: str, row: Mapping[str, Any], is_own: bool) -> str:
        """
        Key of the average that a turn is compared with.

        Args:
            is_own: whether every agent has its own return.
        """
        kind = "" if self._column is None else str(row[self._column])
        return f"{agent}/{kind}" if is_own else kind

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {key: list(value) for key, value in self._averages.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._averages = {key: (average, count) for key, (average, count) in state.items()}

    def of(self, keys: Sequence[str]) -> torch.Tensor:
        """Baselines `(N,)`; 0 for keys without a return so far."""
        return torch.tensor([self._of(key) for key in keys])

    def _of(self, key: str) -> float:
        average, count = self._averages.get(key, (0.0, 0))
        return average / (1 - self._decay**count) if count else average

    def update(self, keys: Sequence[str], returns: torch.Tensor, weights: torch.Tensor) -> None:
        """
        Take in the returns of a batch.

        Args:
            returns (`torch.Tensor` of shape `(N,)`): their returns, NaN where nothing scored them.
            weights (`torch.Tensor` of shape `(N,)`): their weights in the mean of the batch.
        """
        for key in sorted(set(keys)):
            mine = torch.tensor([item == key for item in keys]) & ~returns.isnan()
            if not mine.any():
                continue
            total, part = weights[mine].double(), returns[mine].double()
            average, count = self._averages.get(key, (0.0, 0))
            mean = ((total * part).sum() / total.sum()).item()
            self._averages[key] = (self._decay * average + (1 - self._decay) * mean, count + 1)


@dataclass(frozen=True, eq=False)
class Samples:
    """
    The turns of all processes with their returns. `N` turns.

    Args:
        episodes (`torch.Tensor` of shape `(N,)`): index of the episode of each turn.
        agents (`torch.Tensor` of shape `(N,)`): index of the agent of each turn.
        nodes (`torch.Tensor` of shape `(N,)`): index, inside the episode, of the turn or of the set of candidates.
        returns (`torch.Tensor` of shape `(N,)`): return of each turn; NaN where nothing scored it.
        group_size: `G`, episodes of a prompt; groups are consecutive episodes.
        num_agents: number of agents of the team.
        by_agent: whether every agent has its own return, so that the turns of different agents are not compared.
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
        name: The value of `MARFTConfig.advantage` that chooses it.
        function: `function(samples, scale)` returns advantages `(N,)`, 0 where nothing scored a turn. `scale` is
            `scale_rewards`: `"group"`, `"batch"` or `"none"`.
        needs_group: Whether it compares episodes of a prompt, so that `num_generations` has to be at least 2.
        scales: Whether it divides by the deviation that `scale_rewards` names.
        uses_candidates: Whether it compares candidates for one turn, which the trainer then samples.
        completes: Whether candidates are worth the episodes that are completed from them, and not themselves as
            answers.
        goes_on: Value of `continue_from` if none is set.
        takes_normalized_objectives: Whether it works with `multi_objective_aggregation="normalize_then_sum"`.
        state: `state(args)` makes the state of a baseline that remembers earlier batches: [`RunningBaselines`], or a
            class with its methods.
        reads: Fields of the training arguments that it alone reads.
        by_episode: `by_episode(rewards, group_size, scale)` returns advantages and deviations `(E,)` of whole
            episodes, for turns that all have the return of their episode. Without it the function is asked turn by
            turn.
        in_evaluation: Name of the baseline that takes its place in evaluation. Defaults to the baseline itself.
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


@dataclass(frozen=True)
class CreditRule:
    """
    A credit rule.

    Args:
        name: The value of `MARFTConfig.credit` that chooses it.
        share: `share(reward, turns, steps, discount, as_rewards)` returns the credit `(K,)` of the turns of an
            episode. `steps` `(K,)` are the joint steps of the turns, `discount` is `credit_discount`, and `as_rewards`
            tells whether the credit is a stream of rewards, which is summed, or the return of each turn.
        reruns: Whether it subtracts the mean reward of re-runs in which the turn is another one. `share` is not called
            then.
        removes: Whether the turn of a re-run is an empty one. Otherwise the reference of its agent samples it anew.
        scores_turns: Whether turns have rewards of their own, from reward functions of agents, which are mixed in.
        discounts: Whether it uses `credit_discount`.
        in_evaluation: Name of the rule that takes its place in evaluation. Defaults to the rule itself.
    """

    name: str
    share: Callable[[float, Sequence[Turn], torch.Tensor, float, bool], torch.Tensor]
    reruns: bool = False
    removes: bool = False
    scores_turns: bool = False
    discounts: bool = False
    in_evaluation: str | None = None

    @property
    def settings(self) -> frozenset[str]:
        """Fields of the training arguments that only such a rule reads."""
        flags = {
            "counterfactual_samples": self.reruns,
            "own_reward_weight": self.scores_turns,
            "credit_discount": self.discounts,
        }
        return frozenset(name for name, is_read in flags.items() if is_read)

    @property
    def uses_references(self) -> bool:
        """`True` if turns are sampled from references."""
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
