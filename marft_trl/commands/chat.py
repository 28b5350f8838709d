# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft chat FOLDER`: a conversation with a team in the terminal."""

from __future__ import annotations

import argparse
import sys

from ..system.redaction import for_log, printable
from ..team import Answer, Team, TextDelta, TurnEnded, TurnStarted
from .command import OptionsCommand, Parser
from .teams import add_team_arguments, load_team


_HELP = "Write a question. /greedy takes the most likely tokens, /sample samples as in training, /quit ends."


class Command(OptionsCommand):
    """Ask a team, turn after turn."""

    def add_arguments(self, parser: Parser) -> None:
        add_team_arguments(parser)
        parser.add_argument("--greedy", action="store_true", help="take the most likely tokens")
        parser.add_argument("--seed", type=int, help="seed of sampling, of the first question")
        parser.add_argument("--question", help="ask this one, and end")

    def run(self, args: argparse.Namespace) -> int:
        team, greedy, seed = load_team(args), args.greedy, args.seed
        with team:
            if args.question is not None:
                return _ask(team, args.question, greedy, seed)
            print(f"{team!r}. Each question stands alone. {_HELP}")
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
    Print turns as they arrive, one at a time, and the answer at the end if it was not the last of them. Turns that
    grow beside the one that is being printed wait for its end.
    """
    texts: dict[int, str] = {}  # of turns that have not been printed to their ends
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
