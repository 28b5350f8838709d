# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Inference with a trained team. Prompts, tokenization, stop texts and sampling are those of training."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import is_conversational
from trl.trainer.utils import create_model_from_path

from .agents import AgentSpec, as_tools
from .config.dataset_checks import check_prompts
from .config.evaluation import check_sampling
from .config.sampling import Sampling, decoding
from .episodes.records import Episode, Messages
from .episodes.tools import ToolLimits, tool_name
from .rollout import preparing
from .rollout.chat_template import ChatTemplate
from .rollout.model_engine import ModelEngine
from .rollout.prompts import PromptBuilder, is_plain
from .rollout.runner import EpisodeRunner, Limits
from .rollout.transformers_generator import Decoding, TransformersGenerator
from .rollout.turn_reader import TurnReader
from .rollout.views import View, team_view
from .seams.generation import HALF
from .seams.models import keep_4bit_weights
from .shared_prefix.forward import why_not
from .system.devices import placement
from .system.randomness import UserRandomness
from .weights.adapter_files import check_no_adapter, put_on, team_folder
from .weights.fingerprints import describe_base
from .weights.manifest import Inference, TeamManifest
from .weights.policies import Policies
from .workflows import Workflow, rebuild
from .workflows.anonymity import alias_names


logger = logging.getLogger(__name__)  # that of accelerate needs the state of a trainer

# TRL's defaults, for sampling settings that an agent does not set. Manifests of version 0.1 do not contain the
# trainer's settings.
_DEFAULTS = SimpleNamespace(max_completion_length=512, temperature=1.0, top_p=1.0, top_k=0, min_p=None)


