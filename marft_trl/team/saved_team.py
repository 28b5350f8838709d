# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The parts of a saved team: its base, its tokenizer, its agents with their functions, and what runs episodes."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import CommitInfo, HfApi
from peft import PeftModel
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import is_conversational
from trl.trainer.utils import create_model_from_path

from ..adapters.files import check_no_adapter, forget_local_base, warn_of_leftovers
from ..adapters.manifest import Inference, TeamManifest, describe_base, loading_model
from ..adapters.policies import Policies
from ..agents import AgentSpec, as_tools
from ..config.team_setup import Sampling, own_settings
from ..episodes.tools import ToolLimits, tool_name
from ..learning.memory import cache_size, free_memory
from ..prompts import preparing
from ..prompts.builder import PromptBuilder, is_plain
from ..prompts.chat_template import ChatTemplate
from ..prompts.views import View
from ..reporting.model_card import CARD_NAME, TAGS, team_card
from ..rollout.generator import Generator
from ..rollout.runner import EpisodeRunner, Limits
from ..rollout.transformers_generator import Decoding, ModelEngine, TransformersGenerator
from ..rollout.turn_reader import TurnReader
from ..seams.generation import HALF
from ..seams.lora_layers import MixedLora
from ..seams.models import keep_4bit_weights
from ..shared_prefix.forward import find_obstacle
from ..system.processes import placement
from ..system.randomness import UserRandomness
from ..workflows import Workflow
from ..workflows.base import alias_names, callable_name


if TYPE_CHECKING:
    from ..extras.engines.setup import Servers


logger = logging.getLogger(__name__)  # that of accelerate needs the state of a trainer

# Part of the free memory that turns may take
_PART = 0.5
# Bytes of a logit on its way to a token: in float32, its probability, and sums in double precision
_OF_LOGIT = 24


def turns_that_fit(model: PreTrainedModel, tokens: int) -> int:
    """
    How many turns may be sampled together, with their keys and values in memory.

    Args:
        tokens: tokens of an observation and a turn together.

    Returns: at least 1.
    """
    config = model.config.get_text_config()
    window = getattr(config, "max_position_embeddings", None) or tokens
    of_cache = cache_size(config, 1, min(tokens, window), model.dtype.itemsize)
    return max(int(_PART * free_memory(model.device) / (of_cache + _OF_LOGIT * config.vocab_size)), 1)


# TRL's, for sampling settings that neither an agent nor its manifest has
_DEFAULTS = SimpleNamespace(max_completion_length=512, temperature=1.0, top_p=1.0, top_k=0, min_p=None)


def check_views(inference: Inference, view: View | Mapping[str, View] | None) -> dict[str | None, View]:
    """Return the views by agent name. The key `None` holds the view of all agents without their own."""
    views: dict[str | None, View] = {None: view} if callable(view) else dict((view or {}).items())
    needed: dict[str | None, str] = dict(inference.agent_views.items())
    if inference.view is not None:
        needed[None] = inference.view
    unknown = [agent for agent in views if agent not in needed]
    if unknown:
        whose = "the team" if unknown[0] is None else f"agent {unknown[0]!r}"
        raise ValueError(
            f"`view=` has a function for {whose}, which had no view in training (views in training: "
            f"{needed or 'none'})."
        )
    missing = [agent for agent in needed if agent not in views]
    if missing:
        whose = f"Agent {missing[0]!r}" if missing[0] is not None else "The team"
        form = "`view={'" + missing[0] + "': ...}`" if missing[0] is not None else "`view=`"
        raise ValueError(f"{whose} was trained with the view `{needed[missing[0]]}`. Pass it as {form}.")
    return views


def with_functions(
    agents: Sequence[AgentSpec], inference: Inference, tools: Sequence[Callable], views: Mapping[str | None, View]
) -> list[AgentSpec]:
    """Return the agents with the tools and the views that they had in training."""
    by_name = {tool_name(tool): tool for tool in as_tools(tools, "the team")}
    unused = sorted(set(by_name) - {tool for needed in inference.tools.values() for tool in needed})
    if unused:
        raise ValueError(f"`tools=` has {unused[0]!r}, which no agent of the team was trained with. Leave it out.")
    for name, needed in inference.tools.items():
        missing = [tool for tool in needed if tool not in by_name]
        if missing:
            raise ValueError(
                f"Agent {name!r} was trained with the tools {', '.join(map(repr, needed))}, but {missing[0]!r} is not "
                "in `tools=`. Add it."
            )
    return [
        dataclasses.replace(
            agent,
            tools=tuple(by_name[tool] for tool in inference.tools.get(agent.name, ())),
            view=views.get(agent.name),
        )
        for agent in agents
    ]


