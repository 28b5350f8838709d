# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft init duo`: a script of a team to begin with."""

from __future__ import annotations

import argparse
import ast
from importlib.resources import files
from pathlib import Path

from .command import OptionsCommand, Parser, UsageError


KINDS = ("duo", "debate", "game", "tools", "app")


class Command(OptionsCommand):
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
