# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Transcripts of episodes as text or HTML: the turns, their observations, rewards and advantages."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..episodes.records import Episode, Feedback, Messages, Turn


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
        title (`str`): title of the transcript.
        prompt (`str`): prompt of the dataset row.
        entries (`tuple[Entry, ...]`): turns and feedback, in order.
        rewards (`dict[str, float]`): reward of each reward function; `None` for functions that did not apply.
    """

    title: str
    prompt: str
    entries: tuple[Entry, ...]
    rewards: Mapping[str, float | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        episode: Episode,
        rewards: Mapping[str, float | None] | None = None,
        title: str = "",
        advantages: Sequence[Advantage] | None = None,
        tokens: Sequence[Sequence[str]] | None = None,
        own_rewards: Sequence[Mapping[str, float]] | None = None,
    ) -> Transcript:
        """
        Args:
            episode ([`Episode`]): the episode.
            rewards (`Mapping[str, float]`, *optional*): reward of each reward function.
            title (`str`, *optional*): title of the transcript.
            advantages (`Sequence`, *optional*): advantage of each turn: one number, one per token, or `None`.
            tokens (`Sequence[Sequence[str]]`, *optional*): text of each token of each turn.
            own_rewards (`Sequence[Mapping[str, float]]`, *optional*): rewards of single turns by the names of their
                own reward functions.
        """
        names = _numbered(episode.turns)
        entries = [
            _of_turn(item, names, item is episode.answer, _rewards_of(item, episode, own_rewards), advantages, tokens)
            if isinstance(item, Turn)
            else _of_feedback(item)
            for item in episode.history
        ]
        return cls(title, messages_as_text(episode.prompt), tuple(entries), dict(rewards or {}))

    def as_text(self, width: int = 80) -> str:
        """Return the transcript as text for a terminal with `width` columns."""
        lines = [f"-- {printable(self.title)} ".ljust(width, "-") if self.title else "-" * width]
        lines += _block("prompt", self.prompt, width)
        for entry in self.entries:
            notes = f" ({'; '.join(entry.notes)})" if entry.notes else ""
            lines += _block(f"{entry.speaker}{notes}", entry.text or "(nothing)", width)
        if self.rewards:
            lines += textwrap.wrap(printable(f"reward: {_scores(self.rewards)}"), width)
        return "\n".join([*lines, "-" * width])

    def as_html(self) -> str:
        """Return the transcript as an HTML section for [`html_page`]."""
        parts = [f"<section><h2>{_safe(self.title or 'episode')}</h2>"]
        if self.rewards:
            parts.append(f"<p class=reward>reward: {_safe(_scores(self.rewards))}</p>")
        parts.append(f"<article class=prompt><h3>prompt</h3><pre>{_safe(self.prompt)}</pre></article>")
        parts += [_article(entry) for entry in self.entries]
        return "\n".join([*parts, "</section>"])


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


def html_page(transcripts: Sequence[Transcript], title: str = "Episodes") -> str:
    """
    Make a self-contained HTML page, without scripts, fonts, images or links. Tokens are coloured by their advantage:
    blue for positive and orange for negative advantages. The colour is stronger for larger absolute values.
    """
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{_safe(title)}</title><style>{_STYLE}</style></head><body><h1>{_safe(title)}</h1>"
        '<p class=legend>advantage: <span style="--a:-1">-1</span> <span style="--a:-.5">-0.5</span> '
        '<span style="--a:0">0</span> <span style="--a:.5">0.5</span> <span style="--a:1">1</span></p>'
    )
    return "\n".join([head, *(one.as_html() for one in transcripts), "</body></html>\n"])


def messages_as_text(prompt: str | Messages) -> str:
    """Format messages with their roles. A plain text is returned unchanged."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt)


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}"
    "article{border-left:.25rem solid #8884;margin:1rem 0;padding:0 0 0 1rem}article.prompt{border-color:#888}"
    "article.feedback{border-style:dashed}h2{margin-top:3rem}h3{font-size:1rem;margin:.2rem 0}"
    "h3 small{font-weight:normal;opacity:.75}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0}"
    "details{font-size:.9rem;opacity:.85}"
    # CSS arithmetic turns a number in [-1, 1] into a colour: orange below 0, blue above
    "span[style]{border-radius:.15rem;background:rgb(calc(127 - 110*var(--a)) 127 calc(127 + 110*var(--a))"
    "/calc(.65*max(var(--a),-1*var(--a))))}"
)


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


def printable(text: str) -> str:
    """Replace characters that would move the cursor, colour the terminal or reverse the direction of writing."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
