# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Metrics of agents that have returns of their own: returns, wins against one another, pools of past copies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..config.team_setup import TeamSetup
from ..rollout.own_returns import OwnReturns
from ..rollout.rollouts import Rollout
from ..weights.copies import PastCopies


class Played(NamedTuple):
    """
    What came of an episode.

    Args:
        returns (`Mapping[str, float]`): return of each agent.
        copies (`Mapping[str, int]`): past copies that agents acted with.
    """

    returns: Mapping[str, float]
    copies: Mapping[str, int]


class GameMetrics:
    """
    Computes the metrics.

    Args:
        team ([`TeamSetup`]): the team as it is trained.
        own ([`OwnReturns`]): what agents received by name.
        copies ([`PastCopies`], *optional*): pools of past copies.
    """

    def __init__(self, team: TeamSetup, own: OwnReturns, copies: PastCopies | None = None):
        self._agents, self._trained, self._own, self._copies = team.names, team.trained, own, copies

    def played(self, rollout: Rollout) -> list[Played | None]:
        """What came of the episodes of this process; `None` where nothing scored one, or all have one return."""
        if not rollout.has_own_returns:
            return [None] * len(rollout.episodes)
        return [
            Played({name: self._own.of_agent(reward, one, name) for name in self._agents}, dict(one.copies))
            if reward == reward and one.turns
            else None
            for one, reward in zip(rollout.episodes, rollout.own_rewards, strict=True)
        ]

    def metrics(self, played: Iterable[Played | None]) -> dict[str, float]:
        """
        The metrics of episodes of all processes.

        Args:
            played (`Iterable[Played]`): from [`~GameMetrics.played`].

        Returns: `agents/<name>/return`, the mean; `agents/<name>/win_rate/<other>` and `draw_rate`, how often the
        return of a trained agent is above that of another one, or the same; of an agent that acts with past copies
        `agents/<name>/copies`, their number, and win rates against each, `copy_1` being the newest.
        """
        known = [one for one in played if one is not None]
        metrics: dict[str, float] = {}
        if self._copies is not None:
            for name in self._copies.agents:
                metrics[f"agents/{name}/copies"] = float(len(self._copies.steps(name)))
        if not known:
            return metrics
        for name in self._agents:
            metrics[f"agents/{name}/return"] = sum(one.returns[name] for one in known) / len(known)
        for name in self._trained:
            for other in (other for other in self._agents if other != name):
                metrics |= _against(known, name, other, f"agents/{name}", other)
                metrics |= self._against_copies(known, name, other)
        return metrics

    def _against_copies(self, known: Sequence[Played], name: str, other: str) -> dict[str, float]:
        steps = self._copies.steps(other) if self._copies is not None and other in self._copies.agents else []
        metrics: dict[str, float] = {}
        for age, step in enumerate(reversed(steps), 1):
            its = [one for one in known if one.copies.get(other) == step]
            if its:
                metrics |= _against(its, name, other, f"agents/{name}", f"{other}/copy_{age}")
        return metrics


def _against(played: Sequence[Played], name: str, other: str, prefix: str, label: str) -> dict[str, float]:
    pairs = [(one.returns[name], one.returns[other]) for one in played]
    equal = [math.isclose(*pair, rel_tol=1e-5, abs_tol=1e-6) for pair in pairs]  # rewards add up in float32
    wins = sum(mine > theirs and not same for (mine, theirs), same in zip(pairs, equal, strict=True))
    draws = sum(equal)
    return {
        f"{prefix}/win_rate/{label}": wins / len(played),
        f"{prefix}/draw_rate/{label}": draws / len(played),
    }
