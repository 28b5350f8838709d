# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What decides the results of an experiment, recorded with each run, so that a report joins runs of one experiment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..configs import MARFTConfig
from ..trainer.run_settings import code_of, dataset_hash, plain
from .experiment import Experiment


# Where and how a run is written and shown; the seed is that of the cell
_NOT_RECORDED = ("seed", "output_dir", "run_name", "disable_tqdm", "local_rank")
_NOT_RECORDED_PREFIXES = ("log", "save", "report", "hub", "push", "dataloader")


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """Settings of an experiment by name, JSON-serializable and the same in every process."""
    args = experiment.args
    found: dict[str, Any] = {
        f"args.{item.name}": plain(getattr(args, item.name))
        for item in dataclasses.fields(MARFTConfig)
        if item.name not in _NOT_RECORDED and not item.name.startswith(_NOT_RECORDED_PREFIXES)
    }
    agents = {agent.name: agent for agent in experiment.agents}
    for place, agent in {**agents, "solo": experiment.solo_agent()}.items():
        found |= {f"{place}.{name}": plain(value) for name, value in agent.to_dict().items()}
        found[f"{place}.reward_funcs"] = _codes(agent.reward_funcs)
        found[f"{place}.peft_config"] = _peft(agent.peft_config)
    found |= {
        "model": str(experiment.model),
        "agents": list(agents),
        "reward_funcs": _codes(experiment.reward_funcs),
        "peft_config": _peft(experiment.peft_config),
        "workflow": None if experiment.workflow is None else plain(dict(experiment.workflow.describe())),
        "train_dataset": dataset_hash(experiment.train_dataset),
        "eval_dataset": dataset_hash(experiment.eval_dataset),
        "options": sorted(experiment.options),
    }
    return json.loads(json.dumps(found, default=str))


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Settings that are not the same, as text."""
    names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    return [f"{name} was {theirs.get(name)!r}, is {ours.get(name)!r}" for name in names]


def _codes(functions: Any) -> list[str]:
    if functions is None:
        return []
    several = isinstance(functions, Sequence) and not isinstance(functions, str)
    return [code_of(one) for one in (functions if several else [functions])]


def _peft(config: Any) -> Any:
    return None if config is None else plain(config.to_dict())
