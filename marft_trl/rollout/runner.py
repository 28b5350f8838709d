# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Runs the workflow of a team: builds observations, generates turns and returns finished episodes."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from ..agents import AgentSpec
from ..episodes.collector import EpisodeError, Request, collect, collect_streams, unblocked
from ..episodes.live import Setting
from ..episodes.records import Completion, EndOfEpisode, Episode
from ..episodes.rerun import Rerun
from ..episodes.tools import ToolCall, ToolLimits, as_plain, tool_name
from ..system.event_loop import finished, run_coroutine
from ..system.randomness import EpisodeRandomness, UserRandomness, seed_of
from ..system.user_state import UserState
from ..weights.copies import PastCopies
from ..workflows import Workflow
from .generator import Generator, Sampled, StreamGenerator, check_sampled
from .prompts import Observation, PromptBuilder, Query
from .tool_calls import MALFORMED, call_pattern, parse_calls
from .views import team_view


# `await answering(requests, key)` turns requests into completions, in order
Answering = Callable[[Sequence[Request], tuple], Coroutine[Any, Any, Sequence[Completion | EndOfEpisode]]]


def place_of(request: Request, key: tuple) -> tuple:
    """Place of a turn in a run, the same for any number of processes. `key`: place of its episodes, see `next_key`."""
    return (*key[:-1], key[-1] + request.episode.index, request.number)


