# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Questions to a team, and the events while it answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl import is_conversational

from ..config.dataset_checks import check_prompts
from ..config.marft_config import check_sampling
from ..config.team_setup import decoding
from ..episodes.images import is_image
from ..episodes.records import EndOfEpisode, Episode, Request, Turn
from ..prompts.builder import PromptBuilder
from ..rollout.generator import LiveTurn


# Arguments of `generate` and of chat clients that a question has in another form, or not
SET_ELSEWHERE = {
    **{name: f"Write `sampling={{{name!r}: ...}}`." for name in ("temperature", "top_p", "top_k", "min_p")},
    **dict.fromkeys(
        ("max_new_tokens", "max_tokens", "max_length", "max_completion_length"),
        "The length limit of a turn is the `max_completion_length` of its agent, which was set for training and is "
        "saved with the team.",
    ),
    "do_sample": "Write `greedy=True` to decode without sampling.",
    "images": 'Write `team.run([{"prompt": ..., "images": [...]}])`.',
    "num_return_sequences": "Write `team.run(questions, num_samples=...)`.",
}


def questions(
    prompts: Any, num_samples: int, greedy: bool, sampling: Mapping[str, float] | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return checked dataset rows, each prompt `num_samples` times, and the options of the generator."""
    check_count("num_samples", num_samples)
    if greedy and sampling:
        raise ValueError("`greedy=True` and `sampling` were both passed. Leave one of them out.")
    is_single = prompts is None or isinstance(prompts, (str, Mapping))
    if is_single or (len(prompts) and is_conversational({"prompt": prompts})):
        raise TypeError("`prompts` must be a list of prompts. For one, pass `[prompt]`, or call `team(prompt)`.")
    if not len(prompts):
        raise ValueError("`prompts` is empty. Pass at least one prompt.")
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    rows = [dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt} for prompt in repeated]
    texts = [row.get("prompt", "?") for row in rows]
    empty = [index for index, text in enumerate(texts) if isinstance(text, str | None) and not (text or "").strip()]
    if empty:
        raise ValueError(
            f"Prompt {empty[0] // num_samples} of {len(rows) // num_samples} is empty, so there is nothing to "
            "answer. Pass a text or a list of messages."
        )
    check_prompts(rows, "prompts")
    check_sampling(sampling, "sampling")
    return rows, {"greedy": True} if greedy else decoding(sampling)


def single_question(question: Any, images: Sequence[Any], where: str) -> Any:
    """Return a question, a row if it has images. Raise a `TypeError` unless it is a single one."""
    if not isinstance(question, (str, Mapping)) and not (question and is_conversational({"prompt": question})):
        raise TypeError(
            f"`{where}` answers one question, a string or a list of messages, got {str(question)[:80]}. For several "
            "questions, use `team.run(questions)`, whose episodes have their answers in `episode.answer.text`."
        )
    if not images:
        return question
    row = dict(question) if isinstance(question, Mapping) else {"prompt": question}
    row.pop("image", None)
    return {**row, "images": [images] if isinstance(images, (str, os.PathLike)) or is_image(images) else list(images)}


def check_count(name: str, number: Any) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {number!r}.")


@dataclass(frozen=True)
class Event:
    """Something that happens while a team answers."""


@dataclass(frozen=True)
class TurnStarted(Event):
    """
    An agent begins a turn.

    Args:
        agent (`str`): name of the agent.
        turn (`int`): number of the turn among those of the episode, in the order of their beginnings.
    """

    agent: str
    turn: int


@dataclass(frozen=True)
class TextDelta(Event):
    """New `text` of a turn. The concatenated texts are the text of the turn, without control tokens."""

    agent: str
    turn: int
    text: str


@dataclass(frozen=True)
class TurnEnded(Event):
    """An agent has finished a turn, whose whole text is `text`."""

    agent: str
    turn: int
    text: str


@dataclass(frozen=True)
class Answer(Event):
    """The episode is over: `text` is the team's answer, and `episode` the whole [`Episode`]."""

    text: str
    episode: Episode


class GrowingText:
    """The text of tokens that arrive one by one. A character whose bytes have not all arrived is held back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # The text up to `_shown` was given. Decoding begins at `_from`, some tokens before: a tokenizer may decode the
        # first token of a sequence differently
        self._from, self._shown = 0, 0
        self.text = ""

    def add(self, ids: list[int]) -> str:
        self._ids += ids
        before = self._decode(self._ids[self._from : self._shown])
        after = self._decode(self._ids[self._from :])
        if len(after) <= len(before) or after.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        self.text += (new := after[len(before) :])
        return new

    def get_rest(self, text: str) -> str:
        """What is missing of the whole text; nothing if that is another text."""
        return text[len(self.text) :] if text.startswith(self.text) else ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Narrator:
    """A [`TurnListener`] that emits turns as events, if there is `on_event`. `limit` is the most tokens of a turn."""

    def __init__(
        self,
        prompts: PromptBuilder,
        on_event: Callable[[Event], None] | None = None,
        limit: int | None = None,
        schema: Mapping[str, Any] | None = None,  # of each turn
    ):
        self._prompts, self._on_event, self._limit, self._schema = prompts, on_event, limit, schema
        self._turns: list[LiveTurn] = []
        self._begun: dict[Request, tuple[int, GrowingText]] = {}
        self._count = 0

    def _begin(self, request: Request, on_event: Callable[[Event], None]) -> tuple[int, GrowingText]:
        number, self._count = self._count, self._count + 1
        on_event(TurnStarted(request.agent, number))
        return number, GrowingText(self._prompts.for_agent(request.agent).tokenizer)

    def turn_started(self, request: Request, seed: int) -> LiveTurn:
        on_event, on_tokens = self._on_event, None
        if on_event is not None:
            number, text = self._begun[request] = self._begin(request, on_event)

            def on_tokens(ids: list[int]) -> None:
                if new := text.add(ids):
                    on_event(TextDelta(request.agent, number, new))

        self._turns.append(LiveTurn(seed, self._limit, on_tokens, self._schema))
        return self._turns[-1]

    def turn_ended(self, request: Request, turn: Turn | EndOfEpisode) -> None:
        if self._on_event is None or isinstance(turn, EndOfEpisode):
            return
        # A turn that a function has written begins here
        number, text = self._begun.pop(request) if request in self._begun else self._begin(request, self._on_event)
        if rest := text.get_rest(turn.text):
            self._on_event(TextDelta(request.agent, number, rest))
        self._on_event(TurnEnded(request.agent, number, turn.text))

    def leave(self) -> None:
        """End the turns of an episode that nobody waits for any more."""
        for turn in self._turns:
            turn.is_gone = True
