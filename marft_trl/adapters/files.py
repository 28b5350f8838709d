# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Files of adapters: load the adapters of a saved team, and merge an adapter into its base."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from peft import LoraConfig, PeftConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..agents import AgentSpec
from ..seams.models import without_bitsandbytes
from .lora import adapter_parameters, check_adapter_config, linear_shape
from .manifest import MANIFEST_NAME, BaseModel, TeamManifest, is_hub_id, no_team


logger = logging.getLogger(__name__)  # that of accelerate needs the state of a trainer

WEIGHTS_NAME = "adapter_model.safetensors"
# Files that are not needed to run a team. `*.bin` files are also left out because they are pickles
_UNUSED = ["checkpoint-*/*", "last-checkpoint/*", "completions/*", "runs/*", "_critic*/*", "*.pt", "*.pth", "*.bin"]
# Tensors that a LoRA file may hold: the two matrices (of a linear layer or an embedding) and the magnitudes of DoRA
_LORA_KEY = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<kind>embedding_)?(?P<side>[AB])(?:\.weight|\.bias)?|magnitude_vector(?:\.weight)?)"
)

_LARGEST_WEIGHT = 1e6  # of an adapter; beyond it, turns are noise or overflow


def team_folder(team: str | os.PathLike, revision: str | None = None, token: str | bool | None = None) -> Path:
    """
    Return the local folder of a saved team, or download it from the Hub without its checkpoints and its critic. Raises
    `FileNotFoundError` if `team` is neither the folder of a saved team nor a Hub id.
    """
    path = Path(team)
    if path.is_dir():
        if not (path / MANIFEST_NAME).is_file():
            raise FileNotFoundError(no_team(path))
        return path
    if not is_hub_id(str(team)):
        raise FileNotFoundError(
            f"{str(team)!r} is neither a folder nor a valid Hub id. Pass a folder, or an id such as 'me/my-team'."
        )
    try:
        return Path(snapshot_download(str(team), revision=revision, token=token, ignore_patterns=_UNUSED))
    except (RepositoryNotFoundError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{str(team)!r} is not a local folder, and the team could not be loaded from the Hub: {error}"
        ) from error


def forget_local_bases(folder: Path, manifest: TeamManifest) -> None:
    """Remove the paths of local bases from configs of adapters: uploaded, they may tell more than is meant."""
    for base in manifest.bases:
        for name in manifest.adapters_on(base) if base.is_local else []:
            path = folder / name / CONFIG_NAME
            config = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**config, "base_model_name_or_path": None}, indent=2, sort_keys=True))


