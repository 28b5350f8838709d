# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Teams in scripts and YAML files: read their settings and create their trainer."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trl.rewards
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from ... import rewards, workflows
from ...agents import AgentSpec
from ...config.marft_config import MARFTConfig
from ...system.files import import_file
from ...system.hints import did_you_mean
from ...trainer import MARFTTrainer
from ...workflows import Workflow, rebuild
from .. import sandbox
from .command import Parser, UsageError, as_tokens, check_unknown, read_yaml


# Keys of a YAML file that cannot be written as options
_NOT_OPTIONS = ("agents", "workflow", "reward_funcs")
_FORM = "Define a function `make(args)` that returns a `MARFTTrainer`; `marft init duo` writes an example."
_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class _TrlParser(TrlParser):
    error = Parser.error


class Recipe:
    """
    A team to train: its options, and the trainer that it creates from them.

    Args:
        settings: options that the script or the YAML file sets.
        make: `make(parsed)` creates the trainer from the parsed options.
    """

    def __init__(self, parser: TrlParser, settings: Mapping[str, Any], make: Callable[[Sequence[Any]], MARFTTrainer]):
        self.parser, self.settings, self._make = parser, settings, make
        self.others: Sequence[str] = ()  # options of the launcher
        self.where = "`SETTINGS`"  # source of the settings, for errors
        self.code: str | None = None  # the script, if it defines `TEAM`, which loading the trained team needs

    def trainer(self, tokens: Sequence[str]) -> MARFTTrainer:
        """
        Make the trainer.

        Args:
            tokens: options as on a command line.

        Raises:
            UsageError: an option is unknown.
        """
        parsed = self.parse(tokens)
        try:
            return self._make(parsed)
        except (ValueError, TypeError, OSError, ImportError) as error:
            if isinstance(error, UsageError) or os.environ.get("MARFT_TRACEBACK") or self._is_theirs(error):
                raise
            raise UsageError(f"{error} (Set `MARFT_TRACEBACK=1` for the traceback.)") from error

    def _is_theirs(self, error: BaseException) -> bool:
        """Whether an error was raised in the user's own file."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        mine = Path(__file__).parents[2]
        return (
            trace is not None
            and "site-packages" not in (name := trace.tb_frame.f_code.co_filename)
            and not (Path(name).is_relative_to(mine))
        )

    def parse(self, tokens: Sequence[str]) -> Sequence[Any]:
        """Parse options into their dataclasses."""
        own = as_tokens(self.settings, self.parser, tokens, self.others, self.where)
        *parsed, unknown = self.parser.parse_args_into_dataclasses([*own, *tokens], return_remaining_strings=True)
        check_unknown(unknown, self.parser, self.others)
        return parsed

    @classmethod
    def read(cls, path: str) -> Recipe:
        """
        Read the team of a script (`.py`) or a YAML file.

        Raises:
            UsageError: the file does not exist, or does not define a team.
        """
        if not Path(path).is_file():
            raise UsageError(f"There is no file {path!r}. `marft init duo` writes a starter script.")
        if Path(path).suffix in (".yaml", ".yml"):
            return _make_yaml_recipe(read_yaml(path))
        return _load_script_recipe(path)


# ---- Scripts ----


def load_module(path: str) -> Any:
    """
    Import a Python file.

    Raises:
        UsageError: the file does not exist, or is not a Python script.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"There is no file {path!r}.")
    if file.suffix != ".py":
        raise UsageError(f"{path!r} is not a Python script.")
    return import_file(file)


def _load_script_recipe(path: str) -> Recipe:
    module = load_module(path)
    make = getattr(module, "make", None)
    if not callable(make):
        raise UsageError(f"{path} has no function `make`. {_FORM}")
    parameters = list(inspect.signature(make).parameters.values())
    if not parameters:
        raise UsageError(f"`make` of {path} takes no arguments. {_FORM}")
    own = _as_dataclass(parameters[1:], path)
    parser = _TrlParser((MARFTConfig, own), allow_abbrev=False)

    def trainer(parsed: Sequence[Any]) -> MARFTTrainer:
        args, more = parsed
        made = make(args, **{field.name: getattr(more, field.name) for field in dataclasses.fields(more)})
        if not isinstance(made, MARFTTrainer):
            raise UsageError(f"`make` of {path} must return a `MARFTTrainer`, got {type(made).__name__}.")
        return made

    settings = getattr(module, "SETTINGS", {})
    if not isinstance(settings, dict):
        raise UsageError(f"`SETTINGS` of {path} must be a dictionary of settings, got {type(settings).__name__}.")
    recipe = Recipe(parser, settings, trainer)
    recipe.code = path if isinstance(getattr(module, "TEAM", None), dict) else None
    return recipe


def _as_dataclass(parameters: Sequence[inspect.Parameter], path: str) -> type:
    """Make a dataclass of the further parameters of `make`, which are options as well."""
    fields = []
    for parameter in parameters:
        # The default of a parameter without one is a class, `Parameter.empty`
        if not isinstance(parameter.default, (str, int, float, bool, type(None))):
            raise UsageError(
                f"The parameter `{parameter.name}` of `make` in {path} is a command-line option, so its default must "
                "be a string, a number, a boolean or `None`."
            )
        kind = str if parameter.default is None else type(parameter.default)
        help_text = {"help": "Parameter of `make` in the script."}
        fields.append((parameter.name, kind, dataclasses.field(default=parameter.default, metadata=help_text)))
    taken = {field.name for field in dataclasses.fields(MARFTConfig)} & {name for name, *_ in fields}
    if taken:
        raise UsageError(f"The parameter `{min(taken)}` of `make` in {path} is a setting of `MARFTConfig`. Rename it.")
    return dataclasses.make_dataclass("ScriptOptions", fields)


