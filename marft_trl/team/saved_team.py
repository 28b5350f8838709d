# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Load a saved team (base model, tokenizer, agents and their functions), run its episodes, and save it again."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from trl.trainer.utils import create_model_from_path

from ..adapters.files import check_no_adapter, forget_local_bases, load_onto_base, save_base, warn_of_leftovers
from ..adapters.lora import without_adapters
from ..adapters.manifest import BaseModel, Inference, TeamManifest, describe_base, loading_model
from ..adapters.policies import Policies
from ..agents import AgentSpec, as_tools
from ..config.team_setup import Sampling
from ..episodes.tools import ToolLimits, tool_name
from ..learning.memory import cache_size, free_memory
from ..prompts.views import View
from ..reporting.model_card import CARD_NAME, TAGS, team_card
from ..rollout.generator import Generator
from ..rollout.runner import EpisodeLimits, EpisodeRunner
from ..rollout.several_bases import join_speakers
from ..rollout.speaker import PromptSettings, Speaker, find_end_tokens, find_template, make_speaker
from ..rollout.transformers_generator import ModelEngine, TransformersGenerator
from ..seams.generation import HALF
from ..seams.models import keep_4bit_weights
from ..seams.vision import ImageProcessor, as_tokenizer
from ..shared_prefix.forward import find_obstacle
from ..system.processes import device_map_kwargs
from ..system.randomness import UserRandomness
from ..workflows import Workflow
from ..workflows.base import alias_names


if TYPE_CHECKING:
    from ..extras.engines.setup import Servers


logger = logging.getLogger(__name__)  # accelerate's logger needs the state of a trainer

_MEMORY_FRACTION = 0.5  # fraction of the free memory that turns may use
# Bytes per logit during sampling: the logit and its probability in float32, and sums in double precision
_BYTES_PER_LOGIT = 24


def max_concurrent_turns(model: PreTrainedModel, tokens: int) -> int:
    """Number of turns of `tokens` tokens, with their observations, whose KV caches fit into memory, at least 1."""
    config = model.config.get_text_config()
    window = getattr(config, "max_position_embeddings", None) or tokens
    bytes_per_turn = cache_size(config, 1, min(tokens, window), model.dtype.itemsize)
    bytes_per_turn += _BYTES_PER_LOGIT * config.vocab_size
    return max(int(_MEMORY_FRACTION * free_memory(model.device) / bytes_per_turn), 1)


# Sampling settings that neither the agent nor the manifest sets
_DEFAULT_SAMPLING = SimpleNamespace(max_completion_length=512, temperature=1.0, top_p=1.0, top_k=0, min_p=None)


def resolve_views(inference: Inference, view: View | Mapping[str, View] | None) -> dict[str | None, View]:
    """Check that the views match those of training, and return them by agent. `None` is the key of the common view."""
    views: dict[str | None, View] = {None: view} if callable(view) else dict((view or {}).items())
    needed: dict[str | None, str] = dict(inference.agent_views.items())
    if inference.view is not None:
        needed[None] = inference.view
    if unknown := [agent for agent in views if agent not in needed]:
        owner = "the team" if unknown[0] is None else f"agent {unknown[0]!r}"
        raise ValueError(
            f"`view=` has a function for {owner}, which had no view in training (views: {needed or 'none'})."
        )
    if missing := [agent for agent in needed if agent not in views]:
        owner = f"Agent {missing[0]!r}" if missing[0] is not None else "The team"
        argument = "`view={'" + missing[0] + "': ...}`" if missing[0] is not None else "`view=`"
        raise ValueError(f"{owner} was trained with the view `{needed[missing[0]]}`. Pass it as {argument}.")
    return views