def load_adapters(
    model: PreTrainedModel,
    team: str | os.PathLike,
    revision: str | None = None,
    token: str | bool | None = None,
    agent: str | None = None,
) -> PeftModel:
    """
    Put the adapters of a saved team on a base model.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The base model.
        team (`str` or `os.PathLike`):
            Folder that `MARFTTrainer.save_model` wrote, or the Hub id of a team.
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub.
        token (`str` or `bool`, *optional*):
            Token of the Hub.
        agent (`str`, *optional*):
            An agent on the base. Required if the team has several bases.

    Returns: a [`~peft.PeftModel`] with the adapters of the team under their names. `set_adapter(name)` activates one.

    Raises:
        ValueError: an adapter does not fit the base or would change it. The base is then unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "The `model` of `load_adapters(model, team)` must be a loaded base model without adapters, such as "
            f"`AutoModelForCausalLM.from_pretrained(...)`, got {type(model).__name__}."
        )
    folder = team_folder(team, revision, token)
    manifest = TeamManifest.load(folder)
    bases = {player.name: base for base in manifest.bases for player in manifest.players_on(base)}
    if agent not in bases and (agent is not None or manifest.further_bases):
        on_bases = ", ".join(f"{name!r} (on {base.name!r})" for name, base in bases.items())
        raise ValueError(f"`agent` must be an agent on this base, one of {on_bases}, got {agent!r}.")
    return load_onto_base(model, folder, manifest, bases.get(agent or "", manifest.base))


def load_onto_base(model: PreTrainedModel, folder: Path, manifest: TeamManifest, base: BaseModel) -> PeftModel:
    """Like [`load_adapters`], from a local folder. Weights keep the precision that they were saved in."""
    owners = {agent.adapter: agent for agent in reversed(manifest.players_on(base))}
    if not manifest.adapters_on(base):
        names = ", ".join(repr(agent.name) for agent in manifest.players_on(base))
        raise ValueError(
            f"{names} of the team in {folder} have no adapters, but share one fully trained policy. Load it with "
            f"`AutoModelForCausalLM.from_pretrained({str(folder / base.folder)!r})`, or with `Team.from_pretrained`."
        )
    for name, agent in owners.items():
        for file in (CONFIG_NAME, WEIGHTS_NAME):
            _check_link(folder / name / file, folder)
        check_adapter(folder / name, agent, model, base.name)
    first, *others = manifest.adapters_on(base)
    name = first
    try:
        with without_bitsandbytes(model):
            loaded = PeftModel.from_pretrained(model, str(folder), subfolder=first, adapter_name=first)
            for name in others:
                loaded.load_adapter(str(folder), name, subfolder=name)
    except Exception as error:  # a config from the Hub may ask for anything
        raise ValueError(
            f"PEFT cannot load the adapter {name!r} in {folder}: {type(error).__name__}: {error}. The weights of the "
            "base are unchanged, but it now has adapter layers. Load it again before you continue."
        ) from error
    for name in owners:
        _as_saved(loaded, name, folder / name)
    return loaded


def save_base(
    model: PreTrainedModel | PeftModel,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    folder: Path,
    base: BaseModel,
    adapters: Sequence[str],
) -> None:
    """Save the adapters on a base of a team, or its weights if it is trained itself, and the processing class."""
    if isinstance(model, PeftModel):
        model.save_pretrained(str(folder), selected_adapters=list(adapters), save_embedding_layers=False)
    else:
        model.save_pretrained(folder / base.folder)
    processing_class.save_pretrained(folder / base.folder)


def warn_of_leftovers(folder: Path, adapters: Sequence[str]) -> None:
    """Warn of adapters of an earlier team, which are pushed with the folder but never loaded."""
    others = sorted(item.parent.name for item in folder.glob(f"*/{CONFIG_NAME}") if item.parent.name not in adapters)
    if others:
        logger.warning(
            f"{folder} also has the adapters {', '.join(map(repr, others))} of an earlier team, which this team does "
            "not use. Delete them, or save to another folder."
        )


def check_no_adapter(folder: Path) -> None:
    """Raise if a folder with full weights also has an adapter, which transformers would load unchecked."""
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if (folder / name).exists():
            raise ValueError(f"{folder} has the full weights of a policy and also {name}. Remove {name}.")


def check_adapter(folder: Path, agent: AgentSpec, base: PreTrainedModel, trained_on: str) -> None:
    """
    Check an adapter before it is loaded. Raises `ValueError` if the config would change the base, the tensors are not
    those of a LoRA, or the adapter was trained on another base, and `FileNotFoundError` if there are no weights.
    """
    for name in (CONFIG_NAME, WEIGHTS_NAME):  # PEFT would look for a missing one on the Hub
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"The adapter {agent.adapter!r} of the team has no {name} in {folder}, so the copy or download is "
                "incomplete. Copy or download the folder again."
            )
    config = None
    try:  # a file from the Hub may hold anything
        config = PeftConfig.from_pretrained(str(folder))
        check_adapter_config(agent, config, base)
    except Exception as error:
        if config is not None and isinstance(error, ValueError):  # what is wrong with it
            raise
        file = folder / CONFIG_NAME
        raise ValueError(f"The adapter config {file} cannot be read: {type(error).__name__}: {error}") from error
    try:
        with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a mapping
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS_NAME} cannot be read: {error}") from error
    _check_tensors(agent, config, tensors, base, trained_on)
    _check_values(agent, tensors)


def _check_link(file: Path, team: Path) -> None:
    """Raise `ValueError` if a file of a team is a link to elsewhere, whose content a push would upload."""
    # The cache of the Hub keeps files as links within the folder of the repository
    repository = team.parent.parent
    root = repository if team.parent.name == "snapshots" and repository.name.startswith("models--") else team
    if not file.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{file} is a link to {file.resolve()}, outside of the team's folder. Copy the file instead.")


def check_loadable(model: PreTrainedModel | PeftModel, agents: Sequence[AgentSpec]) -> PreTrainedModel | PeftModel:
    """Return the model, or raise `ValueError` if its adapters, as PEFT rewrote their configs, could not be loaded."""
    if isinstance(model, PeftModel):
        base = cast(PreTrainedModel, model.get_base_model())
        for agent in (agent for agent in agents if agent.has_policy):
            config = model.peft_config[agent.adapter]
            check_adapter_config(agent, config, base)
            saved = get_peft_model_state_dict(model, adapter_name=agent.adapter, save_embedding_layers=False)
            _check_tensors(agent, config, saved, base)
    return model


def _check_values(agent: AgentSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise unless the tensors have one floating dtype and the values of weights."""
    kinds = {str(tensor.dtype) for tensor in tensors.values()}
    if len(kinds) > 1 or not all(tensor.is_floating_point() for tensor in tensors.values()):
        raise ValueError(
            f"The adapter of agent {agent.name!r} has tensors of {', '.join(sorted(kinds))}. All of them must have "
            "the same floating-point dtype."
        )
    for key, tensor in tensors.items():
        if not (tensor.float().abs() < _LARGEST_WEIGHT).all():  # also false for NaN
            raise ValueError(
                f"The adapter of agent {agent.name!r} has values in {key!r} that are not finite or above "
                f"{_LARGEST_WEIGHT:g}: the file is damaged, or training had diverged. Use an earlier checkpoint."
            )


