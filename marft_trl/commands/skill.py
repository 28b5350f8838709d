# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft skill`: what a coding agent needs to know to work with this package."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

from .command import OptionsCommand, Parser, UsageError


class Command(OptionsCommand):
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
