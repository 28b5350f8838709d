# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft transcripts FOLDER`: episodes that a run has logged."""

from __future__ import annotations

import argparse
import html
import re
import webbrowser
from pathlib import Path

from ..reporting.transcripts import printable
from .command import OptionsCommand, Parser, UsageError


class Command(OptionsCommand):
    """Print the latest page of transcripts, or open it."""

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("folder", help="output folder of a run with `log_completions=True`")
        parser.add_argument("--step", type=int, help="logging step; the latest by default")
        parser.add_argument("--open", action="store_true", help="open the page in a browser, with colours")

    def run(self, args: argparse.Namespace) -> None:
        pages = {
            int(path.stem.rpartition("_")[2]): path
            for path in Path(args.folder, "completions").glob("transcripts_*.html")
        }
        if not pages:
            raise UsageError(f"There are no transcripts in {args.folder}: train with `log_completions=True`.")
        step = max(pages) if args.step is None else args.step
        if step not in pages:
            known = ", ".join(map(str, sorted(pages)))
            raise UsageError(f"There are no transcripts of step {step}; there are those of {known}.")
        if args.open:
            webbrowser.open(pages[step].resolve().as_uri())
        print(pages[step] if args.open else _as_text(pages[step].read_text(encoding="utf-8")))


def _as_text(page: str) -> str:
    """The text of a page of transcripts, without what agents were shown, which repeats the turns."""
    body = re.sub(r"(?s)<(style|head|details|script|form)\b.*?</\1>", "", page)
    body = re.sub(r"<h2[^>]*>", "\n\n== ", re.sub(r"<h3[^>]*>", "\n-- ", body))
    body = re.sub(r"</h[23]>|<p[^>]*>|<pre[^>]*>", "\n", body)
    return printable(html.unescape(re.sub(r"<[^>]*>", "", body))).strip()
