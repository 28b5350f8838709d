# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What decides the results of a run, as checkpoints record it, and what a resume compares."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import nn
from trl.trainer.utils import get_callable_name

from ..adapters.manifest import BaseModel, FurtherBaseModel, hash_of_weights
from ..config.marft_config import MARFTConfig
from ..config.options import ALWAYS_UNUSED, INHERITED, collect_rules
from ..config.team_setup import TeamSetup
from ..episodes.images import as_json
from ..prompts.views import View
from ..seams.libraries import installed_version
from ..system.files import read_source
from ..system.hints import brief, did_you_mean
from ..system.redaction import without_secrets
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
    return frozenset(name for name, rule in collect_rules(MARFTConfig, INHERITED).items() if rule.about in what)


# What does not change what is trained
_NOT_RECORDED = fields_about("files", "evaluations", "machines") | ALWAYS_UNUSED
_SAMPLED_ROWS = 20_000  # rows of a dataset that are hashed; of a larger one, so many or more, evenly spaced
_OF_LORA = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias", "target_modules", "modules_to_save"),
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "lora_dropout", "target_parameters"),
)


class RunSettings:
    """Collects what decides the results of a run. `rewards` has the functions of agents, and under `""` the team's."""

    def __init__(
        self,
        team: TeamSetup,
        args: MARFTConfig,
        model: Any,
        bases: Callable[[], Sequence[BaseModel]],  # descriptions, that of the trainer's `model` first
        rewards: Mapping[str, Sequence],
        weights: Sequence[float],
        view: Callable[[], View],
        dataset: Any,
        num_processes: int,
    ):
        self._args, self._agents, self._policies = args, team.agents, team.policies
        self._workflow, self._critic = team.workflow, team.critic
        self._bases, self._view = bases, view
        self._weights, self._dataset, self._num_processes = list(weights), dataset, num_processes
        self._slow: dict[str, Any] | None = None
        # Now, as the files may be edited during the run
        self._workflow_code = compute_fingerprint(team.workflow) if is_of_user(team.workflow) else None
        functions = {f"agents.{agent.name}.reply": agent.reply for agent in team.agents if agent.reply is not None}
        for owner, of_owner in rewards.items():
            functions |= {f"{owner or 'team'}.rewards[{index}]": item for index, item in enumerate(of_owner)}
        self._code = {name: compute_fingerprint(function) for name, function in functions.items()}
        # Now, because no process may have whole weights later
        models = (model, *team.policies.further)
        self._base_weights = [hash_of_weights(item) if isinstance(item, PeftModel) else None for item in models]

    def collect(self) -> dict[str, Any]:
        args, has_critic = self._args, self._critic is not None
        code = {"code": self._workflow_code} if self._workflow_code is not None else {}
        parts: dict[str, Any] = {
            "agents": {agent.name: self._policies.get_adapter(agent.name) for agent in self._agents},
            "adapters": self._adapters(),
            "critic": {name: getattr(args, name) for name in _OF_CRITIC} if has_critic else {"critic": None},
            "optimizer": {"optim": str(getattr(args.optim, "value", args.optim))},
            "seed": {name: getattr(args, name, None) for name in _OF_ORDER},
            "workflow": {**self._workflow.describe(), **code, "team": [agent.name for agent in self._agents]},
            "batch": {name: getattr(args, name) for name in _OF_BATCHES},
            "processes": {"count": self._num_processes},
            "versions": {name: installed_version(name) for name in _PACKAGES},
            "tunable": without_secrets(self._tunables()),
        }
        if self._slow is None:
            kinds: dict[str, Any] = {}
            tokenizers: dict[str, Any] = {}
            for base, weights in zip(self._bases(), self._base_weights, strict=True):
                kind = {"config": base.config_hash, "quantization": base.quantization, "weights": weights}
                tokenizer = {"vocabulary": base.tokenizer_hash, "chat_template": base.chat_template_hash}
                if isinstance(base, FurtherBaseModel):  # by their first agents
                    kinds.setdefault("further", {})[base.folder] = {**kind, "agents": base.agents}
                    tokenizers.setdefault("further", {})[base.folder] = tokenizer
                else:
                    kinds, tokenizers = kind, tokenizer
            self._slow = {"base": kinds, "tokenizer": tokenizers, "dataset": dataset_hash(self._dataset)}
        return json.loads(json.dumps({**parts, **self._slow}, default=str))

    def _adapters(self) -> dict[str, Any]:
        adapters = {}
        for name in filter(self._policies.is_lora, self._policies.names):
            config = self._policies.models[name].peft_config[name]
            lora = {key: plain(getattr(config, key)) for key in _OF_LORA if hasattr(config, key)}
            adapters[name] = {"trained": name in self._policies.trained, **lora}
        return adapters

    def _tunables(self) -> dict[str, Any]:
        recorded = {
            item.name: plain(getattr(self._args, item.name))
            for item in fields(self._args)
            if item.name not in (*_NOT_RECORDED, *_OF_BATCHES, *_OF_ORDER, *_OF_CRITIC, "optim")
        }
        for agent in self._agents:
            for name, value in agent.to_dict().items():
                if name not in ("name", "adapter", "trainable"):
                    recorded[f"agents.{agent.name}.{name}"] = plain(value)
        return {**recorded, **self._code, "reward_weights": self._weights, "view": callable_name(self._view())}


