# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Create, check and copy the LoRAs of a team, or share one fully trained model among its agents."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..agents import AgentSpec
from ..seams.models import expert_parameters, without_adapter_name_warning, without_bitsandbytes
from ..seams.vision import without_vision


logger = logging.getLogger(__name__)  # that of accelerate needs the state of a trainer

# With these values of `init_lora_weights`, an adapter starts as the identity and the base does not change. Others,
# such as "pissa", change the weights of the base, which all agents share.
_IDENTITY_STARTS = (True, "gaussian", "orthogonal", "eva")


def add_adapters(
    model: PreTrainedModel | PeftModel, agents: Sequence[AgentSpec], peft_config: PeftConfig | None
) -> PreTrainedModel | PeftModel:
    """
    Add one adapter to the base model for every adapter name of the team. In a `PeftModel`, those of agents are trained
    further, and missing ones start as copies of its adapter `default`. `peft_config` is for agents without one;
    without any config, all agents share one policy. Raises `ValueError`, with the agent's name, if an adapter cannot
    share the base.
    """
    agents = [agent for agent in agents if agent.has_policy]
    if isinstance(model, PeftModel):
        return _complete(model, agents, peft_config)
    configs = {agent.adapter: agent.peft_config or peft_config for agent in agents}
    if all(config is None for config in configs.values()):
        for agent in agents:
            if not agent.trainable or agent.learning_rate is not None:
                raise ValueError(
                    f"Agent {agent.name!r} sets `{'learning_rate' if agent.trainable else 'trainable'}`, but without "
                    "a `peft_config` all agents on a base share one fully trained policy. Pass "
                    "`peft_config=LoraConfig(...)` to give each agent its own adapter, or leave the setting out."
                )
        if len(agents) > 1:
            logger.warning(
                f"No `peft_config` was passed: the {len(agents)} agents share ONE policy, and all of its "
                f"{model.num_parameters():,} weights are trained. Pass `peft_config=LoraConfig(...)` to give each "
                "agent its own adapter."
            )
        return model
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            "The model already has adapter layers. PEFT adds them in place, so a model that was passed to another "
            "trainer is no longer a plain base. Load it again, or pass the `PeftModel` itself."
        )
    for agent in agents:
        check_adapter_config(agent, configs[agent.adapter], model)
        _check_name_is_free(agent, model)
    (first, config), *others = configs.items()
    with without_adapter_name_warning(), without_bitsandbytes(model):
        base = model
        model = get_peft_model(model, without_vision(copy.deepcopy(config), base), adapter_name=first)
        for name, config in others:
            model.add_adapter(name, without_vision(copy.deepcopy(config), base))
    return model


def find_origins(model: PreTrainedModel | PeftModel, agents: Sequence[AgentSpec]) -> dict[str, str]:
    """Describe where the weights of each adapter come from, given the model before [`add_adapters`]."""
    known = model.peft_config if isinstance(model, PeftModel) else {}
    origin = "copied from the adapter 'default'" if "default" in known else "fresh"  # of new adapters
    adapters = [agent.adapter for agent in agents if agent.has_policy]
    return {adapter: "loaded" if adapter in known else origin for adapter in adapters}


def _warn_of_unused(model: PeftModel, agents: Sequence[AgentSpec], missing: Mapping[str, AgentSpec]) -> None:
    """Warn of adapters that no agent acts with, as after an agent has got another name."""
    unused = sorted(model.peft_config.keys() - {agent.adapter for agent in agents} - {"default"})
    if not unused:
        return
    new = [agent.name for agent in missing.values()]
    cure = f"`AgentSpec({(new[0] if new else agents[0].name)!r}, adapter={unused[0]!r})`"
    logger.warning(
        f"No agent uses the model's adapters {', '.join(map(repr, unused))}, so they are neither trained nor saved."
        + (f" The adapters of {', '.join(map(repr, new))} are new." if new else "")
        + f" To train an existing adapter for an agent of another name, pass {cure}. To remove it, call "
        f"`model.delete_adapter({unused[0]!r})` before you create the trainer."
    )


