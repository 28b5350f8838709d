# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Teams in scripts and YAML files, and the commands that need a trainer: `marft train`, `plan`, `rehearse`, `eval`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import trl.rewards
from accelerate.commands.launch import launch_command, launch_command_parser
from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from ... import rewards, workflows
from ...adapters.lora import load_adapter_weights, load_base_weights
from ...adapters.manifest import MANIFEST_NAME
from ...agents import AgentSpec
from ...config.marft_config import MARFTConfig
from ...episodes.guard import EpisodeError
from ...episodes.records import Episode
from ...reporting.metrics import interval
from ...reporting.transcripts import format_episode
from ...seams.libraries import get_options
from ...system.files import import_file
from ...system.hints import did_you_mean
from ...tiny import tiny_team_model
from ...trainer import MARFTTrainer
from ...workflows import Workflow
from .. import apps, sandbox
from ..apps.routing import rebuild_rule
from . import Parser, UsageError, as_tokens, as_usage_errors, check_unknown, read_config, read_yaml


_FORM = "Define a function `make(args)` that returns a `MARFTTrainer`; `marft init duo` writes an example."
_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class _TrlParser(TrlParser):
    error = Parser.error


@dataclass
class Recipe:
    """A team to train: its options, and the trainer that it creates from them."""

    parser: TrlParser
    settings: Mapping[str, Any]  # options that the script or the YAML file sets
    make: Callable[[Sequence[Any]], MARFTTrainer]  # from the parsed options
    where: str = "`SETTINGS`"  # source of the settings, for errors
    code: str | None = None  # the script, if it defines `TEAM`, which loading the trained team needs
    others: Sequence[str] = ()  # options of the launcher

    def parse(self, tokens: Sequence[str]) -> Sequence[Any]:
        own = as_tokens(self.settings, self.parser, tokens, self.others, self.where)
        *parsed, unknown = self.parser.parse_args_into_dataclasses([*own, *tokens], return_remaining_strings=True)
        check_unknown(unknown, self.parser, self.others)
        return parsed

    @classmethod
    def read(cls, path: str) -> Recipe:
        if not Path(path).is_file():
            raise UsageError(f"There is no file {path!r}. `marft init duo` writes a starter script.")
        if Path(path).suffix in (".yaml", ".yml"):
            return _make_yaml_recipe(read_yaml(path))
        return _load_script_recipe(path)


def _is_of_the_user(error: BaseException) -> bool:
    name = traceback.extract_tb(error.__traceback__)[-1].filename
    return "site-packages" not in name and not Path(name).is_relative_to(Path(__file__).parents[2])