def attach_functions(
    agents: Sequence[AgentSpec], inference: Inference, tools: Sequence[Callable], views: Mapping[str | None, View]
) -> list[AgentSpec]:
    by_name = {tool_name(tool): tool for tool in as_tools(tools, "the team")}
    if unused := sorted(set(by_name) - {tool for needed in inference.tools.values() for tool in needed}):
        raise ValueError(f"`tools=` has {unused[0]!r}, which no agent of the team was trained with. Leave it out.")
    for name, needed in inference.tools.items():
        if missing := [tool for tool in needed if tool not in by_name]:
            raise ValueError(
                f"Agent {name!r} was trained with the tools {', '.join(map(repr, needed))}, but {missing[0]!r} is not "
                "in `tools=`. Add it."
            )
    return [
        dataclasses.replace(
            agent,
            tools=[by_name[tool] for tool in inference.tools[agent.name]] if agent.name in inference.tools else None,
            view=views.get(agent.name),
        )
        for agent in agents
    ]


def attach_replies(
    agents: Sequence[AgentSpec], inference: Inference, replies: Mapping[str, Callable]
) -> list[AgentSpec]:
    """Return the agents, with turns written by the functions in `replies` instead of the model."""
    if not isinstance(replies, Mapping):
        raise TypeError(f"`replies` must map agent names to functions, got {type(replies).__name__}.")
    if unknown := sorted(set(replies) - {agent.name for agent in agents}):
        raise ValueError(f"`replies=` has a function for {unknown[0]!r}, which is not an agent of the team.")
    if missing := sorted(set(inference.replies) - set(replies)):
        raise ValueError(
            f"The function `{inference.replies[missing[0]]}` wrote the turns of agent {missing[0]!r} in training. "
            f"Pass it, or another function, as `replies={{{missing[0]!r}: ...}}`."
        )
    unset: dict[str, Any] = dict.fromkeys(("adapter", "tools", "stop", "learning_rate"))  # settings of policies
    return [
        dataclasses.replace(agent, reply=replies[agent.name], **unset) if agent.name in replies else agent
        for agent in agents
    ]


def load_processing_class(folder: Path) -> PreTrainedTokenizerBase | ProcessorMixin:
    """Load the tokenizer of a base, or its processor if the folder has one."""
    is_processor = (folder / "processor_config.json").is_file()
    try:
        options = {"padding_side": "left", "truncation_side": "left", "trust_remote_code": False}
        loaded = (AutoProcessor if is_processor else AutoTokenizer).from_pretrained(folder, **options)
        tokenizer = as_tokenizer(loaded)
        tokenizer("x")
        str(tokenizer.chat_template).encode()  # fails for unpaired surrogates
        return loaded
    except Exception as error:  # a damaged file can raise any exception
        raise ValueError(
            f"The tokenizer of the team in {folder} cannot be loaded: {type(error).__name__}: {error}. Its files are "
            "`tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. Pass `processing_class=` to use "
            "another tokenizer."
        ) from error


def load_base(
    manifest: TeamManifest, base: BaseModel, folder: Path, model: Any, quantization_config: Any, device: torch.device
) -> PreTrainedModel:
    """Load a base of a team. `folder` has its weights if it is trained itself."""
    has_adapters = bool(manifest.adapters_on(base))
    if model is not None and not has_adapters:
        names = ", ".join(repr(agent.name) for agent in manifest.players_on(base))
        raise ValueError(
            f"{names} share one fully trained policy, whose weights are loaded from "
            "the folder of the team. Leave `model` out"
            + (f", or in a dictionary {base.name!r}." if manifest.further_bases else ".")
        )
    if isinstance(model, PreTrainedModel):
        if quantization_config is not None:
            logger.warning("`quantization_config` is ignored, because `model` is already loaded.")
        keep_4bit_weights(model)
        return model
    if model is not None and not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"`model` must be a name, a folder or a model without adapters, got {type(model).__name__}.")
    # If `trust_remote_code` were not set, transformers would ask the user
    options: dict[str, Any] = {"trust_remote_code": False, **device_map_kwargs(device)}
    if model is None and not has_adapters:
        model = folder  # the folder of the manifest contains the full weights
        options["use_safetensors"] = True  # no pickles
        check_no_adapter(folder)
    elif model is None and not base.is_local:
        model, options["revision"] = base.name, base.revision
    if base.dtype is not None:
        options["dtype"] = base.dtype
    if quantization_config is None and base.quantization is not None:
        quantization_config = _load_quantization_config(base.quantization)
    if quantization_config:
        options["quantization_config"] = quantization_config
    with loading_model(str(model)):
        loaded = create_model_from_path(str(model), **options)
    keep_4bit_weights(loaded)
    return loaded


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedBase:
    """A base of a loaded team with the adapters of its agents."""

    description: BaseModel
    model: PreTrainedModel | PeftModel
    processing_class: PreTrainedTokenizerBase | ProcessorMixin
    chat_template: str | None  # instead of the tokenizer's
    agents: Sequence[str]  # that act with it
    servers: Servers | None = None  # that sample the turns; `None`: this process does

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return as_tokenizer(self.processing_class)


