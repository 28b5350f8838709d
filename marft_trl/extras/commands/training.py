# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The commands that create a trainer: `marft train`, `plan`, `rehearse` and `eval`."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ...adapters.lora import load_adapter_weights
from ...adapters.manifest import MANIFEST_NAME
from ...episodes.guard import EpisodeError
from ...reporting.metrics import interval
from ...reporting.transcripts import format_episode
from ...seams.libraries import get_options
from ...trainer import MARFTTrainer
from .command import BaseCommand, UsageError, as_tokens, read_config
from .scripts import Recipe


# Options of the launcher that are not passed through
_NOT_TAKEN = ("help", "module", "no_python")


class Launcher:
    """The options of `accelerate launch` that are not also training arguments."""

    def __init__(self, taken: Sequence[str]):
        self._parser = launch_command_parser()
        known = get_options(self._parser)
        self._options = {name: item for name, item in known.items() if name not in taken and name not in _NOT_TAKEN}

    @property
    def names(self) -> list[str]:
        """Names of the options."""
        return list(self._options)

    def split_config(self, config: Mapping[str, Any], line: Sequence[str] = ()) -> tuple[list[str], dict[str, Any]]:
        """
        Split the options of a YAML file into command-line arguments of the launcher, without those that the command
        line has already, and all other options.
        """
        mine = {key: value for key, value in config.items() if key.replace("-", "_") in self._options}
        return as_tokens(mine, self._parser, line), {key: value for key, value in config.items() if key not in mine}

    def split_command_line(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split a command line into options of the launcher and the rest."""
        mine, rest, takes = list[str](), list[str](), 0
        for token in argv:
            name = token.partition("=")[0].removeprefix("--").replace("-", "_")
            if token.startswith("--"):
                action = self._options.get(name)
                (rest if action is None else mine).append(token)
                takes = 1 if action is not None and action.nargs != 0 and "=" not in token else 0
            elif takes:
                mine.append(token)
                takes = 0
            else:
                rest.append(token)
        return mine, rest

    def launch(self, options: Sequence[str], argv: Sequence[str]) -> int:
        """
        Run a command in the processes of `accelerate launch`.

        Args:
            options: options of the launcher. The last value of an option counts.
            argv: the command with its own arguments.

        Returns: the exit status. A process that fails has already printed its error.
        """
        args = self._parser.parse_args([*options, "--module", "marft_trl", *argv])
        try:
            launch_command(args)
        except subprocess.CalledProcessError as error:
            return error.returncode
        except ChildFailedError:
            return 1
        except SignalException as error:
            return 128 + int(error.sigval)
        return 0


# Marks the arguments of a process that the launcher has started
_LAUNCHED = "--launched"


class TrainerCommand(BaseCommand):
    """A command on the trainer of a script or a YAML file. Its options are the training arguments."""

    launches = False

    def main(self, argv: Sequence[str]) -> int | None:
        rest, is_launched = list(argv), _LAUNCHED in argv
        rest = [token for token in rest if token != _LAUNCHED]
        is_named = bool(rest) and not rest[0].startswith("-")
        path = rest.pop(0) if is_named else "team.py"
        if not is_named and set(rest) & {"-h", "--help"}:
            print(self._usage())
            return 0
        late = [
            item for before, item in zip(["", *rest], rest, strict=False) if item.endswith(".py") and "-" not in before
        ]
        if late and not is_named:
            raise UsageError(f"The file must be the first argument: `marft {self.name} {late[0]} ...`.")
        recipe = Recipe.read(path)
        recipe.parser.prog = f"marft {self.name} {path}"
        config, rest = read_config(rest)
        launcher = Launcher(list(get_options(recipe.parser)))
        in_file, config = launcher.split_config(config, rest)
        in_script, recipe.settings = launcher.split_config(recipe.settings, [*in_file, *rest])
        on_line, rest = launcher.split_command_line(rest)
        recipe.others = launcher.names if self.launches else []
        tokens = [*as_tokens(config, recipe.parser, rest, recipe.others), *rest]
        options = [*in_script, *in_file, *on_line]
        if options and self.launches and not is_launched:
            return launcher.launch(options, [self.name, path, _LAUNCHED, *tokens])
        if on_line and not is_launched:
            raise UsageError(
                f"{on_line[0]!r} is an option of `accelerate launch`, which `marft {self.name}` does not use."
            )
        trainer = recipe.trainer(tokens)
        try:
            return self.on(trainer, path, recipe.code)
        except EpisodeError as error:  # in training, authors of workflows need the traceback
            if self.launches or os.environ.get("MARFT_TRACEBACK"):
                raise
            raise UsageError(f"{error} (Set `MARFT_TRACEBACK=1` for the traceback.)") from error

    def on(self, trainer: MARFTTrainer, path: str, code: str | None) -> int | None:
        """Run the command on the trainer of a file. `code`: the file, if loading the trained team needs it."""
        raise NotImplementedError

    def _usage(self) -> str:
        return "\n".join(
            [
                f"usage: marft {self.name} [team.py | team.yaml] [--config FILE] [options]",
                "",
                self.sentence,
                "",
                "A script defines a function `make(args)` that returns a `MARFTTrainer`, and may define default",
                "settings in `SETTINGS`. Options are all settings of `MARFTConfig`, the further parameters of `make`",
                "and, for `train`, the options of `accelerate launch`, such as `--num_processes 2`. Options take",
                "precedence over the YAML file, and the YAML file over `SETTINGS`. To list all options, run",
                f"`marft {self.name} FILE --help`.",
            ]
        )


class TrainCommand(TrainerCommand):
    """Train, save, and push to the Hub if `push_to_hub` is set. Resumes an interrupted run."""

    launches = True

    def on(self, trainer: MARFTTrainer, path: str, code: str | None) -> int | None:
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint or True)
        trainer.save_model()
        if trainer.args.push_to_hub:
            trainer.push_to_hub()
        if trainer.accelerator.is_main_process:
            folder, base = trainer.args.output_dir, trainer.manifest()
            local = "" if base.base_model or not base.adapters else f" --model {trainer.model.name_or_path}"
            local += f" --code {code}" if code else ""
            print(f"\nThe team is saved in {folder}. Try it:")
            print(f"  marft chat {folder}{local}\n  marft serve {folder}{local}")
        trainer.end()
        return 0


class PlanCommand(TrainerCommand):
    """Print the plan of a run."""

    def on(self, trainer: MARFTTrainer, path: str, code: str | None) -> None:
        print(trainer.plan())


class RehearseCommand(TrainerCommand):
    """Print an episode on the first row of the dataset, with placeholder turns."""

    def on(self, trainer: MARFTTrainer, path: str, code: str | None) -> None:
        row = dict(next(iter(trainer.train_dataset)))
        print(format_episode(trainer.parts.planner.rehearse(row).episode, title="rehearsal, placeholder turns"))


# Metrics that are printed after all others, in this order
_LAST = (
    "agents/",
    "completions/",
    "entropy|clip_ratio|frac_|context/",
    "loss$|_time$|num_tokens|runtime|per_second|epoch",
)


class EvalCommand(TrainerCommand):
    """Evaluate a team with the weights in its output folder."""

    def on(self, trainer: MARFTTrainer, path: str, code: str | None) -> None:
        folder = Path(trainer.args.output_dir or ".")
        if not (folder / MANIFEST_NAME).is_file():
            raise UsageError(f"There is no trained team in {folder}. Run `marft train {path}` first.")
        if trainer.eval_dataset is None:
            raise UsageError(f"The trainer in {path} has no `eval_dataset`. Pass one to `MARFTTrainer`.")
        if not trainer.policies.has_adapters:
            raise UsageError(
                f"The agents of {path} share a fully trained policy without adapters. Pass {folder} as the model."
            )
        missing = [name for name in trainer.policies.names if not (folder / name).is_dir()]
        if missing:
            raise UsageError(f"{folder} contains a different team: it has no adapter {missing[0]!r}.")
        for name in trainer.policies.names:
            load_adapter_weights(trainer.model, name, folder / name)
        print(f"Evaluating the team in {folder}", flush=True)
        metrics = trainer.evaluate()
        width = max(map(len, metrics))
        for name in sorted(metrics, key=_place):  # in the order of `evaluate` otherwise
            value, scores = metrics[name], trainer.parts.reporter.question_means.get(name)
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            print(f"{name:{width}}  {text}{_format_interval(scores) if scores else ''}")


def _place(metric: str) -> int:
    """Sort key of a metric: results of the team first, cost of the evaluation last."""
    return next((place for place, pattern in enumerate(_LAST, start=1) if re.search(pattern, metric)), 0)


def _format_interval(scores: Sequence[float]) -> str:
    bounds = (0.0, 1.0) if min(scores) >= 0.0 and max(scores) <= 1.0 else None
    found = interval(scores, bounds=bounds)
    return f"  [{found.low:.4g}, {found.high:.4g}]"