def _passed_the_user(error: BaseException) -> bool:
    """Whether an error passed through code that is neither installed nor part of this package."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    others = ("<", sysconfig.get_paths()["stdlib"], str(Path(__file__).parents[2]))
    return any("site-packages" not in frame.filename and not frame.filename.startswith(others) for frame in frames)


def load_module(path: str) -> Any:
    if not Path(path).is_file():
        raise UsageError(f"There is no file {path!r}.")
    if Path(path).suffix != ".py":
        raise UsageError(f"{path!r} is not a Python script.")
    return import_file(Path(path))


def _load_script_recipe(path: str) -> Recipe:
    module = load_module(path)
    make = getattr(module, "make", None)
    if not callable(make):
        raise UsageError(f"{path} has no function `make`. {_FORM}")
    parameters = list(inspect.signature(make).parameters.values())
    if not parameters:
        raise UsageError(f"`make` of {path} takes no arguments. {_FORM}")
    parser = _TrlParser((MARFTConfig, _as_dataclass(parameters[1:], path)), allow_abbrev=False)

    def trainer(parsed: Sequence[Any]) -> MARFTTrainer:
        args, more = parsed
        made = make(args, **vars(more))
        if not isinstance(made, MARFTTrainer):
            raise UsageError(f"`make` of {path} must return a `MARFTTrainer`, got {type(made).__name__}.")
        return made

    settings = getattr(module, "SETTINGS", {})
    if not isinstance(settings, dict):
        raise UsageError(f"`SETTINGS` of {path} must be a dictionary of settings, got {type(settings).__name__}.")
    code = path if isinstance(getattr(module, "TEAM", None), dict) else None
    return Recipe(parser, settings, trainer, code=code)


def _as_dataclass(parameters: Sequence[inspect.Parameter], path: str) -> type:
    """Make a dataclass of the further parameters of `make`, which are options as well."""
    fields = []
    for parameter in parameters:
        name, default, problem = parameter.name, parameter.default, ""
        # The default of a parameter without one is a class, `Parameter.empty`
        if not isinstance(default, (str, int, float, bool, type(None))):
            problem = "a command-line option, so its default must be a string, a number, a boolean or `None`."
        elif name in MARFTConfig.__dataclass_fields__:
            problem = "a setting of `MARFTConfig`. Rename it."
        if problem:
            raise UsageError(f"The parameter `{name}` of `make` in {path} is {problem}")
        field = dataclasses.field(default=default, metadata={"help": "Parameter of `make` in the script."})
        fields.append((name, str if default is None else type(default), field))
    return dataclasses.make_dataclass("ScriptOptions", fields)


def base_named(name: str | None) -> str | None:
    """Resolve the name of a base model; `tiny` is the embedded model."""
    return tiny_team_model() if name == "tiny" else name


def _make_yaml_recipe(config: dict[str, Any]) -> Recipe:
    more = {name: config.pop(name, None) for name in ("agents", "workflow", "reward_funcs")}  # no options
    for name in ("agents", "reward_funcs"):
        if not more[name]:
            raise UsageError(f"The YAML file of a team must set `{name}`. See `docs/reference/command.md`.")
    parser = _TrlParser((MARFTConfig, ModelConfig, ScriptArguments), allow_abbrev=False)
    agents = [_agent(agent, number) for number, agent in enumerate(more["agents"])]
    functions = more["reward_funcs"] if isinstance(more["reward_funcs"], list) else [more["reward_funcs"]]
    reward_funcs = [reward_named(name) for name in functions]
    workflow = _workflow(more["workflow"])

    def trainer(parsed: Sequence[Any]) -> MARFTTrainer:
        args, model, data = parsed
        for name, value in {"model_name_or_path": model.model_name_or_path, "dataset_name": data.dataset_name}.items():
            if value is None:
                raise UsageError(f"`{name}` is not set. Set it in the YAML file, or pass `--{name}`.")
        loading = {name: getattr(model, name) for name in ("dtype", "attn_implementation")}
        args.model_init_kwargs = {"revision": model.model_revision, **loading, **(args.model_init_kwargs or {})}
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

    return Recipe(parser, config, trainer, where="the YAML file")


def _agent(value: Any, number: int) -> AgentSpec:
    if not isinstance(value, (str, dict)):
        raise UsageError(f"Agent {number} of the YAML file must be a name or `AgentSpec` fields, got {value!r}.")
    try:
        return AgentSpec(value) if isinstance(value, str) else AgentSpec(**value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"Agent {number} of the YAML file: {error}") from error


def _workflow(value: Any) -> Workflow | None:
    if value is None:
        return None
    if isinstance(value, dict) and isinstance(value.get("class"), str):
        kinds = {name: getattr(workflows, name) for name in workflows.__all__ if name != "Workflow"}
        known = [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Workflow)]
        known.append("ExternalApp")
        if value["class"] not in known:
            hint = did_you_mean(value["class"], known) or f" Available classes: {', '.join(known)}."
            raise UsageError(f"`workflow` of the YAML file has the unknown class {value['class']!r}.{hint}")
        return _made(**value)
    if isinstance(value, str) and ":" in value:
        workflow = _named(value)
        return workflow() if isinstance(workflow, type) else workflow
    raise UsageError(f"`workflow` of the YAML file must be a mapping with `class`, or 'file.py:Class', got {value!r}.")


def _made(**value: Any) -> Workflow:
    """Create a workflow from its class and the arguments of its constructor, which the user wrote."""
    name = value.pop("class")
    kind = getattr(apps if name == "ExternalApp" else workflows, name)
    known = inspect.signature(kind).parameters
    if unknown := [argument for argument in value if argument not in known]:
        hint = did_you_mean(unknown[0], known) or f" Its arguments are {', '.join(known)}."
        raise UsageError(f"`workflow` of the YAML file: `{name}` has no argument `{unknown[0]}`.{hint}")
    if name == "ByColumn" and isinstance(value.get("workflows"), dict):
        value["workflows"] = {key: _workflow(workflow) for key, workflow in value["workflows"].items()}
    try:
        if name == "ExternalApp" and isinstance(value.get("app"), dict):
            value["app"] = apps.Program(**value["app"])
        if isinstance(value.get("agent_of"), dict):
            value["agent_of"] = rebuild_rule(value["agent_of"])
        return kind(**value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"`workflow` of the YAML file: {error}") from error


def reward_named(name: Any) -> Callable:
    """Find a reward function of TRL or of this package, or 'file.py:function' or 'module:function'."""
    if not isinstance(name, str):
        raise UsageError(f"`reward_funcs` of the YAML file must be names of reward functions, got {name!r}.")
    if ":" in name:
        return _named(name)
    places = {reward: place for place in (trl.rewards, rewards, sandbox) for reward in place.__all__}
    known = [reward for reward in places if reward.endswith("_reward") and not reward.startswith("get_")]
    if name not in known:
        hint = did_you_mean(name, known) or f" Available functions: {', '.join(sorted(known))}."
        raise UsageError(f"Unknown reward function {name!r}.{hint} Pass your own as 'file.py:function'.")
    return getattr(places[name], name)


def _named(name: str) -> Any:
    place, _, attribute = name.rpartition(":")
    try:
        module = load_module(place) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"Cannot import {name!r}: {error}") from error


def _datasets(data: ScriptArguments, evaluates: bool) -> tuple[Any, Any]:
    name, kind = str(data.dataset_name), _KINDS.get(Path(str(data.dataset_name)).suffix)
    if kind is not None:
        if not Path(name).is_file():
            raise UsageError(f"`dataset_name` is {name!r}, but there is no such file.")
        try:
            return load_dataset(kind, data_files=name, split="train"), None
        except DatasetGenerationError as error:
            raise UsageError(f"`dataset_name={name!r}` cannot be read: {error.__cause__ or error}") from error
    splits = load_dataset(name, name=data.dataset_config, streaming=data.dataset_streaming)
    for split in (data.dataset_train_split, *((data.dataset_test_split,) if evaluates else ())):
        if split not in splits:
            raise UsageError(f"The dataset {name} has no split {split!r}. Splits: {', '.join(map(repr, splits))}.")
    return splits[data.dataset_train_split], splits[data.dataset_test_split] if evaluates else None


class Launcher:
    """The options of `accelerate launch` that are not also training arguments."""

    def __init__(self, taken: Iterable[str]):
        self._parser = launch_command_parser()
        others = {*taken, "help", "module", "no_python"}
        self.options = {name: item for name, item in get_options(self._parser).items() if name not in others}

    def split_config(self, config: Mapping[str, Any], line: Sequence[str] = ()) -> tuple[list[str], dict[str, Any]]:
        """Split the options of a YAML file into arguments of the launcher that `line` does not have, and others."""
        known = {key: value for key, value in config.items() if key.replace("-", "_") in self.options}
        return as_tokens(known, self._parser, line), {key: value for key, value in config.items() if key not in known}

    def split_command_line(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split a command line into options of the launcher and the rest."""
        own_arguments, rest, takes_value = list[str](), list[str](), False
        for token in argv:
            if token.startswith("--"):
                action = self.options.get(token.partition("=")[0].removeprefix("--").replace("-", "_"))
                (rest if action is None else own_arguments).append(token)
                takes_value = action is not None and action.nargs != 0 and "=" not in token
            else:
                (own_arguments if takes_value else rest).append(token)
                takes_value = False
        return own_arguments, rest

    def launch(self, options: Sequence[str], argv: Sequence[str]) -> int:
        """Run a command in the processes of `accelerate launch`. Returns the exit status."""
        try:
            launch_command(self._parser.parse_args([*options, "--module", "marft_trl", *argv]))
        except subprocess.CalledProcessError as error:
            return error.returncode  # the process has printed its error
        except ChildFailedError:
            return 1
        except SignalException as error:
            return 128 + int(error.sigval)
        return 0