def load_bases(
    manifest: TeamManifest,
    folder: Path,
    agents: Sequence[AgentSpec],
    workflow: Workflow,
    model: Any,
    quantization_config: Any,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
    engine: Any,
) -> list[LoadedBase]:
    """Load the bases of a team with their tokenizers and adapters. Servers compare weights, so a CPU is enough."""
    device, bases = torch.device("cpu") if engine is not None else PartialState().device, []
    models, engines = manifest.choose(model, "model"), manifest.choose(engine, "engine")
    _check_missing(manifest, models, [agent.name for agent in agents if agent.has_policy])
    for base, chosen, own_engine in zip(manifest.bases, models, engines, strict=True):
        names = [agent.name for agent in manifest.players_on(base)]
        own = [agent for agent in agents if agent.name in names]
        if base.folder and not any(agent.has_policy for agent in own):  # functions write their turns
            continue
        if engine is not None and own_engine is None:
            raise ValueError(
                f"`engine` has no servers for the base {base.name!r} of {', '.join(map(repr, names))}. Pass the "
                f"servers of each base: `engine={{{names[0]!r}: address, ...}}`."
            )
        own_folder = folder / base.folder
        loaded_class = (None if base.folder else processing_class) or load_processing_class(own_folder)
        tokenizer = as_tokenizer(loaded_class)
        if tokenizer.pad_token is None:  # as in training
            tokenizer.pad_token = tokenizer.eos_token
        loaded = load_base(manifest, base, own_folder, chosen, quantization_config, device)
        _, template = find_template(own, workflow, tokenizer)
        check_base_matches(base, loaded, tokenizer, template)
        if manifest.adapters_on(base):
            loaded = load_onto_base(loaded, folder, manifest, base)
        loaded.requires_grad_(False)
        if own_engine is not None:
            from ..extras.engines.setup import Servers

            own_engine = own_engine if isinstance(own_engine, Servers) else Servers(own_engine)
        bases.append(LoadedBase(base, loaded, loaded_class, template, names, own_engine))
    return bases


def _check_missing(manifest: TeamManifest, models: Sequence[Any], players: Sequence[str]) -> None:
    """Raise `ValueError` for local bases that were not passed, and for a loaded model that is to be several bases."""
    missing = {}
    for base, model in zip(manifest.bases, models, strict=True):
        names = [agent.name for agent in manifest.players_on(base)]
        is_needed = not base.folder or set(names) & set(players)
        if model is None and base.is_local and manifest.adapters_on(base) and is_needed:
            missing[names[0]] = base.name
    if missing:
        needed = ", ".join(f"{agent!r}: ..." for agent in missing)
        raise ValueError(
            f"The team was trained on the local base {' and '.join(map(repr, missing.values()))}. Pass its folder or "
            f"the loaded model as `model={f'{{{needed}}}' if manifest.further_bases else ''}`."
        )
    loaded = [id(model) for model in models if isinstance(model, PreTrainedModel)]
    if len(set(loaded)) < len(loaded):
        raise ValueError("`model=` has the same loaded model for several bases. Load it once for each base.")


