# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft vllm-command FOLDER`: the command that starts a vLLM server for a trained team."""

from __future__ import annotations

import argparse

from peft import PeftConfig

from ..servers.command import vllm_command
from ..weights.adapter_files import team_folder
from ..weights.manifest import TeamManifest
from .command import OptionsCommand, Parser, UsageError
from .scripts import base_named


class Command(OptionsCommand):
    """Print the command. Run it where vLLM is installed."""

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("team", help="folder of a saved team, or its Hub id")
        parser.add_argument("--model", help="base model, if the team was trained on a local one")
        parser.add_argument("--revision", help="branch, tag or commit of the team on the Hub")
        parser.add_argument("--port", type=int, default=8000, help="default: 8000")
        parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
        parser.add_argument("--max_model_len", type=int, help="longest prompt and turn together, in tokens")
        parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")

    def run(self, args: argparse.Namespace) -> None:
        try:
            folder = team_folder(args.team, args.revision)
            manifest = TeamManifest.load(folder)
        except (FileNotFoundError, ValueError) as error:
            raise UsageError(str(error)) from error
        model = base_named(args.model) or manifest.base_model
        if model is None or not manifest.adapters:
            raise UsageError("The team was trained on a local base, or has no adapters: pass the base as `--model`.")
        configs = [PeftConfig.from_pretrained(folder / name) for name in manifest.adapters]
        largest = max(configs, key=lambda config: getattr(config, "r", 0))
        limits = {"port": args.port, "host": args.host, "max_model_len": args.max_model_len, "device": args.device}
        print(vllm_command(model, manifest.agents, peft_config=largest, **limits))
