# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The experiment of a report: a task, a model, a team, a budget, and the settings that affect the results."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import PeftConfig

from ...agents import AgentSpec, check_team
from ...config.checks import check_names
from ...config.marft_config import MARFTConfig
from ...episodes.images import as_json
from ...runs.resume import compute_fingerprint, dataset_hash, fields_about, is_of_user, plain
from ...system.files import import_file, read_source
from ...system.hints import checked_names, did_you_mean
from ...system.redaction import without_secrets
from ...trainer import MARFTTrainer
from ...workflows import Workflow


# The cell sets the seed
_NOT_RECORDED = fields_about("files", "machines") | {"seed"}


def collect_settings(experiment: Experiment) -> dict[str, Any]:
    """Collect the settings by name, JSON-serializable, without secrets, equal in every process."""
    names = [item.name for item in dataclasses.fields(MARFTConfig) if item.name not in _NOT_RECORDED]
    settings: dict[str, Any] = {f"args.{name}": plain(getattr(experiment.args, name)) for name in names}
    agents = {agent.name: agent for agent in experiment.agents}
    for place, agent in {**agents, "solo": experiment.solo_agent()}.items():
        settings |= {f"{place}.{name}": plain(value) for name, value in agent.to_dict().items()}
        settings[f"{place}.reward_funcs"] = _codes(agent.reward_funcs)
        settings[f"{place}.peft_config"] = _peft(agent.peft_config)
        if agent.model is not None:
            settings[f"{place}.model"] = agent.model if isinstance(agent.model, str) else type(agent.model).__name__
        functions = {"view": agent.view, "reply": agent.reply, "tools": agent.tools}
        settings |= {f"{place}.{name}": _codes(value) for name, value in functions.items() if value is not None}
    settings |= {
        "model": str(experiment.model),
        "agents": list(agents),
        "reward_funcs": _codes(experiment.reward_funcs),
        "peft_config": _peft(experiment.peft_config),
        "workflow": _value(experiment.workflow),
        "solo.workflow": _value(experiment.solo_workflow),
        "train_dataset": dataset_hash(experiment.train_dataset),
        "eval_dataset": dataset_hash(experiment.eval_dataset),
    }
    settings |= {f"options.{name}": _value(value) for name, value in experiment.options.items()}
    return json.loads(json.dumps(without_secrets(settings), default=str))


# Settings that affect the questions, the answers or the scores of an evaluation
EVALUATION = (
    *("eval_dataset", "args.num_generations_eval", "args.eval_sampling", "args.eval_right_at", "args.eval_right_by"),
)


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    # Another version may have other fields of the configuration
    both = recorded.keys() & current.keys()
    compared = both | {name for name in {*recorded, *current} if not name.startswith("args.")}
    names = sorted(name for name in compared if recorded.get(name) != current.get(name))
    return [f"{name} was {recorded.get(name)!r}, is {current.get(name)!r}" for name in names]


def _workflow(workflow: Workflow) -> dict[str, Any]:
    """Describe a workflow, its code and its plain attributes: custom workflows need not describe their settings."""
    return {
        "describes": _value(dict(workflow.describe())),
        "code": compute_fingerprint(workflow) if is_of_user(workflow) else None,
        "attributes": {name: _value(value) for name, value in vars(workflow).items() if not name.startswith("_")},
    }


def _value(value: Any) -> Any:
    if isinstance(value, Workflow):
        return _workflow(value)
    if isinstance(value, Mapping):
        return {str(name): _value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(entry) for entry in value]
    return _code(value) if callable(value) else plain(value)


def _code(function: Any) -> str:
    """Return the name and a hash of the source of a function, a class or an object."""
    if not isinstance(function, type):
        return compute_fingerprint(function)
    try:
        return f"{function.__qualname__} ({hashlib.sha256(read_source(function).encode()).hexdigest()[:12]})"
    except (OSError, TypeError, SyntaxError):
        return function.__qualname__


def _codes(functions: Any) -> list[str]:
    if functions is None:
        return []
    are_several = isinstance(functions, Sequence) and not isinstance(functions, str)
    return [compute_fingerprint(function) for function in (functions if are_several else [functions])]


