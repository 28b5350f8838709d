# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft transcripts FOLDER`: episodes that a run has logged."""

from __future__ import annotations

import argparse
import html
import re
import webbrowser
from pathlib import Path

from ..system.redaction import printable
from .command import OptionsCommand, Parser, UsageError


_PAGES = "completions/transcripts_*.html"


class Command(OptionsCommand):
    """Print the latest page of transcripts, or open it."""

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("folder", help="output folder of a run with `log_completions=True`")
        parser.add_argument("--step", type=int, help="logging step; the latest by default")
        parser.add_argument("--open", action="store_true", help="open the page in a browser, with colours")

    def run(self, args: argparse.Namespace) -> None:
        found = {path: re.fullmatch(r"transcripts_(\d+)", path.stem) for path in Path(args.folder).glob(_PAGES)}
        pages = {int(match[1]): path for path, match in found.items() if match is not None}
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
    body = re.sub(r"(?s)<(style|head|details|script|form)\b.*?</\1>|<p class=legend>.*?</p>", "", page)
    body = re.sub(r"<h2[^>]*>", "\n\n== ", re.sub(r"<h3[^>]*>", "\n-- ", body))
    body = re.sub(r"</h[23]>|<p[^>]*>|<pre[^>]*>|</caption>|</tr>", "\n", body)
    return printable(html.unescape(re.sub(r"<[^>]*>", "", body))).strip()
