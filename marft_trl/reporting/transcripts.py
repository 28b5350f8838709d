# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Transcripts of episodes, as data, text, HTML pages and traces for trackio."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..episodes.records import Episode, Feedback, Messages, Turn
from ..system.files import write_atomically
from ..system.redaction import printable


# Advantage of a turn: one number, or one per token; `None` if the turn was not trained on.
Advantage = float | Sequence[float] | None


@dataclass(frozen=True)
class Entry:
    """
    A turn or a feedback in a transcript.

    Args:
        speaker (`str`): name of the agent, or source of the feedback.
        text (`str`): text of the turn or the feedback, with control tokens spelled out.
        notes (`tuple[str, ...]`): short remarks: the earlier turns it was shown, tool calls, truncation, rewards.
        shown (`str`): observation of the agent, as text. Empty for feedback.
        tokens (`tuple[str, ...]`): text of each token, if known.
        advantages (`float` or `tuple[float, ...]`, *optional*): advantage of the turn, or of each of its tokens.
        is_feedback (`bool`): `True` for feedback from an environment or a tool.
    """

    speaker: str
    text: str
    notes: tuple[str, ...] = ()
    shown: str = ""
    tokens: tuple[str, ...] = ()
    advantages: float | tuple[float, ...] | None = None
    is_feedback: bool = False


@dataclass(frozen=True)
class Transcript:
    """
    An episode in readable form. It is plain data, so that it can be sent to another process.

    Args:
        entries (`tuple[Entry, ...]`): turns and feedback, in order.
        rewards (`dict[str, float]`): reward of each reward function; `None` for functions that did not apply.
        reward (`float`, *optional*): what the episode earned in all; `None` if nothing scored it.
        reference (`str`): the right answer of the dataset row, if it has one.
        updates (`int`, *optional*): updates before the episode; with `max_staleness`, its turns may have seen fewer.
    """

    title: str
    prompt: str
    entries: tuple[Entry, ...]
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    reference: str = ""
    updates: int | None = None

    @classmethod
    def of(
        cls,
        episode: Episode,
        rewards: Mapping[str, float | None] | None = None,
        title: str = "",
        advantages: Sequence[Advantage] | None = None,
        tokens: Sequence[Sequence[str]] | None = None,
        own_rewards: Sequence[Mapping[str, float]] | None = None,
        reward: float | None = None,
        reference: str = "",
    ) -> Transcript:
        """
        Args:
            rewards (`Mapping[str, float]`, *optional*): reward of each reward function.
            advantages (`Sequence`, *optional*): advantage of each turn: one number, one per token, or `None`.
            tokens (`Sequence[Sequence[str]]`, *optional*): text of each token of each turn.
            own_rewards (`Sequence[Mapping[str, float]]`, *optional*): rewards of single turns by the names of their
                own reward functions.
            reward (`float`, *optional*): what the episode earned in all.
            reference (`str`, *optional*): the right answer of the dataset row.
        """
        names = _numbered(episode.turns)
        entries = [
            _of_turn(item, names, item is episode.answer, _rewards_of(item, episode, own_rewards), advantages, tokens)
            if isinstance(item, Turn)
            else _of_feedback(item)
            for item in episode.history
        ]
        return cls(title, messages_as_text(episode.prompt), tuple(entries), dict(rewards or {}), reward, reference)

    def as_text(self, width: int = 80) -> str:
        """Return the transcript as text for a terminal with `width` columns."""
        lines = [f"-- {printable(self.title)} ".ljust(width, "-") if self.title else "-" * width]
        lines += _block("prompt", self.prompt, width)
        for entry in self.entries:
            notes = f" ({'; '.join(entry.notes)})" if entry.notes else ""
            lines += _block(f"{entry.speaker}{notes}", entry.text or "(nothing)", width)
        if self.rewards:
            lines += textwrap.wrap(printable(f"reward: {_scores(self.rewards)}"), width)
        if self.reference:
            lines += _block("right answer", self.reference, width)
        return "\n".join([*lines, "-" * width])


def format_episode(
    episode: Episode, rewards: Mapping[str, float | None] | None = None, width: int = 80, title: str = ""
) -> str:
    """Format an episode as text: the prompt, then the turns and feedback with their speakers. See [`Transcript`]."""
    return Transcript.of(episode, rewards, title).as_text(width)


def format_turns(
    prompt: str | Messages,
    turns: Sequence[Turn],
    rewards: Mapping[str, float | None] | None = None,
    width: int = 80,
    title: str = "",
    answer: Turn | None = None,
) -> str:
    """Like [`format_episode`], for turns without an episode."""
    names = _numbered(turns)
    entries = tuple(_of_turn(turn, names, turn is answer) for turn in turns)
    return Transcript(title, messages_as_text(prompt), entries, rewards or {}).as_text(width)


