# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The seam of PEFT for passes in which every row has an adapter of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer, LoraModel
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn


# Names of the classes of PEFT (0.21) whose forward pass is that of their base layer plus B(A(dropout(x))) * scaling
PLAIN_LORAS = ("Linear", "Linear4bit", "Linear8bitLt")


class MixedLora:
    """
    Passes in which each row goes through the LoRA of its own adapter.

    PEFT (0.21) has `adapter_names` for inference: it refuses them in training mode, and runs the LoRAs of a layer one
    after the other. Here the matrices of all adapters are stacked, filled up with zeros to the largest rank, and each
    layer multiplies its rows with theirs at once. While it is on, layers have a forward pass of their own, so it does
    not go with gradient checkpointing, which runs forward passes again later.

    Args:
        model ([`~peft.PeftModel`]): a model with several LoRAs.
    """

    def __init__(self, model: PeftModel):
        self._layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        self._order: list[str] = []  # of the adapters of all passes
        self._names: list[str] = []  # of the adapters of a pass
        self._which: torch.Tensor | None = None  # the adapter of each row
        self._slots: torch.Tensor | None = None  # the place of each row, if rows of an adapter stand together
        self._most = 0  # rows of the adapter that has most of them
        self._placed: dict[torch.device, tuple[torch.Tensor, torch.Tensor | None]] = {}  # both, on devices
        self._stacked: dict[int, tuple[list[str], tuple[torch.Tensor, torch.Tensor] | None]] = {}

    @staticmethod
    def why_not(model: Any, adapters: Sequence[str]) -> str | None:
        """Reason why rows of these adapters cannot be mixed, or `None` if they can."""
        if not isinstance(model, PeftModel) or not isinstance(model.base_model, LoraModel):
            return "adapters are not LoRAs"
        for module in model.modules():
            if isinstance(module, AuxiliaryTrainingWrapper):
                return "adapters have modules that are trained as a whole"
            if not isinstance(module, LoraLayer):
                continue
            if type(module).__name__ not in PLAIN_LORAS:
                return f"layers of the class {type(module).__name__} have LoRAs"
            if "forward" in vars(module):
                return "their layers have hooks of others"
            its = [name for name in adapters if name in module.lora_A]
            if any(name in module.lora_variant for name in its):
                return "they are variants of LoRA, such as DoRA"
            if any(module.lora_B[name].bias is not None for name in its) or module.merged:
                return "they have biases, or are merged"
            if len({getattr(module.lora_dropout[name], "p", 0.0) for name in its}) > 1:
                return "their dropout differs"
        return None

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Context manager: passes are mixed. Before each of them, [`~MixedLora.use`] says whose rows it has."""
        for layer in self._layers:
            layer.forward = functools.partial(self._forward, layer)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward
            self._stacked.clear()
            self._order.clear()

    def use(self, adapters: Sequence[str]) -> None:
        """The adapter of each row of the next pass."""
        present = set(adapters)
        self._order += [name for name in dict.fromkeys(adapters) if name not in self._order]
        # In one order, so that matrices stay stacked as they are when rows change their places
        self._names = [name for name in self._order if name in present]
        self._placed.clear()
        places = [self._names.index(name) for name in adapters]
        self._which = torch.tensor(places)
        counts = [0] * len(self._names)
        ranks = []
        for place in places:
            ranks.append(counts[place])
            counts[place] += 1
        self._most = max(counts)
        slots = [place * self._most + rank for place, rank in zip(places, ranks, strict=True)]
        self._slots = None if slots == list(range(len(self._names) * self._most)) else torch.tensor(slots)

    def _forward(self, layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = layer.base_layer(x, *args, **kwargs)
        matrices = self._matrices(layer)
        if matrices is None:
            return result
        if self._which is None or x.dim() != 3 or x.size(0) != len(self._which):
            raise RuntimeError(f"A layer got {tuple(x.shape)} in a pass whose rows have adapters of their own.")
        down, up = matrices  # (K, in, r), (K, r, out)
        dropped = next(iter(layer.lora_dropout[name] for name in self._names if name in layer.lora_A))(x)
        if not torch.is_autocast_enabled(x.device.type):
            dropped = dropped.to(down.dtype)
        return (result + self._change(dropped, down, up)).to(result.dtype)

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The adapter and the place of each row, once on a device for all layers and tokens of a pass."""
        if device not in self._placed:
            which, slots = cast(torch.Tensor, self._which), self._slots
            self._placed[device] = which.to(device), None if slots is None else slots.to(device)
        return self._placed[device]

    def _change(self, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What LoRAs add to the rows `(B, S, in)` of a layer, `(B, S, out)`."""
        (count, length), (which, slots) = x.shape[:2], self._on(x.device)
        if slots is None:  # equally many rows of each adapter stand together
            together = x.reshape(len(self._names), -1, x.size(-1))
            return torch.bmm(torch.bmm(together, down), up).view(count, length, -1)
        if length >= down.size(-1):  # fewer numbers are copied with the matrices than with the rows
            return torch.bmm(torch.bmm(x, down[which]), up[which])
        spread = x.new_zeros(len(self._names) * self._most, length, x.size(-1)).index_copy(0, slots, x)
        together = spread.view(len(self._names), -1, x.size(-1))
        found = torch.bmm(torch.bmm(together, down), up).view(spread.size(0), length, -1)
        return found.index_select(0, slots)

    def _matrices(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """
        The LoRAs of a layer, `(K, in, r)` and `(K, r, out)`, once for passes with the same adapters. Only the latest
        are kept: while rows end in decoding, the order of adapters changes again and again.
        """
        kept = self._stacked.get(id(layer))
        if kept is None or kept[0] != self._names:
            kept = self._stacked[id(layer)] = (self._names, self._stack(layer))
        return kept[1]

    def _stack(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        present = [name for name in self._names if name in layer.lora_A]
        if not present:
            return None
        rank = max(layer.lora_A[name].weight.size(0) for name in present)
        first = present[0]
        nothing = (
            torch.zeros_like(layer.lora_A[first].weight[:1]).expand(rank, -1).t(),
            torch.zeros_like(layer.lora_B[first].weight[:, :1]).expand(-1, rank).t(),
        )
        pairs = [self._pair(layer, name, rank) if name in present else nothing for name in self._names]
        stacked = torch.stack([down for down, _ in pairs]), torch.stack([up for _, up in pairs])
        device = stacked[0].device.type
        if torch.is_autocast_enabled(device) and not torch.is_grad_enabled():
            # Autocast would cast them for every token: it remembers casts of parameters alone
            return tuple(one.to(torch.get_autocast_dtype(device)) for one in stacked)
        return stacked

    @staticmethod
    def _pair(layer: Any, name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        down, up = layer.lora_A[name].weight.t(), layer.lora_B[name].weight.t() * layer.scaling[name]
        missing = rank - down.size(1)
        if missing:
            down, up = nn.functional.pad(down, (0, missing)), nn.functional.pad(up, (0, 0, 0, missing))
        return down, up
