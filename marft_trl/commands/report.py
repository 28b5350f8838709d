# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft report`: is the team worth it? As `python -m marft_trl.report`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ..report import report
from ..report.__main__ import ReportArguments
from ..report.experiment import load_experiment
from ..report.pages import as_markdown
from .command import OptionsCommand, Parser, UsageError


_READ: dict[str, dict[str, Any]] = {
    "settings": {"type": json.loads, "metavar": "JSON"},
    "seeds": {"type": int, "nargs": "+"},
    "arms": {"nargs": "+"},
    "workers": {"type": int},
    "margin": {"type": float},
}


class Command(OptionsCommand):
    """Compare a team with what it should be better than."""

    def add_arguments(self, parser: Parser) -> None:
        for field in dataclasses.fields(ReportArguments):
            made = field.default_factory() if callable(field.default_factory) else None
            default = made if field.default is dataclasses.MISSING else field.default
            options = {"help": field.metadata["help"], "default": default, "required": field.name == "experiment"}
            parser.add_argument(f"--{field.name}", **options, **_READ.get(field.name, {}))

    def run(self, args: argparse.Namespace) -> None:
        given = {field.name: getattr(args, field.name) for field in dataclasses.fields(ReportArguments)}
        try:
            load_experiment(args.experiment, args.settings)
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise UsageError(f"`--experiment {args.experiment}`: {error}") from error
        try:
            print(as_markdown(report(**given)))
        except (ValueError, TypeError) as error:  # of an option: errors of runs are collected, and end it otherwise
            raise UsageError(str(error)) from error
