# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Whether every agent learns from its own return, and what that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..episodes.records import Episode
from ..rewards import environment_reward
from ..seams.logs import get_logger
from ..seams.trl import TrlRewards
from ..system.processes import Processes


logger = get_logger(__name__)


class OwnReturns:
    """
    Rewards that agents receive by name, and whether they stay apart or are added up (`MARFTConfig.returns`).

    Args:
        setting (`str`, *optional*): `"team"`, `"agent"`, or `None`: `"agent"` from the first batch on in which an
            agent is rewarded by name.
        rewards ([`TrlRewards`]): names and weights of the reward functions.
        processes ([`Processes`]): the processes of the run.
    """

    def __init__(self, setting: str | None, rewards: TrlRewards, processes: Processes):
        self._setting, self._rewards, self._processes = setting, rewards, processes
        self._were_named = False

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {"were_named": self._were_named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._were_named = state["were_named"]

    @property
    def are_on(self) -> bool:
        """`True` if every agent learns from its own return, as far as is known."""
        return self._setting == "agent" or (self._setting is None and self._were_named)

    def note(self, episodes: Sequence[Episode]) -> bool:
        """Look at the episodes of this process in a batch. Returns whether every agent learns from its own return."""
        if self._setting is None and not self._were_named:
            named = torch.tensor([float(any(one.own for one in episodes))], dtype=torch.float64)
            self._were_named = bool(self._processes.max(named).item())
            if self._were_named:
                logger.info(
                    "Agents are rewarded by name, so every agent learns from its own return. To train all of them on "
                    "the sum, set `returns='team'`."
                )
        return self.are_on

    @property
    def weight(self) -> float:
        """Weight of rewards that are earned in the workflow; 0 if nothing counts them."""
        if environment_reward.__name__ not in self._rewards.names:
            return 0.0
        return self._rewards.weights[self._rewards.names.index(environment_reward.__name__)].item()

    def received(self, episode: Episode, agent: str) -> torch.Tensor:
        """What an agent received by name after each turn of an episode `(K,)`, weighted."""
        its = episode.own.get(agent, (0.0,) * len(episode.turns))
        return self.weight * torch.tensor(its, dtype=torch.float32)

    def shared(self, episode: Episode) -> torch.Tensor:
        """What the turns of an episode earned for all agents `(K,)`, weighted."""
        earned = self.weight * torch.tensor(episode.earned, dtype=torch.float32)
        return earned - sum((self.received(episode, agent) for agent in episode.own), torch.zeros(len(earned)))

    def of_agent(self, reward: float, episode: Episode, agent: str) -> float:
        """
        An agent's part of the reward of an episode: what all receive, and what it received by name. The reward itself
        with `returns="team"`.

        Args:
            reward (`float`): the sum of all that was received in the episode.
            episode ([`Episode`]): the episode.
            agent (`str`): name of the agent.
        """
        if self._setting == "team" or not episode.own:
            return reward
        others = sum(sum(its) for name, its in episode.own.items() if name != agent)
        return reward - self.weight * others
