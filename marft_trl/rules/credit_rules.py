# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Credit rules: the part of the team's reward that each turn gets.

To add one, write a function of the reward and the turns and give it a name in `CREDITS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import functional
from ..episodes.records import Turn


@dataclass(frozen=True)
class CreditRule:
    """
    A credit rule.

    Args:
        name (`str`):
            The value of `MARFTConfig.credit` that chooses it.
        share (`Callable`):
            `share(reward, turns, steps, discount, as_rewards)` returns the credit `(K,)` of the turns of an episode.
            `steps` `(K,)` are the joint steps of the turns, `discount` is `credit_discount`, and `as_rewards` tells
            whether the credit is a stream of rewards, which is summed, or the return of each turn.
        reruns (`bool`, *optional*, defaults to `False`):
            Whether it subtracts the mean reward of re-runs in which the turn is another one. `share` is not called
            then.
        removes (`bool`, *optional*, defaults to `False`):
            Whether the turn of a re-run is an empty one. Otherwise the reference of its agent samples it anew.
        scores_turns (`bool`, *optional*, defaults to `False`):
            Whether turns have rewards of their own, from reward functions of agents, which are mixed in.
        discounts (`bool`, *optional*, defaults to `False`):
            Whether it uses `credit_discount`.
        in_evaluation (`str`, *optional*):
            Name of the rule that takes its place in evaluation. Defaults to the rule itself.
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
