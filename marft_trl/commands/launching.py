# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Options of `accelerate launch` among those of a command: `marft train team.py --num_processes 2`."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..seams.arguments import options_of
from .command import as_tokens


# What the launcher is told by its own means
_NOT_TAKEN = ("help", "module", "no_python")


class Launcher:
    """
    The options of `accelerate launch` that are not options of the training arguments, too.

    Args:
        taken (`Sequence[str]`): names of the latter.
    """

    def __init__(self, taken: Sequence[str]):
        self._parser = launch_command_parser()
        known = options_of(self._parser)
        self._options = {name: one for name, one in known.items() if name not in taken and name not in _NOT_TAKEN}

    @property
    def names(self) -> list[str]:
        """Names of the options."""
        return list(self._options)

    def of_config(self, given: Mapping[str, Any], line: Sequence[str] = ()) -> tuple[list[str], dict[str, Any]]:
        """
        The launcher's options in a YAML file that the command line has not, as they would stand there, and the rest of
        the file.
        """
        mine = {key: value for key, value in given.items() if key.replace("-", "_") in self._options}
        return as_tokens(mine, self._parser, line), {key: value for key, value in given.items() if key not in mine}

    def of_command_line(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
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
            options (`Sequence[str]`): of the launcher. Of one that is there twice, the last one counts.
            argv (`Sequence[str]`): the command with its own arguments.

        Returns: the exit status. What has failed was said by the process that failed.
        """
        given = self._parser.parse_args([*options, "--module", "marft_trl", *argv])
        try:
            launch_command(given)
        except subprocess.CalledProcessError as error:
            return error.returncode
        except ChildFailedError:
            return 1
        except SignalException as error:
            return 128 + int(error.sigval)
        return 0