def _peft(config: Any) -> Any:
    return None if config is None else plain(config.to_dict())


# Settings from which `MARFTConfig` derives others
_FOLLOWED = {
    *("preset", "bf16", "fp16", "use_cpu", "num_generations", "per_device_train_batch_size", "steps_per_generation"),
    *("gradient_accumulation_steps", "generation_batch_size", "loss_type"),
}


@dataclass(frozen=True)
class Experiment:
    """
    A task, a model, a team and a budget.

    Args:
        model (`str`): Base model: a Hub id or a folder. Each run loads it again.
        agents (`Sequence[AgentSpec]`): The team.
        reward_funcs: Reward functions, as in [`MARFTTrainer`].
        train_dataset (`Dataset`): Questions to train on.
        eval_dataset (`Dataset`): Questions that the arms are compared on. The more there are, the smaller the
            differences that can be seen.
        args ([`MARFTConfig`]): Training arguments of the team; `seed` and `output_dir` are set for each run.
            `eval_right_at`, `eval_sampling` and `num_generations_eval` are those of the comparison.
        peft_config ([`~peft.PeftConfig`], *optional*): Adapters of the agents.
        workflow ([`Workflow`], *optional*): The workflow of the team. Defaults to a chain.
        solo ([`AgentSpec`], *optional*): The agent that works alone. Defaults to the last agent without a teammate to
            wait for, whose turn may be as long as those of the whole team.
        solo_workflow ([`Workflow`], *optional*): The workflow of the agent that works alone. Needed where that of the
            team holds a game or an environment with fixed agents. By default, the agent answers, or acts in the
            [`EnvironmentLoop`] of the team.
        options (`dict`, *optional*): Further arguments of [`MARFTTrainer`].
        variants (`dict[str, Callable[[Experiment], Experiment]]`, *optional*): Arms of your own by name: functions
            that return the experiment with something changed, such as
            `{"rate 1e-4": lambda experiment: experiment.with_args(learning_rate=1e-4)}`. Each is trained until it has
            generated as many tokens as the team, or, if it changes `max_steps`, for these. A preset needs a
            new [`MARFTConfig`].
        name (`str`, *optional*): Title of the report.
    """

    model: str
    agents: Sequence[AgentSpec]
    reward_funcs: Any
    train_dataset: Dataset
    eval_dataset: Dataset
    args: MARFTConfig
    peft_config: PeftConfig | None = None
    workflow: Workflow | None = None
    solo: AgentSpec | None = None
    solo_workflow: Workflow | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Callable[[Experiment], Experiment]] = field(default_factory=dict)
    name: str = "Is the team worth it?"

    def __post_init__(self):
        check_team(self.agents)
        if not isinstance(self.args, MARFTConfig):
            raise TypeError(f"`args` of an `Experiment` must be a `MARFTConfig`, got {type(self.args).__name__}.")
        if not isinstance(self.model, (str, os.PathLike)):
            raise TypeError(
                "`model` of an `Experiment` must be a Hub id or a folder, which each run loads, got "
                f"{type(self.model).__name__}."
            )
        loaded = next((agent for agent in self.agents if not isinstance(agent.model, (str, type(None)))), None)
        if loaded is not None:
            raise TypeError(
                f"`model` of agent {loaded.name!r} in an `Experiment` must be a Hub id or a folder, which each run "
                f"loads, got {type(loaded.model).__name__}."
            )
        if not isinstance(self.eval_dataset, Dataset) or not len(self.eval_dataset):
            raise ValueError("`eval_dataset` of an `Experiment` must be a `Dataset` with at least one row.")
        if not isinstance(self.variants, Mapping):
            raise TypeError(f"`variants` of an `Experiment` must be a dict of functions, got {self.variants!r}.")
        for name, change in self.variants.items():
            if not name or {*name} & {*":/\\"} or not callable(change):
                raise ValueError(
                    "`variants` of an `Experiment` must map names without ':', '/' and '\\' to functions of an "
                    f"experiment, got {name!r}: {change!r}."
                )

    def changed(self, **fields: Any) -> Experiment:
        """Return the experiment with other fields."""
        return dataclasses.replace(self, **fields)

    def with_args(self, **settings: Any) -> Experiment:
        """
        Return the experiment with other training arguments.

        Raises:
            TypeError: there is no such argument.
            ValueError: `MARFTConfig` derives other settings from the argument.
        """
        check_names(settings, [item.name for item in dataclasses.fields(MARFTConfig)])
        if followed := sorted(_FOLLOWED.intersection(settings)):
            names = ", ".join(f"`{name}`" for name in followed)
            raise ValueError(
                f"`with_args` cannot set {names}, because `MARFTConfig` derives other settings from that. Use "
                "`experiment.changed(args=MARFTConfig(...))`."
            )
        args = copy.copy(self.args)
        for name, value in settings.items():
            setattr(args, name, value)
        return self.changed(args=args)

    def solo_agent(self) -> AgentSpec:
        """Return the agent that works alone."""
        if self.solo is not None:
            return self.solo
        last = next((agent for agent in reversed(self.agents) if agent.has_policy), None)
        if last is None:
            raise ValueError("No agent has its own policy, so none can work alone. Set `solo` of the `Experiment`.")
        lengths = [agent.max_completion_length or self.args.max_completion_length or 256 for agent in self.agents]
        return dataclasses.replace(last, trainable=True, adapter=last.name, max_completion_length=sum(lengths))

    def questions_in_both(self) -> int:
        """Count evaluation questions that are also training questions; 0 if all questions have the same prompt."""
        if not isinstance(self.train_dataset, Dataset) or "prompt" not in self.train_dataset.column_names:
            return 0
        sets = (self.eval_dataset, self.train_dataset)
        are_games = all("seed" in split.column_names for split in sets) and len({*_row_keys(sets[0], ["prompt"])}) == 1
        evaluated, trained = (_row_keys(split, ["prompt", "seed"] if are_games else ["prompt"]) for split in sets)
        training_questions = {*trained}
        return sum(question in training_questions for question in evaluated) if len({*evaluated}) > 1 else 0

    def trainer(self) -> MARFTTrainer:
        """Create the trainer of a run."""
        models = [agent.model for agent in self.agents if agent.has_policy]  # of an arm
        return MARFTTrainer(
            model=models[0] if None not in models and self.model not in models else self.model,
            reward_funcs=self.reward_funcs,
            args=self.args,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            peft_config=copy.deepcopy(self.peft_config),
            agents=list(self.agents),
            workflow=self.workflow,
            **self.options,
        )


