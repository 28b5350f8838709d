# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Transcripts of episodes as a page for a browser: one file, which runs nothing that a model wrote."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from pathlib import Path

from ..system.files import write_atomically
from ..system.redaction import printable
from .transcripts import Entry, Transcript


INDEX = "index.html"


def html_page(
    transcripts: Sequence[Transcript],
    title: str = "Episodes",
    run: str = "",
    index: str = "",
    rewards: Sequence[float | None] = (),
) -> str:
    """
    Make a self-contained HTML page. Tokens are coloured by their advantage: blue for positive and orange for negative
    advantages; the colour is stronger for larger absolute values. Episodes can be searched, sorted by reward, and
    read with the keyboard. Its only script is known by its hash, so that no other one runs.

    Args:
        transcripts (`Sequence[Transcript]`): the episodes.
        title (`str`, *optional*, defaults to `"Episodes"`): title of the page.
        run (`str`, *optional*): name of the run.
        index (`str`, *optional*): file beside it that lists the pages of all steps.
        rewards (`Sequence[float]`, *optional*): of all episodes, if these are the first of more.
    """
    about = f"{len(transcripts)} episodes{_mean_of([one.reward for one in transcripts])}"
    if len(rewards) > len(transcripts):
        about = f"The first {len(transcripts)} of {len(rewards)} episodes{_mean_of(rewards)}"
    nav = f' <a href="{_safe(index)}">all steps</a>' if index else ""
    parts = [
        _head(title, about),
        f"<body><h1>{_safe(title)}</h1><p>{_safe(run)}{' · ' * bool(run)}{about}{nav}</p>",
        '<form><input type=search id=find placeholder="Search" aria-label="Search in episodes">'
        "<select id=order aria-label=Order><option value=0>as they came</option>"
        "<option value=-1>highest reward first</option><option value=1>lowest reward first</option></select>"
        "<label><input type=checkbox id=shown> what each was shown</label> <output id=count></output>"
        "<br><small>/ search, j and k next and previous episode, o what each was shown</small></form>",
        '<p class=legend>advantage: <span style="--a:-1">-1</span> <span style="--a:-.5">-0.5</span> '
        '<span style="--a:0">0</span> <span style="--a:.5">0.5</span> <span style="--a:1">1</span></p><main>',
        *map(_section, transcripts),
        f"</main><script>{_SCRIPT}</script></body></html>\n",
    ]
    return "\n".join(parts)


def _mean_of(rewards: Sequence[float | None]) -> str:
    known = [reward for reward in rewards if reward is not None]
    return f", mean reward {sum(known) / len(known):.3g}" if known else ""


def write_index(folder: Path, run: str = "") -> None:
    """Write the page that lists the pages of all steps in a folder, the latest first."""
    rows = []
    pages = {page: re.fullmatch(r"transcripts_(\d+)", page.stem) for page in folder.glob("transcripts_*.html")}
    steps = {page: int(found[1]) for page, found in pages.items() if found is not None}
    for page in sorted(steps, key=steps.__getitem__, reverse=True):
        with open(page, encoding="utf-8") as file:
            about = re.search(r'<meta name="description" content="([^"]*)">', file.read(4096))
        rows.append(f'<li><a href="{_safe(page.name)}">step {steps[page]}</a> ')
        rows.append(f"{about[1] if about else ''}</li>")  # escaped when it was written
    name = f"Episodes of {run}" if run else "Episodes"
    text = f"{_head(name, '')}\n<body><h1>{_safe(name)}</h1>\n<ol>\n{''.join(rows)}\n</ol></body></html>\n"
    write_atomically(folder / INDEX, text)