@dataclasses.dataclass(frozen=True)
class SavedTeam:
    """The parts of a saved team other than its agents and workflow."""

    manifest: TeamManifest
    bases: Sequence[LoadedBase]
    view: View  # of agents without their own

    def make_runner(self, agents: Sequence[AgentSpec], workflow: Workflow) -> EpisodeRunner:
        inference, first = self.manifest.inference, self.bases[0]
        samplings = {agent.name: _get_sampling(agent, inference) for agent in agents}
        further = {name: base.model for base in self.bases[1:] for name in base.agents}
        policies = Policies(first.model, agents, further=further)
        speakers: dict[str, Speaker] = {}
        for base in self.bases:  # the first has the speaker of agents whose turns functions write, too
            speaker = self._make_speaker(base, agents, workflow, samplings, policies)
            speakers |= dict.fromkeys(base.agents if speakers else samplings, speaker)
        limits = EpisodeLimits(ToolLimits(**inference.tool_limits), inference.workflow_timeout)
        randomness = UserRandomness(0, first.model.device)
        return EpisodeRunner(agents, workflow, join_speakers(speakers), randomness, limits)

    def _make_speaker(
        self,
        base: LoadedBase,
        agents: Sequence[AgentSpec],
        workflow: Workflow,
        samplings: Mapping[str, Sampling],
        policies: Policies,
    ) -> Speaker:
        inference, model, tokenizer = self.manifest.inference, base.model, base.tokenizer
        settings = make_generate_settings(inference, model, tokenizer, is_first=base is self.bases[0])
        processor, images = base.processing_class, None
        if isinstance(processor, ProcessorMixin):
            settings.pop("suppress_tokens", None)
            if base.servers is None:  # which get no images
                images, settings["suppress_tokens"] = ImageProcessor(processor), [model.config.image_token_id]
        # With adapters, generation is not inside of autocast
        half = None if isinstance(model, PeftModel) else HALF.get(inference.mixed_precision)
        engine = ModelEngine(model, tokenizer, settings, half)
        max_model_len = None
        further = {name for other in self.bases[1:] for name in other.agents}
        # The first base also stands for agents whose turns functions write
        names = base.agents if base.description.folder else [name for name in samplings if name not in further]
        samplings_of_base = {name: samplings[name] for name in names}
        if base.servers is not None:
            max_model_len = base.servers.find_max_model_len()
            generator: Generator = base.servers.generator(agents, policies, samplings_of_base, engine)
        else:
            share = inference.share_prefixes and find_obstacle(without_adapters(model)) is None
            generator = TransformersGenerator(engine, policies, samplings_of_base, share, images=images)

        prompt_settings = PromptSettings(
            chat_template=base.chat_template,
            images=images,
            chat_template_kwargs=inference.chat_template_kwargs,
            view=self.view,
            aliases=alias_names(agents) if self.manifest.anonymous else {},
            context_overflow=inference.context_overflow,
            show_reasoning=inference.show_reasoning,
        )
        return make_speaker(
            model,
            tokenizer,
            generator,
            agents,
            workflow,
            samplings,
            prompt_settings,
            engine.end_token_ids,
            without_model=[agent.name for agent in agents if not agent.has_policy],
            max_model_len=max_model_len,
            own=names,
        )

    def save(self, folder: Path) -> None:
        """Save the team with its weights to a folder, in the same format as [`MARFTTrainer`]."""
        manifest, saved = self.manifest, []
        if len(self.bases) < len(manifest.bases):
            raise ValueError(
                "The team cannot be saved: functions in `replies` replace all agents of a base, which was not loaded. "
                "Load the team without these functions."
            )
        folder.mkdir(parents=True, exist_ok=True)
        descriptions: list[Any] = []
        for base in self.bases:
            names, description = manifest.adapters_on(base.description), base.description
            save_base(base.model, base.processing_class, folder, description, names)
            saved += [base.model.peft_config[name] for name in names]
            current = describe_base(without_adapters(base.model), base.tokenizer, base.tokenizer.chat_template)
            if description.config_hash != current.config_hash:
                description = dataclasses.replace(description, **vars(current))
            descriptions.append(description)
        if saved:
            warn_of_leftovers(folder, list(manifest.adapters))
        manifest = dataclasses.replace(manifest, base=descriptions[0], further_bases=descriptions[1:])
        manifest.save(folder)
        forget_local_bases(folder, manifest)
        max_rank = max((getattr(config, "r", 0) for config in saved), default=0)
        facts = {"base model": manifest.base_names}
        seeing = [
            name for base in self.bases if isinstance(base.processing_class, ProcessorMixin) for name in base.agents
        ]
        card = team_card(manifest, folder.name, tags=TAGS, max_rank=max_rank, facts=facts, seeing=seeing)
        card.save(folder / CARD_NAME)