def with_replies(
    agents: Sequence[AgentSpec], inference: Inference, replies: Mapping[str, Callable]
) -> list[AgentSpec]:
    """Return the agents, with `replies` as the functions that write their turns."""
    if not isinstance(replies, Mapping):
        raise TypeError(f"`replies` must map agent names to functions, got {type(replies).__name__}.")
    unknown = sorted(set(replies) - {agent.name for agent in agents})
    if unknown:
        raise ValueError(f"`replies=` has a function for {unknown[0]!r}, which is not an agent of the team.")
    missing = sorted(set(inference.replies) - set(replies))
    if missing:
        raise ValueError(
            f"The function `{inference.replies[missing[0]]}` wrote the turns of agent {missing[0]!r} in training. "
            f"Pass it, or another function, as `replies={{{missing[0]!r}: ...}}`."
        )
    names = ("adapter", "tools", "stop", "copy_of", "copy_every", "copies", "learning_rate")
    none: dict[str, Any] = dict.fromkeys(names)
    return [
        dataclasses.replace(agent, reply=replies[agent.name], **none) if agent.name in replies else agent
        for agent in agents
    ]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, padding_side="left", truncation_side="left", trust_remote_code=False
        )
        tokenizer("x")
        str(tokenizer.chat_template).encode()  # no text may have halves of characters
        return tokenizer
    except Exception as error:  # a broken file can raise any
        raise ValueError(
            f"The tokenizer of the team in {folder} cannot be loaded: {type(error).__name__}: {error}. Its files are "
            "`tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. Pass `processing_class=` to use "
            "another tokenizer."
        ) from error


def load_base(
    manifest: TeamManifest, folder: Path, model: Any, quantization_config: Any, device: torch.device
) -> PreTrainedModel:
    """Load the base onto a device, in the precision and with the quantization of training."""
    base = manifest.base
    if model is not None and not manifest.adapters:
        raise ValueError(
            "The agents of this team share one fully trained policy, whose weights are loaded from the folder of the "
            "team. Leave `model` out."
        )
    if isinstance(model, PreTrainedModel):
        if quantization_config is not None:
            logger.warning("`quantization_config` is ignored, because `model` is already loaded.")
        keep_4bit_weights(model)
        return model
    if model is not None and not isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"`model` must be the name or folder of a base model, or a `PreTrainedModel` without adapters, got "
            f"{type(model).__name__}."
        )
    # Without `trust_remote_code`, transformers would ask the user to agree
    options: dict[str, Any] = {"trust_remote_code": False, **placement(device)}
    if model is None and not manifest.adapters:
        model = folder  # the folder of the manifest contains the full weights
        options["use_safetensors"] = True  # no pickles
        check_no_adapter(folder)
    elif model is None and manifest.base_model is not None:
        model, options["revision"] = manifest.base_model, base.revision
    if model is None:
        raise ValueError(
            f"The team was trained on the local base {base.name!r}. Pass its folder or the loaded model as `model=`."
        )
    if base.dtype is not None:
        options["dtype"] = base.dtype
    if quantization_config is None and base.quantization is not None:
        quantization_config = _as_trained(base.quantization)
    if quantization_config:
        options["quantization_config"] = quantization_config
    with loading_model(str(model)):
        loaded = create_model_from_path(str(model), **options)
    keep_4bit_weights(loaded)
    return loaded


