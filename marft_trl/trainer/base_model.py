# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The base model: how it is loaded, in which precision, and on which device."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel
from trl.trainer.utils import create_model_from_path

from ..adapters.manifest import MANIFEST_NAME, loading_model
from ..agents import AgentSpec
from ..config.marft_config import MARFTConfig
from ..seams.libraries import get_logger
from ..seams.models import keep_4bit_weights
from ..system.processes import device_map_kwargs, restrict_to_one_device


logger = get_logger(__name__)


def load_base(
    model: str | PreTrainedModel | PeftModel, args: MARFTConfig, quantization_config: Any, is_frozen: bool
) -> PreTrainedModel | PeftModel:
    """
    Return the base model. If `model` is a name, it is loaded like in `GRPOTrainer`, but for the precision of a frozen
    base, see [`choose_dtype`], and for its device: one process has one, and TRL's `device_map="auto"` would spread the
    base over all that the machine shows.

    The adapters are added before `GRPOTrainer.__init__` runs, so the model has to be loaded before it, too.

    Args:
        args: `model_init_kwargs`, mixed precision, the device.
        quantization_config: as in `GRPOTrainer`.
        is_frozen: whether only adapters on it are trained, see [`stays_frozen`].

    Raises:
        TypeError: `model` is neither a name nor a model.
        ValueError: `quantization_config` is set twice, or the folder is that of a team.
    """
    make_output_dir(args)
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(model, str):
        if not isinstance(model, (PreTrainedModel, PeftModel)):
            raise TypeError(
                f"`model` must be the name or folder of a model, a `PreTrainedModel` or a `PeftModel`, got "
                f"{type(model).__name__}."
            )
        if quantization_config is not None:
            logger.warning(
                "You passed `quantization_config` to the trainer, but your model is already instantiated. The "
                "`quantization_config` will be ignored."
            )
        keep_4bit_weights(model)
        _warn_of_generation_config(model, args)
        restrict_to_one_device(args, model)
        return model
    if (Path(model) / MANIFEST_NAME).is_file():
        raise ValueError(
            f"`model={model!r}` is the folder of a saved team. To continue training, load its adapters onto the base: "
            f"`model=load_adapters(AutoModelForCausalLM.from_pretrained(base), {model!r})`. For inference, use "
            f"`Team.from_pretrained({model!r})`."
        )
    # A copy: the arguments are saved with the run as the user gave them
    model_init_kwargs = dict(args.model_init_kwargs or {})
    if isinstance(quantization_config, bool):
        raise TypeError("`quantization_config` must be a config such as `BitsAndBytesConfig(load_in_4bit=True)`.")
    if quantization_config is not None:
        if "quantization_config" in model_init_kwargs:
            raise ValueError(
                "You set `quantization_config` both as a trainer argument and in `args.model_init_kwargs`. "
                "Please set it in only one place, preferably as a trainer argument."
            )
        model_init_kwargs["quantization_config"] = quantization_config
    if args.world_size > 1:
        model_init_kwargs["device_map"] = None  # "auto" fails in distributed training
    elif "device_map" not in model_init_kwargs:
        model_init_kwargs |= device_map_kwargs(args.device)
    dtype = choose_dtype(args, is_frozen)
    if dtype is not None:
        model_init_kwargs["dtype"] = dtype
        if "quantization_config" in model_init_kwargs:
            quantization = model_init_kwargs["quantization_config"]
            model_init_kwargs["quantization_config"] = computing_in(quantization, dtype)
    model_init_kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    with loading_model(model):
        base = create_model_from_path(model, **model_init_kwargs)
    keep_4bit_weights(base)
    _warn_of_generation_config(base, args)
    restrict_to_one_device(args, base)
    return base


