# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The base models of a team: what cannot work, loading, and how those that TRL does not know take turns."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from datasets import Dataset
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..adapters.files import check_loadable
from ..adapters.lora import add_adapters, find_origins, without_adapters
from ..adapters.manifest import FurtherBaseModel, check_model_name, describe_base
from ..adapters.policies import SHARED_POLICY, Policies
from ..agents import AgentSpec
from ..config.marft_config import MARFTConfig
from ..episodes.images import ImageError, read_prompt
from ..seams.vision import ImageProcessor, as_tokenizer
from ..system.hints import brief
from . import setup


_CHECKED_ROWS = 256  # of a data set, whose images are read before anything is generated


@dataclasses.dataclass(frozen=True, eq=False)
class Base:
    """A base model with the adapters of its agents, and their tokenizer."""

    model: PreTrainedModel | PeftModel
    processing_class: PreTrainedTokenizerBase | ProcessorMixin
    agents: tuple[AgentSpec, ...]
    origins: Mapping[str, str]  # where the weights of each adapter come from

    @property
    def language_model(self) -> PreTrainedModel:
        return without_adapters(self.model)

    @property
    def names(self) -> list[str]:
        return [agent.name for agent in self.agents]

    @functools.cached_property
    def images(self) -> ImageProcessor | None:
        """What processes images, for a vision-language model."""
        return ImageProcessor(self.processing_class) if isinstance(self.processing_class, ProcessorMixin) else None

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return as_tokenizer(self.processing_class)

    def describe(self, chat_template: str | None) -> FurtherBaseModel:
        """The base for the manifest. `chat_template` replaces the tokenizer's, where it is not `None`."""
        revision = (self.agents[0].model_init_kwargs or {}).get("revision")
        template = chat_template or self.tokenizer.chat_template
        base = describe_base(self.language_model, self.tokenizer, template, revision=revision)
        return FurtherBaseModel(**vars(base), agents=self.names, folder=self.agents[0].adapter)


def split_by_base(
    agents: Sequence[AgentSpec], model: Any, processing_class: PreTrainedTokenizerBase | ProcessorMixin | None
) -> list[list[AgentSpec]]:
    """
    Return the agents by base, those that act with the trainer's `model` first: agents that name the same model share
    one. Raises a `ValueError` if no agent acts with `model`, or agents of one base differ in its tokenizer.
    """
    trainer_key = _key(os.fspath(model) if isinstance(model, os.PathLike) else model, None)
    groups: dict[Any, list[AgentSpec]] = {trainer_key: []}
    tokenizers = {trainer_key: processing_class}
    for agent in agents:
        if isinstance(agent.model, str):
            check_model_name(agent.model, f"model of {agent.name!r}")
        elif not isinstance(agent.model, (PreTrainedModel, PeftModel, type(None))):
            raise TypeError(
                f"`model` of agent {agent.name!r} must be the name or folder of a model, a `PreTrainedModel` or a "
                f"`PeftModel`, got {brief(repr(agent.model), 80)} of type {type(agent.model).__name__}."
            )
        key = trainer_key if agent.model is None else _key(agent.model, agent.model_init_kwargs)
        tokenizer = tokenizers.setdefault(key, agent.processing_class)
        follows = key == trainer_key and agent.processing_class is None
        if agent.processing_class is not tokenizer and not follows:
            raise ValueError(
                f"Agent {agent.name!r} acts with the same model as "
                + ("the trainer" if key == trainer_key else f"agent {groups[key][0].name!r}")
                + ", but has another `processing_class`. Set the same tokenizer for both."
            )
        groups.setdefault(key, []).append(agent)
    if len(groups) > 1 and not any(agent.has_policy for agent in groups[trainer_key]):
        example = next(agent for agent in agents if agent.model is not None)
        raise ValueError(
            f"No agent acts with the trainer's `model={_text(model)}`, because each names its own. Pass "
            f"{_text(example.model)} as `model`, and leave `AgentSpec({example.name!r}, model=...)` out."
        )
    return list(groups.values())


