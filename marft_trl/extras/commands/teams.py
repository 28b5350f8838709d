# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The commands `marft chat`, `serve`, `vllm-command`, `transcripts`, `report`, `init` and `env`."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import html
import importlib.util
import json
import logging
import os
import platform
import re
import sys
import webbrowser
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from peft import PeftConfig

from ...adapters.files import team_folder
from ...adapters.manifest import TeamManifest
from ...reporting.transcripts import find_pages
from ...seams.libraries import TESTED, installed_version
from ...system.redaction import for_log, printable
from ...team import Answer, Team, TextDelta, TurnEnded, TurnStarted
from ..engines.own_server import vllm_command
from ..report import report
from ..report.__main__ import ReportArguments
from ..report.comparison import as_markdown
from . import Parser, UsageError
from .scripts import base_named, load_module


def add_team_arguments(parser: argparse.ArgumentParser, samples: bool = True) -> None:
    parser.add_argument("team", help="folder of a saved team, or its Hub id")
    about = "base model if the team was trained on a local model: a folder, or 'tiny'; of several, NAME=FOLDER each"
    parser.add_argument("--model", action="append", help=about)
    parser.add_argument("--revision", help="branch, tag or commit of the team on the Hub")
    if samples:
        parser.add_argument("--engine", nargs="+", help="addresses of vLLM servers that sample the turns")
        parser.add_argument("--code", help="script with your own code in `TEAM`: `workflow`, `tools`, ...")


def chosen_bases(values: list[str] | None) -> Any:
    """The base of `--model`, or several by name."""
    if not values:
        return None
    if len(values) == 1 and "=" not in values[0]:
        return base_named(values[0])
    if not all("=" in value for value in values):
        raise UsageError("For a team with several bases, pass `--model NAME=FOLDER` for each.")
    return {name: base_named(folder) for name, _, folder in (value.partition("=") for value in values)}


def load_team(args: argparse.Namespace) -> Team:
    try:
        own = getattr(load_module(args.code), "TEAM", None) if args.code else {}
        if not isinstance(own, dict):
            raise UsageError(f"{args.code} must define `TEAM = {{...}}`, arguments of `Team.from_pretrained`.")
        return Team.from_pretrained(
            args.team, chosen_bases(args.model), revision=args.revision, engine=args.engine, **own
        )
    except (FileNotFoundError, ValueError, TypeError) as error:
        hint = str(error).replace(
            "Pass its folder or the loaded model as `model=`",
            "Pass its folder, or `tiny` for the embedded model, as `--model`",
        )
        if several := re.search(r"Pass its folder or the loaded model as `model=\{(.+)\}`", hint):
            flags = " ".join(f"--model {agent}=FOLDER" for agent in re.findall(r"'([\w-]+)'", several[1]))
            hint = hint.replace(several[0], f"Pass `{flags}`")
        code = ("`workflow=`", "environment_factory", "`tools=`", "`view=`", "`replies=")
        if args.code is None and any(name in hint for name in code):
            hint += " Pass the script that defines it in `TEAM = {...}`: `--code team.py`."
        raise UsageError(hint) from error


_HELP = "Type a question. /greedy: greedy decoding, /sample: sampling as in training, /quit: exit."


def chat_options(parser: Parser) -> None:
    add_team_arguments(parser)
    parser.add_argument("--greedy", action="store_true", help="use greedy decoding")
    parser.add_argument("--seed", type=int, help="sampling seed of the first question")
    parser.add_argument("--question", help="ask this question and exit")
    parser.add_argument("--image", action="append", default=[], help="image file of each question; can be repeated")


def run_chat(args: argparse.Namespace) -> Callable[[], int]:
    team = load_team(args)

    def chat() -> int:
        greedy, seed = args.greedy, args.seed
        with team:
            if args.question is not None:
                return _ask(team, args.question, greedy, seed, args.image)
            print(f"{team!r}. Each question starts a new conversation. {_HELP}")
            with contextlib.suppress(EOFError):
                while (question := input("\n> " if sys.stdin.isatty() else "").strip()) not in ("/quit", "/exit"):
                    if question in ("/greedy", "/sample"):
                        greedy = question == "/greedy"
                    elif question.startswith("/"):
                        print(_HELP)
                    elif question:
                        _ask(team, question, greedy, seed, args.image)
                        seed = None if seed is None else seed + 1
        return 0

    return chat


