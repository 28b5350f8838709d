# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Views: the messages that an agent is shown, with quoted speaker lines."""

from __future__ import annotations

import codecs
import functools
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..agents import AgentSpec
from ..episodes.records import TOOL, Feedback, Messages, Seen, Turn
from ..episodes.tools import as_plain
from .chat_template import make_call


# A name in brackets between line breaks. Characters that only some tokenizers read as line breaks, and that others
# remove, are U+0085 here. No part can match the beginning of the next one, so matching takes linear time.
_NAME = re.compile(r"(?:\A|(?<=[\n\x85]))\[\x85?[A-Za-z](?:\x85?[A-Za-z0-9_-]){0,47}\x85?\](?=[\n\x85]|\Z)")
_SOFT_BREAKS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# Characters that are read as the first one of a speaker line, or of a word for its bytes.
_OPENING = re.compile("[\\[<\u226e\ufe47\ufe64\uff1c\uff3b]")
# Some tokenizers read these words as bytes.
_BYTE = re.compile("<0x([0-9a-f]{2})>")
# Control characters, invisible and unassigned ones, accents, other marks and spaces
_REMOVED = {"Cc", "Cf", "Cn", "Co", "Mc", "Me", "Mn", "Zs"}


def speaker_line(name: str) -> str:
    """The line before a speaker's text."""
    return f"[{name}]"


@functools.lru_cache(maxsize=1024)  # a turn is shown to many agents
def quoted(text: str) -> str:
    """Return a text with `> ` before each line that a model could read as a speaker line."""
    text = as_plain(text)
    starts = []
    begin = 0
    for line in text.split("\n"):
        starts += [begin + start for start in _names_in(line)]
        begin += len(line) + 1
    return "> ".join(text[begin:end] for begin, end in zip([0, *starts], [*starts, len(text)], strict=True))


def _names_in(line: str) -> list[int]:
    """Positions in a line at which a model could read a speaker line."""
    if _OPENING.search(line) is None:
        return []
    if line.isascii() and line.rstrip("\r").isprintable() and "<0x" not in line.lower():  # most lines
        return [0] if _NAME.fullmatch("".join(line.split())) else []
    read, positions = _with_bytes(*_read(line))
    return [positions[match.start()] for match in _NAME.finditer(read)]


def _read(line: str) -> tuple[str, list[int]]:
    """
    Return what tokenizers can read a line as: without what tells compatibility characters and cases apart, and without
    characters that are removed. Also for each of its characters the position in the line; what is removed before a
    character belongs to it.
    """
    read: list[str] = []
    positions: list[int] = []
    begin = 0
    for position, character in enumerate(line):
        for item in _folded(character):
            if item in _SOFT_BREAKS:
                if read[-1:] != ["\x85"]:
                    read.append("\x85")
                    positions.append(begin)
                begin = position + 1
            else:
                read.append(item)
                positions.append(begin)
                begin = position + 1
    return "".join(read), positions


def _folded(character: str) -> str:
    for change in (str, str.casefold):
        kept = (item for item in unicodedata.normalize("NFKD", change(character)) if not _is_removed(item))
        character = "".join(kept)
    return character


def _is_removed(character: str) -> bool:
    # U+2581 is a space of SentencePiece, and what the last two are depends on the version of Unicode
    if character in _SOFT_BREAKS:
        return False
    return character in "\u2581\ufffd\u1cf2\u1cf3" or unicodedata.category(character) in _REMOVED


def _with_bytes(read: str, positions: list[int]) -> tuple[str, list[int]]:
    """Replace words for bytes by the characters that the bytes encode."""
    texts: list[str] = []
    places: list[int] = []
    last, begin = 0, None
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    for match in _BYTE.finditer(read):
        if match.start() != last:
            decoder.reset()
            begin = None
        begin = positions[match.start()] if begin is None else begin
        character = decoder.decode(bytes.fromhex(match[1]))
        folded = character if character == "\n" else _read(character)[0]
        texts += [read[last : match.start()], folded]
        places += [*positions[last : match.start()], *[begin] * len(folded)]
        last, begin = match.end(), None if character else begin
    return "".join([*texts, read[last:]]), [*places, *positions[last:]]


# `view(agent, prompt, seen)` -> messages. `prompt` is always a list of messages here.
View = Callable[[AgentSpec, Messages, Sequence[Seen]], Messages]

SEPARATOR = "\n\n"


def said_by(turn: Seen) -> str:
    """Return the text that teammates are shown of a turn or of feedback: a line with the speaker, then the text."""
    text = turn.raw_text
    if isinstance(turn, Turn) and turn.without_calls is not None:
        text = turn.without_calls
    return f"{speaker_line(turn.agent)}\n{quoted(text)}"


