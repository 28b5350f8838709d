# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Adapters as they were when the team was at its best, with the state of their optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..weights.policies import Policies


BEST_NAME = "marft_best.safetensors"


class BestAdapters:
    """
    Copies of all trained adapters on the CPU.

    Args:
        policies ([`Policies`]): the adapters.
        optimizer (`Callable`): `optimizer()` returns the optimizer; `None` before there is one.
    """

    def __init__(self, policies: Policies, optimizer: Callable[[], Any]):
        self._policies, self._optimizer = policies, optimizer
        self._weights: dict[str, list[torch.Tensor]] = {}
        self._moments: dict[str, list[dict[str, Any]]] = {}
        self.restored = 0  # how often adapters have gone back

    @property
    def adapters(self) -> list[str]:
        """Adapters that there are copies of."""
        return list(self._weights)

    @property
    def _states(self) -> Any:
        """State of the optimizer by parameter."""
        optimizer = self._optimizer()
        return getattr(optimizer, "optimizer", optimizer).state if optimizer is not None else {}

    def take(self) -> None:
        """Copy all trained adapters as they are now."""
        for name in self._policies.trained:
            parameters = list(self._policies.parameters(name).values())
            self._weights[name] = [_copied(parameter.detach()) for parameter in parameters]
            self._moments[name] = [
                {key: _copied(value) for key, value in self._states.get(parameter, {}).items()}
                for parameter in parameters
            ]

    def weights(self, adapter: str) -> list[torch.Tensor]:
        """Weights of a copy, in the order and on the devices of the adapter's parameters."""
        parameters = self._policies.parameters(adapter).values()
        pairs = zip(self._weights[adapter], parameters, strict=True)
        return [tensor.to(parameter.device, parameter.dtype) for tensor, parameter in pairs]

    @torch.no_grad()
    def restore(self, adapter: str) -> None:
        """Give an adapter the weights of its copy, and its optimizer the state of that time, in place."""
        self.restored += 1
        own = list(self._policies.parameters(adapter).values())
        for parameter, tensor, moments in zip(own, self.weights(adapter), self._moments[adapter], strict=True):
            parameter.data.copy_(tensor)
            now = self._states.get(parameter)
            if now is None:
                continue
            for key in [key for key in now if key not in moments]:
                del now[key]
            for key, value in moments.items():
                is_tensor = isinstance(value, torch.Tensor)
                # Steps may be counted on the CPU
                device = now[key].device if isinstance(now.get(key), torch.Tensor) else parameter.device
                now[key] = value.to(device, copy=True) if is_tensor else value

    # ---- Saving ----

    def save(self, folder: str | Path) -> None:
        """Write the copies into a checkpoint."""
        tensors, plain = {}, {}
        for name, its in self._weights.items():
            for position, (weight, moments) in enumerate(zip(its, self._moments[name], strict=True)):
                tensors[f"{name}.{position}"] = weight.contiguous()
                for key, value in moments.items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"{name}.{position}.{key}"] = value.contiguous()
                    else:
                        plain[f"{name}.{position}.{key}"] = value
        save_file(tensors, Path(folder) / BEST_NAME, metadata={"plain": json.dumps(plain)})

    def load(self, folder: str | Path, source_of: Callable[[str], str | None] | None = None) -> None:
        """
        Load what [`~BestAdapters.save`] wrote. Adapters that the checkpoint does not have are left out.

        Args:
            folder (`str` or `Path`): the checkpoint.
            source_of (`Callable`, *optional*): name that an adapter has in the checkpoint.
        """
        path, named = Path(folder) / BEST_NAME, source_of or (lambda name: name)
        self._weights, self._moments = {}, {}
        if not path.is_file():
            return
        with safe_open(path, "pt") as opened:
            saved: dict[str, Any] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            saved |= json.loads((opened.metadata() or {}).get("plain", "{}"))
        for name in self._policies.trained:
            then, count = named(name), len(self._policies.parameters(name))
            if then is None or f"{then}.0" not in saved:
                continue
            self._weights[name] = [saved[f"{then}.{position}"] for position in range(count)]
            self._moments[name] = [
                {key.split(".", 2)[2]: value for key, value in saved.items() if key.startswith(f"{then}.{position}.")}
                for position in range(count)
            ]


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
