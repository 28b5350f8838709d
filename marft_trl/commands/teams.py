# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Trained teams, as the options of a command name them."""

from __future__ import annotations

import argparse

from ..team import Team
from .command import UsageError
from .scripts import base_named, code_of


def add_team_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a trained team is found."""
    parser.add_argument("team", help="folder of a saved team, or its Hub id")
    parser.add_argument("--model", help="base model, if the team was trained on a local one: a folder, or 'tiny'")
    parser.add_argument("--revision", help="branch, tag or commit of the team on the Hub")
    parser.add_argument("--engine", nargs="+", help="addresses of vLLM servers that sample the turns")
    parser.add_argument("--code", help="script whose `TEAM` has what is your own code: `workflow`, `tools`, ...")


def load_team(args: argparse.Namespace) -> Team:
    """
    The team that the options name.

    Raises:
        UsageError: it cannot be loaded; the message says what to pass.
    """
    try:
        more = code_of(args.code) if args.code else {}
        base = base_named(args.model)
        return Team.from_pretrained(args.team, base, revision=args.revision, engine=args.engine, **more)
    except (FileNotFoundError, ValueError, TypeError) as error:
        hint = str(error).replace(
            "pass it as `model=`, a folder or a loaded model",
            "pass its folder, or `tiny` for the embedded one, as `--model`",
        )
        own = ("`workflow=`", "`environment_factory=`", "environment_factory", "`tools=`", "`view=`", "`replies=")
        if args.code is None and any(name in hint for name in own):
            hint += " Name the script that has it: `--code team.py`, with `TEAM = {...}` in it."
        raise UsageError(hint) from error