def _ask(team: Team, question: str, greedy: bool, seed: int | None, images: Sequence[str]) -> int:
    """Print turns one at a time, as they arrive, and the answer if it was not the last turn."""
    texts: dict[int, str] = {}  # what is not yet printed, by turn, until the turn is complete
    ended: set[int] = set()
    try:
        for event in team.stream(question, greedy=greedy, seed=seed, images=images):
            if isinstance(event, TurnStarted):
                texts[event.turn] = f"{event.agent}: "
            elif isinstance(event, TextDelta):
                texts[event.turn] += printable(event.text)
            elif isinstance(event, TurnEnded):
                ended.add(event.turn)
            while texts:
                first = next(iter(texts))
                print(texts[first], end="", flush=True)
                texts[first] = ""
                if first not in ended:
                    break
                print()
                del texts[first]
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


def serve_options(parser: Parser) -> None:
    if importlib.util.find_spec("aiohttp") is None:
        raise UsageError("aiohttp is not installed: `pip install aiohttp`.")
    from ..apps.served_team import ServeSettings

    add_team_arguments(parser)
    parser.epilog = "Set the API key in the environment variable MARFT_API_KEY."
    parser.add_argument("--name", help="model name of the team (default: name of its folder)")
    parser.add_argument("--hide_turns", action="store_true", help="leave the turns of teammates out of answers")
    for name, value in vars(ServeSettings()).items():
        if name not in ("name", "api_key", "show_turns", "agent_of"):  # whose value is a function
            parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")


def run_serve(args: argparse.Namespace) -> Callable[[], None]:
    from ..apps import ServeSettings, serve

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    limits = {name: getattr(args, name) for name in vars(ServeSettings()) if name in args}
    limits["name"] = args.name or Path(os.path.abspath(args.team)).name or "team"
    limits |= {"api_key": os.environ.get("MARFT_API_KEY") or None, "show_turns": not args.hide_turns}
    settings = ServeSettings(**limits)
    team = load_team(args)

    def listen() -> None:
        with team:
            try:
                serve(team, settings)
            except OSError as error:  # such as a port that is taken
                raise UsageError(f"Cannot listen on {settings.host}:{settings.port}: {error.strerror}.") from error

    return listen


def vllm_command_options(parser: Parser) -> None:
    add_team_arguments(parser, samples=False)
    parser.add_argument("--port", type=int, default=8000, help="default: 8000")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    parser.add_argument("--max_model_len", type=int, help="maximum length of prompt and turn together, in tokens")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")


def run_vllm_command(args: argparse.Namespace) -> None:
    folder = team_folder(args.team, args.revision)
    manifest = TeamManifest.load(folder)
    if not manifest.adapters:
        raise UsageError(f"The team in {args.team} has no adapters. Serve its model with `vllm serve`.")
    limits = {name: getattr(args, name) for name in ("host", "max_model_len", "device")}
    models = zip(manifest.bases, manifest.choose(chosen_bases(args.model), "model"), strict=True)
    for number, (base, chosen) in enumerate(models):
        model = chosen or (None if base.is_local else base.name)
        if model is None:
            flag = f"{manifest.players_on(base)[0].name}=FOLDER" if manifest.further_bases else "FOLDER"
            raise UsageError(f"The team was trained on the local base {base.name!r}. Pass `--model {flag}`.")
        if not manifest.adapters_on(base):
            raise UsageError(f"The base {base.name!r} was trained itself. Serve it with `vllm serve`.")
        configs = [PeftConfig.from_pretrained(folder / name) for name in manifest.adapters_on(base)]
        largest = max(configs, key=lambda config: getattr(config, "r", 0))
        print(vllm_command(model, manifest.players_on(base), peft_config=largest, port=args.port + number, **limits))