def is_of_user(workflow: Any) -> bool:
    return type(workflow).__module__.partition(".")[0] != __name__.partition(".")[0]


def plain(value: Any) -> Any:
    """A value of a setting, JSON-serializable and the same in every process."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, torch.dtype):
        return str(value)
    value = getattr(value, "value", value)  # of an enumeration
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


def compute_fingerprint(function: Any) -> str:
    """
    Name of a function with a hash of its source and of what it was made with: defaults, arguments of
    `functools.partial`, variables of the function that returned it (plain values, functions). Models: the name alone.
    """
    if isinstance(function, (str, nn.Module)):
        return function if isinstance(function, str) else type(function).__name__
    name, made = get_callable_name(getattr(function, "__wrapped__", function)), []
    while isinstance(function, functools.partial):
        made += [function.args, function.keywords]
        function = function.func
    function = getattr(function, "__wrapped__", function)
    try:
        source = read_source(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError, SyntaxError):  # a class in a file that is broken at the moment
        return name
    made += filter(None, (getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)))
    if getattr(function, "__closure__", None):
        kept = {}
        for key, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
            with contextlib.suppress(ValueError):  # a variable without a value yet
                kept[key] = cell.cell_contents
        counters = ",".join(re.findall(r"^\s*nonlocal (.+)$", source, re.MULTILINE))  # states, which change in a run
        made.append({key: value for key, value in kept.items() if not re.search(rf"\b{key}\b", counters)})
    content = source + (json.dumps([_fixed(value) for value in made], sort_keys=True) if made else "")
    return f"{name} ({hashlib.sha256(content.encode()).hexdigest()[:12]})"


def _fixed(value: Any) -> Any:
    """A value that cannot change during a run, JSON-serializable, or `None`."""
    if isinstance(value, Mapping):
        return sorted([repr(key), repr(_fixed(item))] for key, item in value.items())
    if isinstance(value, tuple):
        return [_fixed(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type) and vars(type(value))["__dataclass_params__"].frozen:
        return {item.name: _fixed(getattr(value, item.name)) for item in fields(value)}
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return get_callable_name(value)
    return value if isinstance(value, (str, int, float, bool)) else None


def dataset_hash(dataset: Any) -> dict[str, Any]:
    """Number of rows, columns and a hash of evenly spaced rows. Nothing is read from a stream."""
    if not isinstance(dataset, Dataset):
        return {"kind": "stream"}
    count = len(dataset)
    step = max(count // _SAMPLED_ROWS, 1)
    digest = hashlib.sha256()
    rows = dataset.with_format(None)
    for index in range(0, count, step):
        digest.update(json.dumps(rows[index], sort_keys=True, default=as_json).encode())
    return {"rows": count, "columns": sorted(dataset.column_names), "content": digest.hexdigest()[:16]}


# Parts of the settings that a resumed run may change if it says so, and what the change costs
ACCEPTABLE = {
    "dataset": "the position in the dataset is stored as a number of batches, so different rows are used",
    "seed": "rows come in a different order",
    "workflow": "episodes run differently",
    "base": "the adapters were trained on a different base",
    "tokenizer": "the adapters were trained with a different tokenizer",
    "batch": "the position in the dataset is stored as a number of batches of a different size",
    "processes": "random states and rows in use cannot be redistributed to a different number of processes",
}
_REQUIRED = ("agents", "adapters", "critic", "optimizer")  # parts that must be equal: the state would not fit
_UNKNOWN = "(not recorded)"


def read_accepted(changes: Any) -> tuple[str, ...]:
    """The parts of the settings that may differ, from `MARFTConfig(resume_changes={"accept": [...]})`."""
    if changes is None:
        return ()
    if not isinstance(changes, Mapping):
        raise TypeError(f"`resume_changes` must be a dictionary, got {type(changes).__name__}.")
    if (other := next((key for key in changes if key != "accept"), None)) is not None:
        raise ValueError(
            f"`resume_changes` accepts the key 'accept'; got {other!r}.{did_you_mean(str(other), ['accept'])} A run "
            "resumes with the agents of its checkpoint; for a changed team, start a new run from the adapters of the "
            "checkpoint: `model=load_adapters(base, checkpoint)`."
        )
    parts = changes.get("accept", ())
    if isinstance(parts, (str, Mapping)) or not isinstance(parts, Collection):
        raise TypeError(f"`resume_changes['accept']` must be a list of names, got {parts!r}.")
    for part in parts:
        if part not in ACCEPTABLE:
            raise ValueError(
                f"`resume_changes['accept']` accepts {', '.join(map(repr, ACCEPTABLE))}; got {part!r}."
                f"{did_you_mean(str(part), list(ACCEPTABLE))}"
            )
    return tuple(parts)


def check_same_team(saved: Collection[str], present: Collection[str], folder: Any) -> None:
    """Raise `ValueError` unless a team has the agents and adapters of a checkpoint."""
    new, gone = sorted({*present} - {*saved}), sorted({*saved} - {*present})
    if new or gone:
        differences = [f"{what}: {', '.join(names)}" for what, names in (("new", new), ("missing", gone)) if names]
        raise ValueError(
            f"The checkpoint {folder} has the agents and adapters {sorted(saved)}, but the team has {sorted(present)} "
            f"({'; '.join(differences)}). A run resumes with the agents and adapters of its checkpoint. Resume with "
            "that team, or start a new run with the changed one from the adapters of the checkpoint, without "
            f"`resume_from_checkpoint`: `model=load_adapters(base, {str(folder)!r})`. Agents without an adapter there "
            "start fresh."
        )


def check_structure(
    saved: Mapping[str, Any], present: Mapping[str, Any], accept: Collection[str], folder: Any
) -> list[str]:
    """Return a line for each accepted difference. Raises `ValueError` with a table of the others, then and now."""
    refused, accepted = [], []
    for part in (*_REQUIRED, *ACCEPTABLE, "versions"):
        differences = list(_differences(part, saved.get(part), present.get(part)))
        if part in accept or part == "versions":
            accepted += [f"{name}: {then} -> {now}" for name, then, now in differences]
        else:
            refused += [(part, *difference) for difference in differences]
    if refused:
        can = sorted({part for part, *_ in refused if part in ACCEPTABLE})
        costs = "; ".join(f"{part!r}: {ACCEPTABLE[part]}" for part in can)
        fix = f" To accept the changes, pass `resume_changes={{'accept': {can}}}` ({costs})." if can else ""
        raise ValueError(
            f"The checkpoint {folder} was written with other settings, so its state does not fit this run:\n"
            f"{_table([(name, then, now) for _, name, then, now in refused])}\n"
            f"Resume with the settings of the checkpoint, or start a new run from its adapters (`load_adapters`).{fix}"
        )
    return accepted


def tunables(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Changed settings that take effect (name, then, now), without fields that another version did not record."""
    gone = (".copy_of", ".copy_every", ".copies")  # of agents, up to version 0.4
    then = {name: value for name, value in saved.get("tunable", {}).items() if not name.endswith(gone)}
    differences = _differences("", then, present.get("tunable"))
    return [difference for difference in differences if _UNKNOWN not in difference or not difference[0].isidentifier()]


