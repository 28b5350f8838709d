# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Parse sampled tokens into turns: stop strings, tool calls and truncation."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from ..episodes.records import EndOfEpisode, Request, Turn
from ..episodes.tools import MALFORMED, ToolCall, as_plain
from ..prompts.builder import Observation
from ..prompts.chat_template import ChatTemplate, EarlierReasoning
from ..prompts.tool_calls import call_pattern, parse_calls
from ..shared_prefix.decoding import LateCriterion
from .generator import Generator, SampledTurn


# Most tokens per character, and more to decode before a stop string, since the first may be decoded differently
_TOKENS_PER_CHARACTER, _MARGIN = 4, 8


class StopStrings:
    """
    Stop strings of an agent. A turn ends with the first generated token after which its decoded text, with control
    tokens but without the prompt, contains one of them. Without stop strings, no tokenizer is needed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, texts: Sequence[str]):
        self._tokenizer = tokenizer
        self.texts = tuple(texts)
        self._window = _TOKENS_PER_CHARACTER * max(map(len, self.texts), default=0) + _MARGIN

    def are_in(self, ids: Sequence[int]) -> bool:
        return bool(self.texts) and self._found_in_text(cast(Any, self._tokenizer).decode(list(ids)))

    def cut(self, ids: list[int]) -> list[int]:
        """Truncate a turn after the token that completes the first stop string. The tokens after it are padding."""
        if not self.are_in(ids):
            return ids
        return ids[: bisect.bisect_left(range(len(ids)), True, key=lambda count: self.are_in(ids[:count]))]

    def end(self, turns: Sequence[list[int]], new: int = 1) -> list[bool]:
        """Return, for each turn, `True` if it ends within the last `new` tokens. Call it for every token of a turn."""
        # For most turns, decoding only their last tokens is enough
        window = self._window + new - 1
        recent = cast(Any, self._tokenizer).batch_decode([ids[-window:] for ids in turns])
        return [self._found_in_text(text) and self.are_in(ids) for text, ids in zip(recent, turns, strict=True)]

    def _found_in_text(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)


class StopStringCriterion(LateCriterion):
    """
    Applies [`StopStrings`] during one `generate` call with prompts of equal width. transformers' own criterion matches
    prompt and completion as one text: a stop string that begins in the prompt could end a turn without it.
    """

    def __init__(self, stops: StopStrings):
        self._stops = stops
        self._width: int | None = None
        self._num_checked = 0

    def begin(self, width: int) -> None:
        self._width = self._num_checked = width

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        if self._width is None:  # the decoding loop of transformers first calls this after the first token
            self.begin(input_ids.size(1) - 1)
        new, self._num_checked = input_ids.size(1) - self._num_checked, input_ids.size(1)
        ended = self._stops.end(input_ids[:, self._width :].tolist(), new)
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)


class TurnReader:
    """Parses turns: text, tool calls and truncation. `is_lone` means that the team has one agent."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        template: ChatTemplate,
        uses_tools: bool,
        is_lone: bool,
    ):
        self._tokenizer, self._end_token_ids, self._template = tokenizer, tuple(end_token_ids), template
        self.uses_tools, self._is_lone = uses_tools, is_lone

    def read_samples(
        self,
        requests: Sequence[Request],
        observations: Sequence[Observation],
        sampled_turns: Sequence[SampledTurn],
        generator: Generator,
    ) -> list[Turn | EndOfEpisode]:
        triples = zip(requests, observations, sampled_turns, strict=True)
        return [self.read_sample(*triple, generator) for triple in triples]

    def read_sample(
        self, request: Request, observation: Observation, sampled: SampledTurn, generator: Generator
    ) -> Turn | EndOfEpisode:
        """Make the turn of a request; its episode ends instead if the observation is not valid."""
        if observation.problem is not None:
            return EndOfEpisode(observation.problem, observation.is_too_long)
        ids, logps, sampled_by = self._truncate(request, sampled)
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        has_end = bool(ids) and ids[-1] in (*self._end_token_ids, self._tokenizer.pad_token_id)
        own_stops = request.requested_turn.stop if request.requested_turn else ()
        has_end = has_end or any(stop in text for stop in own_stops)
        is_truncated = bool(ids) and not has_end and not generator.holds_stop(request.agent, ids)
        raw_text = self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._end_token_ids else ids)
        return request.make_turn(
            text,
            observation.seen,
            observation=observation.content,
            prompt_ids=observation.ids,
            images=tuple(observation.images),
            completion_ids=ids,
            raw_text=raw_text,
            tagged=raw_text if raw_text != text and self._reasoning.is_in(raw_text) else None,
            truncated=is_truncated,
            tool_calls=() if is_truncated else self._calls(request, observation.ids, ids),
            without_calls=self._text_before_calls(ids) if request.functions else None,
            logps=logps,
            sampled_by=sampled_by,
        )

    def _truncate(self, request: Request, sampled: SampledTurn) -> SampledTurn:
        requested_turn, ids = request.requested_turn, sampled.ids
        if requested_turn is None:
            return sampled
        count = len(ids)
        if requested_turn.max_tokens is not None and not request.episode.trains:
            count = min(count, requested_turn.max_tokens)

        def stops(length: int) -> bool:
            text = self._tokenizer.decode(ids[:length], skip_special_tokens=True)
            return any(stop in text for stop in requested_turn.stop)

        if requested_turn.stop and stops(count):
            count = bisect.bisect_left(range(count), True, key=stops)
        return sampled._replace(ids=ids[:count], logps=None if sampled.logps is None else sampled.logps[:count])

    def read_reply(
        self, request: Request, observation: Observation, text: str, ids: list[int], is_truncated: bool
    ) -> Turn:
        """Make the turn of a request from a text and its tokens, which lack its end if `is_truncated`."""
        return request.make_turn(
            self._tokenizer.decode(ids) if is_truncated else as_plain(text),
            observation.seen,
            observation=observation.content,
            prompt_ids=observation.ids,
            images=tuple(observation.images),
            completion_ids=ids,
            truncated=is_truncated,
        )

    def _calls(self, request: Request, prompt_ids: list[int], ids: list[int]) -> tuple[ToolCall, ...]:
        if not request.functions:
            return ()
        calls = parse_calls(self._tokenizer, ids, prompt_ids, self._template.schemas(request.functions))
        # In a team of one agent, a turn with a malformed call is final, as in `GRPOTrainer`
        if not calls and not self._is_lone and self._text_before_calls(ids) is not None:
            return (MALFORMED,)
        return calls

    @functools.cached_property
    def _reasoning(self) -> EarlierReasoning:
        return EarlierReasoning(self._template)

    @functools.cached_property
    def _call_pattern(self) -> re.Pattern | None:
        return call_pattern(self._tokenizer, self._template.source) if self.uses_tools else None

    def _text_before_calls(self, ids: list[int]) -> str | None:
        """Return the text before the tool calls, which is shown to teammates, or `None` if the turn has no calls."""
        text = self._tokenizer.decode(ids)
        found = self._call_pattern.search(text) if self._call_pattern is not None else None
        return None if found is None else text[: found.start()].rstrip()
