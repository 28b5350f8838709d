# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Random states of users' code, apart from those of training, and the state of users' objects."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from .hints import brief


class UserState:
    """
    Saves and loads the states of users' objects with `state_dict` and `load_state_dict`, by their names in messages.
    Each process has its own. An object with only one of the methods raises a `TypeError`.
    """

    def __init__(self, objects: Mapping[str, Any]):
        self._objects = {name: item for name, item in objects.items() if _has_state(name, item)}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the states. A state that is not JSON-serializable raises a `TypeError`."""
        states = {}
        for name, item in self._objects.items():
            state = item.state_dict()
            try:
                states[name] = json.loads(json.dumps(state, allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise TypeError(
                    f"`state_dict` of {name} must return JSON-serializable data for checkpoints (dictionaries with "
                    f"string keys, lists, strings, finite numbers, True, False, None): {error}."
                ) from error
            if states[name] != state:
                raise TypeError(
                    f"`state_dict` of {name} changes when it is saved as JSON, for example because of tuples or keys "
                    f"that are not strings: {brief(repr(state), 100)} became {brief(repr(states[name]), 100)}."
                )
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states. Raises a `ValueError` if one is missing, unknown, or refused by its object."""
        for name, owner in self._objects.items():
            if name not in state:
                raise ValueError(
                    f"The checkpoint has no state of {name}, which has `load_state_dict`: it was written before the "
                    "object had this method. Start a new run from the adapters of the checkpoint (`load_adapters`)."
                )
            try:
                owner.load_state_dict(state[name])
            except Exception as error:
                raise ValueError(
                    f"`load_state_dict` of {name} failed on the state in the checkpoint: {type(error).__name__}: "
                    f"{error}"
                ) from error
        if unknown := sorted(state.keys() - self._objects.keys()):
            raise ValueError(
                f"The checkpoint has the state of {', '.join(unknown)}, but no object of this run loads it: an object "
                "was moved or removed, or lost its `load_state_dict`. Resume with the same objects."
            )


def _has_state(name: str, owner: Any) -> bool:
    if isinstance(owner, (nn.Module, str)) or inspect.isclass(owner):
        return False
    saves, loads = (callable(getattr(owner, method, None)) for method in ("state_dict", "load_state_dict"))
    if saves != loads:
        has, lacks = ("state_dict", "load_state_dict") if saves else ("load_state_dict", "state_dict")
        raise TypeError(
            f"{name} ({type(owner).__name__}) has `{has}` but no `{lacks}`. Define both, so that the run can be "
            "resumed, or neither."
        )
    return saves


class RandomStates:
    """Random states of Python, NumPy, torch on the CPU, `device`, and `others` of a base on several devices."""

    def __init__(self, device: torch.device, with_torch: bool = True, others: Sequence[torch.device] = ()):
        self.device, self._with_torch, self._others = device, with_torch, list(others)
        module = getattr(torch, device.type, None) if device.type != "cpu" else None
        self._device_module = module if hasattr(module, "get_rng_state") else None

    def capture(self) -> dict[str, Any]:
        states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
        if self._with_torch:
            states["torch"] = torch.get_rng_state()
        if self._device_module is not None:
            states["device"] = self._call_device("get_rng_state")
        if self._others and self._device_module is not None:
            states["others"] = [self._device_module.get_rng_state(other) for other in self._others]
        return states

    def restore(self, states: dict[str, Any]) -> None:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        if self._with_torch:
            torch.set_rng_state(states["torch"])
        if "device" in states and self._device_module is not None:
            self._call_device("set_rng_state", states["device"])
        if "others" in states and self._device_module is not None:
            for device, state in zip(self._others, states["others"], strict=False):
                self._device_module.set_rng_state(state, device)

    def _call_device(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._device_module, name)
        return function(*arguments) if self.device.type == "mps" else function(*arguments, self.device)


# Held while the states of the process are those of users' code, if episodes run beside training in another thread.
# Without such a thread it is not held: re-runs collect their episodes in another thread while the caller waits.
_USERS = threading.RLock()
_APART = 1_000_003  # added to the seed of users' code, so that it does not draw the same numbers as sampling


