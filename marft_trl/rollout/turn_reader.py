# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""From sampled tokens to turns: stop texts, tool calls, and whether a turn was cut."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from ..episodes.collector import Request
from ..episodes.records import Completion, EndOfEpisode
from ..episodes.tools import MALFORMED, ToolCall, as_plain
from ..prompts.builder import Observation
from ..prompts.chat_template import ChatTemplate, EarlierReasoning
from ..prompts.tool_calls import call_pattern, parse_calls
from ..shared_prefix.decoding import LateCriterion
from .generator import Generator, Sampled


# Maximum number of tokens per character, and number of additional tokens to decode before a stop text. The margin is
# needed because a tokenizer may decode the first token of a sequence differently.
_TOKENS_OF_A_CHARACTER, _MARGIN = 4, 8


class StopTexts:
    """
    Rule for stop texts: a turn ends with the first of its own tokens after which the decoded turn contains a stop
    text. The prompt is ignored.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): decodes the turn, control tokens included.
            Not needed without stop texts.
        texts (`Sequence[str]`): the stop texts; may be empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, texts: Sequence[str]):
        self._tokenizer = tokenizer
        self.texts = tuple(texts)
        self._window = _TOKENS_OF_A_CHARACTER * max(map(len, self.texts), default=0) + _MARGIN

    def are_in(self, ids: Sequence[int]) -> bool:
        """Return `True` if the decoded tokens of a turn contain a stop text."""
        return bool(self.texts) and self._are_in_text(cast(Any, self._tokenizer).decode(list(ids)))

    def cut(self, ids: list[int]) -> list[int]:
        """Cut a turn after the token that completes its first stop text. The tokens after it are padding."""
        if not self.are_in(ids):
            return ids
        low, high = 0, len(ids)  # the first `high` tokens hold a stop text, the first `low` do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.are_in(ids[:middle]) else (middle, high)
        return ids[:high]

    def end(self, turns: Sequence[list[int]], new: int = 1) -> list[bool]:
        """Return, for each turn, `True` if it ends within its last `new` tokens. Called for all tokens of a turn."""
        # For most turns, decoding only their last tokens is enough
        window = self._window + new - 1
        recent = cast(Any, self._tokenizer).batch_decode([ids[-window:] for ids in turns])
        return [self._are_in_text(text) and self.are_in(ids) for text, ids in zip(recent, turns, strict=True)]

    def _are_in_text(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)


class StopTextCriterion(LateCriterion):
    """
    Stopping criterion that applies [`StopTexts`] during one call of `generate`, whose prompts are padded to one width.

    `StopStringCriteria` of transformers reads prompt and completion as one text. There, a stop text that begins in the
    prompt could end a turn that does not contain it.
    """

    def __init__(self, stops: StopTexts):
        self._stops = stops
        self._width: int | None = None
        self._looked = 0

    def begin(self, width: int) -> None:
        self._width = self._looked = width

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        if self._width is None:  # in the loop of transformers the first call comes after the first token
            self.begin(input_ids.size(1) - 1)
        new, self._looked = input_ids.size(1) - self._looked, input_ids.size(1)
        ended = self._stops.end(input_ids[:, self._width :].tolist(), new)
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)


class TurnReader:
    """
    Reads turns.

    Args:
        template ([`ChatTemplate`]): how calls are written.
        uses_tools (`bool`): whether the tokenizer was prepared for tools.
        is_lone (`bool`): whether the team has one agent.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        template: ChatTemplate,
        uses_tools: bool,
        is_lone: bool,
    ):
        self._tokenizer, self._ends, self._template = tokenizer, tuple(ends), template
        self.uses_tools, self._is_lone = uses_tools, is_lone

    def sampled(
        self,
        requests: Sequence[Request],
        observations: Sequence[Observation],
        completions: Sequence[Sampled],
        generator: Generator,
    ) -> list[Completion | EndOfEpisode]:
        """
        What requests are answered with.

        Args:
            observations (`Sequence[Observation]`): what their agents were shown.
            generator ([`Generator`]): knows the stop texts of agents.
        """
        completions = [self._cut(*pair) for pair in zip(requests, completions, strict=True)]
        texts = self._tokenizer.batch_decode([sampled.ids for sampled in completions], skip_special_tokens=True)
        return [
            EndOfEpisode(observation.problem, observation.is_too_long)
            if observation.problem is not None
            else self._completed(request, observation, text, sampled, generator)
            for request, text, observation, sampled in zip(requests, texts, observations, completions, strict=True)
        ]

    def _completed(
        self, request: Request, observation: Observation, text: str, sampled: Sampled, generator: Generator
    ) -> Completion:
        ids, logps, sampled_by = sampled
        has_end = bool(ids) and ids[-1] in (*self._ends, self._tokenizer.pad_token_id)
        has_end = has_end or any(stop in text for stop in (request.given.stop if request.given else ()))
        is_cut = bool(ids) and not has_end and not generator.holds_stop(request.agent, ids)
        raw_text = self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._ends else ids)
        return request.completed(
            text,
            observation.seen,
            observation=observation.content,
            prompt_ids=observation.ids,
            completion_ids=ids,
            raw_text=raw_text,
            tagged=raw_text if raw_text != text and self._reasoning.is_in(raw_text) else None,
            truncated=is_cut,
            tool_calls=() if is_cut else self._calls(request, observation.ids, ids),
            without_calls=self._before_calls(ids) if request.functions else None,
            logps=logps,
            sampled_by=sampled_by,
        )

    def _cut(self, request: Request, sampled: Sampled) -> Sampled:
        """A completion up to the limit of its request, and to the first of its stop texts."""
        given, ids = request.given, sampled.ids
        if given is None:
            return sampled
        count = len(ids) if given.max_tokens is None or request.episode.trains else min(len(ids), given.max_tokens)

        def stops(length: int) -> bool:
            text = self._tokenizer.decode(ids[:length], skip_special_tokens=True)
            return any(stop in text for stop in given.stop)

        if given.stop and stops(count):
            count = bisect.bisect_left(range(count), True, key=stops)
        return sampled._replace(ids=ids[:count], logps=None if sampled.logps is None else sampled.logps[:count])

    def written(self, request: Request, observation: Observation, text: str, ids: list[int], is_cut: bool):
        """The completion of a request by a text, as `ids`, of which `is_cut` says whether they are all of it."""
        return request.completed(
            self._tokenizer.decode(ids) if is_cut else as_plain(text),
            observation.seen,
            observation=observation.content,
            prompt_ids=observation.ids,
            completion_ids=ids,
            truncated=is_cut,
        )

    def _calls(self, request: Request, prompt_ids: list[int], ids: list[int]) -> tuple[ToolCall, ...]:
        if not request.functions:
            return ()
        calls = parse_calls(self._tokenizer, ids, prompt_ids, self._template.schemas(request.functions))
        # A malformed call of a lone agent is its final turn, as in `GRPOTrainer`
        if not calls and not self._is_lone and self._before_calls(ids) is not None:
            return (MALFORMED,)
        return calls

    @functools.cached_property
    def _reasoning(self) -> EarlierReasoning:
        return EarlierReasoning(self._template)

    @functools.cached_property
    def _call_pattern(self) -> re.Pattern | None:
        return call_pattern(self._tokenizer, self._template.source) if self.uses_tools else None

    def _before_calls(self, ids: list[int]) -> str | None:
        """Return the text before the tool calls, which is shown to teammates, or `None` if the turn has no calls."""
        text = self._tokenizer.decode(ids)
        found = self._call_pattern.search(text) if self._call_pattern is not None else None
        return None if found is None else text[: found.start()].rstrip()
