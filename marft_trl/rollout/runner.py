# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Runs the workflow of a team: builds observations, generates turns and returns finished episodes."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..agents import AgentSpec
from ..episodes.collector import EpisodeError, Request, collect
from ..episodes.live import Setting
from ..episodes.records import Completion, EndOfEpisode, Episode
from ..episodes.rerun import Rerun
from ..randomness import UserRandomness
from ..tools import ToolCall, ToolLimits, tool_name
from ..workflows import Workflow
from .generator import Generator, Sampled, check_sampled
from .prompts import Observation, PromptBuilder, Query
from .tool_calls import MALFORMED, call_pattern, parse_calls
from .user_state import UserState


class EpisodeRunner:
    """
    Runs the workflow on dataset rows.

    Args:
        agents (`Sequence[AgentSpec]`): the team.
        workflow ([`Workflow`]): decides who acts next and what each sees.
        prompts ([`PromptBuilder`]): builds the observations of agents.
        generator ([`Generator`]): samples turns.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): decodes turns.
        ends (`Sequence[int]`): ids of the tokens that end a turn.
        randomness ([`UserRandomness`]): random states of workflows, environments, tools and views.
        limits ([`ToolLimits`]): limits of tool calls.
        uses_tools (`bool`): `True` if the tokenizer was prepared for tools.
        aliases (`Mapping[str, str]`): names that agents are shown of one another, if they differ from their own.
        patience (`float`, *optional*): maximum time in seconds that a workflow may wait for something that is
            neither a turn nor a tool.
        max_turns (`int`, *optional*): largest number of turns of an episode.
        vocabulary (`int`, *optional*): number of token ids of the model.
        users ([`UserState`], *optional*): state of users' objects, which a rehearsal leaves as it is.
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec],
        workflow: Workflow,
        prompts: PromptBuilder,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        randomness: UserRandomness,
        limits: ToolLimits,
        uses_tools: bool = False,
        aliases: Mapping[str, str] | None = None,
        patience: float | None = None,
        max_turns: int | None = None,
        vocabulary: int | None = None,
        users: UserState | None = None,
    ):
        self._specs = {agent.name: agent for agent in agents}
        self._workflow = workflow
        self.prompts, self.generator, self.randomness = prompts, generator, randomness
        self._tokenizer = tokenizer
        self._ends = tuple(ends)
        self._limits, self._uses_tools, self._vocabulary = limits, uses_tools, vocabulary
        self._aliases, self._patience, self._max_turns = dict(aliases or {}), patience, max_turns
        self._users = users or UserState({})
        self.options: dict[str, Any] = {}  # further options of the generator
        self.dropped_turns = 0  # number of turns not shown because they did not fit the model's window

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        answer: Callable[[Sequence[Request]], Sequence[Completion | EndOfEpisode]] | None = None,
        reruns: Sequence[Rerun] | None = None,
        failures: dict[int, EpisodeError] | None = None,
    ) -> list[Episode]:
        """
        One finished episode for each row, see [`collect`]. The code of users runs on random states of its own.

        Args:
            rows (`Sequence[dict]`): dataset rows with a `prompt`.
            answer (`Callable`, *optional*): turns requests into completions, in place of [`~EpisodeRunner.answer`].
            reruns (`Sequence[Rerun]`, *optional*): for each row, the recorded episode that is run again.
            failures (`dict[int, EpisodeError]`, *optional*): gets the errors of episodes that fail, while the others
                go on. If left out, the first error ends all.
        """
        answer = answer or self.answer
        tools = {name: agent.functions for name, agent in self._specs.items() if agent.functions}
        setting = Setting(tuple(self._specs), tools, self._limits, self._aliases, self._max_turns)

        def answered(requests: Sequence[Request]) -> Sequence[Completion | EndOfEpisode]:
            with self.randomness.ours():
                return answer(requests)

        with self.randomness.theirs():
            return collect(self._workflow, rows, setting, answered, reruns, self._patience, failures)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Context manager: a rehearsal leaves random states and the state of users' objects as they are."""
        kept, state = self.randomness, self._users.state_dict()
        self.randomness = UserRandomness(0, kept.device)
        try:
            with self.randomness.theirs():
                yield
        finally:
            self.randomness = kept
            self._users.load_state_dict(state)

    def observe(self, queries: Iterable[Query | tuple]) -> list[Observation]:
        """Build observations. Views are users' code, so they run with the random states for users' code."""
        with self.randomness.theirs():
            return self.prompts.build(queries)

    def query(self, request: Request) -> Query:
        """Return the inputs of the observation of a request."""
        agent = self._specs[request.agent]
        return Query(agent, request.episode.prompt, request.seen, request.functions, request.ask.after)

    def answer(self, requests: Sequence[Request]) -> list[Completion | EndOfEpisode]:
        """Completions for all waiting requests: observe, generate, decode."""
        undeclared = next((one for one in requests if one.functions and not self._uses_tools), None)
        if undeclared is not None:
            raise ValueError(
                f"The workflow `{type(self._workflow).__name__}` gives agent {undeclared.agent!r} tools "
                f"({', '.join(map(tool_name, undeclared.functions))}) that the trainer was not told of, so no calls "
                "would be read. Set its `functions` to what it passes as `tools=`."
            )
        observations = self.observe(map(self.query, requests))
        completions = self._generate_for(requests, observations)
        texts = self._tokenizer.batch_decode([sampled.ids for sampled in completions], skip_special_tokens=True)
        self.dropped_turns += sum(observation.dropped for observation in observations)
        return [
            EndOfEpisode(observation.problem)
            if observation.problem is not None
            else request.completed(
                text,
                observation.seen,
                observation=observation.content,
                prompt_ids=observation.ids,
                completion_ids=ids,
                raw_text=self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._ends else ids),
                truncated=self._is_truncated(request.agent, ids),
                tool_calls=self._calls(request, observation.ids, ids),
                without_calls=self._before_calls(ids) if request.functions else None,
                logps=logps,
            )
            for request, text, observation, (ids, logps) in zip(
                requests, texts, observations, completions, strict=True
            )
        ]

    def _generate_for(self, requests: Sequence[Request], observations: Sequence[Observation]) -> list[Sampled]:
        """Sample a completion for each request. It is empty if the episode of the request ends instead."""
        completions: list[Sampled] = [Sampled([]) for _ in requests]
        for by_reference in (False, True):
            mine = [
                index
                for index, (request, observation) in enumerate(zip(requests, observations, strict=True))
                if request.by_reference == by_reference and observation.problem is None
            ]
            if mine:
                prompt_ids = [observations[index].ids for index in mine]
                options = {**self.options, **({"by_reference": True} if by_reference else {})}
                agents = [requests[index].agent for index in mine]
                sampled = self.generator.generate(agents, prompt_ids, **options)
                check_sampled(sampled, agents, self._vocabulary)
                for index, its in zip(mine, sampled, strict=True):
                    completions[index] = its
        return completions

    def _calls(self, request: Request, prompt_ids: list[int], ids: list[int]) -> tuple[ToolCall, ...]:
        if not request.functions or self._is_truncated(request.agent, ids):
            return ()
        calls = parse_calls(self._tokenizer, ids, prompt_ids, self.prompts.template.schemas(request.functions))
        is_lone = len(self._specs) == 1  # then a malformed call is the final turn, as in `GRPOTrainer`
        if not calls and not is_lone and self._before_calls(ids) is not None:
            return (MALFORMED,)
        return calls

    @functools.cached_property
    def _call_pattern(self) -> re.Pattern | None:
        return call_pattern(self._tokenizer, self.prompts.template.source) if self._uses_tools else None

    def _before_calls(self, ids: list[int]) -> str | None:
        """Return the text before the tool calls, which is shown to teammates, or `None` if the turn has no calls."""
        text = self._tokenizer.decode(ids)
        found = self._call_pattern.search(text) if self._call_pattern is not None else None
        return None if found is None else text[: found.start()].rstrip()

    def _is_truncated(self, agent: str, ids: list[int]) -> bool:
        ends = (*self._ends, self._tokenizer.pad_token_id)
        return bool(ids) and ids[-1] not in ends and not self.generator.holds_stop(agent, ids)