@dataclasses.dataclass(frozen=True)
class SavedTeam:
    """
    What a saved team consists of besides its weights, its agents and its workflow.

    Args:
        manifest: with the settings that episodes are run with.
        view: of agents without their own.
    """

    manifest: TeamManifest
    tokenizer: PreTrainedTokenizerBase
    view: View
    servers: Servers | None = None

    @property
    def inference(self) -> Inference:
        """Settings that episodes are run with."""
        return self.manifest.inference

    def runner(self, agents: Sequence[AgentSpec], workflow: Workflow, model: PreTrainedModel) -> EpisodeRunner:
        """What runs episodes of these agents, who act with the adapters of a model."""
        inference, tokenizer = self.inference, self.tokenizer
        uses_tools = workflow.uses_tools or any(agent.tools for agent in agents)
        chat_template = preparing.prepare_tools(tokenizer, agents, workflow) if uses_tools else None
        autocast = HALF.get(inference.mixed_precision)
        engine = ModelEngine(model, tokenizer, known_settings(inference, model, tokenizer), autocast)
        samplings = {agent.name: _sampling(agent, inference) for agent in agents}
        without_model = [agent.name for agent in agents if not agent.has_policy]
        longest = None if self.servers is None else self.servers.find_max_model_len()
        prompts = PromptBuilder(
            tokenizer,
            tokenize=_tokenization(tokenizer, inference, chat_template),
            view=self.view,
            chat_template=ChatTemplate(tokenizer, chat_template, inference.chat_template_kwargs),
            keeps_text_prompts=is_plain(agents, uses_tools),
            window=preparing.make_window(model, samplings, inference.context_overflow, without_model, longest),
            end_token_ids=engine.end_token_ids,
            aliases=alias_names(agents) if self.manifest.anonymous else {},
            is_single_agent=preparing.is_single_agent(agents, workflow),
            show_reasoning=inference.show_reasoning,
        )
        preparing.warn_of_unprotected(prompts, uses_tools)
        generator = self._generator(agents, Policies(model, agents), samplings, engine)
        reader = TurnReader(tokenizer, engine.end_token_ids, prompts.template, uses_tools, is_lone=len(agents) == 1)
        limits = Limits(ToolLimits(**inference.tool_limits), inference.workflow_timeout)
        return EpisodeRunner(agents, workflow, prompts, generator, reader, UserRandomness(0, model.device), limits)

    def _generator(
        self, agents: Sequence[AgentSpec], policies: Policies, samplings: Mapping[str, Sampling], engine: ModelEngine
    ) -> Generator:
        if self.servers is not None:
            return self.servers.generator(agents, policies, samplings, engine)
        model = engine.model
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        share = self.inference.share_prefixes and find_obstacle(base) is None
        mixed = MixedLora(model) if share and MixedLora.find_obstacle(model, policies.names) is None else None
        return TransformersGenerator(engine, policies, samplings, Decoding(share, mixed=mixed))

    def with_agents(self, agents: Sequence[AgentSpec], workflow: Workflow, names: Mapping[str, str]) -> SavedTeam:
        """
        The same with other agents.

        Args:
            names: names that agents had before, by their present ones.
        """
        before, specs = self.inference, {item.name: item for item in self.manifest.agents}
        general = SimpleNamespace(**vars(_DEFAULTS))
        for name in vars(_DEFAULTS):  # what agents have that set nothing themselves
            values = [value[name] for agent, value in before.sampling.items() if getattr(specs[agent], name) is None]
            setattr(general, name, values[0] if values else getattr(_DEFAULTS, name))
        sampling: dict[str, dict[str, Any]] = {}
        for agent in agents:
            known = before.sampling.get(names.get(agent.name, agent.name))
            own = own_settings(Sampling.from_agent(agent, general).as_generation_kwargs())
            sampling[agent.name] = known if known is not None else own
        inference = dataclasses.replace(
            before,
            sampling=sampling,
            tools={agent.name: list(map(tool_name, agent.functions)) for agent in agents if agent.functions},
            agent_views={agent.name: callable_name(agent.view) for agent in agents if agent.view is not None},
            replies={agent.name: callable_name(agent.reply) for agent in agents if agent.reply is not None},
        )
        adapters: dict[str, dict[str, Any]] = {}
        if self.manifest.adapters:
            adapters = {a.adapter: {"folder": a.adapter, "trained": a.trainable} for a in agents if a.has_policy}
        manifest = dataclasses.replace(
            self.manifest,
            agents=list(agents),
            workflow=workflow.describe(),
            adapters=adapters,
            inference=inference,
        )
        return dataclasses.replace(self, manifest=manifest)

    def save(self, folder: Path, model: PreTrainedModel) -> None:
        """Write the team with its weights into a folder, in the form in which [`MARFTTrainer`] saves it."""
        manifest, base = self.manifest, model
        folder.mkdir(parents=True, exist_ok=True)
        max_rank = 0
        if isinstance(model, PeftModel):
            base, names = model.get_base_model(), list(manifest.adapters)
            model.save_pretrained(str(folder), selected_adapters=names, save_embedding_layers=False)
            warn_of_leftovers(folder, names)
            max_rank = max(getattr(model.peft_config[name], "r", 0) for name in names)
        else:
            model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        present = describe_base(base, self.tokenizer, self.tokenizer.chat_template)
        if manifest.base.config_hash != present.config_hash:
            manifest = dataclasses.replace(manifest, base=present)
        if manifest.base_model is None:  # a folder of this machine says nothing to others
            for name in manifest.adapters:
                forget_local_base(folder / name)
        manifest.save(folder)
        facts = {"base model": manifest.base.name}
        card = team_card(manifest, folder.name, tags=TAGS, max_rank=max_rank, facts=facts)
        card.save(folder / CARD_NAME)

    def push(
        self,
        model: PreTrainedModel,
        hub: HfApi,
        repo_id: str,
        private: bool | None,
        revision: str | None,
        commit_message: str,
    ) -> CommitInfo:
        """Push the team to the Hub, see [`Team.push_to_hub`]."""
        name = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / name.rpartition("/")[2]  # the card bears its name
            self.save(folder, model)
            return hub.upload_folder(
                repo_id=name,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
                delete_patterns=["*/adapter_*"],  # of agents that the team there had
            )


