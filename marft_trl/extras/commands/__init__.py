# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The command `marft`. Each subcommand is imported on first use."""

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
    "init": "write a starter script for a team",
    "plan": "show what a run will do, without training: who sees whom, batches, memory",
    "rehearse": "run the workflow once with placeholder turns, without sampling",
    "train": "train the team of a script or YAML file",
    "eval": "evaluate the trained team of a script",
    "report": "compare a team with baselines, over seeds",
    "transcripts": "show the logged episodes of a run",
    "chat": "talk to a trained team in the terminal",
    "serve": "serve a trained team over HTTP, with an OpenAI-compatible API",
    "vllm-command": "print the command that starts a vLLM server for a trained team",
    "skill": "print instructions for coding agents that use this package",
    "env": "print versions and devices of this machine, for a bug report",
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
        argv: name and arguments of the command. Defaults to `sys.argv[1:]`.

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
        hint = f" Did you mean {near[0]!r}?" if near else f" Commands: {', '.join(COMMANDS)}."
        print(f"marft: unknown command {name!r}.{hint}", file=sys.stderr)
        return 2
    try:
        return _run(_load_command(name)(name, COMMANDS[name]), arguments)
    except KeyboardInterrupt:  # imports take seconds as well
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
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
            "`marft COMMAND --help` lists the options of a command. All options can also be set in a YAML file:",
            "`--config FILE`. Command-line options take precedence over the file.",
        ]
    )
