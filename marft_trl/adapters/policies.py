# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Switch, train and freeze the adapters of a team, and keep and update their reference policies."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from ..agents import AgentSpec
from ..seams.models import AdapterLayers, without_bitsandbytes
from .lora import adapter_parameters


# Name of the only policy of a team without adapters
SHARED_POLICY = "policy"
# Adapter name of agents whose turns a function writes. No adapter can have this name
NO_POLICY = "=none"


class Policies:
    """
    The policies of a team: the parameters of each adapter, and the adapter that is active. `origins` is the result of
    [`find_origins`]. Adapters are switched only through this class: PEFT's `set_adapter` sets `requires_grad=False` on
    all others, and an adapter that is switched off between forward and backward loses its gradient without an error.
    """

    def __init__(
        self, model: PreTrainedModel | PeftModel, agents: Sequence[AgentSpec], origins: Mapping[str, str] | None = None
    ):
        self._model, self._origins = model, dict(origins or {})
        self.has_adapters = isinstance(model, PeftModel)
        names = {agent.name: agent.adapter if self.has_adapters else SHARED_POLICY for agent in agents}
        self._adapter_of = {agent.name: names[agent.name] if agent.has_policy else NO_POLICY for agent in agents}
        trained = {agent.adapter for agent in agents if agent.trainable}
        self.trained = sorted(trained) if self.has_adapters else [SHARED_POLICY]
        self.names = sorted(set(self._adapter_of.values()) - {NO_POLICY})
        self._layers = AdapterLayers(model) if isinstance(model, PeftModel) else None
        # For each adapter the names of its parameters, with the module and attribute that hold them
        self._parameter_locations: dict[str, list[tuple[str, torch.nn.Module, str]]] = {}
        self._reference_weights: dict[str, list[torch.Tensor]] = {}
        self._critics: list[str] = []
        self.has_pending_rows = False  # set by the loss, which may train on all slices of an optimizer step at once
        self.restore_requires_grad()

    def get_adapter(self, agent: str) -> str:
        """Name of an agent's adapter: `"policy"` without adapters, [`NO_POLICY`] if a function writes its turns."""
        return self._adapter_of[agent]

    def get_origin(self, adapter: str) -> str:
        return self._origins.get(adapter, "weights of the model")

    @property
    def saved_adapters(self) -> list[str]:
        """Names of the adapters that are saved: those of the agents and of the critic."""
        return [*self.names, *self._critics]

    def get_agents(self, adapter: str) -> list[str]:
        """Names of the agents that use an adapter, in team order."""
        return [agent for agent, name in self._adapter_of.items() if name == adapter]

    @property
    def trained_in_order(self) -> list[str]:
        return [name for name in dict.fromkeys(self._adapter_of.values()) if name in self.trained]

    def is_trained(self, agent: str) -> bool:
        return self.get_adapter(agent) in self.trained

    def parameters(self, adapter: str) -> dict[str, torch.nn.Parameter]:
        """Parameters of an adapter by name, in the order of the model."""
        if self.has_adapters:
            if adapter not in self._parameter_locations:
                parts = [(name, *name.rpartition(".")[::2]) for name in adapter_parameters(self._model, adapter)]
                self._parameter_locations[adapter] = [
                    (name, self._model.get_submodule(module), attribute) for name, module, attribute in parts
                ]
            # Looked up each time, because parameters may be replaced, for example on a move to another device
            return {name: getattr(module, attribute) for name, module, attribute in self._parameter_locations[adapter]}
        return {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}

    def all_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of all adapters, including frozen adapters and the critic's adapters."""
        return [parameter for name in self.saved_adapters for parameter in self.parameters(name).values()]

    def add_critic(self, name: str, config: PeftConfig) -> None:
        """Add an adapter for the critic. It is trained like the other adapters, but no agent uses it."""
        with without_bitsandbytes(self._model):
            self._model.add_adapter(name, copy.deepcopy(config))
        self._critics.append(name)
        self.activate_first()

    def activate(self, agent: str) -> None:
        """Activate an agent's adapter. With gradient checkpointing, it must stay active until backward has run."""
        self.activate_adapter(self._adapter_of[agent])

    def activate_first(self) -> None:
        self.activate_adapter(next(name for name in self._adapter_of.values() if name != NO_POLICY))

    def activate_adapter(self, name: str) -> None:
        """Activate an adapter by name, for example an adapter of the critic. See [`~Policies.activate`]."""
        if self._layers:
            self._layers.activate(name)
            self.restore_requires_grad()  # `activate` may change it

    def restore_requires_grad(self) -> None:
        """Set `requires_grad=True` on all trained adapters and the critic's adapters, and `False` on all others."""
        if self._layers:
            trained = [*self.trained, *self._critics]
            frozen = [name for name in self._model.peft_config if name not in trained]  # also adapters of no agent
            self._layers.set_requires_grad(trained, True)
            self._layers.set_requires_grad(frozen, False)

    def copy_references(self, copy_all: bool = False) -> None:
        """
        Copy the current weights as references. Adapters that do not change the base yet (`lora_B` is 0) need no copy,
        because their reference is the base, unless [`~Policies.mix_references`] will update it (`copy_all`).
        """
        for name in self.names if self.has_adapters else []:
            if copy_all or not self._is_identity(name):
                self._reference_weights[name] = [item.detach().clone() for item in self.parameters(name).values()]

    @torch.no_grad()
    def mix_references(self, alpha: float) -> None:
        """Set the reference of each trained adapter to `alpha * policy + (1 - alpha) * reference`."""
        for name in self.trained:
            parameters = self.parameters(name).values()
            for reference, parameter in zip(self._reference_weights[name], parameters, strict=True):
                reference.mul_(1.0 - alpha).add_(parameter, alpha=alpha)

    def references(self) -> dict[str, torch.Tensor]:
        """The copied references, keyed by adapter name and position of the tensor."""
        copied = self._reference_weights.items()
        return {f"{name}.{index}": tensor for name, tensors in copied for index, tensor in enumerate(tensors)}

    def base_is_reference(self, agent: str) -> bool:
        """`True` if the reference of an agent is the base without any adapter."""
        return self._adapter_of[agent] not in self._reference_weights

    @contextlib.contextmanager
    def base(self) -> Iterator[None]:
        """Deactivate all adapters within the context."""
        if self._layers is None:
            raise TypeError("The base policy is not available: the team has no adapters and trains the base itself.")
        with self._layers.disabled():
            yield
        self.restore_requires_grad()  # PEFT may have set `requires_grad=False` on all but the active adapter

    @contextlib.contextmanager
    def reference(self, agent: str) -> Iterator[None]:
        """Switch an agent to its reference within the context: the base, or the copied weights of its adapter."""
        adapter = self._adapter_of[agent]
        if self.base_is_reference(agent):
            with self.base():
                yield
            return
        self.activate(agent)
        with self.with_weights(adapter, self._reference_weights[adapter]):
            yield

    @property
    def has_pending_gradients(self) -> bool:
        """`True` between the micro-steps of an optimizer step, while gradients accumulate or rows are pending."""
        trained = [parameter for name in self.trained for parameter in self.parameters(name).values()]
        return self.has_pending_rows or any(parameter.grad is not None for parameter in trained)

    @contextlib.contextmanager
    def with_weights(self, adapter: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Replace the weights of an adapter within the context, in the order of [`~Policies.parameters`]."""
        parameters = list(self.parameters(adapter).values())
        current = [parameter.data for parameter in parameters]
        try:
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.data = tensor
            yield
        finally:
            for parameter, data in zip(parameters, current, strict=True):
                parameter.data = data

    def _is_identity(self, adapter: str) -> bool:
        config = self._model.peft_config[adapter]
        outputs = [p for name, p in self.parameters(adapter).items() if "lora_B" in name or "lora_embedding_B" in name]
        is_plain_lora = isinstance(config, LoraConfig) and not config.use_dora
        return is_plain_lora and bool(outputs) and all(not weight.any() for weight in outputs)


REFERENCES_NAME = "marft_references.safetensors"


class SyncReferences(TrainerCallback):
    """Moves references towards policies (`sync_ref_model` with adapters): the soft update of TR-DPO (2404.09656)."""

    def __init__(self, policies: Policies):
        self._policies = policies

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.ref_model_sync_steps == 0:
            self._policies.mix_references(args.ref_model_mixup_alpha)


def _references(policies: Policies, ref_model: nn.Module | None) -> dict[str, torch.Tensor]:
    """The reference weights by name: copies of the adapters, or the weights of TRL's reference model."""
    if ref_model is None:
        return policies.references()
    return {name: parameter.detach() for name, parameter in ref_model.named_parameters()}


def save_references(policies: Policies, ref_model: nn.Module | None, folder: str | Path) -> None:
    """Save the references in a checkpoint. Without them, a resumed run would use the loaded weights as references."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _references(policies, ref_model).items()}
    save_file(tensors, Path(folder) / REFERENCES_NAME)


@torch.no_grad()
def load_references(policies: Policies, ref_model: nn.Module | None, folder: str | Path) -> None:
    """Load what [`save_references`] saved, in place. Raises `ValueError` if references are missing or do not fit."""
    path = Path(folder) / REFERENCES_NAME
    saved = load_file(path) if path.is_file() else {}
    current = _references(policies, ref_model)
    if {name: value.shape for name, value in saved.items()} != {name: value.shape for name, value in current.items()}:
        raise ValueError(
            f"The checkpoint {folder} has no references ({REFERENCES_NAME}) for these policies, but "
            "`sync_ref_model=True` needs them. Resume with the settings of the run that wrote the checkpoint."
        )
    for name, tensor in current.items():
        tensor.copy_(saved[name])
