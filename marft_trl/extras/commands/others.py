# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The commands `marft report`, `init`, `env` and `skill`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import platform
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...seams.libraries import installed_version
from ..report import report
from ..report.__main__ import ReportArguments
from ..report.comparison import as_markdown
from ..report.experiment import load_experiment
from .command import OptionsCommand, Parser, UsageError


_READ: dict[str, dict[str, Any]] = {
    "settings": {"type": json.loads, "metavar": "JSON"},
    "seeds": {"type": int, "nargs": "+"},
    "arms": {"nargs": "+"},
    "workers": {"type": int},
    "margin": {"type": float},
}


class ReportCommand(OptionsCommand):
    """Compare a team with baselines."""

    def add_arguments(self, parser: Parser) -> None:
        for field in dataclasses.fields(ReportArguments):
            made = field.default_factory() if callable(field.default_factory) else None
            default = made if field.default is dataclasses.MISSING else field.default
            options = {"help": field.metadata["help"], "default": default, "required": field.name == "experiment"}
            parser.add_argument(f"--{field.name}", **options, **_READ.get(field.name, {}))

    def run(self, args: argparse.Namespace) -> None:
        arguments = {field.name: getattr(args, field.name) for field in dataclasses.fields(ReportArguments)}
        try:
            load_experiment(args.experiment, args.settings)
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise UsageError(f"`--experiment {args.experiment}`: {error}") from error
        try:
            print(as_markdown(report(**arguments)))
        except (
            ValueError,
            TypeError,
        ) as error:  # from the options: errors of runs are collected into a `RuntimeError`
            raise UsageError(str(error)) from error


KINDS = ("duo", "debate", "game", "tools", "app")


class InitCommand(OptionsCommand):
    """Write a script. Never overwrites a file."""

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("kind", choices=KINDS, nargs="?", default="duo", help="kind of team (default: duo)")
        parser.add_argument("--file", default="team.py", help="file to write (default: team.py)")

    def run(self, args: argparse.Namespace) -> None:
        path = Path(args.file)
        if path.exists():
            raise UsageError(f"{path} already exists. Choose another file with `--file`.")
        text = files(__package__).joinpath("templates", f"{args.kind}.py").read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        about = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
        name = "" if path.name == "team.py" and path.parent == Path() else f" {path}"
        print(f"{path}: {about}\nNext:\n  marft plan{name}\n  marft train{name}")
        if "tiny_team_model" not in text:
            print("The script uses Qwen2.5-0.5B-Instruct from the Hub. Pass `--model FOLDER` to use another model.")


_PACKAGES = (
    *("marft-trl", "trl", "transformers", "peft", "accelerate", "datasets", "bitsandbytes", "evaluate", "torch"),
    *("aiohttp", "vllm", "math-verify"),
)


class EnvCommand(OptionsCommand):
    """Print versions and devices."""

    def add_arguments(self, parser: Parser) -> None:
        pass

    def run(self, args: argparse.Namespace) -> None:
        import psutil
        import torch

        rows = [("platform", platform.platform()), ("python", platform.python_version())]
        rows += [(name, installed_version(name) or "not installed") for name in _PACKAGES]
        rows.append(("processors", f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"))
        rows.append(("memory", f"{psutil.virtual_memory().total / 1e9:.0f} GB"))
        kinds = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        rows.append(("devices", ", ".join(kinds) or "CPU only"))
        for name, text in rows:
            print(f"{name:13} {text}")


class SkillCommand(OptionsCommand):
    """Print the skill, or write it to the folder in which a coding agent looks for skills."""

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("--output_dir", metavar="FOLDER", help="write marft-trl/SKILL.md to this folder of skills")

    def run(self, args: argparse.Namespace) -> None:
        text = files(__package__).joinpath("templates", "SKILL.md").read_text(encoding="utf-8")
        if args.output_dir is None:
            print(text, end="")
            return
        path = Path(args.output_dir) / "marft-trl" / "SKILL.md"
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UsageError(f"{path} already exists with other content. Delete it, or choose another `--output_dir`.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