def _load_quantization_config(quantization: Mapping[str, Any]) -> BitsAndBytesConfig | None:
    if not str(quantization.get("quant_method", "")).endswith("bitsandbytes"):
        return None  # checkpoints quantized with other methods contain their quantization config
    try:
        return BitsAndBytesConfig.from_dict({k: v for k, v in quantization.items() if not k.startswith("_")})
    except TypeError as error:
        raise ValueError(
            f"The quantization of the base in the manifest is not supported: {error} Pass `quantization_config=`, or "
            "`quantization_config=False` for no quantization."
        ) from error


def check_base_matches(
    saved: BaseModel, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat_template: str | None
) -> None:
    """Warn if base, tokenizer or template differ from training. Raises if the base's vocabulary is too small."""
    current = describe_base(base, tokenizer, chat_template or tokenizer.chat_template)
    kinds = {"config_hash": "base", "tokenizer_hash": "tokenizer", "chat_template_hash": "chat template"}
    different = [kind for name, kind in kinds.items() if getattr(current, name) != getattr(saved, name)]
    vocab_size = base.get_input_embeddings().weight.size(0)
    if "base" in different and len(tokenizer) > vocab_size:  # the base of training may lack tokens, too
        raise ValueError(
            f"The tokenizer of the team has {len(tokenizer):,} tokens, but the base has only {vocab_size:,}. Pass "
            f"the base of training ({saved.name!r}) as `model=`: another one, or the same one with the tokens "
            "that were added to it before training (`resize_token_embeddings`, then `save_pretrained`)."
        )
    if different:
        logger.warning(
            f"The {' and the '.join(different)} differ{'s' if len(different) == 1 else ''} from what the team was "
            f"trained with ({saved.name!r}), so its answers may be worse. Pass the `model=` and the "
            "`processing_class=` of training."
        )


def _get_sampling(agent: AgentSpec, inference: Inference) -> Sampling:
    saved = inference.sampling.get(agent.name)
    if saved is None:
        return Sampling.from_agent(agent, _DEFAULT_SAMPLING)
    settings: dict[str, Any] = {name: saved.get(name) for name in vars(_DEFAULT_SAMPLING)}
    return Sampling(**settings, stop=tuple(agent.stop or ()))


# Settings of `generate` that would change the format of its output or override the length limits of agents
_EXCLUDED_SETTINGS = {"num_return_sequences", "num_beams", "return_dict_in_generate", "max_length", "max_new_tokens"}


def make_generate_settings(
    inference: Inference, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, is_first: bool = True
) -> dict[str, Any]:
    """
    Return the settings of `generate`. Unknown settings are dropped, because the manifest is not trusted, and tokens of
    the first base unless the model `is_first`.
    """
    known = (model.generation_config.to_dict().keys() | {"do_sample"}) - _EXCLUDED_SETTINGS
    known = known if is_first else {name for name in known if not name.endswith(("_token_id", "suppress_tokens"))}
    settings = {name: value for name, value in inference.generation.items() if name in known}
    ends = find_end_tokens(model, tokenizer)
    return {"do_sample": True, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": ends, **settings}
