# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Episodes as traces of trackio: a trace for each, with a span for each turn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..system.redaction import printable
from .transcripts import Entry, Transcript


def log_traces(transcripts: Sequence[Transcript], adapters: Mapping[str, str]) -> None:
    """
    Log episodes to the present run of trackio; nothing if there is none. To be called in the main thread, which has
    the run (checked against trackio 0.43).

    Args:
        transcripts (`Sequence[Transcript]`): the episodes.
        adapters (`Mapping[str, str]`): adapter of each agent that has one.
    """
    import trackio

    if not hasattr(trackio, "Trace") or trackio.context_vars.current_run.get() is None:
        return  # an older version, or an evaluation before any log
    traces = {f"episodes/{number}": as_trace(one, adapters) for number, one in enumerate(transcripts)}
    trackio.log({name: trackio.Trace(**parts) for name, parts in traces.items()})


def as_trace(transcript: Transcript, adapters: Mapping[str, str]) -> dict[str, Any]:
    """`messages`, `metadata` and `spans` of an episode, in OpenAI's form of messages. All values are JSON."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": printable(transcript.prompt)}]
    spans = []
    for number, entry in enumerate(transcript.entries):
        role = "user" if entry.is_feedback else "assistant"
        messages.append({"role": role, "name": entry.speaker, "content": printable(entry.text)})
        spans.append(_span(entry, number, transcript.updates, adapters.get(entry.speaker)))
    rewards = {f"reward/{name}": value for name, value in transcript.rewards.items()}
    metadata = {"title": transcript.title, "updates": transcript.updates, "reward": transcript.reward, **rewards}
    if transcript.reference:
        metadata["right answer"] = printable(transcript.reference)
    return {"messages": messages, "metadata": metadata, "spans": spans}


def _span(entry: Entry, number: int, updates: int | None, adapter: str | None) -> dict[str, Any]:
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
