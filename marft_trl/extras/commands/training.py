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


# What the launcher is told by its own means
_NOT_TAKEN = ("help", "module", "no_python")


class Launcher:
    """The options of `accelerate launch` that are not options of the training arguments, too."""

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
        The launcher's options in a YAML file that the command line has not, as they would stand there, and the rest of
        the file.
        """
        mine = {key: value for key, value in config.items() if key.replace("-", "_") in self._options}
        return as_tokens(mine, self._parser, line), {key: value for key, value in config.items() if key not in mine}

    def split_command_line(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """The launcher's options on a command line, and the rest of it."""
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
            options: of the launcher. Of one that is there twice, the last one counts.
            argv: the command with its own arguments.

        Returns: the exit status. What has failed was said by the process that failed.
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


# In front of the arguments of a process that the launcher has started
_LAUNCHED = "--launched"


class TrainerCommand(BaseCommand):
    """A command on the trainer of a script or a YAML file, whose options are those of its training arguments."""

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
            raise UsageError(f"The file comes first: `marft {self.name} {late[0]} ...`.")
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
            raise UsageError(f"{on_line[0]!r} is an option of the launcher, and this command starts no processes.")
        trainer = recipe.trainer(tokens)
        try:
            return self.on(trainer, path, recipe.code)
        except EpisodeError as error:  # in training, whoever wrote the workflow needs to know where
            if self.launches or os.environ.get("MARFT_TRACEBACK"):
                raise
            raise UsageError(f"{error} (`MARFT_TRACEBACK=1` shows where.)") from error

    def on(self, trainer: MARFTTrainer, path: str, code: str | None) -> int | None:
        """Do the work with a trainer of a file, which is also `code` if trained teams need it."""
        raise NotImplementedError

    def _usage(self) -> str:
        return "\n".join(
            [
                f"usage: marft {self.name} [team.py | team.yaml] [--config FILE] [options]",
                "",
                self.sentence,
                "",
                "A script has a function `make(args)` that returns a `MARFTTrainer`, and may have `SETTINGS`, the",
                "defaults of its settings. Options are all settings of `MARFTConfig`, further parameters of `make`,",
                "and, for `train`, options of `accelerate launch`, such as `--num_processes 2`. Options take",
                f"precedence over the YAML file, and that over `SETTINGS`. `marft {self.name} FILE --help` has all.",
            ]
        )


class TrainCommand(TrainerCommand):
    """Train, save, and push if it is asked for. A run that was interrupted goes on."""

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
            print(f"\nThe team is in {folder}. Ask it:\n  marft chat {folder}{local}\n  marft serve {folder}{local}")
        trainer.end()
        return 0


class PlanCommand(TrainerCommand):
    """Print the plan of a run."""

    def on(self, trainer: MARFTTrainer, path: str, code: str | None) -> None:
        print(trainer.plan())


class RehearseCommand(TrainerCommand):
    """Print an episode on the first row of the dataset, in which every turn is made up."""

    def on(self, trainer: MARFTTrainer, path: str, code: str | None) -> None:
        row = dict(next(iter(trainer.train_dataset)))
        print(format_episode(trainer.parts.planner.rehearse(row).episode, title="rehearsal, made-up turns"))


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
            raise UsageError(f"There is no team in {folder} yet: `marft train {path}` trains it.")
        if trainer.eval_dataset is None:
            raise UsageError(f"{path} has no `eval_dataset`. Pass one to the trainer.")
        if not trainer.policies.has_adapters:
            raise UsageError(f"The agents of {path} share one fully trained policy: pass {folder} as its model.")
        missing = [name for name in trainer.policies.names if not (folder / name).is_dir()]
        if missing:
            raise UsageError(f"The team in {folder} is another one: it has no adapter {missing[0]!r}.")
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
    """How far down a metric is printed: what the team is worth first, and last what the evaluation took."""
    return next((place for place, pattern in enumerate(_LAST, start=1) if re.search(pattern, metric)), 0)


def _format_interval(scores: Sequence[float]) -> str:
    bounds = (0.0, 1.0) if min(scores) >= 0.0 and max(scores) <= 1.0 else None
    found = interval(scores, bounds=bounds)
    return f"  [{found.low:.4g}, {found.high:.4g}]"
