# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Past copies of trained adapters, which opponents act with (`AgentSpec.copy_of`)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from ..agents import AgentSpec
from ..randomness import seed_of
from .policies import Policies


COPIES_NAME = "marft_copies.safetensors"


class PastCopies:
    """
    Pools of past copies, one for each adapter that acts as a copy of another one. A copy is known by the number of
    optimizer steps after which it was made. The adapter itself always holds the newest copy.

    Args:
        policies ([`Policies`]): the adapters.
        agents (`Sequence[AgentSpec]`): the team.

    Source: fictitious self-play with a pool of past policies, as in 1710.03748.
    """

    def __init__(self, policies: Policies, agents: Sequence[AgentSpec]):
        self._policies = policies
        specs = {agent.name: agent for agent in agents}
        self._adapters = {one.name: one.adapter for one in agents if one.copy_of is not None}
        self._specs = {one.adapter: one for one in agents if one.copy_of is not None}
        self._sources = {name: specs[str(one.copy_of)].adapter for name, one in self._specs.items()}
        self._pools: dict[str, dict[int, list[torch.Tensor]]] = {name: {} for name in self._specs}
        self._places: dict[str, dict[int, int]] = {name: {} for name in self._specs}  # of copies on servers

    @property
    def agents(self) -> list[str]:
        """Names of the agents that act with past copies."""
        return list(self._adapters)

    def steps(self, agent: str) -> list[int]:
        """The copies in the pool of an agent, the oldest first."""
        return sorted(self._pools[self._adapters[agent]])

    @torch.no_grad()
    def take(self, step: int) -> None:
        """
        Let copies join the pools that are due.

        Args:
            step (`int`): number of optimizer steps so far; 0 fills all pools with a first copy.
        """
        for name, spec in self._specs.items():
            pool = self._pools[name]
            if step % spec.copy_every or step in pool:
                continue
            copy = [p.detach().clone() for p in self._policies.parameters(self._sources[name]).values()]
            self._pools[name] = dict([*pool.items(), (step, copy)][-spec.copies :])
            self._set_places(name)
            self._set_newest(name)

    def _set_places(self, adapter: str) -> None:
        """Give each copy a place, and leave those that have one where they are."""
        kept = {step: place for step, place in self._places[adapter].items() if step in self._pools[adapter]}
        free = iter(sorted(set(range(self._specs[adapter].copies)) - set(kept.values())))
        self._places[adapter] = {step: kept[step] if step in kept else next(free) for step in self._pools[adapter]}

    def _set_newest(self, adapter: str) -> None:
        newest = self._pools[adapter][max(self._pools[adapter])]
        for mine, tensor in zip(self._policies.parameters(adapter).values(), newest, strict=True):
            mine.data.copy_(tensor)

    def draw(self, place: tuple) -> dict[str, int]:
        """
        The copy that each agent acts with in an episode.

        Args:
            place (`tuple`): place of the episode in the run, which the draw depends on.
        """
        return {
            agent: random.Random(seed_of(("copies", agent, *place))).choice(self.steps(agent))  # noqa: S311
            for agent in self._adapters
        }

    def entry(self, agent: str, step: int) -> str:
        """Name of a copy on servers, which have a place for each copy that a pool may hold."""
        adapter = self._adapters[agent]
        return copy_entries(self._specs[adapter])[self._places[adapter][step]]

    def at(self, agent: str, position: int) -> int:
        """The copy that has a place on servers; the newest one where there is none yet."""
        places = self._places[self._adapters[agent]]
        return next((step for step, place in places.items() if place == position), max(places))

    @contextlib.contextmanager
    def acting(self, agent: str, step: int) -> Iterator[None]:
        """Context manager: the adapter of an agent, which is active, has the weights of a copy."""
        adapter = self._adapters[agent]
        with self._policies.with_weights(adapter, self._pools[adapter][step]):
            yield

    def tensors(self) -> list[torch.Tensor]:
        """All copies, for the memory that they take."""
        return [tensor for pool in self._pools.values() for copy in pool.values() for tensor in copy]

    # ---- Saving ----

    def state_dict(self) -> dict[str, Any]:
        """The steps of the copies, which [`~PastCopies.save`] writes the weights of; JSON-serializable."""
        return {"steps": {adapter: sorted(pool) for adapter, pool in self._pools.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Keep the copies of a [`state_dict`], of those that were loaded.

        Raises:
            ValueError: the weights of a copy were not loaded.
        """
        for name, steps in state["steps"].items():
            missing = sorted(set(steps) - set(self._pools.get(name, {})))
            if missing:
                raise ValueError(
                    f"The checkpoint has no weights ({COPIES_NAME}) of the copy of {self._sources.get(name, name)!r} "
                    f"after step {missing[0]}. Resume from another checkpoint."
                )
            self._pools[name] = {step: self._pools[name][step] for step in steps[-self._specs[name].copies :]}
            self._set_places(name)

    def save(self, folder: str | Path) -> None:
        """Write the copies into a checkpoint."""
        tensors = {
            f"{adapter}.{step}.{position}": tensor.cpu().contiguous()
            for adapter, pool in self._pools.items()
            for step, copy in pool.items()
            for position, tensor in enumerate(copy)
        }
        save_file(tensors, Path(folder) / COPIES_NAME)

    def load(self, folder: str | Path) -> None:
        """
        Load what [`~PastCopies.save`] wrote.

        Raises:
            ValueError: the checkpoint has no copies, or those of other adapters.
        """
        path = Path(folder) / COPIES_NAME
        saved = load_file(path) if path.is_file() else {}
        pools: dict[str, dict[int, list[torch.Tensor]]] = {name: {} for name in self._pools}
        for name, pool in pools.items():
            own = list(self._policies.parameters(name).values())
            keys = [key.rpartition(".")[0] for key in saved if key.rpartition(".")[2] == "0"]
            for key in (key for key in keys if key.rpartition(".")[0] == name):
                copy = [saved.get(f"{key}.{position}") for position in range(len(own))]
                whole = [
                    its for its, mine in zip(copy, own, strict=True) if its is not None and its.shape == mine.shape
                ]
                if len(whole) == len(own):
                    pairs = zip(whole, own, strict=True)
                    pool[int(key.rpartition(".")[2])] = [its.to(mine.device, mine.dtype) for its, mine in pairs]
            if not pool:
                raise ValueError(
                    f"The checkpoint {folder} has no past copies ({COPIES_NAME}) for the adapter {name!r}. Resume "
                    "with the settings that it was written with."
                )
            pools[name] = dict(sorted(pool.items()))
        self._pools = {name: dict(list(its.items())[-self._specs[name].copies :]) for name, its in pools.items()}
        for name in pools:
            self._set_places(name)


def copy_entries(agent: AgentSpec) -> list[str]:
    """Names of the places on servers for the past copies that an agent acts with."""
    return [f"={agent.adapter}-copy-{position}" for position in range(agent.copies)]


def served_entries(agent: AgentSpec) -> list[str]:
    """Names of all that servers have of an agent: its adapter, or the places of its copies."""
    if agent.copy_of is not None:
        return copy_entries(agent)
    return [agent.adapter] if agent.has_policy else []


class TakeCopies(TrainerCallback):
    """
    Callback: copies join the pools at the end of optimizer steps.

    Args:
        copies ([`PastCopies`]): the pools.
    """

    def __init__(self, copies: PastCopies):
        self._copies = copies

    def on_step_end(self, args, state, control, **kwargs):
        self._copies.take(state.global_step)
