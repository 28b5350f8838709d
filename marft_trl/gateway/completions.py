# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Chat completions of a team: what a request asks for, and answers with the turns of all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..dialects import RequestError, chat
from ..dialects.fields import flag, read_object, whole
from ..episodes.records import Episode
from ..system.hints import did_you_mean


# Largest number of answers to one request
_MOST_ANSWERS = 16
# Fields that say nothing about the answer, or that ask for what is the case anyway
_IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "reasoning_effort"),
    *("verbosity", "parallel_tool_calls", "prompt_cache_retention"),
}
# Fields that are allowed with values that ask for nothing
_NOTHING: dict[str, tuple[Any, ...]] = {
    "stop": (None, []),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}
_READ = (
    *("model", "messages", "stream", "stream_options", "n", "seed", "temperature", "top_p", "top_k", "min_p"),
    *("max_tokens", "max_completion_tokens", "row", "show_turns"),
)


@dataclass(frozen=True)
class ChatRequest:
    """
    What a request asks for.

    Args:
        model (`str`): name of the team, or of an agent.
        row (`dict`): dataset row, with the messages as its `prompt`.
        count (`int`): number of answers.
        stream (`bool`): whether the answer is to arrive while it grows.
        with_usage (`bool`): whether a stream ends with the numbers of tokens.
        seed (`int`, *optional*): seed of sampling.
        sampling (`dict`): sampling settings in place of those of training.
        max_tokens (`int`, *optional*): largest number of tokens of a turn.
        show_turns (`bool`): whether the answer has the turns of teammates.
    """

    model: str
    row: dict[str, Any]
    count: int = 1
    stream: bool = False
    with_usage: bool = False
    seed: int | None = None
    sampling: dict[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    show_turns: bool = True

    @classmethod
    def read(cls, body: bytes, models: Sequence[str], show_turns: bool) -> ChatRequest:
        """
        Read the body of a request.

        Args:
            body (`bytes`): JSON.
            models (`Sequence[str]`): names that may be asked.
            show_turns (`bool`): whether answers have the turns of teammates where the request does not say.

        Raises:
            RequestError: the message names the field, what it got and what it needs.
        """
        given = read_object(body)
        _check_fields(given)
        for number, message in enumerate(messages if isinstance(messages := given.get("messages"), list) else ()):
            _refuse_tools(message, f"messages[{number}]")
        own = ("n", "row", "seed", "show_turns", *_IGNORED)
        asked = chat.asked_of({name: value for name, value in given.items() if name not in own}, models)
        count = whole(given, "n", 1, _MOST_ANSWERS) or 1
        if asked.stream and count > 1:
            raise RequestError("`n` must be 1 for a stream. Leave `stream` out for several answers.", field="n")
        row = given.get("row") or {}
        if not isinstance(row, dict) or "prompt" in row:
            raise RequestError(
                "`row` must be an object with the further columns of a dataset row; its `prompt` is `messages`.",
                field="row",
            )
        empty = [one["role"] == "user" and not one["content"].strip() for one in asked.messages]
        if any(empty):
            where = f"messages[{empty.index(True)}].content"
            raise RequestError(f"`{where}` is empty, so there is nothing to answer.", field=where)
        return cls(
            model=asked.model,
            row={**row, "prompt": asked.messages},
            count=count,
            stream=asked.stream,
            with_usage=asked.with_usage,
            seed=whole(given, "seed", -(2**63), 2**63 - 1),
            sampling=asked.sampling,
            max_tokens=asked.max_tokens,
            show_turns=flag(given, "show_turns", show_turns) and show_turns,
        )


def _check_fields(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _READ or name in _IGNORED or value is None:
            continue
        if name not in _NOTHING:
            hint = did_you_mean(name, [*_READ, *_NOTHING])
            raise RequestError(f"`{name[:80]}` is no field that this server knows.{hint}", field=name[:80])
        if not any(value == nothing and type(value) is type(nothing) for nothing in (*_NOTHING[name], 0.0)):
            why = "Agents have the stop texts of their training." if name == "stop" else "Leave it out."
            why = "A team has the tools of its training." if name in ("tools", "functions") else why
            raise RequestError(f"`{name}` is not supported. {why}", field=name, code="unsupported_parameter")


def _refuse_tools(message: Any, where: str) -> None:
    if isinstance(message, dict) and (message.get("role") == "tool" or message.get("tool_calls")):
        raise RequestError(
            f"`{where}.role` must be one of 'system', 'developer', 'user', 'assistant'. Calls of "
            "tools are the team's own, and are not passed.",
            field=f"{where}.role",
        )


# ---- Answers ----


def completion(identity: str, request: ChatRequest, episodes: Sequence[Episode]) -> dict[str, Any]:
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
        request ([`ChatRequest`]): what is asked for.
    """

    def __init__(self, identity: str, request: ChatRequest):
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
    """An episode as JSON: who said what, in order, and what they were told."""
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
        "feedback": [{"source": item.agent, "text": item.text} for item in episode.feedback],
    }
