# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The seams of models: TRL's head, transformers, PEFT, bitsandbytes."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.functional import set_adapter, set_requires_grad
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from trl.trainer.utils import add_fused_lm_head

from .libraries import get_logger
from .swapping import swapped, swapped_in_module


logger = get_logger(__name__)


class ScoringTemperature:
    """Switches the temperature that TRL's fused LM head (1.16) builds into the forward pass of a model."""

    # `models` have TRL's head at the temperature `default`; `head`: further arguments of `add_fused_lm_head`
    def __init__(self, models: Iterable[PreTrainedModel], temperatures: Iterable[float], default: float, head: dict):
        self._current = default
        # The common case needs no second forward pass and no patch
        if set(temperatures) == {default}:
            return
        for model in models:
            self._install(model, {*temperatures, default}, default, head)

    def switch_to(self, temperature: float) -> None:
        self._current = temperature

    def _install(self, model: PreTrainedModel, temperatures: set[float], default: float, head: dict) -> None:
        forwards = {default: model.forward}
        for temperature in temperatures - {default}:
            add_fused_lm_head(model, temperature=temperature, **head)
            forwards[temperature] = model.forward
            model.forward = forwards[default]

        # Keep the original signature: `generate` validates its model kwargs against it
        @functools.wraps(type(model).forward)
        def forward(_, *args, **kwargs):
            return forwards[self._current](*args, **kwargs)

        model.forward = types.MethodType(forward, model)


def fused_head(model: PreTrainedModel, hidden: torch.Tensor, tokens: torch.Tensor) -> Any:
    """TRL's fused LM head (1.16) on hidden states `(N, H)` of tokens `(N,)`. The backbone returns them, no hooks."""
    with _with_states(model, hidden):
        return model(shift_labels=tokens.unsqueeze(0), fused_lm_head=True)


class _States(BaseModelOutputWithPast):
    """Hidden states `(1, N, H)` as the output of any backbone. Its other fields are `None`."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextlib.contextmanager
def _with_states(model: PreTrainedModel, hidden: torch.Tensor) -> Iterator[list[None]]:
    """Let the backbone return these hidden states within the context. Yields a list with an entry per call."""
    states = _States(last_hidden_state=hidden.unsqueeze(0))
    calls: list[None] = []

    def forward(*args: Any, **kwargs: Any) -> _States:
        calls.append(None)
        return states

    with swapped(model.base_model, {"forward": forward, "_forward_pre_hooks": {}}):
        yield calls


@torch.no_grad()
def check_fused_head(model: PreTrainedModel, temperature: float) -> None:
    """
    Compare TRL's fused LM head (1.16), which knows a product, a scale and a cap, with the model's own logits. A model
    with another head, such as RoBERTa's, would be trained on other log-probabilities than those that it samples with.
    Raises a `ValueError` if they differ by more than the precision explains, or if the model has no backbone.
    """
    if model.base_model is model:
        raise ValueError(
            f"`{type(model).__name__}` is not supported, as in GRPOTrainer: it has no submodule "
            f"{model.base_model_prefix!r} (`base_model_prefix`), so its hidden states cannot be computed without the "
            "LM head. Use a model of another family."
        )
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if weight is None or weight.is_meta or not weight.is_floating_point():  # sharded later, or quantized
        return
    # A separate generator: the check must not move the run's random numbers
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, weight.size(1), generator=generator).to(weight.device, weight.dtype)
    ids = torch.arange(8, device=weight.device) * 7 % weight.size(0)
    with _with_states(model, hidden) as calls:
        logits = model(input_ids=ids.unsqueeze(0)).logits[0].float()
    if not calls:  # the model calls a part of its backbone (OPT), so this was a whole pass
        with contextlib.ExitStack() as stack:
            for module in model.modules():
                stack.enter_context(swapped(module, {"training": False}))
            hidden = model.base_model(input_ids=ids.unsqueeze(0)).last_hidden_state[0]
            logits = model(input_ids=ids.unsqueeze(0)).logits[0].float()
    found = fused_head(model, hidden, ids).log_probs[0].float()
    expected = (logits / temperature).log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
    gap = (found - expected).abs().max().item() * temperature
    if not gap <= (1e-3 if weight.dtype == torch.float32 else 0.25):
        raise ValueError(
            f"GRPOTrainer's scoring does not match the LM head of `{type(model).__name__}`: its log-probabilities "
            f"differ by {gap:.2g} from those of the model's logits, which the team samples from. Use a model with a "
            "linear head."
        )


@contextlib.contextmanager
def checkpointing_with_caches(backbone: nn.Module) -> Iterator[None]:
    """
    Keep the cache of checkpointed layers within the context. transformers (5.23) removes it, because it would grow
    again when a layer is run again in the backward pass. [`KeptLayer`] does not grow.
    """
    with contextlib.ExitStack() as stack:
        for module in backbone.modules():
            if getattr(module, "gradient_checkpointing", False):
                is_layer = isinstance(module, GradientCheckpointingLayer)
                # Whole models would not hand the cache on
                bent = {"_can_checkpoint_with_cache": True} if is_layer else {"gradient_checkpointing": False}
                stack.enter_context(swapped(module, bent))
        yield


def get_commit(config: Any) -> str | None:
    """Hub commit that a config (transformers 5.23) was loaded from; `None` for a local config."""
    return getattr(config, "_commit_hash", None)


def is_checkpointing(model: Any) -> bool:
    """Whether a model checkpoints gradients. transformers renamed the property in 5.23."""
    name = "is_activation_checkpointing"
    return bool(getattr(model, name) if hasattr(model, name) else model.is_gradient_checkpointing)


class AdapterLayers:
    """
    The layers of a model that hold its adapters, used instead of the model for `set_adapter`, `set_requires_grad` and
    `disable_adapter` of PEFT (0.21), which visit every module and parameter: 20 to 60 ms for 28 layers, several times
    a pass. Layers that do more than hold adapters, such as whole trained modules, are left to PEFT.
    """

    def __init__(self, model: PeftModel):
        self._model = model
        self._configs: list[Any] = []  # of the adapters that the layers were looked up for
        self._layers: list[Any] = []
        self._are_plain = True
        # By adapter: where its parameters are. They may be replaced, such as by some on another device
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}

    def modules(self) -> Iterator[nn.Module]:
        """The layers, which is all that PEFT asks for. New adapters may bring new layers."""
        configs = list(self._model.peft_config.values())
        if len(configs) != len(self._configs) or any(a is not b for a, b in zip(configs, self._configs, strict=True)):
            # The two kinds of layers that PEFT's functions look for
            kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
            self._configs = configs
            self._layers = [module for module in self._model.modules() if isinstance(module, kinds)]
            self._are_plain = all(_is_plain(layer) for layer in self._layers)
            self._places = {}
        return iter(self._layers)

    def activate(self, adapter: str) -> None:
        """Like PEFT's with `inference_mode=True`, but `requires_grad` is undefined afterwards."""
        if adapter not in self._model.peft_config:
            raise ValueError(f"The model has no adapter {adapter!r}. It has {', '.join(self._model.peft_config)}.")
        layers, tuner = list(self.modules()), self._model.base_model
        self._model.active_adapter = tuner.active_adapter = adapter
        if not self._are_plain or any(layer.merged_adapters for layer in layers):
            set_adapter(self, adapter, inference_mode=True, layer_cls=tuner.tuner_layer_cls)
            return
        for layer in layers:
            if layer._active_adapter != [adapter]:
                layer._active_adapter = [adapter]

    def set_requires_grad(self, adapters: Sequence[str], requires_grad: bool) -> None:
        layers = list(self.modules())
        if not self._are_plain:
            set_requires_grad(self, adapters, requires_grad)
            return
        for adapter in adapters:
            if adapter not in self._places:
                self._places[adapter] = [place for layer in layers for place in _places(layer, adapter)]
            for owner, name in self._places[adapter]:
                if owner[name].requires_grad != requires_grad:
                    owner[name].requires_grad_(requires_grad)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Like `PeftModel.disable_adapter`, but `requires_grad` does not change."""
        layers = list(self.modules())
        if not self._are_plain:
            with self._model.disable_adapter():
                yield
            return
        with contextlib.ExitStack() as stack:
            for layer in layers:
                stack.enter_context(swapped(layer, {"_disable_adapters": True}))
            stack.enter_context(swapped(self._model, {"_adapters_disabled": True}))
            yield


def _is_plain(layer: Any) -> bool:
    """`True` if a layer switches adapters like `BaseTunerLayer` of PEFT (0.21), by names alone."""
    return isinstance(layer, BaseTunerLayer) and all(
        getattr(type(layer), name) is getattr(BaseTunerLayer, name)
        for name in ("set_adapter", "set_requires_grad", "enable_adapters", "disable_adapters", "active_adapter")
    )


def _places(layer: Any, adapter: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Parameters of an adapter in a layer, except those that PEFT keeps frozen."""
    frozen = getattr(layer, "frozen_peft_weight_names", {}).get(adapter, ())  # not in PEFT 0.20
    for kind in layer.adapter_layer_names:
        holder = getattr(layer, kind)
        if kind in frozen or adapter not in holder:
            continue
        if isinstance(holder, nn.ParameterDict):
            yield holder._parameters, adapter
            continue
        for module in holder[adapter].modules():
            yield from ((module._parameters, name) for name, p in module._parameters.items() if p is not None)


