# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Past copies of trained adapters, which opponents act with (`AgentSpec.copy_of`)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback

from ..agents import AgentSpec
from ..seams.libraries import get_logger
from ..system.randomness import seed_of
from .policies import Policies


logger = get_logger(__name__)

COPIES_NAME = "marft_copies.safetensors"


class PastCopies:
    """
    Pools of past copies, one for each adapter that acts as a copy of another one. A copy is known by the number of
    optimizer steps after which it was made. The adapter itself always holds the newest copy.

    Source: fictitious self-play with a pool of past policies, as in 1710.03748.
    """

    def __init__(self, policies: Policies, agents: Sequence[AgentSpec]):
        self._policies = policies
        specs = {agent.name: agent for agent in agents}
        self._adapters = {item.name: item.adapter for item in agents if item.copy_of is not None}
        self._specs = {value.adapter: value for value in agents if value.copy_of is not None}
        self._sources = {name: specs[str(spec.copy_of)].adapter for name, spec in self._specs.items()}
        self._pools: dict[str, dict[int, list[torch.Tensor]]] = {name: {} for name in self._specs}
        self._places: dict[str, dict[int, int]] = {name: {} for name in self._specs}  # of copies on servers

    @property
    def agents(self) -> list[str]:
        """Names of the agents that act with past copies."""
        return list(self._adapters)

    def steps(self, agent: str) -> list[int]:
        """The copies in the pool of an agent, the oldest first."""
        return sorted(self._pools[self._adapters[agent]])

    def begin(self) -> None:
        """Fill all pools with a first copy, in place of what is there."""
        self._pools = {name: {} for name in self._specs}
        self.take(0)

    def go_back_to(self, folder: str | Path) -> None:
        """Forget copies that are later than a checkpoint whose adapters were loaded."""
        self.forget_after(_step_of(folder))

    def forget_after(self, step: int, adapters: Sequence[str] | None = None) -> None:
        """
        Forget copies that are later than a step whose adapters are back.

        Args:
            adapters (`Sequence[str]`, *optional*): the adapters that are back. Defaults to all.
        """
        for name, pool in self._pools.items():
            if adapters is not None and self._sources[name] not in adapters:
                continue
            earlier = {at: copy for at, copy in pool.items() if at <= step}
            newest = [p.detach().clone() for p in self._policies.parameters(name).values()]
            self._pools[name] = earlier or {step: newest}
            self._set_places(name)

    @torch.no_grad()
    def take(self, step: int) -> None:
        """
        Let copies join the pools that are due.

        Args:
            step (`int`): number of optimizer steps so far; 0 fills all pools with a first copy.
        """
        for name, spec in self._specs.items():
            if step % spec.copy_every == 0 and step not in self._pools[name]:
                self._add(name, step)

    def _add(self, adapter: str, step: int) -> None:
        copy = [p.detach().clone() for p in self._policies.parameters(self._sources[adapter]).values()]
        pool = [*self._pools[adapter].items(), (step, copy)]
        self._pools[adapter] = dict(pool[-self._specs[adapter].copies :])
        self._set_places(adapter)
        self._set_newest(adapter)

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

    def size(self) -> int:
        """Bytes of full pools."""
        own = {name: self._policies.parameters(name).values() for name in self._specs}
        return sum(spec.copies * sum(p.numel() * p.element_size() for p in own[n]) for n, spec in self._specs.items())

    # ---- Saving ----

    def state_dict(self) -> dict[str, Any]:
        """The steps of the copies, which [`~PastCopies.save`] writes the weights of; JSON-serializable."""
        return {"steps": {adapter: sorted(pool) for adapter, pool in self._pools.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the copies of a [`state_dict`], of those that are there: [`~PastCopies.load`] has their weights."""
        for name, pool in self._pools.items():
            steps = [step for step in state["steps"].get(name, ()) if step in pool]
            self._pools[name] = {step: pool[step] for step in steps} or pool
            self._set_places(name)

    def save(self, folder: str | Path) -> None:
        """Write the copies into a checkpoint."""
        tensors = {
            f"{adapter}.{step}.{position}": tensor.cpu().contiguous()
            for adapter, pool in self._pools.items()
            for step, copy in pool.items()
            for position, tensor in enumerate(copy)
        }
        save_file(tensors, Path(folder) / COPIES_NAME, metadata=self._sources)

    def load(self, folder: str | Path, source_of: Callable[[str], str | None] | None = None) -> None:
        """
        Load what [`~PastCopies.save`] wrote. A pool that the checkpoint does not have begins with the present adapter.

        Args:
            folder (`str` or `Path`): the checkpoint, whose adapters are loaded.
        """
        path, named = Path(folder) / COPIES_NAME, source_of or (lambda name: name)
        saved: dict[str, torch.Tensor] = {}
        sources: dict[str, str] = {}
        if path.is_file():
            with safe_open(path, "pt") as opened:
                keys = list(opened.keys())
                saved, sources = {key: opened.get_tensor(key) for key in keys}, opened.metadata() or {}
        for name, source in self._sources.items():
            then = named(name)
            is_same = then is not None and then in sources and sources[then] == named(source)
            self._pools[name] = self._read(saved, str(then), name) if is_same else {}
            if not self._pools[name]:
                logger.warning(
                    f"The checkpoint {folder} has no past copies of {source!r} for the adapter {name!r}: its pool "
                    "begins anew."
                )
                self._add(name, _step_of(folder))
            self._set_places(name)
            self._set_newest(name)

    def _read(self, saved: Mapping[str, torch.Tensor], then: str, name: str) -> dict[int, list[torch.Tensor]]:
        """The latest copies of an adapter in a file, by step."""
        own = list(self._policies.parameters(name).values())
        steps = sorted(int(key.split(".")[1]) for key in saved if key.split(".")[0] == then and key.endswith(".0"))
        return {
            step: [saved[f"{then}.{step}.{k}"].to(mine.device, mine.dtype) for k, mine in enumerate(own)]
            for step in steps[-self._specs[name].copies :]
        }


def _step_of(folder: str | Path) -> int:
    """Number of optimizer steps of a checkpoint, by its name."""
    number = Path(folder).name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def copy_entries(agent: AgentSpec) -> list[str]:
    """Names of the places on servers for the past copies that an agent acts with."""
    return [f"={agent.adapter}-copy-{position}" for position in range(agent.copies)]


def served_entries(agent: AgentSpec) -> list[str]:
    """Names of all that servers have of an agent: its adapter, or the places of its copies."""
    if agent.copy_of is not None:
        return copy_entries(agent)
    return [agent.adapter] if agent.has_policy else []


class TakeCopies(TrainerCallback):
    """Callback: copies join the pools at the end of optimizer steps."""

    def __init__(self, copies: PastCopies):
        self._copies = copies

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self._copies.begin()

    def on_step_end(self, args, state, control, **kwargs):
        self._copies.take(state.global_step)
