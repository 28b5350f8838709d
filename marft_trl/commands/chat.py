# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft chat FOLDER`: a conversation with a team in the terminal."""

from __future__ import annotations

import argparse
import sys

from ..reporting.transcripts import printable
from ..team import Answer, Team, TextDelta, TurnStarted
from .command import BaseCommand, Parser
from .teams import add_team_arguments, load_team


_HELP = "Write a question. /greedy takes the most likely tokens, /sample samples as in training, /quit ends."


class Command(BaseCommand):
    """Ask a team, turn after turn."""

    def add_arguments(self, parser: Parser) -> None:
        add_team_arguments(parser)
        parser.add_argument("--greedy", action="store_true", help="take the most likely tokens")
        parser.add_argument("--seed", type=int, help="seed of sampling, of the first question")
        parser.add_argument("--question", help="ask this one, and end")

    def run(self, args: argparse.Namespace) -> None:
        team, greedy, seed = load_team(args), args.greedy, args.seed
        with team:
            if args.question is not None:
                _ask(team, args.question, greedy, seed)
                return
            print(f"{team!r}. Each question stands alone. {_HELP}")
            while (question := _read()) is not None:
                if question in ("/quit", "/exit"):
                    return
                if question in ("/greedy", "/sample"):
                    greedy = question == "/greedy"
                elif question.startswith("/"):
                    print(_HELP)
                elif question:
                    _ask(team, question, greedy, seed)
                    seed = None if seed is None else seed + 1


def _read() -> str | None:
    try:
        return input("\n> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _ask(team: Team, question: str, greedy: bool, seed: int | None) -> None:
    """Print turns as they arrive, and the answer at the end if it was not the last of them."""
    speaks = None
    try:
        for event in team.stream(question, greedy=greedy, seed=seed):
            if isinstance(event, (TurnStarted, TextDelta)) and event.turn != speaks:
                print(f"{'' if speaks is None else chr(10)}{event.agent}: ", end="")
                speaks = event.turn
            if isinstance(event, TextDelta):
                print(printable(event.text), end="", flush=True)
            if isinstance(event, Answer):
                print()
                answer = event.episode.answer
                if answer is not None and answer is not event.episode.turns[-1]:
                    print(f"The team answers: {printable(event.text)}")
    except KeyboardInterrupt:
        print(" (stopped)")
    except ValueError as error:  # such as a question that is longer than the window
        print(f"\n{error}", file=sys.stderr)