_LAUNCHED = "--launched"  # marks the arguments of a process that the launcher has started
_USAGE = """\
usage: marft {name} [team.py | team.yaml] [--config FILE] [options]

{sentence}

A script defines a function `make(args)` that returns a `MARFTTrainer`, and may define default
settings in `SETTINGS`. Options are all settings of `MARFTConfig`, the further parameters of `make`
and, for `train`, the options of `accelerate launch`, such as `--num_processes 2`. Options take
precedence over the YAML file, and the YAML file over `SETTINGS`. To list all options, run
`marft {name} FILE --help`."""


def run_on_trainer(name: str, sentence: str, argv: Sequence[str]) -> int | None:
    """Run a command on the trainer of a script or a YAML file. Its options are the training arguments."""
    rest, is_launched, launches = [token for token in argv if token != _LAUNCHED], _LAUNCHED in argv, name == "train"
    if rest and not rest[0].startswith("-"):
        path = rest.pop(0)
    else:
        path = "team.py"
        if set(rest) & {"-h", "--help"}:
            print(_USAGE.format(name=name, sentence=sentence))
            return 0
        if late := [file for before, file in pairwise(["", *rest]) if file.endswith(".py") and "-" not in before]:
            raise UsageError(f"The file must be the first argument: `marft {name} {late[0]} ...`.")
    recipe = Recipe.read(path)
    recipe.parser.prog = f"marft {name} {path}"
    config, rest = read_config(rest)
    launcher = Launcher(get_options(recipe.parser))
    in_file, config = launcher.split_config(config, rest)
    in_script, recipe.settings = launcher.split_config(recipe.settings, [*in_file, *rest])
    on_line, rest = launcher.split_command_line(rest)
    recipe.others = list(launcher.options) if launches else []
    tokens = [*as_tokens(config, recipe.parser, rest, recipe.others), *rest]
    options = [*in_script, *in_file, *on_line]
    if options and launches and not is_launched:
        return launcher.launch(options, [name, path, _LAUNCHED, *tokens])
    if on_line and not is_launched:
        raise UsageError(f"{on_line[0]!r} is an option of `accelerate launch`, which `marft {name}` does not use.")
    with as_usage_errors(ValueError, TypeError, OSError):  # of settings
        parsed = recipe.parse(tokens)
    if not getattr(parsed[0], "output_dir", None):
        raise UsageError("`output_dir` is empty. Pass the folder of the run.")
    with as_usage_errors(ValueError, TypeError, OSError, ImportError, unless=_is_of_the_user):
        trainer = recipe.make(parsed)
    # Authors of the code that raised an error need the traceback
    with as_usage_errors(EpisodeError, ValueError, TypeError, OSError, ImportError, unless=_passed_the_user):
        if name == "train":
            _train(trainer, recipe.code)
        elif name == "plan":
            print(trainer.plan())
        elif name == "rehearse":
            episode = trainer.parts.planner.rehearse(dict(next(iter(trainer.train_dataset)))).episode
            print(format_episode(episode, title="rehearsal, placeholder turns"))
            print(_system_prompts(episode), end="")
        else:
            _evaluate(trainer, path)
    return 0


