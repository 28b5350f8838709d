# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Names, revisions and hashes of the base, the tokenizer and the chat template that a team was trained with."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import get_config_model_id

from ..seams.models import commit_of
from .manifest import BaseModel, is_hub_id


_SAMPLED_ELEMENTS = 64
# Config fields that describe the origin or the storage of a model, not its architecture
_NOT_HASHED = frozenset(
    {
        *("_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "quantization_config"),
        *("use_cache", "pad_token_id", "eos_token_id", "bos_token_id", "_attn_implementation", "attn_implementation"),
        *("architectures", "peft_version", "is_quantized"),
    }
)


def describe_base(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, revision: str | None = None
) -> BaseModel:
    """
    Describe the base model for the manifest.

    Args:
        model ([`~transformers.PreTrainedModel`]): the base.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): its tokenizer.
        chat_template (`str`, *optional*): chat template that prompts were rendered with.
        revision (`str`, *optional*): revision that was requested. The commit that was found, if known, replaces it.
    """
    config = model.config
    name = get_config_model_id(config) or type(model).__name__
    is_local = os.path.isdir(name) or not is_hub_id(name) or not get_config_model_id(config)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    return BaseModel(
        name=os.path.basename(os.path.normpath(name)) if is_local else name,
        is_local=is_local,
        revision=None if is_local else commit_of(config) or revision,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=json.loads(json.dumps(quantization, default=str)) if quantization else None,
        config_hash=hash_of_config(config),
        tokenizer_hash=hash_of_tokenizer(tokenizer),
        chat_template_hash=None if chat_template is None else _sha256(chat_template),
    )


def hash_of_config(config: PreTrainedConfig) -> str:
    """SHA-256 of the config fields that describe the architecture and differ from the defaults of their class."""
    return _sha256(_plain(config.to_diff_dict()))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(its) for key, its in value.items() if key not in _NOT_HASHED}
    return value


def hash_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of a tokenizer's vocabulary and of its special tokens."""
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    return _sha256([sorted(tokenizer.get_vocab().items()), sorted(special.items())])


@torch.no_grad()
def hash_of_weights(model: nn.Module) -> str:
    """
    SHA-256 of evenly spaced elements of every weight of the base, adapters left out. It tells bases of the same
    architecture apart, and costs far less than reading all weights.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name or "modules_to_save" in name:
            continue
        flat = parameter.detach().reshape(-1)
        count = min(flat.numel(), _SAMPLED_ELEMENTS)
        index = torch.arange(count, device=flat.device) * max(flat.numel() // max(count, 1), 1)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(flat[index].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _sha256(data: Any) -> str:
    text = data if isinstance(data, str) else json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
