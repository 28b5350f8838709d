# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Views: functions that make the messages an agent sees. Lines of a text that look like a speaker line are quoted."""

from __future__ import annotations

import codecs
import functools
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..agents import AgentSpec
from ..episodes.images import as_parts, has_image, images_of, text_of, with_images
from ..episodes.records import TOOL, Feedback, Messages, Seen, Turn
from ..episodes.tools import as_plain
from .chat_template import make_call, map_leaves


# A name in brackets between line breaks. U+0085 stands for the characters that some tokenizers read as a line break
# and others remove. No part can match the beginning of the next part, so matching takes linear time.
_SPEAKER_LINE = re.compile(r"(?:\A|(?<=[\n\x85]))\[\x85?[A-Za-z](?:\x85?[A-Za-z0-9_-]){0,47}\x85?\](?=[\n\x85]|\Z)")
_OTHER_LINE_BREAKS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# Characters that a model could read as `[`, the first character of a speaker line, or as `<`, that of a byte token
_FIRST_CHARACTERS = re.compile("[\\[<\u226e\ufe47\ufe64\uff1c\uff3b]")
_BYTE_TOKEN = re.compile("<0x([0-9a-f]{2})>")  # some tokenizers decode these words to bytes
# Unicode categories of characters that tokenizers may remove: control, format, unassigned, private use, marks, spaces
_REMOVED_CATEGORIES = {"Cc", "Cf", "Cn", "Co", "Mc", "Me", "Mn", "Zs"}
# `view(agent, prompt, seen)` -> messages. `prompt` is always a list of messages, even if the dataset has strings
View = Callable[[AgentSpec, Messages, Sequence[Seen]], Messages]
SEPARATOR = "\n\n"


def speaker_line(name: str) -> str:
    return f"[{name}]"


@functools.lru_cache(maxsize=1024)  # a turn is shown to many agents
def quote_speaker_lines(text: str) -> str:
    """Insert `> ` before each line of a text that a model could read as a speaker line."""
    text = as_plain(text)
    starts = []
    line_start = 0
    for line in text.split("\n"):
        starts += [line_start + position for position in _find_speaker_lines(line)]
        line_start += len(line) + 1
    return "> ".join(text[start:end] for start, end in zip([0, *starts], [*starts, len(text)], strict=True))


def _find_speaker_lines(line: str) -> list[int]:
    if _FIRST_CHARACTERS.search(line) is None:
        return []
    if line.isascii() and line.rstrip("\r").isprintable() and "<0x" not in line.lower():  # most lines
        return [0] if _SPEAKER_LINE.fullmatch("".join(line.split())) else []
    normalized, positions = _decode_byte_tokens(*_normalize_line(line))
    return [positions[match.start()] for match in _SPEAKER_LINE.finditer(normalized)]


def _normalize_line(line: str) -> tuple[str, list[int]]:
    """
    Fold case and compatibility characters of a line, drop characters that tokenizers may remove, and replace other
    line breaks by U+0085. Also return, for each character left, its position, or that of what was dropped before it.
    """
    normalized: list[str] = []
    positions: list[int] = []
    start = 0
    for position, character in enumerate(line):
        for letter in _normalize(character):
            letter = "\x85" if letter in _OTHER_LINE_BREAKS else letter
            if letter != "\x85" or normalized[-1:] != ["\x85"]:
                normalized.append(letter)
                positions.append(start)
            start = position + 1
    return "".join(normalized), positions


def _normalize(character: str) -> str:
    for convert in (str, str.casefold):
        kept = (item for item in unicodedata.normalize("NFKD", convert(character)) if not _is_removed(item))
        character = "".join(kept)
    return character


def _is_removed(character: str) -> bool:
    # U+2581 is the space of SentencePiece. The category of the last two depends on the version of Unicode
    if character in _OTHER_LINE_BREAKS:
        return False
    return character in "\u2581\ufffd\u1cf2\u1cf3" or unicodedata.category(character) in _REMOVED_CATEGORIES


def _decode_byte_tokens(text: str, positions: list[int]) -> tuple[str, list[int]]:
    """Replace byte tokens, such as `<0x5b>`, by their characters, in what [`_normalize_line`] returned."""
    parts: list[str] = []
    decoded_positions: list[int] = []
    end, start = 0, None  # end of the last byte token; position of the first byte of an incomplete character
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    for match in _BYTE_TOKEN.finditer(text):
        if match.start() != end:
            decoder.reset()
            start = None
        start = positions[match.start()] if start is None else start
        character = decoder.decode(bytes.fromhex(match[1]))
        normalized = character if character == "\n" else _normalize_line(character)[0]
        parts += [text[end : match.start()], normalized]
        decoded_positions += [*positions[end : match.start()], *[start] * len(normalized)]
        end, start = match.end(), None if character else start
    return "".join([*parts, text[end:]]), [*decoded_positions, *positions[end:]]


def said_by(turn: Seen) -> str:
    """Return a turn or feedback as teammates see it: a line with the speaker's name, then the text, quoted."""
    text = turn.without_calls if isinstance(turn, Turn) and turn.without_calls is not None else turn.raw_text
    return f"{speaker_line(turn.agent)}\n{quote_speaker_lines(text)}"