def _system_prompts(episode: Episode) -> str:
    """Beginnings of the system prompts by agent, as rules such as `BySystemPrompt` need them."""
    beginnings: dict[str, list[str]] = {}
    for turn in episode.turns:
        messages = turn.observation if isinstance(turn.observation, list) else []
        system = [str(message["content"]) for message in messages[:1] if message["role"] == "system"]
        beginnings.setdefault(turn.agent, []).extend(text.strip()[:100] for text in system)
    lines = [f"  {agent}: {text!r}\n" for agent, texts in beginnings.items() for text in dict.fromkeys(texts)]
    return "\nBeginnings of system prompts, by agent:\n" + "".join(lines) if lines else ""


def _train(trainer: MARFTTrainer, code: str | None) -> None:
    """Train, save, and push to the Hub if `push_to_hub` is set. `code`: what loading the trained team needs."""
    resumes = trainer.args.resume_from_checkpoint
    as_flag = {"false": False, "no": False, "true": True, "none": True}.get(str(resumes).lower(), resumes)
    trainer.train(resume_from_checkpoint=as_flag)
    trainer.save_model()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    if trainer.accelerator.is_main_process:
        folder, base = trainer.args.output_dir, trainer.manifest()
        paths = [str(model.name_or_path) for model in (trainer.model, *trainer.policies.further)]
        needed = [
            pair for pair in zip(base.bases, paths, strict=True) if pair[0].is_local and base.adapters_on(pair[0])
        ]
        local = "".join(f" --model {f'{saved.name}=' if len(paths) > 1 else ''}{path}" for saved, path in needed)
        local += f" --code {code}" if code else ""
        print(f"\nThe team is saved in {folder}. Try it:")
        print(f"  marft chat {folder}{local}\n  marft serve {folder}{local}")
    trainer.end()


