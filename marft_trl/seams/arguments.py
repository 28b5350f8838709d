# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The seam of argparse, whose parsers do not tell the options that they have."""

from __future__ import annotations

import argparse


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """
    The options of a parser, by their long names without `--`, with `_` for `-`. Parsers of transformers and accelerate
    are made by their own functions, so nothing else knows what was added to them (Python 3.11 to 3.13).
    """
    return {
        text.removeprefix("--").replace("-", "_"): action
        for action in parser._actions
        for text in action.option_strings
        if text.startswith("--")
    }