class EpisodeRunner:
    """
    Runs the workflow on dataset rows.

    Args:
        agents (`Sequence[AgentSpec]`): the team.
        workflow ([`Workflow`]): decides who acts next and what each sees.
        prompts ([`PromptBuilder`]): builds the observations of agents.
        generator ([`Generator`] or [`StreamGenerator`]): samples turns.
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
        seed (`int`, *optional*, defaults to `0`): seed of turns that servers sample.
        copies ([`PastCopies`], *optional*): past copies that opponents act with.
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec],
        workflow: Workflow,
        prompts: PromptBuilder,
        generator: Generator | StreamGenerator,
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
        seed: int = 0,
        copies: PastCopies | None = None,
    ):
        self._specs = {agent.name: agent for agent in agents}
        self.copies = copies
        self._workflow = workflow
        self.prompts, self.generator, self.randomness = prompts, generator, randomness
        self._tokenizer = tokenizer
        self._ends = tuple(ends)
        self._limits, self.uses_tools, self._vocabulary = limits, uses_tools, vocabulary
        self._aliases, self._patience, self._max_turns = dict(aliases or {}), patience, max_turns
        self._users = users or UserState({})
        self.options: dict[str, Any] = {}  # further options of the generator
        self._silent: frozenset[str] = frozenset()
        self._key: tuple = (seed,)  # what seeds of servers are made from, with the number of the run
        self._runs, self._rehearses, self._trains_beside = 0, False, False
        self._lock = threading.RLock()  # of what is not made for several threads: tokenizers, and TRL's use of them
        self.dropped_turns = 0  # number of turns not shown because they did not fit the model's window

    @property
    def streams(self) -> bool:
        """`True` if no episode waits for another one, because servers generate."""
        return getattr(self.generator, "streams", False) and not self._rehearses

    def publish(self, alone: bool = False) -> None:
        """Let servers, if there are any, have the present weights. `alone`: other processes do not call this."""
        if self.streams:
            cast(StreamGenerator, self.generator).publish(alone)

    def close(self) -> None:
        """Take from servers, if there are any, what they were given."""
        if self.streams:
            cast(StreamGenerator, self.generator).close()

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        answer: Answering | None = None,
        reruns: Sequence[Rerun] | None = None,
        failures: dict[int, EpisodeError] | None = None,
        first: int = 0,
    ) -> list[Episode]:
        """
        One finished episode for each row, see [`collect`]. The code of users runs on random states of its own.

        Args:
            rows (`Sequence[dict]`): dataset rows with a `prompt`.
            answer (`Callable`, *optional*): `await answer(requests, key)` turns requests into completions, in place
                of [`~EpisodeRunner.answer`].
            reruns (`Sequence[Rerun]`, *optional*): for each row, the recorded episode that is run again.
            failures (`dict[int, EpisodeError]`, *optional*): gets the errors of episodes that fail, while the others
                go on. If left out, the first error ends all.
            first (`int`, *optional*, defaults to `0`): position of the first row among those of all processes.
        """
        key = self.next_key(first)
        if not self.streams:
            return finished(self._run(rows, answer, reruns, failures, key))
        with self.randomness.theirs():
            return run_coroutine(self._run_streams, rows, answer, reruns, failures, key)

    async def run_again(
        self, rows: Sequence[dict[str, Any]], reruns: Sequence[Rerun], key: tuple, answer: Answering | None = None
    ) -> list[Episode]:
        """
        Run recorded episodes again, within [`~EpisodeRunner.run`].

        Args:
            rows (`Sequence[dict]`): their dataset rows.
            reruns (`Sequence[Rerun]`): the recorded episodes.
            key (`tuple`): place of the re-runs in the run.
            answer (`Callable`, *optional*): as in [`~EpisodeRunner.run`].
        """
        return await self._run(rows, answer, reruns, None, key)

    def next_key(self, first: int) -> tuple:
        """
        Place of the next run.

        Args:
            first (`int`): position of its first row among those of all processes, the last part of the place.
        """
        self._runs += 1
        return (*self._key, self._runs - 1, first)

    async def _run_streams(self, rows, answer, reruns, failures, key) -> list[Episode]:
        async with self.connected():
            return await self._run(rows, answer, reruns, failures, key)

    def _randomness_of(self, place: tuple) -> EpisodeRandomness:
        return EpisodeRandomness(seed_of(("users", *place)), is_beside=self._trains_beside)

    # ---- Episodes of servers, in an event loop of the caller's ----

    def in_background(self) -> EpisodeRunner:
        """A copy of this runner for a background thread. It does not touch the training thread's random states."""
        self.randomness.shares = True
        other = copy.copy(self)
        vars(other).update(options={}, dropped_turns=0, _trains_beside=True)
        return other

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Asynchronous context manager around [`~EpisodeRunner.stream`]."""
        async with cast(StreamGenerator, self.generator).connected(), unblocked(self._workflow, self._patience):
            yield

    async def stream(
        self, rows: Sequence[dict[str, Any]], failures: dict[int, EpisodeError] | None, key: tuple
    ) -> list[Episode]:
        """Like [`~EpisodeRunner.run`], with a key of [`~EpisodeRunner.next_key`]."""
        return await self._run(rows, None, None, failures, key)

    def pin(self) -> Any:
        """Weights that servers have now, see [`StreamGenerator`]."""
        return cast(StreamGenerator, self.generator).pin()

    def release(self, pin: Any) -> None:
        """Weights of [`~EpisodeRunner.pin`] are no longer used."""
        cast(StreamGenerator, self.generator).release(pin)

    def using(self, pin: Any) -> contextlib.AbstractContextManager[None]:
        """Context manager: turns are sampled from weights of [`~EpisodeRunner.pin`]."""
        return cast(StreamGenerator, self.generator).using(pin)

    async def _run(
        self,
        rows: Sequence[dict[str, Any]],
        answer: Answering | None,
        reruns: Sequence[Rerun] | None,
        failures: dict[int, EpisodeError] | None,
        key: tuple,
    ) -> list[Episode]:
        ask = answer or self.answer
        tools = {name: agent.functions for name, agent in self._specs.items() if agent.functions}
        scripts = {} if self._rehearses else {name: self._write for name, one in self._specs.items() if one.reply}
        draw = functools.partial(self._drawn, key)
        setting = Setting(tuple(self._specs), tools, self._limits, self._aliases, self._max_turns, scripts, draw)
        if self.streams:
            return await collect_streams(
                self._workflow,
                rows,
                setting,
                lambda asked: ask(asked, key),
                reruns,
                self._patience,
                failures,
                around=lambda index: self._randomness_of((*key[:-1], key[-1] + index)).active,
            )

        def answered(requests: Sequence[Request]) -> Sequence[Completion | EndOfEpisode]:
            with self.randomness.ours():
                return finished(ask(requests, key))

        with self.randomness.theirs():
            return collect(self._workflow, rows, setting, answered, reruns, self._patience, failures)

    def _drawn(self, key: tuple, index: int) -> Mapping[str, int]:
        """The past copies that agents act with in an episode of a run."""
        return self.copies.draw((*key[:-1], key[-1] + index)) if self.copies is not None else {}

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """
        Context manager: a rehearsal leaves random states and the state of users' objects as they are, and asks no
        server.
        """
        kept, state, runs = self.randomness, self._users.state_dict(), self._runs
        self.randomness, self._rehearses = UserRandomness(0, kept.device), True
        try:
            with self.randomness.theirs():
                yield
        finally:
            self.randomness, self._runs, self._rehearses = kept, runs, False
            self._users.load_state_dict(state)

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Context manager: what servers sample depends on this seed alone."""
        kept = self._key, self._runs
        self._key, self._runs = ("seeded", seed), 0
        try:
            yield
        finally:
            self._key, self._runs = kept

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {"runs": self._runs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._runs = state["runs"]

    def observe(self, queries: Iterable[Query | tuple]) -> list[Observation]:
        """Build observations. Views are users' code, so they run with the random states for users' code."""
        users = contextlib.nullcontext() if self._trains_beside else self.randomness.theirs()
        with self._lock, users:
            return self.prompts.build(queries)

    def query(self, request: Request) -> Query:
        """Return the inputs of the observation of a request."""
        agent = self._specs[request.agent]
        return Query(agent, request.episode.prompt, request.seen, request.functions, request.ask.after)

    async def answer(self, requests: Sequence[Request], key: tuple) -> list[Completion | EndOfEpisode]:
        """
        Completions for waiting requests: observe, generate, decode.

        Args:
            requests (`Sequence[Request]`): the requests.
            key (`tuple`): place of their episodes in the run.
        """
        undeclared = next((one for one in requests if one.functions and not self.uses_tools), None)
        if undeclared is not None:
            raise ValueError(
                f"The workflow `{type(self._workflow).__name__}` gives agent {undeclared.agent!r} tools "
                f"({', '.join(map(tool_name, undeclared.functions))}) that the trainer was not told of, so no calls "
                "would be read. Set its `functions` to what it passes as `tools=`."
            )
        if self.streams:
            views = [self.prompts.view, *(agent.view for agent in self._specs.values())]
            draws = any(view not in (None, team_view) for view in views)  # code of users may
            with requests[0].episode.around() if draws else contextlib.nullcontext():
                observations = self.observe(map(self.query, requests))
            completions = await self._stream_for(requests, observations, key)
        else:
            observations = self.observe(map(self.query, requests))
            completions = self._generate_for(requests, observations)
        with self._lock:
            completed = self._completed(requests, observations, completions)
        return [self._heard(request, one) for request, one in zip(requests, completed, strict=True)]

    @contextlib.contextmanager
    def silencing(self, *names: str) -> Iterator[None]:
        """Context manager: turns of these agents are empty, for teammates, environments and answers."""
        kept, self._silent = self._silent, frozenset(names)
        try:
            yield
        finally:
            self._silent = kept

    def _heard(self, request: Request, completion: Completion | EndOfEpisode) -> Completion | EndOfEpisode:
        if request.agent not in self._silent or isinstance(completion, EndOfEpisode):
            return completion
        return dataclasses.replace(completion, text="", raw_text="", tool_calls=(), without_calls=None)

    async def _write(self, request: Request) -> Completion | EndOfEpisode:
        """The completion of a request by the function of its agent (`AgentSpec.reply`)."""
        agent = self._specs[request.agent]
        function = cast(Callable, agent.reply)
        (observation,) = self.observe([self.query(request)])
        if observation.problem is not None:
            return EndOfEpisode(observation.problem)
        shown = observation.content
        messages = [{"role": "user", "content": shown}] if isinstance(shown, str) else copy.deepcopy(shown)
        try:
            text = await request.episode.write(function, messages)
        except Exception as error:
            raise RuntimeError(f"`reply` of agent {agent.name!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise TypeError(f"`reply` of agent {agent.name!r} must return the text of a turn, got {text!r}.")
        with self._lock:
            ids, is_cut = self.prompts.written(agent.name, text)
            text = self._tokenizer.decode(ids) if is_cut else as_plain(text)
        self.dropped_turns += observation.dropped
        completed = request.completed(
            text,
            observation.seen,
            observation=shown,
            prompt_ids=observation.ids,
            completion_ids=ids,
            truncated=is_cut,
        )
        return self._heard(request, completed)

    def _completed(
        self, requests: Sequence[Request], observations: Sequence[Observation], completions: Sequence[Sampled]
    ) -> list[Completion | EndOfEpisode]:
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
                sampled_by=sampled_by,
            )
            for request, text, observation, (ids, logps, sampled_by) in zip(
                requests, texts, observations, completions, strict=True
            )
        ]

    async def _stream_for(
        self, requests: Sequence[Request], observations: Sequence[Observation], key: tuple
    ) -> list[Sampled]:
        """Like [`~EpisodeRunner._generate_for`], each completion by itself."""
        generator = cast(StreamGenerator, self.generator)

        async def sample(place: int, request: Request, observation: Observation) -> Sampled:
            if observation.problem is not None:
                return Sampled([])
            its_key = (*place_of(request, key), place)
            options = {**self.options, **({"by_reference": True} if request.by_reference else {})}
            if request.agent in request.episode.copies:
                options["copy"] = request.episode.copies[request.agent]
            return await generator.sample(request.agent, observation.ids, its_key, **options)

        pairs = zip(requests, observations, strict=True)
        sampled = await asyncio.gather(*[sample(place, *pair) for place, pair in enumerate(pairs)])
        check_sampled(sampled, [request.agent for request in requests], self._vocabulary)
        return sampled

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
                drawn = [requests[index].episode.copies.get(requests[index].agent) for index in mine]
                options |= {"copies": drawn} if any(copy is not None for copy in drawn) else {}
                sampled = cast(Generator, self.generator).generate(agents, prompt_ids, **options)
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
        return call_pattern(self._tokenizer, self.prompts.template.source) if self.uses_tools else None

    def _before_calls(self, ids: list[int]) -> str | None:
        """Return the text before the tool calls, which is shown to teammates, or `None` if the turn has no calls."""
        text = self._tokenizer.decode(ids)
        found = self._call_pattern.search(text) if self._call_pattern is not None else None
        return None if found is None else text[: found.start()].rstrip()

    def _is_truncated(self, agent: str, ids: list[int]) -> bool:
        ends = (*self._ends, self._tokenizer.pad_token_id)
        return bool(ids) and ids[-1] not in ends and not self.generator.holds_stop(agent, ids)
