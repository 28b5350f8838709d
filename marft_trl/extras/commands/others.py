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
    """Compare a team with what it should be better than."""

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
        except (ValueError, TypeError) as error:  # of an option: errors of runs are collected, and end it otherwise
            raise UsageError(str(error)) from error


KINDS = ("duo", "debate", "game", "tools", "app")


class InitCommand(OptionsCommand):
    """Write a script. Nothing is overwritten."""

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("kind", choices=KINDS, nargs="?", default="duo", help="which team; duo by default")
        parser.add_argument("--file", default="team.py", help="file to write; team.py by default")

    def run(self, args: argparse.Namespace) -> None:
        path = Path(args.file)
        if path.exists():
            raise UsageError(f"There is a file {path} already. Choose another one with `--file`.")
        text = files(__package__).joinpath("templates", f"{args.kind}.py").read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        about = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
        name = "" if path.name == "team.py" and path.parent == Path() else f" {path}"
        print(f"{path}: {about}\nNext:\n  marft plan{name}\n  marft train{name}")
        if "tiny_team_model" not in text:
            print("The model is Qwen2.5-0.5B-Instruct of the Hub; `--model FOLDER` names another one.")


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
        rows.append(("processors", f"{os.cpu_count()}, {torch.get_num_threads()} threads of torch"))
        rows.append(("memory", f"{psutil.virtual_memory().total / 1e9:.0f} GB"))
        kinds = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        rows.append(("devices", ", ".join(kinds) or "none but the CPU"))
        for name, text in rows:
            print(f"{name:13} {text}")


class SkillCommand(OptionsCommand):
    """Print the file, or write it where a coding agent looks for skills."""

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("--output_dir", metavar="FOLDER", help="folder of skills; marft-trl/SKILL.md in it")

    def run(self, args: argparse.Namespace) -> None:
        text = files(__package__).joinpath("templates", "SKILL.md").read_text(encoding="utf-8")
        if args.output_dir is None:
            print(text, end="")
            return
        path = Path(args.output_dir) / "marft-trl" / "SKILL.md"
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UsageError(f"There is another {path} already. Delete it, or choose another `--output_dir`.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
