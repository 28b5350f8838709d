# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft serve FOLDER`: a team over HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

from .command import OptionsCommand, Parser, UsageError
from .teams import add_team_arguments, load_team


class Command(OptionsCommand):
    """Serve a team until the process is told to end."""

    def add_arguments(self, parser: Parser) -> None:
        if importlib.util.find_spec("aiohttp") is None:
            raise UsageError("aiohttp is missing: `pip install 'marft-trl[serve]'`.")
        from ..gateway.settings import GatewaySettings

        add_team_arguments(parser)
        parser.epilog = "An API key is taken from the environment variable MARFT_API_KEY."
        default = GatewaySettings()
        parser.add_argument("--name", help="name of the team as a model; that of its folder by default")
        parser.add_argument("--hide_turns", action="store_true", help="answer without the turns of teammates")
        for field in dataclasses.fields(default):
            if field.name in ("name", "api_key", "show_turns"):
                continue
            value = getattr(default, field.name)
            parser.add_argument(f"--{field.name}", type=type(value), default=value, help=f"default: {value}")

    def run(self, args: argparse.Namespace) -> None:
        from ..gateway import GatewaySettings, serve

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        limits: dict[str, Any] = {
            field.name: getattr(args, field.name, None) for field in dataclasses.fields(GatewaySettings)
        }
        limits |= {
            "name": args.name or Path(os.path.abspath(args.team)).name or "team",
            "api_key": os.environ.get("MARFT_API_KEY") or None,
        }
        try:
            settings = GatewaySettings(**{**limits, "show_turns": not args.hide_turns})
        except ValueError as error:
            raise UsageError(str(error)) from error
        with load_team(args) as team:
            try:
                serve(team, settings)
            except OSError as error:  # such as a port that is taken
                raise UsageError(
                    f"{settings.host}:{settings.port} cannot be listened at: {error.strerror}."
                ) from error
