# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The manifest: everything needed to run and train a saved team again, with hashes of the base and the tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import get_config_model_id

from ..agents import AgentSpec, check_name, check_team
from ..episodes.tools import ToolLimits
from ..seams.libraries import installed_version
from ..seams.models import get_commit
from ..system.hints import did_you_mean
from ..system.json_fields import check_fields


_SAMPLED_ELEMENTS = 64
# Config fields that describe the origin or the storage of a model, not its architecture
_NOT_HASHED = {
    *("_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "quantization_config"),
    *("use_cache", "pad_token_id", "eos_token_id", "bos_token_id", "_attn_implementation", "attn_implementation"),
    *("architectures", "peft_version", "is_quantized"),
}


def describe_base(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, revision: str | None = None
) -> BaseModel:
    """Describe the base for the manifest. The commit that was loaded, if known, replaces the requested revision."""
    config = model.config
    name = get_config_model_id(config) or type(model).__name__
    is_local = os.path.isdir(name) or not is_hub_id(name) or not get_config_model_id(config)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    return BaseModel(
        name=os.path.basename(os.path.normpath(name)) if is_local else name,
        is_local=is_local,
        revision=None if is_local else get_commit(config) or revision,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=json.loads(json.dumps(quantization, default=str)) if quantization else None,
        # Fields that describe the architecture and differ from the defaults of their class
        config_hash=_sha256(_plain(config.to_diff_dict())),
        tokenizer_hash=_sha256([sorted(tokenizer.get_vocab().items()), sorted(special.items())]),
        chat_template_hash=None if chat_template is None else _sha256(chat_template),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key not in _NOT_HASHED}
    return value


@torch.no_grad()
def hash_of_weights(model: nn.Module) -> str:
    """SHA-256 of evenly spaced elements of every weight of the base, without adapters: reading all would take long."""
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


MANIFEST_NAME = "marft_team.json"
# Teams with one base are written as format 2, which versions 0.3 and 0.4 read
_FORMATS = (2, 3)
_PACKAGES = ("marft-trl", "trl", "transformers", "peft", "torch")
_DAMAGED = (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError)


@dataclass(frozen=True)
class BaseModel:
    """The base model of a team's adapters, and its tokenizer."""

    name: str  # Hub id, or the last part of a local path
    is_local: bool  # loaded from a local folder or created in code
    revision: str | None = None  # commit, branch or tag on the Hub
    dtype: str | None = None  # precision of the weights, e.g. "bfloat16"
    quantization: dict[str, Any] | None = None
    config_hash: str = ""  # SHA-256 of the model config, without paths, versions and precision
    tokenizer_hash: str = ""  # SHA-256 of the vocabulary and special tokens
    chat_template_hash: str | None = None
    folder: ClassVar[str] = ""  # of the team: its own


@dataclass(frozen=True)
class FurtherBaseModel(BaseModel):
    """The base model of agents that do not act with the first base of their team."""

    agents: list[str] = field(default_factory=list)
    # Of the team, with the tokenizer, and with the weights if the base itself is trained
    folder: str = ""  # type: ignore[misc]


@dataclass(frozen=True)
class Inference:
    """Settings that the team's episodes are run with, in addition to the agents and the workflow."""

    sampling: dict[str, dict[str, Any]] = field(default_factory=dict)  # by agent, with the trainer's values filled in
    generation: dict[str, Any] = field(default_factory=dict)  # settings of `generate` that are the same for all agents
    share_prefixes: bool = True
    mixed_precision: str = "no"  # "no", "bf16" or "fp16"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    context_overflow: str = "raise"  # if an observation does not fit the model's window
    tools: dict[str, list[str]] = field(default_factory=dict)  # names of the tools, by agent
    tool_limits: dict[str, Any] = field(default_factory=dict)  # see [`~marft_trl.episodes.tools.ToolLimits`]
    view: str | None = None  # name of the team's view function; `None` for the default
    agent_views: dict[str, str] = field(default_factory=dict)  # names of the view functions of agents
    workflow_timeout: float | None = None  # maximum seconds that a workflow may wait
    replies: dict[str, str] = field(default_factory=dict)  # names of the functions that write agents' turns
    # Earlier turns keep reasoning that the chat template cuts, as in teams of earlier versions
    show_reasoning: bool = True


@dataclass
class TeamManifest:
    """
    Args:
        agents (`list[AgentSpec]`):
            Agents in order, as passed to the trainer. `inference` contains the settings that they do not set.
        workflow (`dict`):
            Description of the workflow, as returned by [`Workflow.describe`].
        adapters (`dict[str, dict]`):
            `folder` and `trained` of each adapter. Without an adapter on the first base, its agents share one fully
            trained policy, whose weights are in the folder of the manifest.
        base ([`BaseModel`]):
            Base model; the first, if the team has several.
        inference ([`Inference`]):
            Settings that episodes are run with.
        versions (`dict[str, str]`):
            Versions of the installed packages at the time of saving.
        anonymous (`str`, *optional*):
            Kind of anonymity, `"numbered"` or `"none"`, if agents see one another as `agent_1`, `agent_2`, ...
        further_bases (`list[FurtherBaseModel]`, *optional*):
            Bases of the agents that do not act with the first.
    """

    agents: list[AgentSpec]
    workflow: dict[str, Any]
    adapters: dict[str, dict[str, Any]]
    base: BaseModel
    inference: Inference
    versions: dict[str, str] = field(default_factory=dict)
    anonymous: str | None = None
    further_bases: list[FurtherBaseModel] = field(default_factory=list)

    @property
    def bases(self) -> list[BaseModel]:
        return [self.base, *self.further_bases]

    @property
    def base_names(self) -> str:
        return ", ".join(dict.fromkeys(base.name for base in self.bases))

    def choose(self, values: Any, argument: str) -> list[Any]:
        """
        For each base, the value of a mapping for its name or for one of its agents, or `None`. Anything else is for
        the first base. Raises a `ValueError` for another name, and for the name of several bases.
        """
        if not isinstance(values, Mapping):
            return [values, *(None for _ in self.further_bases)]
        keys = {base.name: index for index, base in enumerate(self.bases)}
        keys |= {agent.name: index for index, base in enumerate(self.bases) for agent in self.players_on(base)}
        chosen: list[Any] = [None] * len(self.bases)
        for key, value in values.items():
            alike = [base for base in self.bases if base.name == key]
            if key not in keys or len(alike) > 1:
                why = "which is the name of several bases" if alike else "which is no base"
                accepted = ", ".join(map(repr, keys))
                raise ValueError(
                    f"`{argument}=` has {key!r}, {why} of the team. Use the name of an agent on the base, or of a "
                    f"base: {accepted}.{did_you_mean(key, keys)}"
                )
            chosen[keys[key]] = value
        return chosen

    def players_on(self, base: BaseModel) -> list[AgentSpec]:
        """The agents whose turns a base writes."""
        others = {name for further in self.further_bases for name in further.agents}
        names = base.agents if isinstance(base, FurtherBaseModel) else {agent.name for agent in self.agents} - others
        return [agent for agent in self.players if agent.name in names]

    def adapters_on(self, base: BaseModel) -> list[str]:
        """Names of the adapters on a base; none if the base itself is trained."""
        names = dict.fromkeys(agent.adapter for agent in self.players_on(base))
        return [name for name in names if name in self.adapters]

    @property
    def players(self) -> list[AgentSpec]:
        """The agents whose turns a model writes."""
        return [agent for agent in self.agents if agent.has_policy and agent.name not in self.inference.replies]

    @property
    def base_model(self) -> str | None:
        """Hub id of the base; `None` for a local one."""
        return None if self.base.is_local else self.base.name

    @classmethod
    def load(cls, folder: str | os.PathLike) -> TeamManifest:
        """
        Read the manifest of a folder.

        Raises:
            FileNotFoundError: The folder has no manifest.
            ValueError: The manifest is damaged, has an unknown format, or names a file outside the folder.
        """
        path = Path(folder) / MANIFEST_NAME
        if not path.is_file():
            raise FileNotFoundError(no_team(Path(folder)))
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] not in _FORMATS:
                raise ValueError(
                    f"{path} has format {data['format']!r}; this version of marft_trl reads the formats "
                    f"{' and '.join(map(str, _FORMATS))}. Use the version that saved the team, or a newer one."
                )
            return cls._from_dict(data, path)
        except _DAMAGED as error:
            raise ValueError(
                f"{path} is damaged: {type(error).__name__}: {error}. Restore it from a copy, or save the team again."
            ) from error

    @classmethod
    def _from_dict(cls, data: dict[str, Any], path: Path) -> TeamManifest:
        kinds = dict.fromkeys((*AgentSpec.stored_fields(), *_OF_PAST_COPIES), Any)  # `AgentSpec` checks their types
        agents = check_team(
            [
                AgentSpec(**_without_past_copies(check_fields(agent, kinds, f"{path}: agent {number}")))
                for number, agent in enumerate(data["agents"], start=1)
            ]
        )
        adapters = dict(data["adapters"])
        for name, adapter in adapters.items():
            check_name(name, "an adapter")
            if adapter["folder"] != name:
                raise ValueError(f"{path} has {adapter['folder']!r} as the folder of the adapter {name!r}.")
        workflow = data["workflow"]
        if not isinstance(workflow, dict) or not isinstance(workflow["class"], str):
            raise TypeError("the workflow is not a mapping with a class")
        base = BaseModel(**check_fields(data["base"], typing.get_type_hints(BaseModel), f"{path}: 'base'"))
        kinds = typing.get_type_hints(Inference)
        inference = Inference(**check_fields(data["inference"], kinds, f"{path}: 'inference'"))
        _check_values(inference)
        kinds = typing.get_type_hints(FurtherBaseModel)
        further = [
            FurtherBaseModel(**check_fields(saved, kinds, f"{path}: 'further_bases'"))
            for saved in data.get("further_bases", [])
        ]
        for model in (base, *further):
            if not model.is_local and not is_hub_id(model.name):
                raise ValueError(f"{path} names the base {model.name!r}, which is not a valid Hub id.")
        anonymous = data.get("anonymous")
        if anonymous not in (None, "numbered", "none"):
            raise TypeError(f"'anonymous' is {anonymous!r}")
        manifest = cls(agents, workflow, adapters, base, inference, dict(data["versions"]), anonymous, further)
        _check_bases(manifest)
        return manifest

    def save(self, folder: str | os.PathLike) -> None:
        """Write the manifest into a folder."""
        data = {
            "format": _FORMATS[bool(self.further_bases)],
            "agents": [agent.to_dict() for agent in self.agents],
            "workflow": self.workflow,
            "adapters": self.adapters,
            "base": asdict(self.base),
            **({"further_bases": [asdict(base) for base in self.further_bases]} if self.further_bases else {}),
            "inference": asdict(self.inference),
            "versions": {name: installed_version(name) for name in _PACKAGES},
            **({"anonymous": self.anonymous} if self.anonymous else {}),
        }
        path = Path(folder) / MANIFEST_NAME
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_bases(manifest: TeamManifest) -> None:
    """Raise `KeyError`, `TypeError` or `ValueError` unless each agent has one base, and each adapter is saved."""
    if not manifest.players_on(manifest.base):
        raise TypeError("no agent has a policy on the first base" if manifest.players else "no agent has a policy")
    names = [name for base in manifest.further_bases for name in base.agents]
    unknown = sorted(set(names) - {agent.name for agent in manifest.players})
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"'further_bases' has agent {(unknown or names)[0]!r}, which does not act or is there twice")
    taken: set[str] = set()
    for base in manifest.bases:
        own, saved = {agent.adapter for agent in manifest.players_on(base)}, manifest.adapters_on(base)
        if isinstance(base, FurtherBaseModel):
            check_name(base.folder, "the folder of a base")
        if taken & own or (base.folder and base.folder not in own):
            raise ValueError(f"'further_bases' has the folder {base.folder!r}, or adapters, of agents of another base")
        taken |= own
        if unsaved := sorted(own - set(saved)):
            is_trained = not saved and (manifest.further_bases or not manifest.adapters)
            if not is_trained:
                raise KeyError(f"no adapter {unsaved[0]!r}")