def _complete(model: PeftModel, agents: Sequence[AgentSpec], peft_config: PeftConfig | None) -> PeftModel:
    """Add missing adapters to a `PeftModel`, made from their agents' configs or copied from the adapter `default`."""
    base = cast(PreTrainedModel, model.get_base_model())
    missing = {agent.adapter: agent for agent in agents if agent.adapter not in model.peft_config}
    configs = {name: agent.peft_config or peft_config for name, agent in missing.items()}
    has_default = "default" in model.peft_config
    known = next((agent for agent in agents if agent.peft_config is not None and agent.adapter not in missing), None)
    if known is not None:
        raise ValueError(
            f"Agent {known.name!r} has a `peft_config`, but the model already has its adapter {known.adapter!r}. "
            "Leave the config out to continue training that adapter, or rename the agent."
        )
    if peft_config is not None and (not missing or has_default):
        raise ValueError(
            "A `peft_config` was passed with a `PeftModel`, but "
            + ("no agent is new" if not missing else "new agents copy the model's adapter 'default'")
            + ". Leave the config out to train the adapters of the model, or merge and unload them and pass the base "
            "model with the config."
        )
    for name, agent in missing.items():
        if configs[name] is None and not has_default:
            raise ValueError(
                f"Agent {agent.name!r} uses the adapter {name!r}, but the model has only {sorted(model.peft_config)}. "
                "Pass `peft_config=LoraConfig(...)` to give new agents an adapter, set `AgentSpec(adapter=...)` to an "
                "adapter of the model, or load an adapter as 'default', which missing adapters start from."
            )
        if configs[name] is not None:
            check_adapter_config(agent, configs[name], base)
        _check_name_is_free(agent, base)
    _warn_of_unused(model, agents, missing)
    for name in missing:
        with without_adapter_name_warning(), without_bitsandbytes(model):
            config = without_vision(copy.deepcopy(configs[name] or model.peft_config["default"]), base)
            model.add_adapter(name, config)
        if configs[name] is None:
            copies = adapter_parameters(model, name).values()
            for copied, source in zip(copies, adapter_parameters(model, "default").values(), strict=True):
                copied.data.copy_(source.data)
    if has_default:
        model.set_adapter(agents[0].adapter)
        model.delete_adapter("default")
    return model


def check_adapter_config(agent: AgentSpec, config: PeftConfig | None, base: PreTrainedModel) -> None:
    """Raise if an adapter with this config (also as PEFT rewrote it for a base) cannot share the base with others."""
    if config is None:
        raise ValueError(
            f"Agent {agent.name!r} has no `peft_config`, but other agents have one. Pass `peft_config=` to the "
            "trainer for the agents without their own."
        )
    if not isinstance(config, PeftConfig):
        hint = " For single agents, set `AgentSpec(peft_config=...)`." if isinstance(config, Mapping) else ""
        raise TypeError(
            f"`peft_config` must be a `peft.PeftConfig` such as `peft.LoraConfig(...)`, got {config!r} for agent "
            f"{agent.name!r}.{hint}"
        )
    if config.is_prompt_learning:
        raise ValueError(
            f"The `peft_config` of agent {agent.name!r} is a {type(config).__name__}, but prompt learning methods "
            "cannot share a base with other adapters. Use `peft.LoraConfig(...)`."
        )
    if type(config) is not LoraConfig:
        raise ValueError(
            f"The adapter of agent {agent.name!r} is a {type(config).__name__}. Teams support only LoRA (including "
            "DoRA and rsLoRA), whose tensors are checked when a saved team is loaded. Use `peft.LoraConfig(...)`."
        )
    if getattr(config.task_type, "value", config.task_type) not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"`task_type={config.task_type!r}` of the adapter of agent {agent.name!r} is for models that do not "
            "generate text, and adds layers. Set `task_type='CAUSAL_LM'`, or leave it out."
        )
    experts = expert_parameters(base) if config.target_parameters else set()
    for field, known in {"trainable_token_indices": set(), "target_parameters": experts}.items():
        if wrong := sorted(set(getattr(config, field, None) or ()) - known):
            raise ValueError(
                f"`{field}` of the adapter of agent {agent.name!r} targets parameters of the base, which all agents "
                f"share ({wrong}). Leave it out."
            )
    ranks = [config.r, *(config.rank_pattern or {}).values()]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise ValueError(f"`r` of agent {agent.name!r} must be an integer of at least 1, got {config.r!r}.")
    scales = [config.lora_alpha, *(config.alpha_pattern or {}).values()]
    if not all(isinstance(scale, (int, float)) and math.isfinite(scale) for scale in scales):
        raise ValueError(f"`lora_alpha` of agent {agent.name!r} must be a finite number, got {config.lora_alpha!r}.")
    start = config.init_lora_weights
    if start is not False and start not in _IDENTITY_STARTS:
        raise ValueError(
            f"`init_lora_weights={start!r}` of agent {agent.name!r} changes the weights of the base, which all agents "
            "and saved teams share. Use a value that leaves the base unchanged, such as the default `True`."
        )
    refused = {
        "bias": "trains biases of the base, which all agents share. Leave it out.",
        "layer_replication": "changes the layers of the base, which all agents share. Leave it out.",
        "modules_to_save": "copies whole modules for each adapter, and vLLM refuses such adapters. Add the modules to "
        "`target_modules` instead.",
    }
    for field, reason in refused.items():
        value = getattr(config, field)
        if value != "none" if field == "bias" else value:
            raise ValueError(f"`{field}={value!r}` of agent {agent.name!r} {reason}")


