# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The command `marft`. Each of its commands is imported when it is used."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from ...seams.libraries import installed_version


# Name -> what it does
COMMANDS = {
    "init": "write a script of a team to begin with",
    "plan": "say what a run will do, without training: who sees whom, batches, memory",
    "rehearse": "run the workflow once with made-up turns, which no model writes",
    "train": "train the team of a script or a YAML file",
    "eval": "evaluate the team that a script has trained",
    "report": "compare a team with what it should be better than, over seeds",
    "transcripts": "show the episodes that a run has logged",
    "chat": "talk to a trained team in the terminal",
    "serve": "serve a trained team over HTTP, in the form of OpenAI's API",
    "vllm-command": "print the command that starts a vLLM server for a trained team",
    "skill": "print what a coding agent needs to know to work with this package",
    "env": "print what a bug report needs to say of this machine",
}


# Module -> its commands. The class of `vllm-command` is `VllmCommand`, of all others `<Name>Command`
_MODULES = {
    "training": ("train", "plan", "rehearse", "eval"),
    "teams": ("chat", "serve", "vllm-command", "transcripts"),
    "others": ("report", "init", "env", "skill"),
}


def _load_command(name: str) -> Any:
    module = next(module for module, names in _MODULES.items() if name in names)
    kind = f"{name.removesuffix('-command').capitalize()}Command"
    return getattr(importlib.import_module(f".{module}", __name__), kind)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    Args:
        argv: its name and arguments. Defaults to those of the process.

    Returns: the exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"marft_trl {installed_version('marft-trl')}")
        return 0
    name = arguments.pop(0)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(COMMANDS)}."
        print(f"marft: there is no command {name!r}.{hint}", file=sys.stderr)
        return 2
    try:
        return _run(_load_command(name)(name, COMMANDS[name]), arguments)
    except KeyboardInterrupt:  # imports take seconds, too
        return 130
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(command: Any, arguments: Sequence[str]) -> int:
    from .command import UsageError

    try:
        return command.main(arguments) or 0
    except UsageError as error:
        print(f"marft {command.name}: {error}", file=sys.stderr)
        return 2


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: marft COMMAND [arguments]",
            "",
            *lines,
            "",
            "`marft COMMAND --help` has its options. All of them can stand in a YAML file, too: `--config FILE`.",
            "Options of the command line take precedence over the file.",
        ]
    )