def messages_as_text(prompt: str | Messages) -> str:
    """Format messages with their roles. A plain text is returned unchanged."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt)


def _of_turn(
    turn: Turn,
    names: Sequence[str],
    answers: bool,
    rewards: Sequence[str] = (),
    advantages: Sequence[Advantage] | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
) -> Entry:
    saw = [names[index] for index in turn.sees] + (["feedback"] if turn.hears else [])
    notes = [f"sees {', '.join(saw)}" if saw else "sees the prompt"]
    notes += [f"calls {', '.join(call.name for call in turn.tool_calls)}"] if turn.tool_calls else []
    notes += ["cut off at its length limit"] if turn.truncated else []
    notes += rewards
    notes += ["the team's answer"] if answers else []
    advantage = advantages[turn.index] if advantages is not None else None
    return Entry(
        speaker=turn.agent,
        text=turn.raw_text,
        notes=tuple(notes),
        shown=messages_as_text(turn.observation),
        tokens=tuple(tokens[turn.index]) if tokens is not None else (),
        advantages=tuple(advantage) if isinstance(advantage, Sequence) else advantage,
    )


def _rewards_of(turn: Turn, episode: Episode, own_rewards: Sequence[Mapping[str, float]] | None) -> list[str]:
    """Rewards of the turn itself: by the environment, and by reward functions of single turns."""
    earned = episode.earned[turn.index]
    own = own_rewards[turn.index] if own_rewards else {}
    known = {name: value for name, value in own.items() if value == value}
    notes = [f"earned {earned:.3g}"] if earned else []
    return notes + ([f"own reward: {_scores(known)}"] if known else [])


def _of_feedback(item: Feedback) -> Entry:
    note = "feedback" if item.tool is None else f"result of {item.tool}, for {item.audience}"
    return Entry(item.agent, item.raw_text, (note,), is_feedback=True)


def _numbered(turns: Sequence[Turn]) -> list[str]:
    return [f"{turn.agent} #{index + 1}" for index, turn in enumerate(turns)]


def _scores(rewards: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'none' if value is None else f'{value:.3g}'}" for name, value in rewards.items())


def _block(head: str, text: str, width: int) -> list[str]:
    body = []
    for line in printable(text).splitlines() or [""]:
        body += _wrap(line, width - 2)
    return [*textwrap.wrap(printable(head), width), *(f"  {line}" for line in body)]


def _wrap(line: str, width: int) -> list[str]:
    """Like `textwrap.wrap`, but in linear time for a long line without blanks."""
    if len(line) <= width:
        return [line]
    if len(line) > 20 * width:
        return [line[start : start + width] for start in range(0, len(line), width)]
    return textwrap.wrap(line, width, drop_whitespace=False, replace_whitespace=False) or [""]


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


def log_traces(transcripts: Sequence[Transcript], adapters: Mapping[str, str]) -> None:
    """
    Log episodes to the present run of trackio; nothing if there is none. To be called in the main thread, which has
    the run (checked against trackio 0.43).

    Args:
        adapters (`Mapping[str, str]`): adapter of each agent that has one.
    """
    import trackio

    if not hasattr(trackio, "Trace") or trackio.context_vars.current_run.get() is None:
        return  # an older version, or an evaluation before any log
    traces = {f"episodes/{number}": as_trace(transcript, adapters) for number, transcript in enumerate(transcripts)}
    trackio.log({name: trackio.Trace(**parts) for name, parts in traces.items()})


def as_trace(transcript: Transcript, adapters: Mapping[str, str]) -> dict[str, Any]:
    """`messages`, `metadata` and `spans` of an episode, in OpenAI's form of messages. All values are JSON."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": printable(transcript.prompt)}]
    spans = []
    for number, entry in enumerate(transcript.entries):
        role = "user" if entry.is_feedback else "assistant"
        messages.append({"role": role, "name": entry.speaker, "content": printable(entry.text)})
        spans.append(_trace_span(entry, number, transcript.updates, adapters.get(entry.speaker)))
    rewards = {f"reward/{name}": value for name, value in transcript.rewards.items()}
    metadata = {"title": transcript.title, "updates": transcript.updates, "reward": transcript.reward, **rewards}
    if transcript.reference:
        metadata["right answer"] = printable(transcript.reference)
    return {"messages": messages, "metadata": metadata, "spans": spans}


def _trace_span(entry: Entry, number: int, updates: int | None, adapter: str | None) -> dict[str, Any]:
    advantages = entry.advantages
    mean = statistics.fmean(advantages) if isinstance(advantages, tuple) and advantages else advantages
    about = {"agent": entry.speaker, "notes": list(entry.notes), "advantage": mean if mean != () else None}
    return {
        "id": str(number),
        "name": entry.speaker,
        "kind": "tool" if entry.is_feedback else "generation",
        "input": printable(entry.shown),
        "output": printable(entry.text),
        **({"model": f"{adapter}@{updates}"} if adapter and updates is not None else {}),
        "metadata": about,
    }
