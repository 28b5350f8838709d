# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What decides the results of a run, as it is recorded in checkpoints and compared when a run is resumed."""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from trl.trainer.utils import get_callable_name

from ..config.inherited import INHERITED
from ..config.marft_config import MARFTConfig
from ..config.options import rules_of
from ..config.team_setup import TeamSetup
from ..config.unused import ALWAYS_UNUSED
from ..rollout.views import View
from ..seams.versions import installed_version
from ..system.redaction import without_secrets
from ..weights.fingerprints import hash_of_weights
from ..weights.manifest import BaseModel
from ..workflows.base import callable_name


_PACKAGES = ("marft-trl", "trl", "transformers", "peft", "accelerate", "torch", "bitsandbytes")
_OF_BATCHES = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "steps_per_generation"),
    *("num_iterations", "update_order", "agent_iteration_interval"),
)
_OF_ORDER = ("seed", "shuffle_dataset")
_OF_CRITIC = ("critic", "level")


def fields_about(*what: str) -> frozenset[str]:
    """Names of the settings that are about `"files"`, `"evaluations"` or `"machines"`, see [`Rule`]."""
    return frozenset(name for name, rule in rules_of(MARFTConfig, INHERITED).items() if rule.about in what)


# What does not change what is trained
_NOT_RECORDED = fields_about("files", "evaluations", "machines") | ALWAYS_UNUSED
# Rows of a dataset that are hashed; of a larger one, so many or more, evenly spaced
_SAMPLED_ROWS = 20_000
_OF_LORA = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias", "target_modules", "modules_to_save"),
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "lora_dropout", "target_parameters"),
)


class RunSettings:
    """
    Collects what decides the results of a run.

    Args:
        team ([`TeamSetup`]): the team as it is trained.
        args ([`MARFTConfig`]): training arguments.
        model (`nn.Module`): the model with its adapters.
        base (`Callable`): `base()` describes the base, the tokenizer and the chat template.
        rewards (`Mapping[str, Sequence]`): reward functions of the team, under `""`, and of agents.
        weights (`Sequence[float]`): weights of the team's reward functions.
        view (`Callable`): `view()` returns the present view.
        dataset: the training dataset.
        num_processes (`int`): number of processes.
    """

    def __init__(
        self,
        team: TeamSetup,
        args: MARFTConfig,
        model: Any,
        base: Callable[[], BaseModel],
        rewards: Mapping[str, Sequence],
        weights: Sequence[float],
        view: Callable[[], View],
        dataset: Any,
        num_processes: int,
    ):
        self._args, self._agents, self._policies = args, team.agents, team.policies
        self._workflow, self._critic = team.workflow, team.critic
        self._model, self._base, self._rewards, self._view = model, base, rewards, view
        self._weights, self._dataset, self._num_processes = list(weights), dataset, num_processes
        self._slow: dict[str, Any] | None = None
        # Now, because no process may have whole weights later
        self._base_weights = hash_of_weights(model) if team.policies.has_adapters else None

    def collect(self) -> dict[str, Any]:
        """Settings by part, JSON-serializable. The parts are those of [`~marft_trl.runs.changes`]."""
        args = self._args
        parts: dict[str, Any] = {
            "agents": {agent.name: self._policies.adapter_of(agent.name) for agent in self._agents},
            "adapters": self._adapters(),
            "critic": {name: getattr(args, name) for name in _OF_CRITIC}
            if self._critic is not None
            else {"critic": None},
            "optimizer": {"optim": str(getattr(args.optim, "value", args.optim))},
            "seed": {name: getattr(args, name, None) for name in _OF_ORDER},
            "workflow": {**self._describe_workflow(), "team": [agent.name for agent in self._agents]},
            "batch": {name: getattr(args, name) for name in _OF_BATCHES},
            "processes": {"count": self._num_processes},
            "versions": {name: installed_version(name) for name in _PACKAGES},
            "tunable": without_secrets(self._tunables()),
        }
        if self._slow is None:
            self._slow = self._of_base_and_data()
        return json.loads(json.dumps({**parts, **self._slow}, default=str))

    def _of_base_and_data(self) -> dict[str, Any]:
        base = self._base()
        return {
            "base": {"config": base.config_hash, "quantization": base.quantization, "weights": self._base_weights},
            "tokenizer": {"vocabulary": base.tokenizer_hash, "chat_template": base.chat_template_hash},
            "dataset": dataset_hash(self._dataset),
        }

    def _describe_workflow(self) -> dict[str, Any]:
        """Its description, and for a class outside of this package a hash of its source."""
        described = dict(self._workflow.describe())
        if type(self._workflow).__module__.partition(".")[0] != __name__.partition(".")[0]:
            described["code"] = code_of(self._workflow)
        return described

    def _adapters(self) -> dict[str, Any]:
        if not self._policies.has_adapters:
            return {}
        configs = {name: self._model.peft_config[name] for name in self._policies.names}
        return {
            name: {
                "trained": name in self._policies.trained,
                **{key: plain(getattr(config, key)) for key in _OF_LORA if hasattr(config, key)},
            }
            for name, config in configs.items()
        }

    def _tunables(self) -> dict[str, Any]:
        recorded = {
            item.name: plain(getattr(self._args, item.name))
            for item in fields(self._args)
            if item.name not in (*_NOT_RECORDED, *_OF_BATCHES, *_OF_ORDER, *_OF_CRITIC, "optim")
        }
        for agent in self._agents:
            spec = {
                name: value for name, value in agent.to_dict().items() if name not in ("name", "adapter", "trainable")
            }
            recorded |= {f"agents.{agent.name}.{name}": plain(value) for name, value in spec.items()}
            if agent.reply is not None:
                recorded[f"agents.{agent.name}.reply"] = code_of(agent.reply)
        for owner, functions in self._rewards.items():
            for position, function in enumerate(functions):
                recorded[f"{owner or 'team'}.rewards[{position}]"] = code_of(function)
        recorded["reward_weights"] = self._weights
        recorded["view"] = callable_name(self._view())
        return recorded