def _check_name_is_free(agent: AgentSpec, model: PreTrainedModel) -> None:
    """Raise if the adapter's name occurs in the names of the base's parameters: PEFT finds adapters by such parts."""
    taken = {part for name, _ in model.named_parameters() for part in name.split(".")} | {"model", "base_model"}
    if agent.adapter in taken:
        raise ValueError(
            f"Agent {agent.name!r} uses an adapter named {agent.adapter!r}, which is also part of the parameter names "
            "of the base, so PEFT could not tell them apart. Choose another name."
        )


def load_adapter_weights(model: PeftModel, adapter: str, folder: str | Path) -> None:
    """Load the weights of an adapter from its PEFT folder, in place. Raises `ValueError` if the tensors do not fit."""
    weights = load_peft_weights(str(folder), device="cpu")
    for name, parameter in adapter_parameters(model, adapter).items():
        head, _, tail = name.rpartition(f".{adapter}")
        saved = weights.get(head + tail)
        if saved is not None and saved.shape != parameter.shape:
            raise ValueError(
                f"The weights in {folder} do not fit the adapter {adapter!r}: {head + tail} has the shape "
                f"{tuple(saved.shape)} in the file and {tuple(parameter.shape)} in the model. The folder was saved "
                "with a different `peft_config` (rank) or base model."
            )
    result = set_peft_model_state_dict(model, weights, adapter_name=adapter)
    missing = sorted(set(result.missing_keys) & set(adapter_parameters(model, adapter)))
    if missing or result.unexpected_keys:
        raise ValueError(
            f"The weights in {folder} do not fit the adapter {adapter!r}: missing {missing[:3]}, unexpected "
            f"{list(result.unexpected_keys)[:3]}. The folder was saved with a different `peft_config` or base model."
        )


def load_base_weights(model: PreTrainedModel, policy: str, folder: str | Path) -> None:
    """Load the weights of a base that is trained itself, in place. Raises `ValueError` if they do not fit."""
    saved = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True).state_dict()
    present = model.state_dict()
    if {name: tensor.shape for name, tensor in saved.items()} != {n: tensor.shape for n, tensor in present.items()}:
        raise ValueError(f"The weights in {folder} do not fit the model of {policy!r}, a {type(model).__name__}.")
    model.load_state_dict(saved)


def without_adapters(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    return cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model


def linear_shape(layer: torch.nn.Module) -> tuple[int, int] | None:
    """Number of inputs and outputs of a linear layer, which may be quantized; `None` for other layers."""
    layer = getattr(layer, "base_layer", layer)
    if isinstance(layer, Conv1D):
        return layer.nx, layer.nf
    if hasattr(layer, "in_features") and hasattr(layer, "out_features"):
        return layer.in_features, layer.out_features
    return None


def adapter_parameters(model: PeftModel, adapter: str) -> dict[str, torch.nn.Parameter]:
    """Parameters of an adapter by full name, in the order of the model."""
    own: set[int] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            for holder in (getattr(module, name) for name in module.adapter_layer_names):
                if adapter in holder:
                    held = holder[adapter]
                    own |= {id(held)} if isinstance(held, torch.nn.Parameter) else set(map(id, held.parameters()))
        elif isinstance(module, AuxiliaryTrainingWrapper):
            own |= {id(p) for n, p in module.named_parameters() if adapter in n.split(".")}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in own}


def max_lora_rank(ranks: Iterable[int]) -> int:
    """Return the `--max-lora-rank` of a vLLM server for adapters: the next of the ranks that it accepts."""
    rank = max(ranks, default=0)
    return next((accepted for accepted in (1, 8, 16, 32, 64, 128, 256, 320) if accepted >= rank), 512)
