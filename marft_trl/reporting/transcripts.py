# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Transcripts of episodes, as data, text, HTML pages and traces for trackio."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jinja2
from markupsafe import Markup

from ..episodes.images import as_data_url, images_of, is_parts, with_images
from ..episodes.records import Episode, Messages, Turn
from ..system.files import write_atomically
from ..system.redaction import printable


_THUMBNAIL = 160  # pixels
_TEMPLATES = Path(__file__).parent / "templates"
# Advantage of a turn: one number, or one per token; `None` if the turn was not trained on.
Advantage = float | Sequence[float] | None


@dataclass(frozen=True)
class TranscriptMessage:
    speaker: str  # name of the agent, or source of the feedback
    text: str  # with control tokens spelled out
    notes: tuple[str, ...] = ()  # the earlier turns it was shown, tool calls, truncation, rewards
    shown: str = ""  # observation of the agent, as text
    tokens: tuple[str, ...] = ()  # text of each token, if known
    advantages: float | tuple[float, ...] | None = None  # of the turn, or of each of its tokens
    is_feedback: bool = False
    images: tuple[str, ...] = ()  # small copies, as `data:` URLs


@dataclass(frozen=True)
class Transcript:
    """An episode in readable form. It is plain data, so that it can be sent to another process."""

    title: str
    prompt: str
    entries: tuple[TranscriptMessage, ...]
    rewards: Mapping[str, float | None] = field(default_factory=dict)  # by reward function; `None` if it did not apply
    reward: float | None = None  # what the episode earned in all; `None` if nothing scored it
    reference: str = ""  # right answer of the dataset row, if it has one
    updates: int | None = None  # before the episode; with `max_staleness`, its turns may have seen fewer
    images: tuple[str, ...] = ()  # of the prompt, small copies as `data:` URLs

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
        """Make a transcript. `advantages`, `tokens` and `own_rewards` have an item for each turn."""
        turns, names, entries = episode.turns, _numbered(episode.turns), []
        # Of several conversations of an application, and not just one request to each agent
        has_lineages = len({turn.lineage for turn in turns}) > 1 and len({turn.agent for turn in turns}) < len(turns)
        for item in episode.history:
            if isinstance(item, Turn):
                earned, own = episode.earned[item.index], own_rewards[item.index] if own_rewards else {}
                known = {name: value for name, value in own.items() if value == value}
                notes = [f"lineage {item.lineage}"] if has_lineages else []
                notes += [f"earned {earned:.3g}"] if earned else []
                notes += [f"own reward: {_scores(known)}"] if known else []
                entries.append(_turn_entry(item, names, item is episode.answer, notes, advantages, tokens))
            else:
                note = "feedback" if item.tool is None else f"result of {item.tool}"
                note += f", for {item.audience}" if item.audience else ""
                text, images = _shown(with_images(item.raw_text, item.images)), _thumbnails(item.images)
                entries.append(TranscriptMessage(item.agent, text, (note,), is_feedback=True, images=images))
        return cls(
            title,
            messages_as_text(episode.prompt),
            tuple(entries),
            dict(rewards or {}),
            reward,
            reference,
            images=_thumbnails(images_of(episode.prompt)),
        )

    def as_text(self, width: int = 80) -> str:
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
    entries = tuple(_turn_entry(turn, names, turn is answer) for turn in turns)
    return Transcript(title, messages_as_text(prompt), entries, rewards or {}).as_text(width)


def messages_as_text(prompt: str | Messages) -> str:
    """Format messages with their roles. A plain text is returned unchanged."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {_shown(message.get('content'))}" for message in prompt)


def _shown(content: Any) -> str:
    """A content as text, with the sizes of images in their places."""
    if not is_parts(content):
        return str(content or "")
    return "\n".join(
        part["text"] if part["type"] == "text" else "[image {} x {}]".format(*part["image"].size) for part in content
    )


def without_pixels(messages: str | Messages) -> str | Messages:
    """Messages whose contents are texts, with the sizes of images in their places."""
    return [{**message, "content": _shown(message.get("content"))} for message in cast(Messages, messages)]


def _thumbnails(images: Sequence[Any]) -> tuple[str, ...]:
    return tuple(as_data_url(image, _THUMBNAIL) for image in images)


def _turn_entry(
    turn: Turn,
    names: Sequence[str],
    answers: bool,
    rewards: Sequence[str] = (),
    advantages: Sequence[Advantage] | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
) -> TranscriptMessage:
    saw = [names[index] for index in turn.sees] + (["feedback"] if turn.hears else [])
    notes = [f"sees {', '.join(saw)}" if saw else "sees the prompt"]
    notes += [f"calls {', '.join(call.name for call in turn.tool_calls)}"] if turn.tool_calls else []
    notes += ["truncated at the length limit"] if turn.truncated else []
    notes += rewards
    notes += ["the team's answer"] if answers else []
    advantage = advantages[turn.index] if advantages is not None else None
    return TranscriptMessage(
        speaker=turn.agent,
        text=turn.raw_text,
        notes=tuple(notes),
        shown=messages_as_text(turn.observation),
        tokens=tuple(tokens[turn.index]) if tokens is not None else (),
        advantages=tuple(advantage) if isinstance(advantage, Sequence) else advantage,
    )


def _numbered(turns: Sequence[Turn]) -> list[str]:
    return [f"{turn.agent} #{index + 1}" for index, turn in enumerate(turns)]


def _scores(rewards: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'none' if value is None else f'{value:.3g}'}" for name, value in rewards.items())


def _block(head: str, text: str, width: int) -> list[str]:
    body = [part for line in printable(text).splitlines() or [""] for part in _wrap(line, width - 2)]
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
    Make a self-contained HTML page, with blue tokens for positive and orange ones for negative advantages. No script
    but its own runs, by its hash. `index`: the file that lists all pages; `rewards`: of all episodes, if of more.
    """
    about = f"{len(transcripts)} episodes{_format_mean([transcript.reward for transcript in transcripts])}"
    if len(rewards) > len(transcripts):
        about = f"The first {len(transcripts)} of {len(rewards)} episodes{_format_mean(rewards)}"
    pictures = any(
        transcript.images or any(entry.images for entry in transcript.entries) for transcript in transcripts
    )
    return _render(title=title, about=about, run=run, index=index, transcripts=transcripts, has_images=pictures)