def team_view(agent: AgentSpec, prompt: Messages, seen: Sequence[Seen]) -> Messages:
    """
    Default view of an agent: its system prompt, the prompt of the dataset row, and the turns and feedback it sees. The
    agent's own turns are `assistant` messages, the results of its own tool calls are `tool` messages, and all other
    turns and feedback are `user` messages that name the speaker. Lines of a text that look like the name of a speaker
    are quoted. Consecutive messages of the same role are merged, for templates that require alternating roles.

    Args:
        prompt (`list[dict]`):
            Messages of the dataset row.
        seen (`Sequence[Turn]`):
            Turns and feedback to show, in order.

    Returns: `list[dict]` with `role` and `content`.
    """
    messages = [dict(message) for message in prompt]
    if agent.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": agent.system_prompt})
    messages += [_as_message(agent, item) for item in seen]
    return merge_neighbours(messages)


def _as_message(agent: AgentSpec, item: Seen) -> dict[str, Any]:
    if isinstance(item, Turn):
        if item.agent != agent.name:
            return {"role": "user", "content": said_by(item)}
        calls = calls_in(item)
        fields = {"content": item.without_calls or "", "tool_calls": calls} if calls else {"content": item.raw_text}
        return {"role": "assistant", **fields}
    if item.tool is not None and item.audience == agent.name:  # result of the agent's own call
        return {"role": "tool", "name": item.tool, "content": quoted(item.text)}
    return {"role": "user", "content": said_by(item)}


def calls_in(turn: Turn) -> list[dict[str, Any]]:
    """The calls of a turn as a message has them; none if one of them cannot be made, so that they are a text."""
    readable = all(call.problem is None and isinstance(call.arguments, Mapping) for call in turn.tool_calls)
    return [make_call(call.name, call.arguments) for call in turn.tool_calls] if readable else []


def merge_neighbours(messages: Messages) -> Messages:
    """Join the contents of consecutive messages of one role."""
    merged: Messages = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"] and _is_plain(merged[-1]) and _is_plain(message):
            contents = filter(None, (merged[-1]["content"], message["content"]))
            merged[-1] = {**merged[-1], "content": SEPARATOR.join(contents)}
        else:
            merged.append(message)
    return merged


def fold_system(messages: Messages) -> Messages:
    """Move the system message into the first user message, for templates that do not support the system role."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, rest = messages[0], messages[1:]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": system["content"] + SEPARATOR + rest[0]["content"]}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


def _is_plain(message: dict[str, Any]) -> bool:
    return set(message) == {"role", "content"} and isinstance(message["content"], str)


def check_view(view: Any, whose: str) -> None:
    """Raise unless a view is a function."""
    if not callable(view):
        hint = " To set the view of a single agent, use `AgentSpec(view=...)`." if isinstance(view, Mapping) else ""
        raise TypeError(f"`view` of {whose} must be a function `view(agent, prompt, seen)`, got {view!r}.{hint}")


def shown_by(view: View, agent: AgentSpec, prompt: Messages, seen: Sequence[Seen]) -> Messages:
    """
    Return the messages that a user's view makes.

    Raises:
        TypeError: the view returned something other than messages with a role and a text. The error names the view and
            the agent.
    """
    if view is team_view:
        return team_view(agent, prompt, seen)
    what = f"The view `{getattr(view, '__name__', view)}` of agent {agent.name!r}"
    try:
        messages = view(agent, prompt, seen)
    except Exception as error:
        nobody = " `seen` is empty before the first turn." if isinstance(error, IndexError) else ""
        error.add_note(f"Raised by the view of agent {agent.name!r}, called as `view(agent, prompt, seen)`.{nobody}")
        raise
    form = '`[{"role": "user", "content": "..."}, ...]`'
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise TypeError(f"{what} must return a list of messages {form}, got {str(messages)[:80]!r}.")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            cure = '`{"role": "user", "content": turn.text}`'
            hint = f" Write {cure} for a turn." if isinstance(message, (Turn, Feedback)) else ""
            raise TypeError(
                f"{what} must return messages {form}, but message {number} is a {type(message).__name__}.{hint}"
            )
        if "role" not in message:
            raise TypeError(f"{what} returned message {number} without a `role`; it has {sorted(message)}.")
        if not isinstance(message.get("content"), str | None):
            raise TypeError(
                f"{what} returned message {number} with a {type(message['content']).__name__} as `content`, which "
                "must be a string. `prompt` is a list of messages: unpack it with `*prompt`."
            )
    return list(messages)


def without_roles(messages: Messages, after_calls: bool) -> Messages:
    """Convert results of tools to user messages; not those after a message with calls, where these are rendered."""
    shown: Messages = []
    follows_calls = False
    for message in messages:
        is_result = message["role"] == "tool"
        follows_calls = bool(message.get("tool_calls")) or (is_result and follows_calls)
        if is_result and not (follows_calls and after_calls):
            message = {"role": "user", "content": f"{speaker_line(TOOL)}\n{message['content']}"}
        shown.append(message)
    return shown