def plain(value: Any) -> Any:
    """A value of a setting, JSON-serializable and the same in every process."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Mapping):
        return {str(key): plain(its) for key, its in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, torch.dtype):
        return str(value)
    value = getattr(value, "value", value)  # of an enumeration
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


def code_of(function: Any) -> str:
    """
    Name of a reward function, and a hash of its source and of what it was made with (defaults, arguments of
    `functools.partial`, variables of the function that returned it, as far as these are plain values or functions).
    The name alone for models.
    """
    if isinstance(function, (str, nn.Module)):
        return function if isinstance(function, str) else type(function).__name__
    content = _content_of(function, set())
    name = get_callable_name(getattr(function, "__wrapped__", function))
    return name if content is None else f"{name} ({hashlib.sha256(content.encode()).hexdigest()[:12]})"


def _content_of(function: Any, seen: set[int]) -> str | None:
    """Source of a function and what it was made with; `None` if neither is known."""
    function = getattr(function, "__wrapped__", function)
    seen.add(id(function))
    made = _made_with(function)
    kept = {name: its for name, one in made.items() if (its := _fixed(one, seen)) is not None}
    try:
        source = inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        source = ""
    return (source + (json.dumps(kept, sort_keys=True) if kept else "")) or None


def _made_with(function: Any) -> dict[str, Any]:
    """Values that a function was made with, by name."""
    if isinstance(function, functools.partial):
        return {"": function.func, **{str(n): one for n, one in enumerate(function.args)}, **function.keywords}
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    # A variable that the function assigns itself is a state, such as a counter
    assigned = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_DEREF"}
    found = {f"default {number}": one for number, one in enumerate(function.__defaults__ or ())}
    found |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name not in assigned:
            with contextlib.suppress(ValueError):  # a variable without a value yet
                found[name] = cell.cell_contents
    return found


def _fixed(value: Any, seen: set[int]) -> Any:
    """A value that cannot change while a run goes on, JSON-serializable, or `None`."""
    if isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, tuple):
        return [_fixed(one, seen) for one in value]
    if is_dataclass(value) and not isinstance(value, type) and vars(type(value))["__dataclass_params__"].frozen:
        return {item.name: _fixed(getattr(value, item.name), seen) for item in fields(value)}
    if (inspect.isroutine(value) or isinstance(value, functools.partial)) and id(value) not in seen:
        return [get_callable_name(value), _content_of(value, seen)]
    return None


def dataset_hash(dataset: Any) -> dict[str, Any]:
    """Number of rows, columns and a hash of evenly spaced rows. Nothing is read from a stream."""
    if not isinstance(dataset, Dataset):
        return {"kind": "stream"}
    count = len(dataset)
    step = max(count // _SAMPLED_ROWS, 1)
    digest = hashlib.sha256()
    plain = dataset.with_format(None)
    for index in range(0, count, step):
        digest.update(json.dumps(plain[index], sort_keys=True, default=str).encode())
    return {"rows": count, "columns": sorted(dataset.column_names), "content": digest.hexdigest()[:16]}