class UserRandomness:
    """
    Random states for users' code: many reward functions call `torch.manual_seed(0)`, after which every batch would
    sample the same tokens. Pass a different `seed` on every process; devices as in [`RandomStates`].
    """

    def __init__(self, seed: int, device: torch.device, others: Sequence[torch.device] = ()):
        self.device = device
        self._states = RandomStates(device, others=others)
        self._is_theirs = False
        self.shares = False  # whether episodes run beside training, in another thread
        trainer_states = self._states.capture()
        try:
            start = (seed + _APART) % 2**32
            random.seed(start)
            np.random.seed(start)
            torch.manual_seed(start)
            self._other = self._states.capture()
        finally:
            self._states.restore(trainer_states)

    def user_states(self) -> contextlib.AbstractContextManager[None]:
        """Run users' code with its own random states within the context."""
        return self._switched(True)

    def trainer_states(self) -> contextlib.AbstractContextManager[None]:
        """Switch back to the random states of training within the context, inside [`~UserRandomness.user_states`]."""
        return self._switched(False)

    @contextlib.contextmanager
    def _switched(self, to_theirs: bool) -> Iterator[None]:
        with _USERS if self.shares else contextlib.nullcontext():
            is_needed = self._is_theirs != to_theirs
            if is_needed:
                self._switch()
            try:
                yield
            finally:
                if is_needed:
                    self._switch()

    def _switch(self) -> None:
        present = self._states.capture()
        self._states.restore(self._other)
        self._other, self._is_theirs = present, not self._is_theirs

    def state_dict(self) -> dict[str, Any]:
        states = self._other
        kind, keys, *rest = states["numpy"]
        version, internal, gauss = states["python"]
        saved = {
            "python": [version, list(internal), gauss],
            "numpy": [kind, keys.tolist(), *rest],
            "torch": states["torch"].tolist(),
        }
        if "device" in states:
            saved["device"] = states["device"].tolist()
        if "others" in states:
            saved["others"] = [state.tolist() for state in states["others"]]
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        version, internal, gauss = saved["python"]
        kind, keys, *rest = saved["numpy"]
        self._other = {
            **self._other,  # keeps the state of the device if the saved run used another kind of device
            "python": (version, tuple(internal), gauss),
            "numpy": (kind, np.array(keys, dtype=np.uint32), *rest),
            "torch": torch.tensor(saved["torch"], dtype=torch.uint8),
        }
        if "device" in saved and "device" in self._other:
            self._other["device"] = torch.tensor(saved["device"], dtype=torch.uint8)
        if "others" in saved and "others" in self._other:
            self._other["others"] = [torch.tensor(state, dtype=torch.uint8) for state in saved["others"]]


class EpisodeRandomness:
    """Random states of the users' code of one episode: common ones would depend on how long servers take."""

    # `is_concurrent`: another thread trains meanwhile. Then torch has no state of the episode, and code of the episode
    # waits while that thread runs users' code
    def __init__(self, seed: int, is_concurrent: bool = False):
        self._states, self._is_concurrent = RandomStates(torch.device("cpu"), not is_concurrent), is_concurrent
        self._seed = seed % 2**32
        self._own: dict[str, Any] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        # Otherwise the thread that waits for these episodes holds the lock already
        with _USERS if self._is_concurrent else contextlib.nullcontext():
            before = self._states.capture()
            if self._own is None:
                random.seed(self._seed)
                np.random.seed(self._seed)
                if not self._is_concurrent:
                    torch.default_generator.manual_seed(self._seed)  # `torch.manual_seed` takes 2 ms
            else:
                self._states.restore(self._own)
            try:
                yield
            finally:
                self._own = self._states.capture()
                self._states.restore(before)


def undisturbed() -> contextlib.AbstractContextManager[Any]:
    """Keep other threads from running users' code, so that the random states of the process are those of training."""
    return _USERS


def make_seed(key: tuple) -> int:
    """A seed of 63 bits for a place in a run. Servers that seed alike would repeat themselves without one."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1