class Team:
    """
    A team of agents for inference. [`Team.from_pretrained`] loads a saved team; `trainer.team` is the trained team.

    ```python
    team = Team.from_pretrained("me/my-team")
    print(team("How many apples are left?"))
    ```

    Args:
        agents (`Sequence[AgentSpec]`): the agents.
        workflow ([`Workflow`]): decides who acts next and what each sees.
        runner ([`EpisodeRunner`]): runs episodes.
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the base with the agents' adapters.
        seeds (`random.Random`, *optional*): source of the seed of `run` if none is passed. It keeps the global random
            states, which a trainer uses, unchanged.
        finish (`Callable[[], None]`, *optional*): called at the end of a run. Other processes may not be done yet.
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec],
        workflow: Workflow,
        runner: EpisodeRunner,
        model: PreTrainedModel,
        seeds: random.Random | None = None,
        finish: Callable[[], None] = lambda: None,
    ):
        self.agents, self.workflow, self.model = list(agents), workflow, model
        self._runner, self._seeds, self._finish = runner, seeds, finish

    def __repr__(self) -> str:
        names = ", ".join(agent.name for agent in self.agents)
        return f"Team({names}; {type(self.workflow).__name__})"

    @classmethod
    def from_pretrained(
        cls,
        team: str | os.PathLike,
        model: str | PreTrainedModel | None = None,
        quantization_config: Any = None,
        revision: str | None = None,
        *,
        workflow: Workflow | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
        tools: Sequence[Callable] = (),
        view: View | Mapping[str, View] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        token: str | bool | None = None,
        replies: Mapping[str, Callable] | None = None,
    ) -> Team:
        """
        Load a team that `MARFTTrainer` saved or pushed.

        Args:
            team (`str` or `os.PathLike`):
                Folder of the team, or its Hub id.
            model (`str` or [`~transformers.PreTrainedModel`], *optional*):
                Base model: a Hub id, a folder, or a loaded model without adapters. Defaults to the Hub model that the
                team was trained on. Required if the team was trained on a local base.
            quantization_config (*optional*):
                Quantization config used to load the base. Defaults to the config of training. `False` disables
                quantization.
            revision (`str`, *optional*):
                Branch, tag or commit of the team on the Hub.
            workflow ([`Workflow`], *optional*):
                Workflow of the team. Ready-made workflows are rebuilt from the manifest by default. Required if the
                workflow is your own class.
            environment_factory (`Callable`, *optional*):
                Function that creates an environment, if the workflow of the team is `EnvironmentLoop`, or a dictionary
                of several.
            tools (`Sequence[Callable]`, *optional*):
                Functions that agents may call. Each agent gets the functions that it had in training, matched by name.
            view (`Callable` or `dict[str, Callable]`, *optional*):
                View that the team was trained with, if it was not the default: a function, or a dictionary that maps
                agent names to functions if agents have their own views.
            processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
                Tokenizer to use instead of the one saved with the team.
            token (`str` or `bool`, *optional*):
                Hub token.
            replies (`dict[str, Callable]`, *optional*):
                Functions `reply(messages)` by agent name, of agents whose turns a function wrote in training, and of
                others that a function is to take the place of.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: An object that the team needs was not passed, or an adapter does not fit the base.
        """
        if workflow is not None and not isinstance(workflow, Workflow):
            raise TypeError(f"`workflow` must be a `Workflow` object, got {workflow!r}.")
        folder = team_folder(team, revision, token)
        manifest = TeamManifest.load(folder)
        inference = manifest.inference or _without_inference(folder)
        if workflow is None:
            workflow = rebuild(manifest.workflow, environment_factory)
        elif environment_factory is not None:
            raise ValueError("`workflow` and `environment_factory` were both passed. Pass the workflow alone.")
        views = _views(inference, view)
        agents = _with_replies(_with_functions(manifest.agents, inference, tools, views), inference, replies or {})
        workflow.check([agent.name for agent in agents])
        tokenizer = processing_class or _load_tokenizer(folder)
        if tokenizer.pad_token is None:  # as in training
            tokenizer.pad_token = tokenizer.eos_token
        base = _load_base(manifest, folder, model, quantization_config)
        _warn_of_another_base(manifest, base, tokenizer)
        loaded = put_on(base, folder) if manifest.adapters else base
        loaded.requires_grad_(False)
        aliases = alias_names(agents) if manifest.anonymous else {}
        share = inference.share_prefixes and why_not(base) is None
        runner = _runner(agents, workflow, inference, loaded, tokenizer, views.get(None, team_view), aliases, share)
        return cls(agents, workflow, runner, loaded)

    def __call__(
        self,
        question: str | Messages | Mapping[str, Any],
        greedy: bool = False,
        seed: int | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> str:
        """
        The team's answer to one question, sampled as in training. [`Team.run`] takes several, and returns whole
        episodes.

        Args:
            question (`str`, `list[dict]` or `dict`):
                A text, a list of messages, or a dataset row with a `prompt`.
            greedy (`bool`, *optional*, defaults to `False`):
                Whether to use greedy decoding instead of sampling.
            seed (`int`, *optional*):
                Seed of sampling, as in [`Team.run`].
            sampling (`dict`, *optional*):
                Sampling settings, as in [`Team.run`].

        Raises:
            TypeError: `question` is neither a text nor messages nor a row; several questions are for [`Team.run`].
            ValueError: it is empty.
        """
        if not isinstance(question, (str, Mapping)) and not (question and is_conversational({"prompt": question})):
            raise TypeError(
                f"`team(question)` answers one question, a text or a list of messages, got {str(question)[:80]}. For "
                "several, use `team.run(questions)`: it returns an episode for each, with its answer in "
                "`episode.answer.text`."
            )
        (episode,) = self.run([question], greedy=greedy, seed=seed, sampling=sampling)
        return episode.answer.text if episode.answer is not None else ""

    def run(
        self,
        prompts: Sequence[str | Messages | Mapping[str, Any]],
        num_samples: int = 1,
        greedy: bool = False,
        seed: int | None = None,
        batch_size: int | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> list[Episode]:
        """
        Run the workflow on prompts.

        Args:
            prompts (`Sequence`):
                Texts, lists of messages, or dataset rows with a `prompt`. The workflow and the environment can read
                the other columns of a row.
            num_samples (`int`, *optional*, defaults to `1`):
                Number of episodes per prompt.
            greedy (`bool`, *optional*, defaults to `False`):
                Whether to use greedy decoding instead of sampling.
            seed (`int`, *optional*):
                Seed of sampling and of random draws in your own code (workflow, environment, tools and views). The
                random states are restored afterwards. If `None`, a loaded team uses torch's current random state, and
                `trainer.team` draws a seed from its own generator.
            batch_size (`int`, *optional*):
                Number of episodes that run at once. If `None`, all episodes run at once.
            sampling (`dict`, *optional*):
                Sampling settings of all agents in place of those of training: `temperature`, `top_p`, `top_k`,
                `min_p`.

        Returns: the finished episodes, grouped by prompt; `episode.answer.text` is the team's answer.

        Raises:
            ValueError: `prompts` is empty, a prompt is not valid, or `num_samples` or `batch_size` is below 1.
        """
        for name, number in (("num_samples", num_samples), ("batch_size", batch_size or 1)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1, got {number!r}.")
        if greedy and sampling:
            raise ValueError("`greedy=True` and `sampling` were both passed. Leave one of them out.")
        if seed is None and self._seeds is not None:
            seed = self._seeds.getrandbits(31)
        rows = [_as_row(prompt) for prompt in _as_list(prompts) for _ in range(num_samples)]
        empty = [index for index, row in enumerate(rows) if _is_blank(row.get("prompt", "?"))]
        if empty:
            raise ValueError(
                f"Prompt {empty[0] // num_samples} of {len(rows) // num_samples} is empty, so there is nothing to "
                "answer. Pass a text or a list of messages."
            )
        check_prompts(rows, "prompts")
        size, episodes = batch_size or max(len(rows), 1), []
        check_sampling(sampling, "sampling")
        with self._running({"greedy": True} if greedy else decoding(sampling), seed):
            for start in range(0, len(rows), size):
                done = self._runner.run(rows[start : start + size])
                episodes += [dataclasses.replace(episode, index=start + episode.index) for episode in done]
        return episodes

    @contextlib.contextmanager
    def _running(self, options: dict[str, Any], seed: int | None) -> Iterator[None]:
        runner, model, was_training = self._runner, self.model, self.model.training
        before, randomness, dropped = runner.options, runner.randomness, runner.dropped_turns
        runner.options = options
        devices = [] if model.device.type == "cpu" else [model.device]
        model.eval()
        try:
            with torch.random.fork_rng(devices, enabled=seed is not None, device_type=model.device.type):
                if seed is not None:
                    torch.manual_seed(seed)
                    runner.randomness = UserRandomness(seed, model.device)
                runner.generator.publish(alone=True)
                with runner.seeded(seed or 0):
                    yield
                self._finish()
        finally:
            runner.options, runner.randomness, runner.dropped_turns = before, randomness, dropped
            model.train(was_training)


# ---- Loading the parts of a saved team ----


def _without_inference(folder: Path) -> Inference:
    logger.warning(
        f"The team in {folder} was saved by version 0.1, which did not save the sampling settings of the trainer. For "
        "settings that an agent does not have, TRL's defaults are used (temperature 1, at most 512 tokens per turn)."
    )
    return Inference(generation={"do_sample": True})


def _as_list(prompts: Any) -> list:
    if (
        prompts is None
        or isinstance(prompts, (str, Mapping))
        or (len(prompts) and is_conversational({"prompt": prompts}))
    ):
        raise TypeError(
            "`prompts` must be a list of prompts; for a single one pass `[prompt]`, or call `team(prompt)`."
        )
    prompts = list(prompts)
    if not prompts:
        raise ValueError("`prompts` is empty: pass at least one.")
    return prompts


def _is_blank(prompt: Any) -> bool:
    return prompt is None or (isinstance(prompt, str) and not prompt.strip())


def _as_row(prompt: Any) -> dict[str, Any]:
    return dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}


def _views(inference: Inference, view: View | Mapping[str, View] | None) -> dict[str | None, View]:
    """Return the views by agent name. The key `None` holds the view of all agents without their own."""
    given: dict[str | None, View] = {None: view} if callable(view) else dict((view or {}).items())
    needed: dict[str | None, str] = dict(inference.agent_views.items())
    if inference.view is not None:
        needed[None] = inference.view
    unknown = [agent for agent in given if agent not in needed]
    if unknown:
        whose = "the team" if unknown[0] is None else f"agent {unknown[0]!r}"
        raise ValueError(
            f"`view=` has a function for {whose}, which had none in training (functions were: {needed or 'none'})."
        )
    missing = [agent for agent in needed if agent not in given]
    if missing:
        whose = f"agent {missing[0]!r}" if missing[0] is not None else "the team"
        form = "`view={'" + missing[0] + "': ...}`" if missing[0] is not None else "`view=`"
        raise ValueError(
            f"The messages {whose} was shown in training came from the view `{needed[missing[0]]}`: pass it as {form}."
        )
    return given


def _with_functions(
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
                "among `tools=`. Add it."
            )
    return [
        dataclasses.replace(
            agent,
            tools=tuple(by_name[tool] for tool in inference.tools.get(agent.name, ())),
            view=views.get(agent.name),
        )
        for agent in agents
    ]


def _with_replies(
    agents: Sequence[AgentSpec], inference: Inference, replies: Mapping[str, Callable]
) -> list[AgentSpec]:
    """Return the agents, those whose turns functions write with these functions."""
    if not isinstance(replies, Mapping):
        raise TypeError(f"`replies` must map names of agents to functions, got {type(replies).__name__}.")
    unknown = sorted(set(replies) - {agent.name for agent in agents})
    if unknown:
        raise ValueError(f"`replies=` has a function for {unknown[0]!r}, which is no agent of the team.")
    missing = sorted(set(inference.replies) - set(replies))
    if missing:
        raise ValueError(
            f"The turns of agent {missing[0]!r} came from the function `{inference.replies[missing[0]]}` in training: "
            f"pass it, or another one, as `replies={{{missing[0]!r}: ...}}`."
        )
    names = ("adapter", "tools", "stop", "copy_of", "copy_every", "copies", "learning_rate")
    none: dict[str, Any] = dict.fromkeys(names)
    return [
        dataclasses.replace(agent, reply=replies[agent.name], **none) if agent.name in replies else agent
        for agent in agents
    ]


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, padding_side="left", truncation_side="left", trust_remote_code=False
        )
        tokenizer("x")
        str(tokenizer.chat_template).encode()  # no text may have halves of characters
        return tokenizer
    except Exception as error:  # a broken file can raise any
        raise ValueError(
            f"The tokenizer of the team in {folder} cannot be loaded, {type(error).__name__}: {error}. Its files are "
            "`tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. Pass `processing_class=` to use "
            "another one."
        ) from error


def _load_base(manifest: TeamManifest, folder: Path, model: Any, quantization_config: Any) -> PreTrainedModel:
    """Load the base in the precision and with the quantization of training."""
    base = manifest.base
    if model is not None and not manifest.adapters:
        raise ValueError(
            "The agents of this team share one fully trained policy, whose weights lie in its folder; a `model` would "
            "take their place. Leave `model` out."
        )
    if isinstance(model, PreTrainedModel):
        if quantization_config is not None:
            logger.warning("`quantization_config` is ignored, since `model` is loaded already.")
        keep_4bit_weights(model)
        return model
    if model is not None and not isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"`model` must be the name or folder of a base model, or a `PreTrainedModel` without adapters, got "
            f"{type(model).__name__}."
        )
    # Without `trust_remote_code`, transformers would ask the user to agree
    options: dict[str, Any] = {"trust_remote_code": False, **placement(PartialState().device)}
    if model is None and not manifest.adapters:
        model = folder  # the folder of the manifest contains the full weights
        options["use_safetensors"] = True  # no pickles
        check_no_adapter(folder)
    elif model is None and manifest.base_model is not None:
        model, options["revision"] = manifest.base_model, manifest.base_model_revision
    if model is None:
        raise ValueError(
            "The team was trained on a local base"
            + (f", {manifest.base_name!r}" if manifest.base_name else "")
            + ": pass it as `model=`, a folder or a loaded model."
        )
    if base is not None and base.dtype is not None:
        options["dtype"] = base.dtype
    if quantization_config is None and base is not None and base.quantization is not None:
        quantization_config = _as_trained(base.quantization)
    if quantization_config:
        options["quantization_config"] = quantization_config
    loaded = create_model_from_path(str(model), **options)
    keep_4bit_weights(loaded)
    return loaded


def _runner(
    agents: Sequence[AgentSpec],
    workflow: Workflow,
    inference: Inference,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    view: View,
    aliases: Mapping[str, str],
    share: bool,
) -> EpisodeRunner:
    """Create the [`EpisodeRunner`] of a saved team."""
    uses_tools = bool(workflow.functions) or any(agent.tools for agent in agents)
    chat_template = preparing.prepare_tools(tokenizer, agents, workflow) if uses_tools else None
    autocast = HALF.get(inference.mixed_precision)
    engine = ModelEngine(model, tokenizer, _known_settings(inference, model, tokenizer), autocast)
    samplings = {agent.name: _sampling(agent, inference) for agent in agents}
    prompts = PromptBuilder(
        tokenizer,
        tokenize=_tokenization(tokenizer, inference, chat_template),
        view=view,
        chat_template=ChatTemplate(tokenizer, chat_template, inference.chat_template_kwargs),
        plain=is_plain(agents, uses_tools),
        window=preparing.window_of(
            model, samplings, inference.context_overflow, [agent.name for agent in agents if not agent.has_policy]
        ),
        ends=engine.ends,
        aliases=aliases,
        alone=preparing.is_alone(agents, workflow),
        show_reasoning=inference.show_reasoning,
    )
    preparing.warn_of_unprotected(prompts, uses_tools)
    generator = TransformersGenerator(engine, Policies(model, agents), samplings, Decoding(share))
    reader = TurnReader(tokenizer, engine.ends, prompts.template, uses_tools, is_lone=len(agents) == 1)
    limits = Limits(ToolLimits(**inference.tool_limits), inference.workflow_timeout)
    return EpisodeRunner(agents, workflow, prompts, generator, reader, UserRandomness(0, model.device), limits)


def _as_trained(quantization: Mapping[str, Any]) -> BitsAndBytesConfig | None:
    if str(quantization.get("quant_method", "")).endswith("bitsandbytes"):
        try:
            return BitsAndBytesConfig.from_dict({k: v for k, v in quantization.items() if not k.startswith("_")})
        except TypeError as error:
            raise ValueError(
                f"The quantization of the base in the manifest cannot be used: {error} Pass "
                "`quantization_config=`, or `False` for none."
            ) from error
    return None  # checkpoints quantized with other methods contain their quantization config


def _warn_of_another_base(manifest: TeamManifest, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if base, tokenizer or chat template differ from training. Shapes are checked when adapters are loaded."""
    if manifest.base is None:
        return
    present = describe_base(base, tokenizer, tokenizer.chat_template)
    kinds = {"config_hash": "base", "tokenizer_hash": "tokenizer", "chat_template_hash": "chat template"}
    other = [kind for name, kind in kinds.items() if getattr(present, name) != getattr(manifest.base, name)]
    size = base.get_input_embeddings().weight.size(0)
    if "base" in other and len(tokenizer) > size:  # with the base of training, it is as it was in training
        raise ValueError(
            f"The tokenizer of the team has {len(tokenizer):,} tokens, and the base has {size:,}: it is another "
            f"model. Pass the base of training ({manifest.base.name!r}) as `model=`."
        )
    if manifest.inference is not None and manifest.inference.tools and "chat template" in other:
        other.remove("chat template")  # teams with tools may use a template other than the tokenizer's
    if other:
        logger.warning(
            f"The {' and the '.join(other)} differ{'s' if len(other) == 1 else ''} from what the team was trained "
            f"with ({manifest.base.name!r}), so its answers may be worse. Pass the `model=` and the "
            "`processing_class=` of training."
        )


def _sampling(agent: AgentSpec, inference: Inference) -> Sampling:
    own = inference.sampling.get(agent.name)
    if own is None:  # a manifest of version 0.1
        return Sampling.of(agent, _DEFAULTS)
    settings: dict[str, Any] = {
        name: own.get(name) for name in ("max_completion_length", "temperature", "top_p", "top_k", "min_p")
    }
    return Sampling(**settings, stop=tuple(agent.stop or ()))


# Settings of `generate` that would change the format of its output or override the length limits of agents
_NOT_OF_A_TEAM = frozenset({"num_return_sequences", "return_dict_in_generate", "max_length", "max_new_tokens"})


def _known_settings(
    inference: Inference, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
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
