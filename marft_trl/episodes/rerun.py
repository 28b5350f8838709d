# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A recorded episode that is run again with one turn changed: turns that do not depend on it stay as they were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .records import Completion, Episode, Seen, Turn


# What a turn was made from: the agent, and the items it was to see: turns of the recorded episode by their positions
# (-1 for turns that were not in it), and feedback by its source and text.
_Place = tuple[str, tuple[Any, ...]]


class Found(NamedTuple):
    """
    A recorded completion.

    Args:
        completion ([`Completion`]): what was generated.
        asked (`tuple[Turn | Feedback, ...]`): items that the recorded workflow asked to show for it.
        origin (`int`, *optional*): position of its turn in the recorded episode; `None` for a candidate and for an
            empty turn in place of another one, which have none.
    """

    completion: Completion
    asked: tuple[Seen, ...]
    origin: int | None


class Rerun:
    """
    Answers the requests of a re-run from a recorded episode.

    A request for the same agent with the same turns to see gets the recorded completion, which was drawn from the very
    same observation. Every other turn, above all those that see the changed one, is left to be generated.

    Args:
        episode ([`Episode`]):
            The record; the episode may still be running.
        changed (`int`, *optional*):
            Index of the turn that is not repeated: it is sampled anew from the agent's reference.
        removed (`int`, *optional*):
            Index of the turn that is an empty one.
        candidate (`tuple[str, Sequence[Turn | Feedback], Completion]`, *optional*):
            Agent, items to see and completion of a turn that is yet to come.
        skip (`int`, *optional*, defaults to `0`):
            Number of pending requests that ask for the same as `candidate` and come before it; they are generated.
    """

    def __init__(
        self,
        episode: Episode,
        changed: int | None = None,
        removed: int | None = None,
        candidate: tuple[str, Sequence[Seen], Completion] | None = None,
        skip: int = 0,
    ):
        self.copies = episode.copies  # opponents are the same ones
        # For each place what was recorded there, in order; `None` for a turn that is to be generated
        self._recorded: dict[_Place, list[Found | None]] = defaultdict(list)
        self._changed_place: _Place | None = None
        self._origins: dict[int, int] = {}
        for turn, asked in zip(episode.turns, episode.asked, strict=True):
            place = turn.agent, tuple(map(_key, asked))
            shown = [item for item in asked if item.index in (turn.sees if isinstance(item, Turn) else turn.hears)]
            is_changed = turn.index == changed
            found: Found | None = Found(Completion.of(turn, shown), asked, turn.index)
            if turn.index == removed:
                empty = Completion("", shown, observation=turn.observation, prompt_ids=turn.prompt_ids)
                found = Found(empty, asked, None)
            self._recorded[place].append(None if is_changed else found)
            if is_changed:
                self._changed_place = place
        if candidate is not None:
            agent, seen, completion = candidate
            found = Found(completion, tuple(seen), None)
            self._recorded[agent, tuple(map(_key, seen))] += [*[None] * skip, found]

    def find(self, agent: str, seen: Sequence[Seen]) -> tuple[Found | None, bool]:
        """
        The recorded completion for a request of the re-run, to be given to [`~Rerun.completion`], or `None` if it has
        to be generated; and whether the agent's reference has to generate it.
        """
        origins = tuple(self._origins.get(item.index, -1) if isinstance(item, Turn) else _key(item) for item in seen)
        place = agent, origins
        waiting = self._recorded[place] if -1 not in origins else []
        if not waiting:
            return None, False
        found = waiting.pop(0)
        return found, found is None and place == self._changed_place

    def completion(self, found: Found, index: int, seen: Sequence[Seen]) -> Completion:
        """A recorded completion for turn number `index` of the re-run, which asked for `seen`."""
        if found.origin is not None:
            self._origins[index] = found.origin
        shown = {id(item) for item in found.completion.seen}
        pairs = zip(seen, found.asked, strict=True)
        return replace(found.completion, seen=tuple(new for new, old in pairs if id(old) in shown))


def _key(item: Seen) -> Any:
    return item.index if isinstance(item, Turn) else (item.agent, item.text)