Experiment.__init__ = checked_names("Experiment")(Experiment.__init__)  # type: ignore[method-assign]


def _row_keys(dataset: Dataset, names: Sequence[str]) -> list[str]:
    return [json.dumps(row, default=as_json) for row in zip(*(dataset[name] for name in names), strict=True)]


def load_experiment(place: str, settings: Mapping[str, Any] | None = None) -> Experiment:
    """
    Call the function that creates an experiment.

    Args:
        place (`str`): `"file.py:function"` or `"module:function"`.
        settings (`Mapping[str, Any]`, *optional*): arguments of the function.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    source, _, name = place.rpartition(":")
    if not source:
        raise ValueError(f"`experiment` must be 'file.py:function' or 'module:function', got {place!r}.")
    if source.endswith(".py") and not Path(source).exists():
        raise ValueError(f"There is no file {os.fspath(Path(source).absolute())!r}.")
    module: Any = import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    make: Callable | None = getattr(module, name, None)
    if make is None:
        known = [var for var, value in vars(module).items() if callable(value) and not var.startswith("_")]
        raise ValueError(f"{source} has no function {name!r}.{did_you_mean(name, known)}")
    try:
        inspect.signature(make).bind(**(settings or {}))
    except TypeError as error:
        raise ValueError(
            f"`{name}` in {source}, the function that returns the `Experiment`, cannot be called with "
            f"`settings={dict(settings or {})}`: {error}."
        ) from None
    experiment = make(**(settings or {}))
    if not isinstance(experiment, Experiment):
        raise ValueError(f"`{name}` in {source} must return an `Experiment`, got {type(experiment).__name__}.")
    return experiment
