# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The command `marft`, and options on the command line and in YAML files. Subcommands are imported on first use."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...seams.libraries import get_options, installed_version
from ...system.hints import did_you_mean


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
    "env": "print versions and devices of this machine, for a bug report",
}
# The others are in `teams.py`, as functions named `<name>_options` and `run_<name>`
_ON_A_TRAINER = ("train", "plan", "rehearse", "eval")
_HELP = (
    "`marft COMMAND --help` lists the options of a command. All options can also be set in a YAML file:\n"
    "`--config FILE`. Command-line options take precedence over the file."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with its arguments, `sys.argv[1:]` by default, and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        rows = (f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
        print("usage: marft COMMAND [arguments]", "", *rows, "", _HELP, sep="\n")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"marft_trl {installed_version('marft-trl')}")
        return 0
    name = arguments.pop(0)
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f" Commands: {', '.join(COMMANDS)}."
        print(f"marft: unknown command {name!r}.{hint}", file=sys.stderr)
        return 2
    try:
        return _run(name, arguments) or 0
    except UsageError as error:
        print(f"marft {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # imports take seconds as well
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(name: str, argv: Sequence[str]) -> int | None:
    sentence = f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}."
    module = importlib.import_module(".scripts" if name in _ON_A_TRAINER else ".teams", __name__)
    if name in _ON_A_TRAINER:
        return module.run_on_trainer(name, sentence, argv)
    parser = Parser(prog=f"marft {name}", description=sentence, allow_abbrev=False)
    key = name.replace("-", "_")
    getattr(module, f"{key}_options", lambda parser: None)(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file with options; the command line wins")
    config, rest = read_config(argv)
    args, unknown = parser.parse_known_args([*as_tokens(config, parser, rest), *rest])
    check_unknown(unknown, parser)
    with as_usage_errors(OSError, ValueError, TypeError, ImportError):  # of what an option names
        outcome = getattr(module, f"run_{key}")(args)
    # What runs as long as its user wants is returned, and its errors keep their tracebacks
    return outcome() if callable(outcome) else outcome


class UsageError(ValueError):
    """Raised when a command is called with invalid arguments."""


class Parser(argparse.ArgumentParser):
    """A parser that raises [`UsageError`] where argparse ends the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `--help` for the options.")


@contextlib.contextmanager
def as_usage_errors(*kinds: type[Exception], unless: Callable[[Exception], bool] | None = None) -> Iterator[None]:
    """Convert errors of these kinds to [`UsageError`]s, except with `MARFT_TRACEBACK`."""
    try:
        yield
    except kinds as error:
        is_done = isinstance(error, (UsageError, BrokenPipeError))
        if is_done or os.environ.get("MARFT_TRACEBACK") or (unless is not None and unless(error)):
            raise
        raise UsageError(f"{error} (Set `MARFT_TRACEBACK=1` for the traceback.)") from error


def read_config(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Read the YAML file of `--config`. Returns its options and the other arguments."""
    if argv and argv[-1] == "--config":
        raise UsageError("`--config` needs the name of a YAML file.")
    finder = Parser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    found, rest = finder.parse_known_args(argv)
    return {} if found.config is None else read_yaml(found.config), rest


def read_yaml(path: str | os.PathLike) -> dict[str, Any]:
    """Read the mapping in a YAML file. The key `env` is removed, and sets environment variables."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"`--config {path}` cannot be read: {error}") from error
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UsageError(f"`--config {path}` must be a mapping of options, got {type(found).__name__}.")
    variables = found.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise UsageError(f"`env` in {path} must be a mapping of environment variables, got {variables!r}.")
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    return found


def as_tokens(
    config: Mapping[str, Any],
    parser: argparse.ArgumentParser,
    line: Iterable[str] = (),
    others: Iterable[str] = (),
    where: str = "the YAML file",
) -> list[str]:
    """Convert the options of a file to arguments, without those that the command `line` has already."""
    # Arguments, so that both are checked in the same way; before the line, because the last value of an option counts
    known, tokens = get_options(parser), list[str]()
    there = {token.partition("=")[0] for token in line}
    for key, value in config.items():
        action = known.get(key.replace("-", "_"))
        if action is None or action.dest in ("help", "config"):
            hint = did_you_mean(key, [*known, *others]) or " See `--help` for the options."
            raise UsageError(f"Unknown option {key!r} in {where}.{hint}")
        if not there.isdisjoint(action.option_strings):
            continue
        option = next(text for text in action.option_strings if text.startswith("--"))
        takes_several = action.nargs in ("*", "+")
        if value is None or (isinstance(value, dict) and not _reads_json(action)):
            parser.set_defaults(**{action.dest: value})
        elif action.nargs == 0:  # a flag
            if not isinstance(value, bool):
                raise UsageError(f"{key!r} in {where} must be true or false, got {value!r}.")
            tokens += [option] if value else []
        else:
            values = value if isinstance(value, list) and takes_several else [value]
            texts = [json.dumps(item) if isinstance(item, (dict, list)) else str(item) for item in values]
            tokens += [option, *texts] if takes_several else [f"{option}={texts[0]}"]  # a value may begin with "-"
    return tokens


def _reads_json(action: argparse.Action) -> bool:
    """Return `False` for options of transformers (5.23) that are mappings, which no text of a command line becomes."""
    with contextlib.suppress(TypeError, ValueError):
        return not callable(action.type) or isinstance(action.type("{}"), (dict, str))
    return False


def check_unknown(unknown: Iterable[str], parser: argparse.ArgumentParser, others: Iterable[str] = ()) -> None:
    """Raise a [`UsageError`] if there are arguments that no parser has recognized."""
    if (first := next(iter(unknown), None)) is not None:
        name = first.partition("=")[0].removeprefix("--").replace("-", "_")
        hint = did_you_mean(name, [*get_options(parser), *others]) if first.startswith("--") else ""
        hint = hint.replace("'", "`--", 1).replace("'", "`", 1) if hint else " See `--help` for the options."
        raise UsageError(f"Unknown argument {first!r}.{hint}")
