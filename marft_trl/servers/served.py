# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Adapters as inference servers take them: which ones they can serve, and their tensors."""

from __future__ import annotations

import copy

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils import get_peft_model_state_dict

from ..agents import AgentSpec


# Modules whose adapters a server does not apply, or not everywhere
_HEADS = ("lm_head", "embed_tokens")


def check_servable(agent: AgentSpec, config: PeftConfig) -> None:
    """
    Raises:
        ValueError: a server would apply the adapter of an agent in part, or not at all.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"The adapter of agent {agent.name!r} is a {type(config).__name__}, but vLLM serves LoRAs. Use a "
            "`LoraConfig`, or set `use_vllm=False`."
        )
    targets = config.target_modules if isinstance(config.target_modules, (list, set, tuple)) else []
    wrong = {
        "target_parameters": config.target_parameters,
        "use_dora": config.use_dora,
        "bias": config.bias != "none",
        "modules_to_save": config.modules_to_save,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "trainable_token_indices": getattr(config, "trainable_token_indices", None),
        "target_modules": [name for name in targets if name.rpartition(".")[2] in _HEADS],
    }
    # Of a mixture of experts, PEFT has rewritten `target_modules`
    experts = "Name layers of the attention alone in `target_modules`, such as ['q_proj', 'v_proj']"
    cure = experts if config.target_parameters else "Leave it out"
    for name, is_set in wrong.items():
        if is_set:
            raise ValueError(
                f"`{name}` of the adapter of agent {agent.name!r} is {getattr(config, name)!r}, which vLLM does not "
                f"serve as the trainer computes it. {cure}, or set `use_vllm=False`."
            )


def adapter_tensors(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    """The present tensors of an adapter, by their names in PEFT's files."""
    return get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)


def zero_tensors(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    """Tensors of an adapter that changes nothing. A server that has only adapters gets the base by it."""
    return {name: torch.zeros_like(tensor) for name, tensor in adapter_tensors(model, adapter).items()}


def served_config(model: PeftModel, adapter: str) -> LoraConfig:
    """The config of an adapter, without what a server does not need."""
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode, config.base_model_name_or_path = True, None
    return config
