# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Chat completions of a team: answers with the turns of all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..dialects import Asked
from ..episodes.records import Episode
from ..workflows.external_app import OUTPUT


def completion(identity: str, request: Asked, episodes: Sequence[Episode]) -> dict[str, Any]:
    """The answer to a request as a whole."""
    choices = []
    for index, episode in enumerate(episodes):
        message = {"role": "assistant", "content": answer_text(episode)}
        if request.show_turns and (said := thoughts(episode)):
            message["reasoning_content"] = said
        choice = {"index": index, "message": message, "finish_reason": finish_reason(episode), "logprobs": None}
        choices.append(choice)
    shown = {"marft": [as_data(episode) for episode in episodes]} if request.show_turns else {}
    head = {"id": identity, "object": "chat.completion", "created": int(time.time()), "model": request.model}
    return {**head, "choices": choices, "usage": usage(episodes), **shown}


class Chunks:
    """
    The parts of a streamed answer.

    Args:
        identity (`str`): id of the answer.
        request ([`Asked`]): what is asked for.
    """

    def __init__(self, identity: str, request: Asked):
        self._request = request
        created = int(time.time())
        self._head = {"id": identity, "object": "chat.completion.chunk", "created": created, "model": request.model}

    def delta(self, fields: Mapping[str, Any], reason: str | None = None, **further: Any) -> dict[str, Any]:
        """A part of the answer."""
        choice = {"index": 0, "delta": dict(fields), "finish_reason": reason, "logprobs": None}
        return {**self._head, "choices": [choice], **further}

    def last(self, episode: Episode) -> list[dict[str, Any]]:
        """What ends the answer."""
        shown = {"marft": [as_data(episode)]} if self._request.show_turns else {}
        parts = [self.delta({}, finish_reason(episode), **shown)]
        if self._request.with_usage:
            parts.append({**self._head, "choices": [], "usage": usage([episode])})
        return parts


def heading(agent: str, is_first: bool) -> str:
    """What stands above a turn among the turns of teammates."""
    return f"{'' if is_first else chr(10) * 2}[{agent}]\n"


def thoughts(episode: Episode) -> str:
    """The turns before the answer, with their agents' names."""
    turns = [turn for turn in episode.turns if turn is not episode.answer]
    return "".join(heading(turn.agent, not number) + turn.text for number, turn in enumerate(turns))


def answer_text(episode: Episode) -> str:
    """The team's answer; empty if there was no turn."""
    return episode.answer.text if episode.answer is not None else ""


def finish_reason(episode: Episode) -> str:
    """`"length"` if the answer was cut at its length limit."""
    return "length" if episode.answer is not None and episode.answer.truncated else "stop"


def usage(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Numbers of tokens, all together and of each agent."""
    agents: dict[str, dict[str, int]] = {}
    for turn in (turn for episode in episodes for turn in episode.turns):
        its = agents.setdefault(turn.agent, {"prompt_tokens": 0, "completion_tokens": 0})
        its["prompt_tokens"] += len(turn.prompt_ids)
        its["completion_tokens"] += len(turn.completion_ids)
    read = sum(its["prompt_tokens"] for its in agents.values())
    said = sum(its["completion_tokens"] for its in agents.values())
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said, "agents": agents}


def as_data(episode: Episode) -> dict[str, Any]:
    """An episode as JSON: who said what, in order, and what they were told. The output of a program is not shown."""
    return {
        "turns": [
            {
                "agent": turn.agent,
                "text": turn.text,
                "sees": list(turn.sees),
                "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls],
                "truncated": turn.truncated,
                "is_answer": turn is episode.answer,
                "prompt_tokens": len(turn.prompt_ids),
                "completion_tokens": len(turn.completion_ids),
            }
            for turn in episode.turns
        ],
        "feedback": [{"source": one.agent, "text": one.text} for one in episode.feedback if one.agent != OUTPUT],
    }
