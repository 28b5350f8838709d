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
    [`find_origins`], and `further` has the models of agents that do not act with `model`. Adapters are switched only
    through this class: PEFT's `set_adapter` sets `requires_grad=False` on all others, and an adapter that is switched
    off between forward and backward loses its gradient without an error.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        agents: Sequence[AgentSpec],
        origins: Mapping[str, str] | None = None,
        further: Mapping[str, PreTrainedModel | PeftModel] | None = None,
    ):
        self._model, self._origins, further = model, dict(origins or {}), dict(further or {})
        self.further = list(dict.fromkeys(further.values()))  # models other than the trainer's
        owners = {own: name for name, own in reversed(further.items())}
        self.base_owners = {name: owners[own] for name, own in further.items()}  # the first agent on each of them
        self.has_adapters = isinstance(model, PeftModel)
        self._adapter_of = {agent.name: NO_POLICY for agent in agents}
        self.models: dict[str, PreTrainedModel | PeftModel] = {}  # by adapter, those of the critic included
        fully_trained = {model: SHARED_POLICY}  # another one has the name of the first of its agents
        for agent in (agent for agent in agents if agent.has_policy):
            own = further.get(agent.name, model)
            is_lora = isinstance(own, PeftModel)
            name = agent.adapter if is_lora else fully_trained.setdefault(own, agent.adapter)
            self._adapter_of[agent.name], self.models[name] = name, own
        self.names = sorted(self.models)
        self.trained = sorted({self._adapter_of[agent.name] for agent in agents if agent.trainable})
        models = [item for item in (model, *self.further) if isinstance(item, PeftModel)]
        self._layers = {item: AdapterLayers(item) for item in models}
        # For each adapter the names of its parameters, with the module and attribute that hold them
        self._parameter_locations: dict[str, list[tuple[str, torch.nn.Module, str]]] = {}
        self._reference_weights: dict[str, list[torch.Tensor]] = {}
        self._critics: list[str] = []
        self.has_pending_rows = False  # set by the loss, which may train on all slices of an optimizer step at once
        self.restore_requires_grad()

    def get_model(self, agent: str) -> PreTrainedModel | PeftModel:
        """The base of an agent with its adapters."""
        return self.models.get(self._adapter_of[agent], self._model)

    def is_lora(self, adapter: str) -> bool:
        """`False` for the policy of agents whose base itself is trained."""
        return isinstance(self.models[adapter], PeftModel)

    def get_adapters(self, model: PreTrainedModel | PeftModel) -> list[str]:
        """Names of the policies on a model that are saved: those of agents and of the critic."""
        return [name for name in self.saved_adapters if self.models[name] is model]

    def with_further(self, model: nn.Module) -> nn.Module:
        """The trainer's model, together with the models that the `Trainer` does not know, if there are any."""
        return nn.ModuleList([model, *self.further]) if self.further else model

    def find_trained(self, agents: Sequence[str]) -> str:
        """An adapter of agents on one base, if possible one that is trained."""
        names = {self._adapter_of[agent] for agent in agents} - {NO_POLICY}
        return min(names, key=lambda name: (name not in self.trained, name))

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
        model = self.models[adapter]
        if isinstance(model, PeftModel):
            if adapter not in self._parameter_locations:
                parts = [(name, *name.rpartition(".")[::2]) for name in adapter_parameters(model, adapter)]
                self._parameter_locations[adapter] = [
                    (name, model.get_submodule(module), attribute) for name, module, attribute in parts
                ]
            # Looked up each time, because parameters may be replaced, for example on a move to another device
            return {name: getattr(module, attribute) for name, module, attribute in self._parameter_locations[adapter]}
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def all_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of all adapters, including frozen adapters and the critic's adapters."""
        return [parameter for name in self.saved_adapters for parameter in self.parameters(name).values()]

    def add_critic(self, name: str, config: PeftConfig, model: PeftModel) -> None:
        """Add an adapter for the critic. It is trained like the other adapters, but no agent uses it."""
        with without_bitsandbytes(model):
            model.add_adapter(name, copy.deepcopy(config))
        self._critics.append(name)
        self.models[name] = model
        self.activate_first()

    def activate(self, agent: str) -> None:
        """Activate an agent's adapter. With gradient checkpointing, it must stay active until backward has run."""
        self.activate_adapter(self._adapter_of[agent])

    def activate_first(self) -> None:
        """Leave an agent's adapter active on every base, not the critic's."""
        for model in (self._model, *self.further):
            name = next((name for name in self._adapter_of.values() if self.models.get(name) is model), None)
            if name is not None:  # a loaded team may have a function in place of the agents of a base
                self.activate_adapter(name)

    def activate_adapter(self, name: str) -> None:
        """Activate an adapter by name, for example an adapter of the critic. See [`~Policies.activate`]."""
        model = self.models[name]
        if model is not self._model and model.training != self._model.training:
            model.train(self._model.training)  # TRL switches only the model that it knows
        if model in self._layers:
            self._layers[model].activate(name)
            self.restore_requires_grad()  # `activate` may change it

    def restore_requires_grad(self) -> None:
        """Set `requires_grad=True` on all trained adapters and the critic's adapters, and `False` on all others."""
        for model, layers in self._layers.items():
            trained = [name for name in (*self.trained, *self._critics) if name in model.peft_config]
            frozen = [name for name in model.peft_config if name not in trained]  # also adapters of no agent
            layers.set_requires_grad(trained, True)
            layers.set_requires_grad(frozen, False)

    def copy_references(self, copy_all: bool = False, has_kl: bool = True) -> None:
        """
        Copy the current weights as references. Adapters that do not change the base yet (`lora_B` is 0) need no copy,
        because their reference is the base, unless [`~Policies.mix_references`] will update it (`copy_all`). TRL has
        the reference of its own model. A base that is trained itself is copied only where the loss `has_kl`.
        """
        for name in self.names:
            needs_copy = copy_all or not self._is_identity(name)
            if not self.is_lora(name):
                needs_copy = has_kl and self.models[name] is not self._model
            if needs_copy:
                self._reference_weights[name] = [item.detach().clone() for item in self.parameters(name).values()]

    @torch.no_grad()
    def mix_references(self, alpha: float) -> None:
        """Set the reference of each trained adapter to `alpha * policy + (1 - alpha) * reference`."""
        for name in (name for name in self.trained if name in self._reference_weights):
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
    def base(self, model: PreTrainedModel | PeftModel | None = None) -> Iterator[None]:
        """Deactivate all adapters of a model, by default the trainer's, within the context."""
        layers = self._layers.get(model or self._model)
        if layers is None:
            raise TypeError("The base policy is not available: the base has no adapters and is trained itself.")
        with layers.disabled():
            yield
        self.restore_requires_grad()  # PEFT may have set `requires_grad=False` on all but the active adapter

    @contextlib.contextmanager
    def reference(self, agent: str) -> Iterator[None]:
        """Switch an agent to its reference within the context: the base, or the copied weights of its adapter."""
        adapter = self._adapter_of[agent]
        if self.base_is_reference(agent):
            with self.base(self.models[adapter]):
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
        model = self.models[adapter]
        config = model.peft_config[adapter] if isinstance(model, PeftModel) else None
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
    of_trl = {} if ref_model is None else {name: value.detach() for name, value in ref_model.named_parameters()}
    return policies.references() | of_trl


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
