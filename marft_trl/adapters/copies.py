# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Past copies of trained adapters, which opponents act with (`AgentSpec.copy_of`)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback

from ..agents import AgentSpec
from ..seams.libraries import get_logger
from ..system.randomness import make_seed
from .policies import Policies


logger = get_logger(__name__)

COPIES_NAME = "marft_copies.safetensors"


class PastCopies:
    """
    Pools of past copies, one for each adapter that acts as a copy of another adapter, by the number of optimizer steps
    after which they were made. The adapter itself always holds the newest copy. Source: fictitious self-play
    (1710.03748).
    """

    def __init__(self, policies: Policies, agents: Sequence[AgentSpec]):
        self._policies = policies
        specs = {agent.name: agent for agent in agents}
        self._adapters = {item.name: item.adapter for item in agents if item.copy_of is not None}
        self._specs = {value.adapter: value for value in agents if value.copy_of is not None}
        self._sources = {name: specs[str(spec.copy_of)].adapter for name, spec in self._specs.items()}
        self._pools: dict[str, dict[int, list[torch.Tensor]]] = {name: {} for name in self._specs}
        self._slots: dict[str, dict[int, int]] = {name: {} for name in self._specs}  # server slots, by step

    @property
    def agents(self) -> list[str]:
        return list(self._adapters)

    def steps(self, agent: str) -> list[int]:
        """Steps of the copies in the pool of an agent, oldest first."""
        return sorted(self._pools[self._adapters[agent]])

    def begin(self) -> None:
        self._pools = {name: {} for name in self._specs}
        self.take(0)

    def drop_after_checkpoint(self, folder: str | Path) -> None:
        """Drop the copies that were made after a checkpoint whose adapters have been loaded."""
        self.drop_after(_parse_step(folder))

    def drop_after(self, step: int, adapters: Sequence[str] | None = None) -> None:
        """Drop the copies that were made after a step whose adapters (by default, all) have been restored."""
        for name, pool in self._pools.items():
            if adapters is not None and self._sources[name] not in adapters:
                continue
            earlier = {at: copy for at, copy in pool.items() if at <= step}
            self._pools[name] = earlier or {step: self._copy_of(name)}
            self._assign_slots(name)

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Add a copy to every pool for which one is due after `step` optimizer steps. Step 0 fills all pools."""
        for name, spec in self._specs.items():
            if step % spec.copy_every == 0 and step not in self._pools[name]:
                pool = [*self._pools[name].items(), (step, self._copy_of(self._sources[name]))]
                self._pools[name] = dict(pool[-spec.copies :])
                self._assign_slots(name)
                self._set_newest(name)

    def _copy_of(self, adapter: str) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._policies.parameters(adapter).values()]

    def _assign_slots(self, adapter: str) -> None:
        """Assign a server slot to each copy. Copies that already have a slot keep it."""
        kept = {step: place for step, place in self._slots[adapter].items() if step in self._pools[adapter]}
        free = iter(sorted(set(range(self._specs[adapter].copies)) - set(kept.values())))
        self._slots[adapter] = {step: kept[step] if step in kept else next(free) for step in self._pools[adapter]}

    def _set_newest(self, adapter: str) -> None:
        newest = self._pools[adapter][max(self._pools[adapter])]
        for parameter, tensor in zip(self._policies.parameters(adapter).values(), newest, strict=True):
            parameter.data.copy_(tensor)

    def draw(self, place: tuple) -> dict[str, int]:
        """Draw the copy that each agent acts with in an episode, whose key `place` seeds the draw."""
        return {
            agent: random.Random(make_seed(("copies", agent, *place))).choice(self.steps(agent))  # noqa: S311
            for agent in self._adapters
        }

    def entry(self, agent: str, step: int) -> str:
        """Return the name of a copy on servers, which have one slot for each copy of a full pool."""
        adapter = self._adapters[agent]
        return copy_entries(self._specs[adapter])[self._slots[adapter][step]]

    def at(self, agent: str, position: int) -> int:
        """Return the copy in a server slot, or the newest copy if the slot is empty."""
        places = self._slots[self._adapters[agent]]
        return next((step for step, place in places.items() if place == position), max(places))

    @contextlib.contextmanager
    def acting(self, agent: str, step: int) -> Iterator[None]:
        """Context manager: the active adapter of an agent has the weights of a copy."""
        adapter = self._adapters[agent]
        with self._policies.with_weights(adapter, self._pools[adapter][step]):
            yield

    def size(self) -> int:
        own = {name: self._policies.parameters(name).values() for name in self._specs}
        return sum(spec.copies * sum(p.numel() * p.element_size() for p in own[n]) for n, spec in self._specs.items())

    def state_dict(self) -> dict[str, Any]:
        """Return the steps of the copies, JSON-serializable. [`~PastCopies.save`] writes the weights."""
        return {"steps": {adapter: sorted(pool) for adapter, pool in self._pools.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep only the copies whose steps are in a [`state_dict`]. [`~PastCopies.load`] loads the weights."""
        for name, pool in self._pools.items():
            steps = [step for step in state["steps"].get(name, ()) if step in pool]
            self._pools[name] = {step: pool[step] for step in steps} or pool
            self._assign_slots(name)

    def save(self, folder: str | Path) -> None:
        tensors = {
            f"{adapter}.{step}.{position}": tensor.cpu().contiguous()
            for adapter, pool in self._pools.items()
            for step, copy in pool.items()
            for position, tensor in enumerate(copy)
        }
        save_file(tensors, Path(folder) / COPIES_NAME, metadata=self._sources)

    def load(self, folder: str | Path) -> None:
        """
        Load the copies that [`~PastCopies.save`] wrote, after the adapters of the checkpoint have been loaded. A pool
        that is not in the checkpoint starts with the current adapter.
        """
        path, saved, sources = Path(folder) / COPIES_NAME, dict[str, torch.Tensor](), dict[str, str]()
        if path.is_file():
            with safe_open(path, "pt") as opened:
                keys = list(opened.keys())
                saved, sources = {key: opened.get_tensor(key) for key in keys}, opened.metadata() or {}
        for name, source in self._sources.items():
            self._pools[name] = self._read(saved, name) if sources.get(name) == source else {}
            if not self._pools[name]:
                logger.warning(
                    f"The checkpoint {folder} has no past copies of {source!r} for the adapter {name!r}, so its pool "
                    "starts with the current adapter."
                )
                self._pools[name] = {_parse_step(folder): self._copy_of(source)}
            self._assign_slots(name)
            self._set_newest(name)

    def _read(self, saved: Mapping[str, torch.Tensor], name: str) -> dict[int, list[torch.Tensor]]:
        own = list(self._policies.parameters(name).values())
        steps = sorted(int(key.split(".")[1]) for key in saved if key.split(".")[0] == name and key.endswith(".0"))
        return {
            step: [saved[f"{name}.{step}.{k}"].to(item.device, item.dtype) for k, item in enumerate(own)]
            for step in steps[-self._specs[name].copies :]
        }


def _parse_step(folder: str | Path) -> int:
    """Return the number of optimizer steps in the name of a checkpoint folder, or 0."""
    number = Path(folder).name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def copy_entries(agent: AgentSpec) -> list[str]:
    """Return the names of the server slots for the past copies that an agent acts with."""
    return [f"={agent.adapter}-copy-{position}" for position in range(agent.copies)]


def served_entries(agent: AgentSpec) -> list[str]:
    """Return all names of an agent on servers: its adapter, or the slots of its past copies."""
    if agent.copy_of is not None:
        return copy_entries(agent)
    return [agent.adapter] if agent.has_policy else []


class PastCopiesCallback(TrainerCallback):
    def __init__(self, past_copies: PastCopies):
        self._past_copies = past_copies

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self._past_copies.begin()

    def on_step_end(self, args, state, control, **kwargs):
        self._past_copies.take(state.global_step)