_SCRIPT = """
const all = [...document.querySelectorAll("section")], main = document.querySelector("main");
const find = document.querySelector("#find"), order = document.querySelector("#order");
const shown = document.querySelector("#shown"), count = document.querySelector("#count");
const texts = all.map(one => one.textContent.toLowerCase());
function search() {
  const words = find.value.toLowerCase().split(/\\s+/).filter(Boolean);
  all.forEach((one, i) => one.hidden = !words.every(word => texts[i].includes(word)));
  count.textContent = words.length ? all.filter(one => !one.hidden).length + " of " + all.length : "";
}
function sort() {
  const sign = Number(order.value), of = one => Number(one.dataset.reward || -1e9);
  main.append(...(sign ? [...all].sort((a, b) => sign * (of(a) - of(b))) : all));
}
function open() { document.querySelectorAll("details").forEach(one => one.open = shown.checked); }
function go(by) {
  const seen = [...main.children].filter(one => !one.hidden), tops = seen.map(one => one.getBoundingClientRect().top);
  const below = document.querySelector("form").getBoundingClientRect().height + 16;
  const next = by > 0 ? tops.findIndex(top => top > below + 2) : tops.findLastIndex(top => top < below - 2);
  if (next >= 0) { scrollBy(0, tops[next] - below); seen[next].focus({preventScroll: true}); }
}
find.oninput = search; order.onchange = sort; shown.onchange = open;
document.querySelector("form").onsubmit = event => event.preventDefault();
document.onkeydown = event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select")) { if (event.key === "Escape") event.target.blur(); return; }
  if (event.key === "/") { event.preventDefault(); find.focus(); }
  if (event.key === "j") go(1);
  if (event.key === "k") go(-1);
  if (event.key === "o") { shown.checked = !shown.checked; open(); }
};
"""
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}"
    "article{border-left:.25rem solid #8884;margin:1rem 0;padding:0 0 0 1rem}article.prompt{border-color:#888}"
    "article.feedback{border-style:dashed}section{margin-top:3rem}h2{margin:0}h3{font-size:1rem;margin:.2rem 0}"
    "caption{text-align:left;opacity:.75}"
    "h3 small{font-weight:normal;opacity:.75}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0}"
    "details{font-size:.9rem;opacity:.85}section:focus{outline:none}section:focus h2{text-decoration:underline}"
    "form{position:sticky;top:0;background:Canvas;padding:.5rem 0}form *{margin-right:.5rem}"
    "table{border-collapse:collapse}td,th{font-weight:normal;text-align:left;padding:0 1rem 0 0}"
    # CSS arithmetic turns a number in [-1, 1] into a colour: orange below 0, blue above
    "span[style]{border-radius:.15rem;background:rgb(calc(127 - 110*var(--a)) 127 calc(127 + 110*var(--a))"
    "/calc(.65*max(var(--a),-1*var(--a))))}"
)


def _head(title: str, about: str) -> str:
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"
    policy += "; form-action 'none'; base-uri 'none'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f'<meta name="description" content="{_safe(about)}">'
        f"<title>{_safe(title)}</title><style>{_STYLE}</style></head>"
    )


def _section(one: Transcript) -> str:
    reward = "" if one.reward is None else f' data-reward="{one.reward:g}"'
    parts = [f"<section tabindex=-1{reward}><h2>{_safe(one.title or 'episode')}</h2>"]
    rows = [(name, "none" if value is None else f"{value:.3g}") for name, value in one.rewards.items()]
    if one.reward is not None and (len(rows) != 1 or rows[0][1] != f"{one.reward:.3g}"):
        rows.append(("in all", f"{one.reward:.3g}"))
    if rows:
        cells = "".join(f"<tr><th>{_safe(name)}</th> <td>{value}</td></tr>" for name, value in rows)
        parts.append(f"<table class=reward><caption>reward</caption>{cells}</table>")
    parts.append(f"<article class=prompt><h3>prompt</h3><pre>{_safe(one.prompt)}</pre></article>")
    parts += [_article(entry) for entry in one.entries]
    if one.reference:
        parts.append(f"<article class=prompt><h3>right answer</h3><pre>{_safe(one.reference)}</pre></article>")
    return "\n".join([*parts, "</section>"])


def _article(entry: Entry) -> str:
    notes = "; ".join([*entry.notes, *_advantage_note(entry.advantages)])
    kind = " class=feedback" if entry.is_feedback else ""
    parts = [f"<article{kind}><h3>{_safe(entry.speaker)} <small>{_safe(notes)}</small></h3>"]
    parts.append(f"<pre>{_coloured(entry)}</pre>")
    if entry.shown:
        parts.append(f"<details><summary>what it was shown</summary><pre>{_safe(entry.shown)}</pre></details>")
    return "".join([*parts, "</article>"])


def _advantage_note(advantages: float | Sequence[float] | None) -> list[str]:
    if advantages is None:
        return []
    if isinstance(advantages, Sequence):
        return [f"advantages {min(advantages):+.3g} to {max(advantages):+.3g}"] if advantages else []
    return [f"advantage {advantages:+.3g}"]


def _coloured(entry: Entry) -> str:
    """The text as coloured HTML. Each token has its colour if tokens and their advantages are known."""
    if entry.advantages is None:
        return _safe(entry.text) or "(nothing)"
    if not isinstance(entry.advantages, tuple):
        return _span(entry.text or "(nothing)", entry.advantages)
    if len(entry.tokens) != len(entry.advantages):
        mean = sum(entry.advantages) / max(len(entry.advantages), 1)
        return _span(entry.text or "(nothing)", mean)
    return "".join(_span(text, value) for text, value in zip(entry.tokens, entry.advantages, strict=True))


def _span(text: str, advantage: float) -> str:
    strength = max(-1.0, min(1.0, advantage))
    return f'<span style="--a:{strength:.2f}" title="{advantage:+.3g}">{_safe(text)}</span>'


def _safe(text: str) -> str:
    return html.escape(printable(text))
