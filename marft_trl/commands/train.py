# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft train team.py`, and what is common to the commands that make a trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..episodes.guard import EpisodeError
from ..seams.arguments import options_of
from ..trainer import MARFTTrainer
from .command import BaseCommand, UsageError, as_tokens, config_of
from .launching import Launcher
from .scripts import Recipe


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
            one for before, one in zip(["", *rest], rest, strict=False) if one.endswith(".py") and "-" not in before
        ]
        if late and not is_named:
            raise UsageError(f"The file comes first: `marft {self.name} {late[0]} ...`.")
        recipe = Recipe.read(path)
        recipe.parser.prog = f"marft {self.name} {path}"
        given, rest = config_of(rest)
        launcher = Launcher(list(options_of(recipe.parser)))
        in_file, given = launcher.of_config(given, rest)
        in_script, recipe.given = launcher.of_config(recipe.given, [*in_file, *rest])
        on_line, rest = launcher.of_command_line(rest)
        recipe.others = launcher.names if self.launches else []
        tokens = [*as_tokens(given, recipe.parser, rest, recipe.others), *rest]
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


class Command(TrainerCommand):
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