def _check_tensors(
    agent: AgentSpec,
    config: LoraConfig,
    tensors: Mapping[str, torch.Tensor],
    base: PreTrainedModel,
    trained_on: str | None = None,
) -> None:
    found: dict[str, set[str]] = {}
    modules = dict(base.named_modules())
    for key, shape in ((key, tensor.shape) for key, tensor in tensors.items()):
        match = _LORA_KEY.fullmatch(key.removeprefix("base_model.model."))
        if match is None:
            raise ValueError(
                f"The adapter of agent {agent.name!r} has the tensor {key!r}, which is not part of a LoRA. Loading it "
                "would change the base, which all agents share. Save only the adapter."
            )
        found.setdefault(match["module"], set()).add(match["side"] or "")
        experts = _check_shape(agent, match, shape, modules, config.target_parameters or (), trained_on)
        rank = shape[0] / experts if match["side"] == "A" and len(shape) == 2 else None
        known = {config.r, *(config.rank_pattern or {}).values()}
        if rank is not None and match["kind"] is None and rank not in known:
            raise ValueError(
                f"The adapter of agent {agent.name!r} has the rank {rank:g} in {match['module']!r}, but its config "
                f"has {sorted(known)}. The two files are not from the same adapter."
            )
    half = sorted(name for name, sides in found.items() if not sides >= {"A", "B"})
    if half or not found:
        what = f"lacks a LoRA matrix of {half[0]!r}" if half else "has no LoRA"
        raise ValueError(f"The adapter file of agent {agent.name!r} {what}. It is truncated or was edited by hand.")


def _check_shape(
    agent: AgentSpec,
    match: re.Match,
    shape: Sequence[int],
    modules: Mapping[str, nn.Module],
    targets: Collection[str],
    trained_on: str | None,
) -> int:
    """Raise a readable error if a tensor of a LoRA does not fit its layer. Returns how many LoRAs it stacks."""
    name, depth = re.subn(r"\.base_layer(?=\.|$)", "", match["module"])
    origin = f" The team was trained on {trained_on!r}: pass that base." if trained_on else ""
    layer = modules.get(name)
    experts = [] if layer is None else _targeted(name, layer, targets)
    if layer is None or (depth and depth >= len(experts)):
        raise ValueError(
            f"The adapter of agent {agent.name!r} is for another base: it has weights for the layer "
            f"{match['module']!r}, which this base does not have.{origin}"
        )
    # The LoRA of the last parameter of a layer is the outermost, that of the one before is its `base_layer`
    count, *sizes = experts[-1 - depth] if experts else (1, *(linear_shape(layer) or ()))
    if not sizes or match["kind"] is not None or match["side"] is None or len(shape) != 2:
        return count
    end, present, needed = ("inputs", sizes[0], shape[1]) if match["side"] == "A" else ("outputs", sizes[1], shape[0])
    if present != needed:
        raise ValueError(
            f"The adapter of agent {agent.name!r} is for another base: its weights for {name!r} need a layer with "
            f"{needed} {end}, but the layer of this base has {present}.{origin}"
        )
    return count