def _key(model: Any, init_kwargs: Mapping[str, Any] | None) -> Any:
    """What is equal for models that are loaded once. A copy with other arguments is another base."""
    if not isinstance(model, str):
        return id(model)
    settings = sorted((name, repr(argument)) for name, argument in (init_kwargs or {}).items())
    return str(Path(model).resolve()) if Path(model).is_dir() else model, tuple(settings)


def _text(model: Any) -> str:
    return repr(model) if isinstance(model, str) else f"a loaded {type(model).__name__}"


def check_settings(args: MARFTConfig, groups: Sequence[Sequence[AgentSpec]], sharding: ModuleType | None) -> None:
    """Raise a `ValueError` for settings that do not support several bases, before anything is loaded."""
    if len(groups) == 1:
        return
    who = ", ".join(repr(agent.name) for group in groups[1:] for agent in group)
    if args.world_size > 1 and not any(agent.trainable for agent in groups[0]):
        raise ValueError(
            "No agent of the trainer's `model` is trained, which several processes do not support. Pass the model of "
            f"a trained agent as `model`, and that of {', '.join(repr(agent.name) for agent in groups[0])} as "
            "`AgentSpec(model=...)`."
        )
    is_by_model = isinstance(args.vllm_server_base_url, Mapping)
    refused = {
        "FSDP2 shards one base; start the run without it, and load large bases in 4 bits": sharding is not None,
        "`cast_lm_head_to_fp32=True` casts the head of one base; leave it out": args.cast_lm_head_to_fp32,
        "`torch_compile=True` compiles one base; leave it out": args.torch_compile,
        "`use_vllm=True` needs servers of each model; set `vllm_mode='server'` and `vllm_server_base_url={model: "
        "address, ...}`": args.use_vllm and not (args.vllm_mode == "server" and is_by_model),
        "`router_aux_loss_coef` trains the routers of one base; leave it out": bool(args.router_aux_loss_coef),
    }
    for reason, is_set in refused.items():
        if is_set:
            raise ValueError(f"The team has several bases (`AgentSpec(model=...)` of {who}), but {reason}.")


def load_all(
    groups: Sequence[Sequence[AgentSpec]],
    datasets: Mapping[str, Any],
    model: Any,
    args: MARFTConfig,
    peft_config: PeftConfig | None,
    sharding: ModuleType | None,
    *others: Any,
) -> list[Base]:
    """Load the bases, and check what agents that see images need. `others` are further arguments of [`load`]."""
    numbers = range(len(groups))
    bases = [load(groups, number, model, args, peft_config, sharding, *others) for number in numbers]
    check_images(bases, args, datasets, sharding is not None)
    return bases


