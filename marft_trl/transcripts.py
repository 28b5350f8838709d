# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Episodes as texts that a person can read."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from .episodes import Episode, Messages, Turn


def format_episode(
    episode: Episode, rewards: Mapping[str, float | None] | None = None, width: int = 80, title: str | None = None
) -> str:
    """
    An episode as plain text: the prompt, then each turn with its speaker, what it saw and what it said.

    Args:
        episode ([`Episode`]):
            What happened.
        rewards (`Mapping[str, float]`, *optional*):
            Reward of each reward function.
        width (`int`, *optional*, defaults to `80`):
            Columns.
        title (`str`, *optional*):
            Headline.
    """
    return format_turns(episode.prompt, episode.turns, rewards, width, title, episode.answer)


def format_turns(
    prompt: str | Messages,
    turns: Sequence[Turn],
    rewards: Mapping[str, float | None] | None = None,
    width: int = 80,
    title: str | None = None,
    answer: Turn | None = None,
) -> str:
    """As [`format_episode`], from its parts."""
    lines = [f"-- {title} ".ljust(width, "-") if title else "-" * width]
    lines += _block("prompt", _text(prompt), width)
    for turn in turns:
        notes = [f"sees {_names(turn, turns)}" if turn.sees else "sees the prompt"]
        notes += ["cut off at its length limit"] if turn.truncated else []
        notes += ["the team's answer"] if turn is answer else []
        lines += _block(f"{turn.agent} ({'; '.join(notes)})", turn.raw_text or "(nothing)", width)
    if rewards:
        figures = ", ".join(f"{name} {'none' if value is None else f'{value:.3g}'}" for name, value in rewards.items())
        lines += textwrap.wrap(f"reward: {figures}", width)
    return "\n".join([*lines, "-" * width])


def _names(turn: Turn, turns: Sequence[Turn]) -> str:
    return ", ".join(f"{turns[index].agent} #{index + 1}" for index in turn.sees)


def _text(prompt: str | Messages) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _block(head: str, text: str, width: int) -> list[str]:
    body = []
    for line in _printable(text).splitlines() or [""]:
        body += textwrap.wrap(line, width - 2, drop_whitespace=False, replace_whitespace=False) or [""]
    return [*textwrap.wrap(head, width), *(f"  {line}" for line in body)]


def _printable(text: str) -> str:
    """Without characters that would move the cursor or colour the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