def _targeted(name: str, layer: nn.Module, targets: Collection[str]) -> list[tuple[int, int, int]]:
    """Parameters of a layer that `target_parameters` name, as PEFT takes them: experts, inputs and outputs of each."""
    layer = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    found = []
    for key, parameter in layer.named_parameters(recurse=False):
        if any(f"{name}.{key}".endswith(f".{target}") for target in targets):
            *experts, outputs, inputs = getattr(parameter, "ds_shape", parameter.shape)
            if experts and getattr(layer, "is_transposed", False):
                inputs, outputs = outputs, inputs
            found.append((experts[0] if experts else 1, inputs, outputs))
    return found


@torch.no_grad()
def _as_saved(model: PeftModel, adapter: str, folder: Path) -> None:
    """Restore the precision of the file. PEFT's may be another, and turns would differ from those in training."""
    saved = load_file(folder / WEIGHTS_NAME)
    for name, parameter in adapter_parameters(model, adapter).items():
        head, _, tail = name.rpartition(f".{adapter}")
        tensor = saved.get(head + tail)
        if tensor is not None and tensor.shape == parameter.shape:
            parameter.data = tensor.to(parameter.device)


def alone(model: PeftModel, adapter: str) -> PeftModel:
    """Copy a model with one of its adapters. Layers and adapter weights are separate; base weights are shared."""
    own = {id(item) for name in model.peft_config for item in adapter_parameters(model, name).values()}
    shared = [*model.named_parameters(), *model.named_buffers()]
    single = _only(copy.deepcopy(model, {id(item): item for _, item in shared if id(item) not in own}), adapter)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "This model shares the weights of the base with its team, so merging would change the team. Use "
            "`team.merge(agent)`, which returns a merged copy."
        )

    for name in ("merge_adapter", "merge_and_unload"):
        setattr(single.base_model, name, refuse)
    return single


def merged(model: PeftModel, adapter: str) -> PreTrainedModel:
    copied = _only(copy.deepcopy(model), adapter)
    base = copied.get_base_model()
    if getattr(base, "is_loaded_in_4bit", False) or getattr(base, "is_loaded_in_8bit", False):
        states = [getattr(parameter, "quant_state", None) for parameter in base.parameters()]
        if any(getattr(state, "packing_format_for_cpu", False) for state in states):
            raise ValueError(
                "The 4-bit base has run in evaluation mode before it got adapters, so bitsandbytes repacked its "
                "weights, which can no longer be merged. Load the base again."
            )
        # Rounded to 4 bits again, the adapter would be lost
        config, weights = copied.peft_config[adapter], get_peft_model_state_dict(copied, adapter_name=adapter)
        copied = PeftModel(copied.unload().dequantize(), config, adapter)
        set_peft_model_state_dict(copied, weights, adapter)
        base = copied.get_base_model()
    text_config = base.config.get_text_config()
    if text_config.tie_word_embeddings and isinstance(base.get_input_embeddings(), BaseTunerLayer):
        head = base.get_output_embeddings()  # has no adapter, so the merged embedding is not its weight
        head.weight = nn.Parameter(head.weight.detach().clone())
        base.config.tie_word_embeddings = text_config.tie_word_embeddings = False
    return copied.merge_and_unload()


def _only(model: PeftModel, adapter: str) -> PeftModel:
    model.set_adapter(adapter)
    for name in [name for name in model.peft_config if name != adapter]:
        model.delete_adapter(name)
    return model
