# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""State that users' objects keep between calls: reward functions, the workflow, the maker of environments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from torch import nn


class UserState:
    """
    Saves and loads the state of users' objects that have the methods `state_dict` and `load_state_dict`. Each process
    has its own.

    Args:
        objects (`Mapping[str, Any]`): users' objects by the names that they have in checkpoints and messages.

    Raises:
        TypeError: an object has only one of the methods.
    """

    def __init__(self, objects: Mapping[str, Any]):
        self._objects = {name: one for name, one in objects.items() if _has_state(name, one)}

    @property
    def names(self) -> list[str]:
        """Names of the objects that have state."""
        return list(self._objects)

    def state_dict(self) -> dict[str, Any]:
        """
        State of the objects, a copy.

        Raises:
            TypeError: a state is not JSON-serializable. The message names the object.
        """
        states = {}
        for name, one in self._objects.items():
            state = one.state_dict()
            try:
                states[name] = json.loads(json.dumps(state, allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise TypeError(
                    f"`state_dict` of {name} must return what JSON can hold (dictionaries with text keys, lists, "
                    f"texts, finite numbers, True, False, None), for checkpoints: {error}."
                ) from error
            if states[name] != state:
                raise TypeError(
                    f"`state_dict` of {name} is not the same after a way through JSON, for instance because of tuples "
                    f"or of keys that are no texts: {_brief(state)} came back as {_brief(states[name])}."
                )
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Go on from a [`state_dict`].

        Raises:
            ValueError: the checkpoint has no state of an object, or the object does not take it.
        """
        for name, one in self._objects.items():
            if name not in state:
                raise ValueError(
                    f"The checkpoint has no state of {name}, but it has `load_state_dict`: it was written before the "
                    "object had one. Start a new run from its adapters (`load_adapters`)."
                )
            try:
                one.load_state_dict(state[name])
            except Exception as error:
                raise ValueError(
                    f"`load_state_dict` of {name} failed on the state in the checkpoint: {type(error).__name__}: "
                    f"{error}"
                ) from error
        unknown = sorted(state.keys() - self._objects.keys())
        if unknown:
            raise ValueError(
                f"The checkpoint has the state of {', '.join(unknown)}, but nothing that takes it: an object has lost "
                "its `load_state_dict`, or its place. Resume with the objects of before."
            )


def _has_state(name: str, one: Any) -> bool:
    if isinstance(one, (nn.Module, str)) or inspect.isclass(one):
        return False
    saves, loads = (callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict"))
    if saves != loads:
        has, lacks = ("state_dict", "load_state_dict") if saves else ("load_state_dict", "state_dict")
        raise TypeError(
            f"{name} ({type(one).__name__}) has `{has}` but no `{lacks}`. For a run that can be resumed it needs "
            "both, or neither."
        )
    return saves


def _brief(value: Any, limit: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
