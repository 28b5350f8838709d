# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What an agent is shown, as messages: its prompt, the task, and what others said, under their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..agents import AgentSpec
from ..episodes.records import Messages, Seen, Turn


# `view(agent, prompt, seen)` -> messages. `prompt` is always a list of messages here.
View = Callable[[AgentSpec, Messages, Sequence[Seen]], Messages]

# A line like "[solver]" opens what a teammate says. The same line inside a teammate's text is quoted, so that no agent
# can put words into another's mouth; whatever a model may take for the end of a line is one.
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SPEAKER_LINE = re.compile(
    rf"(?:(?<=[{_BREAKS}])|\A)([^\S{_BREAKS}]*\[[A-Za-z][A-Za-z0-9_-]{{0,47}}\][^\S{_BREAKS}]*)(?=[{_BREAKS}]|\Z)"
)
SEPARATOR = "\n\n"


def speaker(turn: Seen) -> str:
    """What a teammate is shown of a turn, or anybody of feedback: a line that names the speaker, then its words."""
    said = turn.raw_text
    if isinstance(turn, Turn) and turn.without_calls is not None:
        said = turn.without_calls
    return f"[{turn.agent}]\n" + _SPEAKER_LINE.sub(r"> \1", said)


def team_view(agent: AgentSpec, prompt: Messages, seen: Sequence[Seen]) -> Messages:
    """
    The default view of an agent: its system prompt, the prompt of the dataset, then the turns it sees, its own as
    `assistant`, the results of its own tools as `tool`, and everything else, that of others and feedback, as `user`
    messages that name the speaker. Neighbours of one role are merged, so that templates which demand alternating roles
    work.

    Args:
        agent ([`AgentSpec`]):
            Who is about to speak.
        prompt (`list[dict]`):
            Messages of the dataset row.
        seen (`Sequence[Turn]`):
            The turns and the feedback it is shown, in order.

    Returns: `list[dict]` with `role` and `content`.
    """
    messages = [dict(message) for message in prompt]
    if agent.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": agent.system_prompt})
    messages += [_as_message(agent, item) for item in seen]
    return merge_neighbours(messages)


def _as_message(agent: AgentSpec, item: Seen) -> dict[str, Any]:
    if isinstance(item, Turn):
        own = item.agent == agent.name
        return {"role": "assistant", "content": item.raw_text} if own else {"role": "user", "content": speaker(item)}
    if item.tool is not None and item.audience == agent.name:  # what its own call gave
        return {"role": "tool", "name": item.tool, "content": item.text}
    return {"role": "user", "content": speaker(item)}


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
    """Move the system message into the first user message, for templates that know no system role."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, rest = messages[0], messages[1:]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": system["content"] + SEPARATOR + rest[0]["content"]}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


def _is_plain(message: dict[str, Any]) -> bool:
    return set(message) == {"role", "content"} and isinstance(message["content"], str)