def _format_mean(rewards: Sequence[float | None]) -> str:
    known = [reward for reward in rewards if reward is not None]
    return f", mean reward {sum(known) / len(known):.3g}" if known else ""


def remove_old_completions(folder: Path, step: int, limit: int) -> None:
    """Remove the pages and tables of all but the latest `limit` logging steps up to `step`."""
    pattern = r"(?:transcripts|completions)_(\d+)(?:_eval)?"
    matches = {file: re.fullmatch(pattern, file.stem) for file in folder.iterdir()}
    # Files of later steps are those of a run that this one resumes, which writes them again
    steps = {file: int(match[1]) for file, match in matches.items() if match is not None and int(match[1]) <= step}
    kept = sorted({step, *steps.values()})[-limit:]
    for file in steps:
        if steps[file] not in kept and file.is_file():
            file.unlink(missing_ok=True)


def page_name(step: int, is_evaluation: bool) -> str:
    return f"transcripts_{step:05d}{'_eval' if is_evaluation else ''}.html"


def find_pages(folder: Path) -> dict[tuple[int, bool], Path]:
    """Return the pages in a folder, by their step and whether they are of an evaluation."""
    matches = (re.fullmatch(r"transcripts_(\d+)(_eval)?\.html", path.name) for path in folder.glob("*.html"))
    return {(int(match[1]), match[2] is not None): folder / match[0] for match in matches if match is not None}


def write_index(folder: Path, run: str = "") -> None:
    """Write the page that lists the pages of all steps in a folder, the latest first."""
    pages = []
    for (step, is_evaluation), page in sorted(find_pages(folder).items(), reverse=True):
        with open(page, encoding="utf-8") as file:
            about = re.search(r'<meta name="description" content="([^"]*)">', file.read(8192))
        link = {"name": page.name, "title": f"step {step}{', evaluation' if is_evaluation else ''}"}
        pages.append({**link, "about": html.unescape(about[1]) if about else ""})
    title = f"Episodes of {run}" if run else "Episodes"
    write_atomically(folder / INDEX, _render(title=title, about="", pages=pages))


def _render(**values: Any) -> str:
    script = (_TEMPLATES / "transcripts.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = _plain(values) | {"script": script, "hash": digest}
    functions = {"score_rows": _score_rows, "advantage_note": _advantage_note}
    return _page().render(strength=lambda advantage: max(-1.0, min(1.0, advantage)), **functions, **values)


def _plain(value: Any) -> Any:
    """A value whose texts are plain: subclasses of `str` may claim that they are escaped already."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, (Transcript, TranscriptMessage)):
        return replace(value, **{name: _plain(item) for name, item in vars(value).items()})
    return value


@functools.cache
def _page() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, finalize=_finalized, keep_trailing_newline=True)
    return environment.from_string((_TEMPLATES / "transcripts.html").read_text(encoding="utf-8"))


def _finalized(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _score_rows(transcript: Transcript) -> list[tuple[str, str]]:
    """Names and values of the rewards, and the total if it is not the only reward."""
    rows = [(name, "none" if value is None else f"{value:.3g}") for name, value in transcript.rewards.items()]
    whole = "" if transcript.reward is None else f"{transcript.reward:.3g}"
    return [*rows, ("total", whole)] if whole and [value for _, value in rows] != [whole] else rows


def _advantage_note(advantages: float | Sequence[float] | None) -> list[str]:
    if advantages is None:
        return []
    if isinstance(advantages, Sequence):
        return [f"advantages {min(advantages):+.3g} to {max(advantages):+.3g}"] if advantages else []
    return [f"advantage {advantages:+.3g}"]


def log_traces(transcripts: Sequence[Transcript], adapters: Mapping[str, str]) -> None:
    """Log episodes to the present run of trackio (0.43), if there is one. Only the main thread has it."""
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
        values, adapter, updates = entry.advantages, adapters.get(entry.speaker), transcript.updates
        mean = statistics.fmean(values) if isinstance(values, tuple) and values else values
        span = {
            "id": str(number),
            "name": entry.speaker,
            "kind": "tool" if entry.is_feedback else "generation",
            "input": printable(entry.shown),
            "output": printable(entry.text),
            **({"model": f"{adapter}@{updates}"} if adapter and updates is not None else {}),
        }
        about = {"agent": entry.speaker, "notes": list(entry.notes), "advantage": mean if mean != () else None}
        spans.append({**span, "metadata": about})
    rewards = {f"reward/{name}": value for name, value in transcript.rewards.items()}
    metadata = {"title": transcript.title, "updates": transcript.updates, "reward": transcript.reward, **rewards}
    if transcript.reference:
        metadata["right answer"] = printable(transcript.reference)
    return {"messages": messages, "metadata": metadata, "spans": spans}