# Metrics that are printed after all others, in this order
_LAST = (
    "agents/",
    "completions/",
    "entropy|clip_ratio|frac_|context/",
    "loss$|_time$|num_tokens|runtime|per_second|epoch",
)


def _evaluate(trainer: MARFTTrainer, path: str) -> None:
    folder = Path(trainer.args.output_dir or ".")
    if not (folder / MANIFEST_NAME).is_file():
        raise UsageError(f"There is no trained team in {folder}. Run `marft train {path}` first.")
    if trainer.eval_dataset is None:
        raise UsageError(f"The trainer in {path} has no `eval_dataset`. Pass one to `MARFTTrainer`.")
    if not trainer.policies.has_adapters:
        raise UsageError(f"The agents of {path} share a trained policy without adapters. Pass {folder} as the model.")
    if missing := [name for name in trainer.policies.names if not (folder / name).is_dir()]:
        raise UsageError(f"{folder} contains a different team: it has no adapter {missing[0]!r}.")
    for name in trainer.policies.names:
        load = load_adapter_weights if trainer.policies.is_lora(name) else load_base_weights
        load(trainer.policies.models[name], name, folder / name)
    print(f"Evaluating the team in {folder}", flush=True)
    metrics = trainer.evaluate()
    width = max(map(len, metrics))
    for name in sorted(metrics, key=_place):  # in the order of `evaluate` otherwise
        text = f"{metrics[name]:.4g}" if isinstance(metrics[name], float) else str(metrics[name])
        if scores := trainer.parts.reporter.question_means.get(name):
            found = interval(scores, bounds=(0.0, 1.0) if min(scores) >= 0.0 and max(scores) <= 1.0 else None)
            text += f"  [{found.low:.4g}, {found.high:.4g}]"
        print(f"{name:{width}}  {text}")


def _place(metric: str) -> int:
    """Sort key of a metric: results of the team first, cost of the evaluation last."""
    return next((place for place, pattern in enumerate(_LAST, start=1) if re.search(pattern, metric)), 0)