def _as_trained(quantization: Mapping[str, Any]) -> BitsAndBytesConfig | None:
    if str(quantization.get("quant_method", "")).endswith("bitsandbytes"):
        try:
            return BitsAndBytesConfig.from_dict({k: v for k, v in quantization.items() if not k.startswith("_")})
        except TypeError as error:
            raise ValueError(
                f"The quantization of the base in the manifest is not supported: {error} Pass "
                "`quantization_config=`, or `quantization_config=False` for no quantization."
            ) from error
    return None  # checkpoints quantized with other methods contain their quantization config


def warn_of_another_base(manifest: TeamManifest, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if base, tokenizer or chat template differ from training. Shapes are checked when adapters are loaded."""
    present = describe_base(base, tokenizer, tokenizer.chat_template)
    kinds = {"config_hash": "base", "tokenizer_hash": "tokenizer", "chat_template_hash": "chat template"}
    other = [kind for name, kind in kinds.items() if getattr(present, name) != getattr(manifest.base, name)]
    size = base.get_input_embeddings().weight.size(0)
    if "base" in other and len(tokenizer) > size:  # with the base of training, it is as it was in training
        raise ValueError(
            f"The tokenizer of the team has {len(tokenizer):,} tokens, but the base has only {size:,}, so the team "
            f"was trained on another base. Pass that base ({manifest.base.name!r}) as `model=`."
        )
    if manifest.inference.tools and "chat template" in other:
        other.remove("chat template")  # teams with tools may use a template other than the tokenizer's
    if other:
        logger.warning(
            f"The {' and the '.join(other)} differ{'s' if len(other) == 1 else ''} from what the team was trained "
            f"with ({manifest.base.name!r}), so its answers may be worse. Pass the `model=` and the "
            "`processing_class=` of training."
        )


def _sampling(agent: AgentSpec, inference: Inference) -> Sampling:
    own = inference.sampling.get(agent.name)
    if own is None:
        return Sampling.from_agent(agent, _DEFAULTS)
    settings: dict[str, Any] = {
        name: own.get(name) for name in ("max_completion_length", "temperature", "top_p", "top_k", "min_p")
    }
    return Sampling(**settings, stop=tuple(agent.stop or ()))


# Settings of `generate` that would change the format of its output or override the length limits of agents
_NOT_OF_A_TEAM = frozenset(
    {"num_return_sequences", "num_beams", "return_dict_in_generate", "max_length", "max_new_tokens"}
)


def known_settings(inference: Inference, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the known settings of `generate`. Unknown ones are removed, since the manifest may come from anybody."""
    known = (model.generation_config.to_dict().keys() | {"do_sample"}) - _NOT_OF_A_TEAM
    settings = {name: value for name, value in inference.generation.items() if name in known}
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    own = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": [*dict.fromkeys([tokenizer.eos_token_id, *ends])]}
    return {"do_sample": True, **own, **settings}


def _tokenization(
    tokenizer: PreTrainedTokenizerBase, inference: Inference, chat_template: str | None
) -> Callable[..., list[list[int]]]:
    """Return a tokenization of dataset prompts that equals `GRPOTrainer._tokenize_prompts` of TRL 1.16."""

    def tokenize(prompts: list, functions: Sequence[Callable] = ()) -> list[list[int]]:
        if not is_conversational({"prompt": prompts[0]}):
            return tokenizer(text=prompts)["input_ids"]
        return tokenizer.apply_chat_template(
            conversation=prompts,
            tools=list(functions) or None,
            chat_template=chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **inference.chat_template_kwargs,
        )["input_ids"]

    return tokenize
