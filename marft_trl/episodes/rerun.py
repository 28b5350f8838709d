# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A recorded episode that is run again with one turn changed: turns that do not depend on it stay as they were."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .records import Episode, Feedback, Request, RequestedTurn, Seen, Turn


class RecordedTurn(NamedTuple):
    turn: Turn | None  # `None` if the agent's reference has to generate it
    seen: tuple[Seen, ...]  # items that the recorded workflow asked to show for it
    origin: int | None  # position of its turn in the recorded episode; `None` for a candidate
    is_other: bool  # whether it is the turn that the re-run is made for


class Rerun:
    """
    Answers requests of a re-run that show an agent the same as a recorded one, with its turn. Every other turn,
    above all those that see the changed one, is left to be generated.
    """

    def __init__(
        self,
        episode: Episode,  # the record; the episode may still be running
        changed: int | None = None,  # turn that is not repeated, but sampled again from the agent's reference
        removed: int | None = None,  # turn that is replaced by an empty one
        candidate: tuple[Request, Turn] | None = None,  # for a turn that is yet to come
        skip: int = 0,  # number of pending requests before `candidate` that show the same; they are generated
        keys: Sequence[tuple] | None = None,  # of [`make_keys`], for several re-runs of a record
    ):
        # Whether the changed, removed or candidate turn was taken; a re-run that ends without it says nothing about it
        self.holds_turn = False
        # For each key what was recorded, in order; `None` for a turn that is to be generated
        self._recorded: dict[tuple, list[RecordedTurn | None]] = defaultdict(list)
        # Turns of the re-run by their positions in the record, and the positions of those that are as recorded
        self._turns: dict[int, Turn] = {}
        self._origins: dict[int, int] = {}
        for turn, seen, key in zip(episode.turns, episode.asked, keys or make_keys(episode), strict=True):
            recorded: Turn | None = turn
            if turn.index == removed:
                empty: Any = {"completion_ids": (), "tool_calls": (), "logps": None, "sampled_by": None}
                empty |= {"without_calls": None, "tagged": None, "truncated": False}
                recorded = replace(turn, text="", raw_text="", **empty)
            if turn.index == changed:
                recorded = None
            is_other = turn.index in (changed, removed)
            self._recorded[key].append(RecordedTurn(recorded, seen, turn.index, is_other))
        if candidate is not None:
            request, turn = candidate
            key = observation_key(request.agent, request.seen, request.requested_turn)
            self._recorded[key] += [*[None] * skip, RecordedTurn(turn, request.seen, None, True)]

    def find(self, request: Request) -> RecordedTurn | None:
        """What was recorded for a request of the re-run; `None` if it has to be generated."""
        key = observation_key(request.agent, request.seen, request.requested_turn, self._origins)
        waiting = self._recorded.get(key)
        return waiting.pop(0) if waiting else None

    def turn(self, found: RecordedTurn, request: Request) -> Turn | None:
        turn = found.turn
        if turn is None:
            return None
        pairs: Iterable[tuple[Seen, Seen]] = ()
        if request.requested_turn is None:
            pairs = zip(request.seen, found.seen, strict=True)
        else:  # what a program had read is what it had read, whichever answer comes first now
            old = [item for item in found.seen if isinstance(item, Turn) and item.index in self._turns]
            pairs = [(self._turns[item.index], item) for item in old]
        shown = [new for new, old in pairs if old.index in (turn.sees if isinstance(old, Turn) else turn.hears)]
        return turn.repeat(request, shown)

    def add(self, turn: Turn, recorded: RecordedTurn) -> None:
        self.holds_turn |= recorded.is_other
        if recorded.origin is not None:
            self._turns[recorded.origin] = turn
            if not recorded.is_other:
                self._origins[turn.index] = recorded.origin


def make_keys(episode: Episode) -> list[tuple]:
    turns = zip(episode.turns, episode.asked, episode.given, strict=True)
    return [observation_key(turn.agent, seen, requested_turn) for turn, seen, requested_turn in turns]


def observation_key(
    agent: str,
    seen: Sequence[Seen],
    requested_turn: RequestedTurn | None = None,
    origins: Mapping[int, int] | None = None,  # recorded positions of turns of a re-run; other turns match no record
) -> tuple:
    """What requests share that show an agent the same: messages of a program, or else what has been seen."""

    def key(item: Any) -> Any:
        if isinstance(item, Turn):
            return item.index if origins is None else origins.get(item.index, -1)
        if not isinstance(item, Feedback):
            return repr(item)
        return (item.agent, item.text, item.tool, item.audience, *map(id, item.images))  # equal images are one object

    if requested_turn is None:
        return agent, tuple(map(key, seen))
    messages = []
    for message in requested_turn.messages:  # without the ids of calls, which count the turns of an episode
        calls = [call.get("function") for call in message.get("tool_calls") or ()]
        messages.append({**message, "tool_calls": calls, "tool_call_id": None})
    shown = [messages, list(requested_turn.tools), list(requested_turn.stop)]
    return agent, json.dumps(shown, sort_keys=True, default=key)