def make_output_dir(args: Any) -> None:
    """
    Make the folder of the run, before the base is loaded, which can take minutes.

    Raises:
        ValueError: the folder cannot be created.
    """
    try:
        if args.should_save:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"The folder `output_dir={args.output_dir!r}` cannot be created: {error.strerror}: {error.filename!r}. "
            "Set `output_dir` to a folder that exists or can be created."
        ) from error


def stays_frozen(agents: Sequence[AgentSpec], peft_config: PeftConfig | None) -> bool:
    """`True` if the base of a team stays frozen and only adapters are trained."""
    configs = [config for agent in agents if (config := agent.peft_config or peft_config) is not None]
    whole = ("modules_to_save", "trainable_token_indices")  # PEFT trains copies of these in the precision of the base
    return bool(configs) and not any(getattr(config, name, None) for config in configs for name in whole)


def choose_dtype(args: MARFTConfig, is_frozen: bool) -> torch.dtype | None:
    """
    Precision of the weights of a base that is loaded by name, if the user sets none; `None` for TRL's float32.

    With mixed precision on a GPU, products of a float32 base are cast to bfloat16 in training but not in generation,
    which takes twice the memory and several times the time, and samples from other numbers than are scored. A base
    that stays frozen loses nothing that training would need, so it is loaded in bfloat16. Adapters stay in float32.
    """
    if not args.bf16 or args.device.type == "cpu" or "dtype" in (args.model_init_kwargs or {}):
        return None
    if is_frozen:
        logger.info(
            "The base is frozen and loaded in bfloat16; adapters are trained in float32. To load the base in float32, "
            "set `model_init_kwargs={'dtype': 'float32'}`."
        )
        return torch.bfloat16
    logger.info(
        "The weights of the base are trained, so they are loaded in float32, and products are computed in bfloat16. "
        "To halve their memory, set `model_init_kwargs={'dtype': 'bfloat16'}`."
    )
    return None


def computing_in(quantization_config: Any, dtype: torch.dtype | None) -> Any:
    """
    The config of a 4-bit base that computes in the precision that the base is loaded in. The default of bitsandbytes
    (0.50), float32, casts the inputs and the weights of every layer in every pass, and cannot be told from a choice:
    for float32, set the `dtype` of the base. Another precision stays.
    """
    if isinstance(quantization_config, dict):
        follows = dtype is not None and quantization_config.get("load_in_4bit")
        return {"bnb_4bit_compute_dtype": dtype, **quantization_config} if follows else quantization_config
    computes = getattr(quantization_config, "bnb_4bit_compute_dtype", None)
    if dtype is None or computes != torch.float32 or not getattr(quantization_config, "load_in_4bit", False):
        return quantization_config
    quantization_config = copy.deepcopy(quantization_config)
    quantization_config.bnb_4bit_compute_dtype = dtype
    return quantization_config


# Settings of a generation config that training arguments replace, and those that do not say what is sampled
_REPLACED = frozenset(
    {
        *("temperature", "top_p", "top_k", "repetition_penalty", "do_sample", "max_length", "max_new_tokens"),
        *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "cache_implementation"),
        *("use_cache", "cache_config", "disable_compile", "compile_config", "transformers_version"),
        *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
        "prefill_chunk_size",
    }
)


def _warn_of_generation_config(base: PreTrainedModel | PeftModel, args: MARFTConfig) -> None:
    """Warn of settings in the generation config of the base that have no effect. Only its end tokens are used."""
    config = getattr(base, "generation_config", None)
    defaults = config.to_diff_dict() if config is not None else {}
    overrides = {*(args.generation_kwargs or {}), *(["min_p"] if args.min_p is not None else [])}
    unused = {
        name: value
        for name, value in defaults.items()
        if not name.startswith("_") and name not in _REPLACED | overrides
    }
    if unused:
        logger.warning(
            "The generation config of the base sets "
            f"{', '.join(f'{name}={value!r}' for name, value in unused.items())}, which has no effect: the training "
            "arguments set how turns are sampled. To use it, set `min_p` or `generation_kwargs`."
        )