def load(
    groups: Sequence[Sequence[AgentSpec]],
    number: int,
    model: Any,
    args: MARFTConfig,
    peft_config: PeftConfig | None,
    sharding: ModuleType | None,
    quantization_config: Any,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
) -> Base:
    """Load a base with the adapters of its agents. The trainer's `model`, number 0, has the trainer's settings."""
    agents, init_kwargs = groups[number], args.model_init_kwargs
    if number:
        model, init_kwargs, processing_class = agents[0].model, agents[0].model_init_kwargs, agents[0].processing_class
        quantization_config = None
    base = setup.load_base(model, args, quantization_config, setup.stays_frozen(agents, peft_config), init_kwargs)
    processing_class = setup.load_processing_class(processing_class, base, args, init_kwargs)
    origins = find_origins(base, agents)  # before new adapters hide which ones came with the model
    adapters = {agent.adapter for agent in agents if agent.has_policy}
    known = set(base.peft_config) if isinstance(base, PeftModel) else set()
    if len(groups) > 1 and known and ("default" in known or adapters <= known):
        peft_config = None  # it is for agents of other bases
    try:
        base = check_loadable(add_adapters(base, agents, peft_config), agents)
    except ValueError as error:
        if not number:
            raise
        names = ", ".join(repr(agent.name) for agent in agents)
        raise ValueError(
            f"The adapters of {names} cannot be added to {_text(model)}: {error} A config for this base alone can be "
            "set with `AgentSpec(peft_config=...)`."
        ) from error
    if isinstance(base, PeftModel) and isinstance(base.get_output_embeddings(), BaseTunerLayer):
        raise ValueError(
            f"The adapter of {agents[0].name!r} on the LM head would never be trained, as in GRPOTrainer. Remove "
            "'lm_head' from its `target_modules`."
        )
    setup.check_learning(args, base, sharding)
    if number and not isinstance(base, PeftModel) and getattr(base, "is_quantized", False):
        raise ValueError(
            f"The base of agent {agents[0].name!r} is quantized, so it cannot be trained itself. Set "
            "`AgentSpec(peft_config=LoraConfig(...))`."
        )
    return Base(base, processing_class, tuple(agents), origins)


def check_images(bases: Sequence[Base], args: MARFTConfig, datasets: Mapping[str, Any], is_sharded: bool) -> None:
    """Raise a `ValueError` for settings that do not support images, and data sets with images that no agent sees."""
    sees_images = any(base.images is not None and any(agent.sees_images for agent in base.agents) for base in bases)
    refused = {
        "`use_vllm=True` does not send images to servers; leave it out": args.use_vllm,
        "`critic_sees='history'` reads texts; set `critic_sees='observation'`": args.critic_sees == "history",
        "FSDP2 has not been tried with images; start the run without it": is_sharded,
    }
    for reason, is_set in refused.items():
        if sees_images and is_set:
            raise ValueError(
                f"Agents see images, but {reason}. To train on texts alone, set `AgentSpec(sees_images=False)`, or "
                "pass the tokenizer as `processing_class`."
            )
    for name, dataset in datasets.items():
        columns = [column for column in ("image", "images") if column in (dataset.column_names or ())]
        if columns and not sees_images:
            raise ValueError(
                f"`{name}` has the column {columns[0]!r}, but no agent sees images: "
                + ("`sees_images=False`" if any(base.images for base in bases) else _without_processor(bases[0]))
                + ". To train on texts alone, remove the column, or rename it if reward functions need it."
            )
        if sees_images and isinstance(dataset, Dataset):
            for number in range(min(len(dataset), _CHECKED_ROWS)):
                try:
                    read_prompt(dataset[number])
                except Exception as error:  # of `datasets`, which decodes a column of the type `Image`
                    kind = "" if isinstance(error, ImageError) else f"{type(error).__name__}: "
                    raise ValueError(f"Row {number} of `{name}`: {kind}{error}") from error


def _without_processor(base: Base) -> str:
    kind = type(base.processing_class).__name__
    return f"`processing_class` is a {kind}; a vision-language model needs `AutoProcessor.from_pretrained(...)`"


def make_policies(bases: Sequence[Base], agents: Sequence[AgentSpec]) -> Policies:
    """The policies on all bases. Raises a `ValueError` for an adapter named like a fully trained first base."""
    names = {agent.adapter for base in bases[1:] for agent in base.agents}
    if not isinstance(bases[0].model, PeftModel) and SHARED_POLICY in names:
        raise ValueError(
            f"An adapter is named {SHARED_POLICY!r}, which is the name of the trainer's `model`, as that is trained "
            "itself. Choose another name for the adapter or its agent."
        )
    with_adapters = [base for base in bases if isinstance(base.model, PeftModel)]
    origins = {adapter: origin for base in with_adapters for adapter, origin in base.origins.items()}
    further = {name: base.model for base in bases[1:] for name in base.names}
    return Policies(bases[0].model, agents, origins, further)