def expert_parameters(base: PreTrainedModel) -> set[str]:
    """Names of parameters of experts that PEFT (0.21) targets instead of modules; empty for other bases."""
    config = LoraConfig(target_modules="all-linear")
    convert_peft_config_for_transformers(config, base, None)
    return set(config.target_parameters or ())


@contextlib.contextmanager
def without_adapter_name_warning() -> Iterator[None]:
    """Silence the warning of PEFT (0.21) about names within "lora_", such as "a"; [`add_adapters`] checks names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Adapter name .* should not be contained in the prefix")
        yield


@contextlib.contextmanager
def without_bitsandbytes(model: Any) -> Iterator[None]:
    """Let PEFT (0.21) add LoRA layers without importing bitsandbytes, unless the model is quantized."""
    if getattr(model, "is_quantized", False):
        yield
        return
    from peft.tuners.lora import model as lora

    absent = dict.fromkeys(("is_bnb_available", "is_bnb_4bit_available"), bool)  # `bool()` is `False`
    with swapped_in_module(lora, absent):
        yield


def keep_4bit_weights(model: nn.Module) -> None:
    """
    Keep the 4-bit layers of a model on the CPU as they were loaded. With AVX512-BF16, bitsandbytes (0.50, since
    bitsandbytes#1804) repacks the weights of a `Linear4bit` at its first pass in evaluation mode without gradients.
    From then on it computes in bfloat16, also in training mode, so log-probabilities would depend on the machine. The
    layer's own switch turns this off.
    """
    if not getattr(model, "is_loaded_in_4bit", False):
        return
    from bitsandbytes.nn import Linear4bit

    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    on_cpu = [layer for layer in layers if layer.weight.device.type == "cpu"]
    for layer in on_cpu:
        layer.support_avx512bf16_for_cpu = False
    if any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in on_cpu):
        logger.warning(
            "The 4-bit model has run in evaluation mode, so bitsandbytes repacked its weights for bfloat16, and the "
            "compute dtype that it was loaded with no longer applies. Load it again to keep this compute dtype."
        )
