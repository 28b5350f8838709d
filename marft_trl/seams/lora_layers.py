# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Seams of PEFT's LoRA layers: an adapter for each row, and decoding layers with fewer kernels."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.nn import functional as F

from .swapping import swapped


# Names of the classes of PEFT (0.21) whose forward pass is that of their base layer plus B(A(dropout(x))) * scaling
PLAIN_LORAS = ("Linear", "Linear4bit", "Linear8bitLt")


class MixedLora:
    """
    Passes in which each row goes through the LoRA of its own adapter, for decoding. PEFT (0.21) runs the LoRAs of a
    layer one after the other. Here the matrices of all adapters are stacked, padded to the largest rank, and
    multiplied at once.
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
    def find_obstacle(model: Any, adapters: Sequence[str]) -> str | None:
        """Reason why rows of these adapters cannot be mixed; `None` if they can."""
        if not isinstance(model, PeftModel) or not isinstance(model.base_model, LoraModel):
            return "the adapters are not LoRA adapters"
        for module in model.modules():
            if isinstance(module, AuxiliaryTrainingWrapper):
                return "the adapters have `modules_to_save` or trainable tokens"
            if not isinstance(module, LoraLayer):
                continue
            if type(module).__name__ not in PLAIN_LORAS:
                return f"LoRA targets layers of the class {type(module).__name__}"
            if "forward" in vars(module):
                return "another library has hooked the layers"
            names = [name for name in adapters if name in module.lora_A]
            if any(name in module.lora_variant for name in names):
                return "the adapters use a variant of LoRA, such as DoRA"
            if any(module.lora_B[name].bias is not None for name in names) or module.merged:
                return "the adapters have biases or are merged"
            if len({getattr(module.lora_dropout[name], "p", 0.0) for name in names}) > 1:
                return "the adapters have different dropout rates"
        return None

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Mix passes within the context. Call [`~MixedLora.use`] before each of them."""
        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(swapped(layer, {"forward": functools.partial(self._forward, layer)}))
            stack.callback(self._stacked.clear)
            stack.callback(self._order.clear)
            yield

    def use(self, adapters: Sequence[str]) -> None:
        """Set the adapter of each row of the next pass."""
        present = set(adapters)
        self._order += [name for name in dict.fromkeys(adapters) if name not in self._order]
        # In one order, so that matrices stay stacked as they are when rows change their places
        self._names = [name for name in self._order if name in present]
        self._placed.clear()
        places = [self._names.index(name) for name in adapters]
        self._which = torch.tensor(places)
        counters = [itertools.count() for _ in self._names]
        ranks = [next(counters[place]) for place in places]  # of each row among those of its adapter
        self._most = max(ranks) + 1
        slots = [place * self._most + rank for place, rank in zip(places, ranks, strict=True)]
        self._slots = None if slots == list(range(len(self._names) * self._most)) else torch.tensor(slots)

    def _forward(self, layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = layer.base_layer(x, *args, **kwargs)
        kept = self._stacked.get(id(layer))
        if kept is None or kept[0] != self._names:  # only the latest are kept, as their order changes often
            kept = self._stacked[id(layer)] = (self._names, self._stack(layer))
        matrices = kept[1]
        if matrices is None:
            return result
        if self._which is None or x.dim() != 3 or x.size(0) != len(self._which):
            raise RuntimeError(f"A LoRA input {tuple(x.shape)} does not fit the rows of the mixed pass.")
        down, up = matrices  # (K, in, r), (K, r, out)
        dropped = next(layer.lora_dropout[name] for name in self._names if name in layer.lora_A)(x)
        if not torch.is_autocast_enabled(x.device.type):
            dropped = dropped.to(down.dtype)
        return (result + self._change(dropped, down, up)).to(result.dtype)

    def _change(self, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What LoRAs add to the rows `(B, S, in)` of a layer, `(B, S, out)`."""
        if x.device not in self._placed:  # once for all layers and tokens of a pass
            which, slots = cast(torch.Tensor, self._which), self._slots
            self._placed[x.device] = which.to(x.device), None if slots is None else slots.to(x.device)
        (count, length), (which, slots) = x.shape[:2], self._placed[x.device]
        if slots is None:  # equally many rows of each adapter stand together
            together = x.reshape(len(self._names), -1, x.size(-1))
            return torch.bmm(torch.bmm(together, down), up).view(count, length, -1)
        if length >= down.size(-1):  # fewer numbers are copied with the matrices than with the rows
            return torch.bmm(torch.bmm(x, down[which]), up[which])
        spread = x.new_zeros(len(self._names) * self._most, length, x.size(-1)).index_copy(0, slots, x)
        together = spread.view(len(self._names), -1, x.size(-1))
        found = torch.bmm(torch.bmm(together, down), up).view(spread.size(0), length, -1)
        return found.index_select(0, slots)

    def _stack(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """LoRAs of a layer, `(K, in, r)` and `(K, r, out)`; `None` if it has none."""
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
            return tuple(item.to(torch.get_autocast_dtype(device)) for item in stacked)
        return stacked

    @staticmethod
    def _pair(layer: Any, name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        down, up = layer.lora_A[name].weight.t(), layer.lora_B[name].weight.t() * layer.scaling[name]
        if missing := rank - down.size(1):
            down, up = nn.functional.pad(down, (0, missing)), nn.functional.pad(up, (0, 0, 0, missing))
        return down, up


# Layers that read the same input, by their names in a parent
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Largest error of a norm, in units of its last place: transformers rounds twice, and a fused kernel once
_ROUNDING = 4.0


class DecodingLayers:
    """
    LoRAs and norms of a model, computed with fewer kernels while tokens are decoded without gradients: for a few rows,
    launching kernels takes most of a GPU's time. PEFT (0.21) takes six for a LoRA. Here adapters are copied in the
    precision of the activations with their scale multiplied in, layers with the same input share the first product,
    and the second adds to the output in place. A norm of transformers (5.23) takes eight kernels, and `rms_norm` one.

    The copies keep their addresses, so a captured graph stays valid when an adapter changes. Results differ from
    PEFT's by rounding.
    """

    def __init__(self, model: Callable[[], Any]):
        self._model = model
        self._packs: dict[str, _Pack] = {}  # by adapter
        self._norms: list[nn.Module] | None = None

    @contextlib.contextmanager
    def on(self) -> Iterator[Hashable | None]:
        """Use these layers within the context. Yields a key of the addresses of weights, `None` if they may change."""
        with contextlib.ExitStack() as patches:
            try:
                yield self._patch(patches)
            finally:
                for pack in self._packs.values():
                    pack.forget()

    def _patch(self, patches: contextlib.ExitStack) -> Hashable | None:
        if self._norms is None:
            self._norms = [module for module in self._model().modules() if _is_plain_norm(module)]
        for norm in self._norms:
            if "forward" not in vars(norm):
                patches.enter_context(swapped(norm, {"forward": functools.partial(_rms_norm, norm)}))
        layers: dict[str, Any] = {}
        adapters: set[str] = set()
        for name, module in self._model().named_modules():
            if isinstance(module, LoraLayer) and not module.disable_adapters:
                if any(adapter in module.lora_embedding_A for adapter in module.active_adapters):
                    return None
                active = [adapter for adapter in module.active_adapters if adapter in module.lora_A]
                adapters.update(active)
                if len(adapters) > 1 or not all(_is_plain_lora(module, adapter) for adapter in active):
                    return None
                if active:
                    layers[name] = module
            elif isinstance(module, (AuxiliaryTrainingWrapper, BaseTunerLayer)) and not isinstance(module, LoraLayer):
                return None
        embeddings = self._model().get_input_embeddings().weight
        # Other weights, and those of a model that was moved, are elsewhere. Those of adapters are copied
        others = [item.data_ptr() for name, item in self._model().named_parameters() if "lora_" not in name]
        place = (*others, self._model().training)
        if not adapters:
            return "", place
        (adapter,) = adapters
        pack = self._packs.get(adapter)
        if pack is None or not pack.fits(layers, embeddings.dtype):
            pack = self._packs[adapter] = _Pack(adapter, layers, embeddings.dtype)
        pack.refresh()
        for name, layer in layers.items():
            patches.enter_context(swapped(layer, {"forward": pack.forwards[name]}))
        return pack, place


class _Pack:
    """Copies of the LoRAs of an adapter at fixed addresses."""

    def __init__(self, adapter: str, layers: Mapping[str, Any], dtype: torch.dtype):
        self._adapter, self._layers, self._dtype = adapter, dict(layers), dtype
        groups = _groups(layers)
        self._order = [layers[name] for names in groups for name in names]
        self._shapes = [tensor.shape for tensor in self._weights()]
        self._targets: list[torch.Tensor] = []
        self._groups: list[_LayerGroup] = []
        self.forwards: dict[str, Callable[..., torch.Tensor]] = {}
        for names in groups:
            pairs = [(layers[name].lora_A[adapter].weight, layers[name].lora_B[adapter].weight) for name in names]
            rank = sum(len(down) for down, _ in pairs)
            group = _LayerGroup(pairs[0][0].new_empty(rank, pairs[0][0].size(1), dtype=dtype))
            self._groups.append(group)
            start = 0
            for name, (down, up) in zip(names, pairs, strict=True):
                end, copied = start + len(down), up.new_empty(up.size(1), up.size(0), dtype=dtype)
                self._targets += [group.down[start:end], copied]
                self.forwards[name] = functools.partial(group.forward, layers[name], copied, start, end)
                start = end

    def _weights(self) -> list[torch.Tensor]:
        """A `(r, in)` and B `(r, out)` of each layer, read at each call: an adapter may act with other weights."""
        pairs = [(layer.lora_A[self._adapter].weight, layer.lora_B[self._adapter].weight) for layer in self._order]
        return [tensor.detach() for down, up in pairs for tensor in (down, up.t())]

    def fits(self, layers: Mapping[str, Any], dtype: torch.dtype) -> bool:
        same = dtype == self._dtype and layers == self._layers
        return same and [tensor.shape for tensor in self._weights()] == self._shapes

    @torch.no_grad()
    def refresh(self) -> None:
        torch._foreach_copy_(self._targets, self._weights())
        torch._foreach_mul_(self._targets[1::2], [float(layer.scaling[self._adapter]) for layer in self._order])

    def forget(self) -> None:
        for group in self._groups:
            group.source = group.product = None


class _LayerGroup:
    """Layers that read the same input: `down` `(R, in)` has the first matrices of all their LoRAs."""

    def __init__(self, down: torch.Tensor):
        self.down = down
        self.source: torch.Tensor | None = None  # the latest input
        self.product: torch.Tensor | None = None  # `(N, R)`

    def forward(
        self, layer: Any, up: torch.Tensor, start: int, end: int, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if torch.is_grad_enabled():  # another thread trains meanwhile
            return type(layer).forward(layer, x, *args, **kwargs)
        result = layer.base_layer(x, *args, **kwargs)
        if self.source is not x:
            self.source, self.product = x, F.linear(x.flatten(0, -2).to(self.down.dtype), self.down)
        product = self.product[:, start:end]  # type: ignore[index]
        if result.dtype == up.dtype and result.is_contiguous():
            result.view(-1, result.size(-1)).addmm_(product, up)
            return result
        return result + (product @ up).view(result.shape).to(result.dtype)


def _groups(layers: Mapping[str, Any]) -> list[list[str]]:
    """Names of layers, grouped by input."""
    found: dict[tuple[str, int], list[str]] = {}
    for name in layers:
        parent, _, own = name.rpartition(".")
        kind = next((index for index, names in enumerate(_SIBLINGS) if own in names), None)
        key = (name, -1) if kind is None else (parent, kind)
        found.setdefault(key, []).append(name)
    return list(found.values())


def _is_plain_lora(layer: Any, adapter: str) -> bool:
    """Whether the LoRA of a layer can be computed here: no hooks, variant, bias, merged weights or dropout."""
    if type(layer).__name__ not in PLAIN_LORAS or "forward" in vars(layer) or layer.merged:
        return False
    dropout = layer.lora_dropout[adapter]
    has_dropout = dropout.training and getattr(dropout, "p", 0.0)
    return not (has_dropout or adapter in layer.lora_variant or layer.lora_B[adapter].bias is not None)


def _rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != norm.weight.dtype or torch.is_grad_enabled():
        return type(norm).forward(norm, x)
    with torch.autocast(x.device.type, enabled=False):  # which may compute norms in float32
        return F.rms_norm(x, norm.weight.shape, norm.weight, _epsilon(norm))


def _epsilon(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.no_grad()
def _is_plain_norm(module: nn.Module) -> bool:
    """Whether `rms_norm` computes a norm of transformers within rounding, which is tried."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1 or not _epsilon(module):
        return False
    if weight.is_meta or "forward" in vars(module):  # it is elsewhere until it is called
        return False
    x = torch.linspace(-3, 3, 2 * len(weight), device=weight.device, dtype=torch.float32).sin().view(2, -1)
    x = x.to(weight.dtype)
    expected, fused = module(x), _rms_norm(module, x)
    limit = _ROUNDING * torch.finfo(weight.dtype).eps * expected.float().abs().max()
    return expected.dtype == fused.dtype and bool((fused.float() - expected.float()).abs().max() <= limit)
