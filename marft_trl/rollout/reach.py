# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Checks that rewards reach the agents: opposed rewards cancel in the team's sum, and some agents may get none."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..seams.logs import get_logger


logger = get_logger(__name__)

# Warn if the correlation of two agents' rewards is below the first number, over at least this number of episodes
_OPPOSED, _ENOUGH_EPISODES = -0.5, 8
# Number of generation batches in a row without an advantage after which there is a warning about an agent
PATIENCE = 5


class RewardReach:
    """
    Warns or raises if rewards do not reach the agents. With `returns="team"`, the team's reward is the sum of the
    rewards of its agents, so agents with opposed rewards learn little or nothing from it. With `returns="agent"`, an
    agent that is never rewarded by name learns nothing where the team has no other rewards.

    Args:
        agents (`Sequence[str]`): names of the trained agents.
    """

    def __init__(self, agents: Sequence[str]):
        self._in_a_row = dict.fromkeys(agents, 0)
        self._warned: set[tuple[str, ...]] = set()
        self._cancelled = 0  # episodes in a row whose rewards cancel

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {"in_a_row": self._in_a_row, "warned": sorted(map(list, self._warned)), "cancelled": self._cancelled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._in_a_row |= state["in_a_row"]
        self._warned, self._cancelled = {tuple(names) for names in state["warned"]}, state["cancelled"]

    def check_acted(self, acted: Collection[str]) -> None:
        """
        Warn, once, of a batch in which nobody acted who is trained.

        Args:
            acted (`Collection[str]`): names of the agents that took a turn, of all processes.
        """
        trained = list(self._in_a_row)
        if acted and not set(acted) & set(trained) and ("", *sorted(acted)) not in self._warned:
            self._warned.add(("", *sorted(acted)))
            logger.warning(
                f"In all episodes of a batch, only {', '.join(map(repr, sorted(acted)))} took turns, and only "
                f"{', '.join(map(repr, trained))} would be trained, so nothing is learned from it. Does the workflow, "
                "or the application, ask for the agents that are to learn?"
            )

    def check_earned(self, earned: Sequence[Mapping[str, float]], is_all: bool = True) -> None:
        """
        Check the rewards that agents earned in the episodes of a batch.

        Args:
            earned (`Sequence[Mapping[str, float]]`): reward of each agent, for every episode of all processes.
            is_all (`bool`, *optional*, defaults to `True`): `True` if the team gets no other rewards.

        Raises:
            ValueError: the team gets no other rewards, and the rewards of its agents have cancelled in all of the last
                eight or more episodes in which any were earned.
        """
        some = [its for its in earned if any(its.values())]
        names = sorted({name for its in some for name, value in its.items() if value})
        if len(names) < 2:
            return
        cancel = all(abs(sum(its.values())) <= 1e-6 * sum(map(abs, its.values())) for its in some)
        self._cancelled = self._cancelled + len(some) if cancel else 0
        if is_all and self._cancelled >= _ENOUGH_EPISODES:
            raise ValueError(
                f"The rewards of the agents {', '.join(map(repr, names))} cancel in their sum in all of the last "
                f"{self._cancelled} episodes that earned some. With `returns='team'` all agents learn from the sum, "
                "so none would learn anything. Set `returns='agent'`, so that each learns from its own rewards, or "
                "give the team a reward that does not cancel."
            )
        if len(some) < _ENOUGH_EPISODES:
            return
        values = torch.tensor([[its.get(name, 0.0) for its in some] for name in names], dtype=torch.float64)
        for (i, one), (j, other) in itertools.combinations(enumerate(names), 2):
            if (one, other) in self._warned or not (values[i].std() > 0 and values[j].std() > 0):
                continue
            correlation = torch.corrcoef(values[[i, j]])[0, 1].item()
            if correlation < _OPPOSED:
                self._warned.add((one, other))
                logger.warning(
                    f"THE REWARDS OF THE AGENTS {one!r} AND {other!r} ARE OPPOSED (correlation {correlation:.2f} over "
                    f"{len(some)} episodes), but both learn from the team's sum, in which they cancel. Set "
                    "`returns='agent'`, so that each learns from its own."
                )

    def check_named(self, named: Sequence[Mapping[str, float]], acted: Sequence[str]) -> None:
        """
        Check who is rewarded, where agents receive nothing but rewards by their own names.

        Args:
            named (`Sequence[Mapping[str, float]]`): what agents received, for every episode of all processes.
            acted (`Sequence[str]`): names of the agents that acted in them.
        """
        known = {name for its in named for name in its}
        for name in acted:
            if known and name in self._in_a_row and name not in known and (name, "") not in self._warned:
                self._warned.add((name, ""))
                logger.warning(
                    f"NO REWARD CAN REACH THE AGENT {name!r}: every agent learns from its own rewards, and none of "
                    f"{len(named)} episodes rewards it by name (only {', '.join(map(repr, sorted(known)))}). Reward "
                    "it in the mapping, give the team a reward function, or set `returns='team'`."
                )

    def note_advantages(self, have_some: Mapping[str, bool]) -> None:
        """
        Check the advantages of a generation batch.

        Args:
            have_some (`Mapping[str, bool]`): `True` for each trained agent that has a turn with a non-zero advantage
                on any process.
        """
        if not any(have_some.values()):  # no agent has an advantage; other metrics show this
            return
        for name, has_some in have_some.items():
            self._in_a_row[name] = 0 if has_some else self._in_a_row[name] + 1
            if self._in_a_row[name] == PATIENCE and (name,) not in self._warned:
                self._warned.add((name,))
                logger.warning(
                    f"NO REWARD REACHES THE AGENT {name!r}: in {PATIENCE} generation batches in a row none of its "
                    "turns had an advantage, or it did not speak, while other agents learned. Look at its turns in "
                    "the transcripts (`log_completions=True`), at `credit` and `advantage`, and at whether the "
                    "workflow lets it speak."
                )