def no_team(folder: Path) -> str:
    """The message for a folder without a manifest."""
    saved = sorted((path.parent for path in folder.glob(f"*/{MANIFEST_NAME}")), key=lambda path: path.stat().st_mtime)
    hint = f" Its latest saved team is {saved[-1]}." if saved else ""
    if not saved and (folder / "adapter_config.json").is_file():
        hint = " It has a PEFT adapter: load that with `PeftModel.from_pretrained`."
    return f"{folder} has no {MANIFEST_NAME}, which `trainer.save_model()` writes.{hint}"


def is_hub_id(name: str) -> bool:
    """`True` if a name can be the id of a repository on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


# Fields of versions up to 0.4, in which an agent could act with past copies of another one. Its adapter has the newest
_OF_PAST_COPIES = ("copy_of", "copy_every", "copies")


def _without_past_copies(agent: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in agent.items() if name not in _OF_PAST_COPIES}
    return {**plain, "trainable": False} if agent.get("copy_of") is not None else plain


def check_model_name(name: str, argument: str = "model") -> None:
    """Raise `FileNotFoundError` if `name` is neither a folder nor a valid Hub id, and `ValueError` for a GGUF file."""
    if name.endswith(".gguf"):
        raise ValueError(
            f"`{argument}={name!r}` is a GGUF file, which cannot be trained. Pass the folder or Hub id of the model "
            "that it was converted from."
        )
    if not os.path.exists(name) and not is_hub_id(name):
        raise FileNotFoundError(
            f"`{argument}={name!r}` is neither a folder (searched in {Path.cwd()}) nor a valid Hub id. Pass a folder "
            f"that `save_pretrained` wrote, or an id such as 'Qwen/Qwen2.5-0.5B-Instruct'.{_near_path(name)}"
        )


@contextlib.contextmanager
def loading_model(name: str) -> Iterator[None]:
    """Add the searched places to the `OSError` for a model that is not found."""
    check_model_name(name)
    try:
        yield
    except OSError as error:
        if os.path.exists(name):
            raise
        raise OSError(
            f"`model={name!r}` is not a folder (searched in {Path.cwd()}), and could not be loaded from the Hub: "
            f"{error}{_near_path(name)}"
        ) from error


def _near_path(name: str) -> str:
    folder = Path(name).parent
    models = folder.glob("*/config.json") if folder.is_dir() else ()
    return did_you_mean(Path(name).name, (file.parent.name for file in models))


def _check_values(inference: Inference) -> None:
    """Raise `TypeError` or `ValueError` for values that would fail, or be ignored, only when the team answers."""
    kinds = dict.fromkeys((item.name for item in fields(ToolLimits)), Any)
    limits = ToolLimits(**check_fields(inference.tool_limits, kinds, "'tool_limits'"))
    for name, limit in asdict(limits).items():
        rounds = name == "rounds" and limit is None
        if not rounds and (not isinstance(limit, (int, float)) or isinstance(limit, bool) or not 0 <= limit < 1e9):
            raise ValueError(f"'tool_limits' has {limit!r} for {name!r}")
    timeout = inference.workflow_timeout
    if timeout is not None and not 0 < timeout < 1e9:
        raise ValueError(f"'workflow_timeout' is {timeout!r}")
    if inference.context_overflow not in ("raise", "drop_oldest_turn", "end_episode"):
        raise ValueError(f"'context_overflow' is {inference.context_overflow!r}")
    of_tokenizer = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    of_template = {"documents"}  # which templates read, like further names
    if reserved := sorted((set(of_tokenizer) - of_template) & set(inference.chat_template_kwargs)):
        raise ValueError(f"'chat_template_kwargs' has {reserved[0]!r}, which is an argument of the tokenizer")
    for name, sampling in inference.sampling.items():
        length = sampling.get("max_completion_length", 1)
        if not isinstance(length, int) or not 1 <= length < 1e9:
            raise ValueError(f"'sampling' of {name!r} has the 'max_completion_length' {length!r}")
        for key, value in sampling.items():
            if key != "stop" and not isinstance(value, (int, float, type(None))):
                raise TypeError(f"'sampling' of {name!r} has {value!r} for {key!r}")