def _differences(part: str, saved: Any, present: Any) -> Iterable[tuple[str, str, str]]:
    """Entries of a part that differ: name, then, now."""
    if saved is None or present is None:
        return
    saved, present = dict(saved), dict(present)
    if part == "seed":
        saved.pop("data_seed", None)  # earlier versions recorded it; it has no effect
    if part == "workflow" and isinstance(saved.get("class"), str):  # version 0.3 had another path
        saved["class"] = saved["class"].replace("marft_trl.tasks.", "marft_trl.extras.tasks.", 1)
    if part == "workflow" and isinstance(present.get("team"), list):  # names in team order
        saved["team"] = saved.get("team") or present["team"]  # earlier versions did not record it
    yield from _different(part, saved, present)


def _different(where: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    for name in [*present, *(name for name in saved if name not in present)]:
        then, now = saved.get(name, _UNKNOWN), present.get(name, _UNKNOWN)
        full = f"{where}.{name}" if where else name
        if isinstance(then, Mapping) and isinstance(now, Mapping):
            yield from _different(full, then, now)
        elif then != now:
            yield full, _as_text(then), _as_text(now)


def _as_text(value: Any) -> str:
    return brief(value if isinstance(value, str) else repr(value), 60)


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    lines = [("setting", "then", "now"), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join("  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)) for line in lines)
