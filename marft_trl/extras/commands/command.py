# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Base classes of commands: options of the command line and of YAML files."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...seams.libraries import get_options
from ...system.hints import did_you_mean


class UsageError(ValueError):
    """Raised when a command is called with invalid arguments."""


class Parser(argparse.ArgumentParser):
    """A parser that raises [`UsageError`] where argparse ends the process, and that takes no abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `--help` for the options.")


class BaseCommand:
    """A command."""

    def __init__(self, name: str, help: str):
        self.name, self.help = name, help

    @property
    def sentence(self) -> str:
        """The help text as a sentence."""
        return f"{self.help[0].upper()}{self.help[1:]}."

    def main(self, argv: Sequence[str]) -> int | None:
        """Run the command with its arguments. Returns the exit status, 0 by default."""
        raise NotImplementedError


class OptionsCommand(BaseCommand):
    """A command with options of its own. Subclasses add them and do the work."""

    def parser(self) -> Parser:
        """The parser of its options."""
        parser = Parser(prog=f"marft {self.name}", description=self.sentence)
        self.add_arguments(parser)
        parser.add_argument("--config", metavar="FILE", help="YAML file with options; the command line wins")
        return parser

    def add_arguments(self, parser: Parser) -> None:
        """Add the options of the command."""
        raise NotImplementedError

    def run(self, args: argparse.Namespace) -> int | None:
        """Do the work. Returns the exit status, 0 by default."""
        raise NotImplementedError

    def main(self, argv: Sequence[str]) -> int | None:
        parser = self.parser()
        config, rest = read_config(argv)
        tokens = as_tokens(config, parser, rest)
        args, unknown = parser.parse_known_args([*tokens, *rest])
        check_unknown(unknown, parser)
        try:
            return self.run(args)
        except OSError as error:  # of a file or folder that an option names
            if isinstance(error, BrokenPipeError) or os.environ.get("MARFT_TRACEBACK"):
                raise
            raise UsageError(f"{error} (Set `MARFT_TRACEBACK=1` for the traceback.)") from error


# ---- Options in YAML files ----


def read_config(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """
    Read the YAML file of `--config`, whose `env` sets environment variables. Returns its options and the other
    arguments.

    Raises:
        UsageError: the file cannot be read, or is not a mapping.
    """
    rest = list(argv)
    if rest and rest[-1] == "--config":
        raise UsageError("`--config` needs the name of a YAML file.")
    for index, token in enumerate(rest):
        name, _, value = token.partition("=")
        if name == "--config":
            path = value or (rest[index + 1] if index + 1 < len(rest) else "")
            del rest[index : index + (1 if value else 2)]
            return read_yaml(path), rest
    return {}, rest


def read_yaml(path: str | os.PathLike) -> dict[str, Any]:
    """
    Read the mapping in a YAML file. The key `env` is removed, and sets environment variables.

    Raises:
        UsageError: the file cannot be read, or is not a mapping.
    """
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
    """
    Convert the options of a file to command-line arguments, so that both are parsed and checked in the same way. They
    go before the arguments of the command line, because the last value of an option counts.

    Args:
        line: the command line. Its options are left out, even if argparse would collect several values.
        where: source of the options, for the error.

    Raises:
        UsageError: a key is not an option.
    """
    known, tokens = get_options(parser), list[str]()
    there = {token.partition("=")[0] for token in line}
    for key, value in config.items():
        action = known.get(key.replace("-", "_"))
        if action is None or action.dest in ("help", "config"):
            hint = did_you_mean(key, [*known, *others]) or " See `--help` for the options."
            raise UsageError(f"Unknown option {key!r} in {where}.{hint}")
        if there.isdisjoint(action.option_strings):
            tokens += _tokens(action, value, key, parser, where)
    return tokens


def _tokens(action: argparse.Action, value: Any, key: str, parser: argparse.ArgumentParser, where: str) -> list[str]:
    option = next(text for text in action.option_strings if text.startswith("--"))
    if value is None or (isinstance(value, dict) and not _reads_json(action)):
        parser.set_defaults(**{action.dest: value})
        return []
    if action.nargs == 0:  # a flag
        if not isinstance(value, bool):
            raise UsageError(f"{key!r} in {where} must be true or false, got {value!r}.")
        return [option] if value else []
    values = value if isinstance(value, list) and action.nargs in ("*", "+") else [value]
    texts = [json.dumps(item) if isinstance(item, (dict, list)) else str(item) for item in values]
    if action.nargs in ("*", "+"):
        return [option, *texts]
    return [f"{option}={texts[0]}"]  # so that a value may begin with "-"


def _reads_json(action: argparse.Action) -> bool:
    """transformers (5.23) declares some options as mappings that no text of a command line becomes."""
    try:
        return not callable(action.type) or isinstance(action.type("{}"), (dict, str))
    except (TypeError, ValueError):
        return False


def check_unknown(unknown: Iterable[str], parser: argparse.ArgumentParser, others: Iterable[str] = ()) -> None:
    """
    Args:
        unknown: arguments that no parser has recognized.

    Raises:
        UsageError: there are unknown arguments.
    """
    first = next(iter(unknown), None)
    if first is not None:
        name = first.partition("=")[0].removeprefix("--").replace("-", "_")
        hint = did_you_mean(name, [*get_options(parser), *others]) if first.startswith("--") else ""
        hint = hint.replace("'", "`--", 1).replace("'", "`", 1) if hint else " See `--help` for the options."
        raise UsageError(f"Unknown argument {first!r}.{hint}")