def transcripts_options(parser: Parser) -> None:
    parser.add_argument("folder", help="output folder of a run with `log_completions=True`")
    parser.add_argument("--step", type=int, help="logging step (default: the latest)")
    parser.add_argument("--eval", action="store_true", help="episodes of the evaluation at the step")
    parser.add_argument("--open", action="store_true", help="open the page in a browser, with colors")


def run_transcripts(args: argparse.Namespace) -> None:
    found = find_pages(Path(args.folder) / "completions")
    steps = sorted({step for step, is_evaluation in found if is_evaluation or not args.eval})
    if not steps:
        of = " of evaluations" if args.eval else ""
        raise UsageError(f"There are no transcripts{of} in {args.folder}. Train with `log_completions=True`.")
    latest = max((step for step, is_evaluation in found if is_evaluation == args.eval), default=steps[-1])
    step = latest if args.step is None else args.step
    if step not in steps:
        known = ", ".join(map(str, steps))
        raise UsageError(f"There are no transcripts of step {step}. Available steps: {known}.")
    page = found[step, args.eval or (step, False) not in found]
    if args.open:
        webbrowser.open(page.resolve().as_uri())
    print(page if args.open else _as_text(page.read_text(encoding="utf-8")))


def _as_text(page: str) -> str:
    """Return the text of a page of transcripts, without the prompts of agents, which repeat the turns."""
    body = re.sub(r"(?s)<(style|head|details|script|form)\b.*?</\1>|<p class=legend>.*?</p>", "", page)
    body = re.sub(r"<h2[^>]*>", "\n\n== ", re.sub(r"<h3[^>]*>", "\n-- ", body))
    body = re.sub(r"</h[23]>|<p[^>]*>|<pre[^>]*>|</caption>|</tr>", "\n", body)
    return printable(html.unescape(re.sub(r"<[^>]*>", "", body))).strip()


def report_options(parser: Parser) -> None:
    read: dict[str, Any] = {"settings": json.loads, "seeds": int, "workers": int, "margin": float}
    defaults = vars(ReportArguments(experiment=""))
    for field in dataclasses.fields(ReportArguments):
        name, nargs = field.name, "+" if field.name in ("seeds", "arms") else None
        options = {"default": defaults[name], "required": name == "experiment", "help": field.metadata["help"]}
        parser.add_argument(f"--{name}", type=read.get(name, str), nargs=nargs, **options)


def run_report(args: argparse.Namespace) -> None:
    arguments = {field.name: getattr(args, field.name) for field in dataclasses.fields(ReportArguments)}
    print(as_markdown(report(**arguments)))  # errors of runs are collected into a `RuntimeError`


KINDS = ("duo", "app")


def init_options(parser: Parser) -> None:
    parser.add_argument("kind", choices=KINDS, nargs="?", default="duo", help="kind of team (default: duo)")
    parser.add_argument("--file", default="team.py", help="file to write (default: team.py)")


def run_init(args: argparse.Namespace) -> None:
    path = Path(args.file)
    text = files(__package__).joinpath("templates", f"{args.kind}.py").read_text(encoding="utf-8")
    if path.exists():
        raise UsageError(f"{path} already exists. Choose another file with `--file`.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    about = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    name = "" if path.name == "team.py" and path.parent == Path() else f" {path}"
    print(f"{path}: {about}\nNext:\n  marft plan{name}\n  marft train{name}")


def run_env(args: argparse.Namespace) -> None:
    import psutil
    import torch

    packages = ("marft-trl", *TESTED, "aiohttp", "vllm", "math-verify")
    kinds = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    rows = {
        **{"platform": platform.platform(), "python": platform.python_version()},
        **{name: installed_version(name) or "not installed" for name in packages},
        "processors": f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads",
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "devices": ", ".join(kinds) or "CPU only",
    }
    for name, text in rows.items():
        print(f"{name:13} {text}")