def team_view(agent: AgentSpec, prompt: Messages, seen: Sequence[Seen]) -> Messages:
    """
    Default view of an agent: its system prompt, the prompt of the dataset row, and the turns and feedback it sees. The
    agent's own turns are `assistant` messages, the results of its own tool calls are `tool` messages, and all other
    turns and feedback are `user` messages that name the speaker. Lines of a text that look like a speaker line are
    quoted. Consecutive messages of the same role are merged, for templates that require alternating roles.

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
    return merge_consecutive(messages)


def _as_message(agent: AgentSpec, item: Seen) -> dict[str, Any]:
    if isinstance(item, Turn) and item.agent == agent.name:
        calls = make_message_calls(item)
        fields = {"content": item.without_calls or "", "tool_calls": calls} if calls else {"content": item.raw_text}
        return {"role": "assistant", **fields}
    if isinstance(item, Feedback) and item.tool is not None and item.audience == agent.name:  # of its own call
        return result_message(item, quote_speaker_lines)
    content = said_by(item)
    if isinstance(item, Feedback) and item.images:
        content = with_images(content, item.images)
    return {"role": "user", "content": content}


def result_message(result: Feedback, quote: Callable[[str], str] = str) -> dict[str, Any]:
    """The message of a tool's result. Strings of a list are quoted like texts."""
    content = result.text if result.elements is None else list(result.elements)
    if result.images:
        return {"role": "tool", "name": result.tool, "content": with_images(quote(result.text), result.images)}
    quoted = map_leaves(lambda leaf: quote(leaf) if isinstance(leaf, str) else leaf, content)
    return {"role": "tool", "name": result.tool, "content": quoted}


def make_message_calls(turn: Turn) -> list[dict[str, Any]]:
    """Return the `tool_calls` of a turn's message; empty if a call could not be parsed and is part of the text."""
    are_parsed = all(call.problem is None and isinstance(call.arguments, Mapping) for call in turn.tool_calls)
    return [make_call(call.name, call.arguments) for call in turn.tool_calls] if are_parsed else []


def merge_consecutive(messages: Messages) -> Messages:
    """Merge consecutive messages of the same role that have only a role and a text, maybe with images."""
    merged: Messages = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"] and _has_only_text(merged[-1]) and _has_only_text(message):
            contents = filter(None, (merged[-1]["content"], message["content"]))
            merged[-1] = {**merged[-1], "content": join_contents(*contents)}
        else:
            merged.append(message)
    return merged


def join_contents(*contents: Any) -> Any:
    """Join contents, with a blank line between two texts. Images stay where they are."""
    if all(isinstance(content, str) for content in contents):
        return SEPARATOR.join(contents)
    joined: list[dict[str, Any]] = []
    for content in contents:
        first, *rest = as_parts(content)
        if first["type"] == "text" and joined and joined[-1]["type"] == "text":
            first = {"type": "text", "text": joined.pop()["text"] + SEPARATOR + first["text"]}
        joined += [first, *rest]
    return joined


def fold_system_message(messages: Messages) -> Messages:
    """Move the system message into the first user message, for templates that do not support the system role."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, rest = messages[0], messages[1:]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": join_contents(system["content"], rest[0]["content"])}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


def _has_only_text(message: dict[str, Any]) -> bool:
    content = message["content"]
    return set(message) == {"role", "content"} and (isinstance(content, str) or has_image(content))


def check_view(view: Any, owner: str) -> None:
    if not callable(view):
        hint = " To set the view of a single agent, use `AgentSpec(view=...)`." if isinstance(view, Mapping) else ""
        raise TypeError(f"`view` of {owner} must be a function `view(agent, prompt, seen)`, got {view!r}.{hint}")


def call_view(view: View, agent: AgentSpec, prompt: Messages, seen: Sequence[Seen]) -> Messages:
    """Call a view. Raise a `TypeError` unless it returns messages with a role and a text."""
    if view is team_view:
        return team_view(agent, prompt, seen)
    subject = f"The view `{getattr(view, '__name__', view)}` of agent {agent.name!r}"
    try:
        messages = view(agent, prompt, seen)
    except Exception as error:
        hint = " `seen` is empty before the first turn." if isinstance(error, IndexError) else ""
        error.add_note(f"Raised by the view of agent {agent.name!r}, called as `view(agent, prompt, seen)`.{hint}")
        raise
    example = '`[{"role": "user", "content": "..."}, ...]`'
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise TypeError(f"{subject} must return a list of messages {example}, got {str(messages)[:80]!r}.")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            fix = '`{"role": "user", "content": turn.text}`'
            hint = f" Write {fix} for a turn." if isinstance(message, (Turn, Feedback)) else ""
            raise TypeError(
                f"{subject} must return messages {example}, but message {number} is a {type(message).__name__}.{hint}"
            )
        if "role" not in message:
            raise TypeError(f"{subject} returned message {number} without a `role`; it has {sorted(message)}.")
        if not isinstance(message.get("content"), str | None) and not has_image(message["content"]):
            raise TypeError(
                f"{subject} returned message {number} with a {type(message['content']).__name__} as `content`, which "
                "must be a string. `prompt` is a list of messages: unpack it with `*prompt`."
            )
    return list(messages)


def convert_tool_messages(messages: Messages, keep_called: bool) -> Messages:
    """Convert `tool` messages to `user` messages. With `keep_called`, those that follow a message with calls stay."""
    converted: Messages = []
    follows_calls = False
    for message in messages:
        is_result = message["role"] == "tool"
        follows_calls = bool(message.get("tool_calls")) or (is_result and follows_calls)
        if is_result and not (follows_calls and keep_called):
            content, head = message["content"], f"{speaker_line(TOOL)}\n"
            if isinstance(content, list) and has_image(content):
                message = {"role": "user", "content": with_images(head + text_of(content), images_of([message]))}
            else:
                message = {"role": "user", "content": f"{head}{content}"}
        converted.append(message)
    return converted
