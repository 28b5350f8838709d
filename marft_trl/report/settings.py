# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What decides the results of an experiment, recorded with each run, so that a report joins runs of one experiment."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.marft_config import MARFTConfig
from ..runs.run_settings import code_of, dataset_hash, fields_about, plain
from ..system.redaction import without_secrets
from ..workflows import Workflow
from .experiment import Experiment


# The seed is that of the cell
_NOT_RECORDED = fields_about("files", "machines") | {"seed"}


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """Settings of an experiment by name, without secrets, JSON-serializable and the same in every process."""
    args = experiment.args
    found: dict[str, Any] = {
        f"args.{item.name}": plain(getattr(args, item.name))
        for item in dataclasses.fields(MARFTConfig)
        if item.name not in _NOT_RECORDED
    }
    agents = {agent.name: agent for agent in experiment.agents}
    for place, agent in {**agents, "solo": experiment.solo_agent()}.items():
        found |= {f"{place}.{name}": plain(value) for name, value in agent.to_dict().items()}
        found[f"{place}.reward_funcs"] = _codes(agent.reward_funcs)
        found[f"{place}.peft_config"] = _peft(agent.peft_config)
        functions = {"view": agent.view, "reply": agent.reply, "tools": agent.tools}
        found |= {f"{place}.{name}": _codes(its) for name, its in functions.items() if its is not None}
    found |= {
        "model": str(experiment.model),
        "agents": list(agents),
        "reward_funcs": _codes(experiment.reward_funcs),
        "peft_config": _peft(experiment.peft_config),
        "workflow": _workflow(experiment.workflow),
        "solo.workflow": _workflow(experiment.solo_workflow),
        "train_dataset": dataset_hash(experiment.train_dataset),
        "eval_dataset": dataset_hash(experiment.eval_dataset),
    }
    found |= {f"options.{name}": _value(value) for name, value in experiment.options.items()}
    return json.loads(json.dumps(without_secrets(found), default=str))


# What decides which questions are asked in an evaluation, how they are answered and what is right
EVALUATION = (
    *("eval_dataset", "args.num_generations_eval", "args.eval_sampling", "args.eval_right_at", "args.eval_right_by"),
)


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Settings that are not the same, as text."""
    # Another version has other fields of the configuration
    both = {name for name in {*theirs, *ours} if not name.startswith("args.") or (name in theirs and name in ours)}
    names = sorted(name for name in both if theirs.get(name) != ours.get(name))
    return [f"{name} was {theirs.get(name)!r}, is {ours.get(name)!r}" for name in names]


def _workflow(workflow: Workflow | None) -> Any:
    """Its description, code and plain attributes: a workflow of one's own need not describe its settings."""
    if workflow is None:
        return None
    attributes = {name: _value(value) for name, value in vars(workflow).items() if not name.startswith("_")}
    return {"describes": _value(dict(workflow.describe())), "code": code_of(workflow), "attributes": attributes}


def _value(value: Any) -> Any:
    if isinstance(value, Workflow):
        return _workflow(value)
    if isinstance(value, Mapping):
        return {str(name): _value(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(one) for one in value]
    return _code(value) if callable(value) else plain(value)


def _code(function: Any) -> str:
    """Name and hash of the source of a function, a class or an object."""
    if not isinstance(function, type):
        return code_of(function)
    try:
        return f"{function.__qualname__} ({hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]})"
    except (OSError, TypeError):
        return function.__qualname__


def _codes(functions: Any) -> list[str]:
    if functions is None:
        return []
    several = isinstance(functions, Sequence) and not isinstance(functions, str)
    return [code_of(one) for one in (functions if several else [functions])]


def _peft(config: Any) -> Any:
    return None if config is None else plain(config.to_dict())