def load_team_arguments(path: str) -> dict[str, Any]:
    """
    Load `TEAM` of a script, the arguments for loading a trained team.

    Raises:
        UsageError: the script does not define it.
    """
    found = getattr(load_module(path), "TEAM", None)
    if not isinstance(found, dict):
        raise UsageError(
            f"{path} must define `TEAM = {{...}}` with arguments of `Team.from_pretrained`, such as `workflow`."
        )
    return found


def base_named(name: str | None) -> str | None:
    """Resolve the name of a base model; `"tiny"` is the embedded model."""
    if name != "tiny":
        return name
    from ...tiny import tiny_team_model

    return tiny_team_model()


# ---- YAML files ----


def _make_yaml_recipe(config: dict[str, Any]) -> Recipe:
    more = {name: config.pop(name, None) for name in _NOT_OPTIONS}
    if not more["agents"] or not more["reward_funcs"]:
        missing = "agents" if not more["agents"] else "reward_funcs"
        raise UsageError(
            f"The YAML file of a team must set `{missing}`. See the example in `docs/reference/command.md`."
        )
    parser = _TrlParser((MARFTConfig, ModelConfig, ScriptArguments), allow_abbrev=False)
    agents = [_agent(agent, number) for number, agent in enumerate(more["agents"])]
    functions = more["reward_funcs"] if isinstance(more["reward_funcs"], list) else [more["reward_funcs"]]
    reward_funcs = [reward_named(name) for name in functions]
    workflow = _workflow(more["workflow"])

    def trainer(parsed: Sequence[Any]) -> MARFTTrainer:
        args, model, data = parsed
        if model.model_name_or_path is None or data.dataset_name is None:
            missing = "model_name_or_path" if model.model_name_or_path is None else "dataset_name"
            raise UsageError(f"`{missing}` is not set. Set it in the YAML file, or pass `--{missing}`.")
        model_options = {"revision": model.model_revision, "dtype": model.dtype}
        model_options["attn_implementation"] = model.attn_implementation
        args.model_init_kwargs = {**model_options, **(args.model_init_kwargs or {})}
        train, held_out = _datasets(data, args.eval_strategy != "no")
        return MARFTTrainer(
            model=base_named(model.model_name_or_path),
            agents=agents,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train,
            eval_dataset=held_out,
            workflow=workflow,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
        )

    recipe = Recipe(parser, config, trainer)
    recipe.where = "the YAML file"
    return recipe


def _agent(value: Any, number: int) -> AgentSpec:
    if isinstance(value, str):
        return AgentSpec(value)
    if not isinstance(value, dict):
        raise UsageError(
            f"Agent {number} of the YAML file must be a name or a mapping of `AgentSpec` fields, got {value!r}."
        )
    try:
        return AgentSpec(**value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"Agent {number} of the YAML file: {error}") from error


def _workflow(value: Any) -> Workflow | None:
    if value is None:
        return None
    if isinstance(value, dict) and isinstance(value.get("class"), str):
        known = [name for name in workflows.__all__ if isinstance(getattr(workflows, name), type)]
        known = [name for name in known if issubclass(getattr(workflows, name), Workflow) and name != "Workflow"]
        known.append("ExternalApp")
        if value["class"] not in known:
            hint = did_you_mean(value["class"], known) or f" Available classes: {', '.join(known)}."
            raise UsageError(f"`workflow` of the YAML file has the unknown class {value['class']!r}.{hint}")
        try:
            return rebuild(value)
        except (TypeError, ValueError) as error:
            raise UsageError(f"`workflow` of the YAML file: {error}") from error
    if isinstance(value, str) and ":" in value:
        made = _named(value)
        return made() if isinstance(made, type) else made
    raise UsageError(
        "`workflow` of the YAML file must be a mapping such as `{class: Sequential, rounds: 2}`, or 'file.py:Class', "
        f"got {value!r}."
    )


def reward_named(name: Any) -> Callable:
    """
    Find a reward function by name: one of TRL or of this package, or 'file.py:function' or 'module:function'.

    Raises:
        UsageError: there is no reward function with this name.
    """
    if not isinstance(name, str):
        raise UsageError(f"`reward_funcs` of the YAML file must be names of reward functions, got {name!r}.")
    if ":" in name:
        return _named(name)
    every = {item: getattr(place, item) for place in (trl.rewards, rewards, sandbox) for item in place.__all__}
    known = {
        value: entry for value, entry in every.items() if value.endswith("_reward") and not value.startswith("get_")
    }
    if name not in known:
        hint = did_you_mean(name, known) or f" Available functions: {', '.join(sorted(known))}."
        raise UsageError(f"Unknown reward function {name!r}.{hint} Pass your own as 'file.py:function'.")
    return known[name]


def _named(name: str) -> Any:
    place, _, what = name.rpartition(":")
    try:
        module = load_module(place) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, what)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"Cannot import {name!r}: {error}") from error


def _datasets(data: ScriptArguments, evaluates: bool) -> tuple[Any, Any]:
    name, kind = str(data.dataset_name), _KINDS.get(Path(str(data.dataset_name)).suffix)
    if kind is not None:
        if not Path(name).is_file():
            raise UsageError(f"`dataset_name` is {name!r}, but there is no such file.")
        return load_dataset(kind, data_files=name, split="train"), None
    splits = load_dataset(name, name=data.dataset_config, streaming=data.dataset_streaming)
    for split in (data.dataset_train_split, *((data.dataset_test_split,) if evaluates else ())):
        if split not in splits:
            raise UsageError(
                f"The dataset {name} has no split {split!r}. Available splits: {', '.join(map(repr, splits))}."
            )
    return splits[data.dataset_train_split], splits[data.dataset_test_split] if evaluates else None
