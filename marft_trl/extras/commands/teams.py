# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The commands that use a trained team: `marft chat`, `serve`, `vllm-command` and `transcripts`."""

from __future__ import annotations

import argparse
import dataclasses
import html
import importlib.util
import logging
import os
import re
import sys
import webbrowser
from pathlib import Path
from typing import Any

from peft import PeftConfig

from ...adapters.files import team_folder
from ...adapters.manifest import TeamManifest
from ...system.redaction import for_log, printable
from ...team import Answer, Team, TextDelta, TurnEnded, TurnStarted
from ..engines.own_server import vllm_command
from .command import OptionsCommand, Parser, UsageError
from .scripts import base_named, load_team_arguments


def add_team_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a trained team."""
    parser.add_argument("team", help="folder of a saved team, or its Hub id")
    parser.add_argument("--model", help="base model if the team was trained on a local model: a folder, or 'tiny'")
    parser.add_argument("--revision", help="branch, tag or commit of the team on the Hub")
    parser.add_argument("--engine", nargs="+", help="addresses of vLLM servers that sample the turns")
    parser.add_argument("--code", help="script with your own code in `TEAM`: `workflow`, `tools`, ...")


def load_team(args: argparse.Namespace) -> Team:
    """
    Load the team that the options select.

    Raises:
        UsageError: the team cannot be loaded; the message says what to pass.
    """
    try:
        more = load_team_arguments(args.code) if args.code else {}
        base = base_named(args.model)
        return Team.from_pretrained(args.team, base, revision=args.revision, engine=args.engine, **more)
    except (FileNotFoundError, ValueError, TypeError) as error:
        hint = str(error).replace(
            "Pass its folder or the loaded model as `model=`",
            "Pass its folder, or `tiny` for the embedded model, as `--model`",
        )
        own = ("`workflow=`", "`environment_factory=`", "environment_factory", "`tools=`", "`view=`", "`replies=")
        if args.code is None and any(name in hint for name in own):
            hint += " Pass the script that defines it in `TEAM = {...}`: `--code team.py`."
        raise UsageError(hint) from error


_HELP = "Type a question. /greedy: greedy decoding, /sample: sampling as in training, /quit: exit."


class ChatCommand(OptionsCommand):
    """Ask a team questions in the terminal."""

    def add_arguments(self, parser: Parser) -> None:
        add_team_arguments(parser)
        parser.add_argument("--greedy", action="store_true", help="use greedy decoding")
        parser.add_argument("--seed", type=int, help="sampling seed of the first question")
        parser.add_argument("--question", help="ask this question and exit")

    def run(self, args: argparse.Namespace) -> int:
        team, greedy, seed = load_team(args), args.greedy, args.seed
        with team:
            if args.question is not None:
                return _ask(team, args.question, greedy, seed)
            print(f"{team!r}. Each question starts a new conversation. {_HELP}")
            while (question := _read()) is not None:
                if question in ("/quit", "/exit"):
                    break
                if question in ("/greedy", "/sample"):
                    greedy = question == "/greedy"
                elif question.startswith("/"):
                    print(_HELP)
                elif question:
                    _ask(team, question, greedy, seed)
                    seed = None if seed is None else seed + 1
        return 0


def _read() -> str | None:
    try:
        return input("\n> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _ask(team: Team, question: str, greedy: bool, seed: int | None) -> int:
    """
    Print turns as they arrive, one at a time, and at the end the answer if it was not the last turn. Parallel turns
    wait until the current one is complete.
    """
    texts: dict[int, str] = {}  # of turns that are not yet printed completely
    ended: set[int] = set()
    speaks: int | None = None
    try:
        for event in team.stream(question, greedy=greedy, seed=seed):
            if isinstance(event, TurnStarted):
                texts[event.turn] = f"{event.agent}: "
            elif isinstance(event, TextDelta):
                texts[event.turn] += printable(event.text)
            elif isinstance(event, TurnEnded):
                ended.add(event.turn)
            while texts:
                speaks = next(iter(texts)) if speaks is None else speaks
                print(texts[speaks], end="", flush=True)
                texts[speaks] = ""
                if speaks not in ended:
                    break
                print()
                del texts[speaks]
                speaks = None
            if isinstance(event, Answer):
                answer = event.episode.answer
                if answer is not None and answer is not event.episode.turns[-1]:
                    print(f"The team answers: {printable(event.text)}")
    except KeyboardInterrupt:
        print(" (stopped)")
    except Exception as error:  # such as a question that is longer than the window, or a workflow that fails
        print(f"\n{type(error).__name__}: {for_log(str(error))}", file=sys.stderr)
        return 1
    return 0


class ServeCommand(OptionsCommand):
    """Serve a team until the process receives SIGINT or SIGTERM."""

    def add_arguments(self, parser: Parser) -> None:
        if importlib.util.find_spec("aiohttp") is None:
            raise UsageError("aiohttp is not installed: `pip install 'marft-trl[serve]'`.")
        from ..apps.served_team import GatewaySettings

        add_team_arguments(parser)
        parser.epilog = "Set the API key in the environment variable MARFT_API_KEY."
        default = GatewaySettings()
        parser.add_argument("--name", help="model name of the team (default: name of its folder)")
        parser.add_argument("--hide_turns", action="store_true", help="leave the turns of teammates out of answers")
        for field in dataclasses.fields(default):
            if field.name in ("name", "api_key", "show_turns"):
                continue
            value = getattr(default, field.name)
            parser.add_argument(f"--{field.name}", type=type(value), default=value, help=f"default: {value}")

    def run(self, args: argparse.Namespace) -> None:
        from ..apps import GatewaySettings, serve

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
                raise UsageError(f"Cannot listen on {settings.host}:{settings.port}: {error.strerror}.") from error


class VllmCommand(OptionsCommand):
    """Print the command. Run it where vLLM is installed."""

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("team", help="folder of a saved team, or its Hub id")
        parser.add_argument("--model", help="base model if the team was trained on a local model")
        parser.add_argument("--revision", help="branch, tag or commit of the team on the Hub")
        parser.add_argument("--port", type=int, default=8000, help="default: 8000")
        parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
        parser.add_argument("--max_model_len", type=int, help="maximum length of prompt and turn together, in tokens")
        parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")

    def run(self, args: argparse.Namespace) -> None:
        try:
            folder = team_folder(args.team, args.revision)
            manifest = TeamManifest.load(folder)
        except (FileNotFoundError, ValueError) as error:
            raise UsageError(str(error)) from error
        model = base_named(args.model) or manifest.base_model
        if not manifest.adapters:
            raise UsageError(f"The team in {args.team} has no adapters. Serve its model with `vllm serve`.")
        if model is None:
            raise UsageError("The team was trained on a local base model. Pass its folder as `--model`.")
        configs = [PeftConfig.from_pretrained(folder / name) for name in manifest.adapters]
        largest = max(configs, key=lambda config: getattr(config, "r", 0))
        limits = {"port": args.port, "host": args.host, "max_model_len": args.max_model_len, "device": args.device}
        print(vllm_command(model, manifest.agents, peft_config=largest, **limits))


_PAGES = "completions/transcripts_*.html"


class TranscriptsCommand(OptionsCommand):
    """Print the latest page of transcripts, or open it."""

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("folder", help="output folder of a run with `log_completions=True`")
        parser.add_argument("--step", type=int, help="logging step (default: the latest)")
        parser.add_argument("--open", action="store_true", help="open the page in a browser, with colors")

    def run(self, args: argparse.Namespace) -> None:
        found = {path: re.fullmatch(r"transcripts_(\d+)", path.stem) for path in Path(args.folder).glob(_PAGES)}
        pages = {int(match[1]): path for path, match in found.items() if match is not None}
        if not pages:
            raise UsageError(f"There are no transcripts in {args.folder}. Train with `log_completions=True`.")
        step = max(pages) if args.step is None else args.step
        if step not in pages:
            known = ", ".join(map(str, sorted(pages)))
            raise UsageError(f"There are no transcripts of step {step}. Available steps: {known}.")
        if args.open:
            webbrowser.open(pages[step].resolve().as_uri())
        print(pages[step] if args.open else _as_text(pages[step].read_text(encoding="utf-8")))


def _as_text(page: str) -> str:
    """Return the text of a page of transcripts, without the prompts of agents, which repeat the turns."""
    body = re.sub(r"(?s)<(style|head|details|script|form)\b.*?</\1>|<p class=legend>.*?</p>", "", page)
    body = re.sub(r"<h2[^>]*>", "\n\n== ", re.sub(r"<h3[^>]*>", "\n-- ", body))
    body = re.sub(r"</h[23]>|<p[^>]*>|<pre[^>]*>|</caption>|</tr>", "\n", body)
    return printable(html.unescape(re.sub(r"<[^>]*>", "", body))).strip()
