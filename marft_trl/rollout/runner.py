# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Run the workflow of a team: build observations, generate turns and return finished episodes."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from ..agents import AgentSpec
from ..config.team_setup import decoding
from ..episodes.collector import apply_time_limit, collect_async, limit_blocking_code, run_to_completion
from ..episodes.guard import EpisodeError
from ..episodes.records import (
    EndOfEpisode,
    Episode,
    Function,
    Messages,
    PromptError,
    Request,
    RequestedTurn,
    TeamContext,
    Turn,
)
from ..episodes.rerun import Rerun
from ..episodes.tools import ToolLimits, tool_name
from ..prompts.builder import Observation
from ..prompts.views import team_view
from ..system.event_loop import StepContext
from ..system.randomness import EpisodeRandomness, UserRandomness, UserState, make_seed
from ..system.watchdog import TimeLimit
from ..workflows import Workflow
from .generator import Generator, LiveTurn, SampledTurn, check_sampled
from .speaker import Speaker


# `await answer(requests, key)` returns one turn per request, in order
KeyedAnswerFunction = Callable[[Sequence[Request], tuple], Coroutine[Any, Any, Sequence[Turn | EndOfEpisode]]]


def turn_key(request: Request, key: tuple) -> tuple:
    """Return the key of a turn, from which its seed is made. It does not depend on the number of processes."""
    return (*key[:-1], key[-1] + request.episode.index, request.number)


class TurnListener(Protocol):
    """Receives the turns of one [`~EpisodeRunner.collect`] call. The event loop calls its methods."""

    def turn_started(self, request: Request, seed: int) -> LiveTurn:
        """Called before a turn is sampled with this seed. Returns the [`LiveTurn`] that receives the tokens."""

    def turn_ended(self, request: Request, turn: Turn | EndOfEpisode) -> None:
        """Called after a turn was sampled, or written by a `reply` function."""


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    tools: ToolLimits
    workflow_timeout: float | None = None  # seconds to wait for something that is neither a turn nor a tool
    max_turns: int | None = None


@dataclasses.dataclass(frozen=True)
class RunMode:
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further arguments of `Generator.generate`
    trains: bool = False  # whether the trainer trains on the turns
    is_rehearsal: bool = False  # with placeholder turns, and without servers
    is_concurrent: bool = False  # whether other threads or tasks use the random states of user code at the same time
    silent: frozenset[str] = frozenset()  # agents whose turns teammates, environments and the answer see as empty text
    listener: TurnListener | None = None  # receives turns while they are sampled


class SeedKeys:
    """Keys of runs, from which seeds are derived. All of them start with `base`."""

    def __init__(self, *base: Any):
        self._base, self._runs = base, 0

    def next(self, first: int) -> tuple:
        """Return the key of the next run. It ends with the index of the first row over all processes."""
        self._runs += 1
        return (*self._base, self._runs - 1, first)

    def state_dict(self) -> dict[str, Any]:
        return {"runs": self._runs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._runs = state["runs"]


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeSession:
    """Runs episodes in an event loop, for any number of its tasks. See [`EpisodeRunner.session`]."""

    runner: EpisodeRunner
    limit: TimeLimit | None  # of code that blocks the event loop

    async def run(
        self,
        rows: Sequence[dict[str, Any]],
        key: tuple,
        failures: dict[int, EpisodeError] | None = None,
        runner: EpisodeRunner | None = None,
    ) -> list[Episode]:
        """Like [`~EpisodeRunner.run`], with a key from [`~SeedKeys.next`], and a changed copy of the runner."""
        with apply_time_limit(self.limit):
            return await (runner or self.runner).collect(rows, key, failures=failures)


class EpisodeRunner:
    """Runs a workflow on dataset rows. Servers sample with `seed`. A rehearsal restores the state of `users`."""

    def __init__(
        self,
        agents: Sequence[AgentSpec],
        workflow: Workflow,
        speaker: Speaker,
        randomness: UserRandomness,
        limits: EpisodeLimits,
        users: UserState | None = None,
        seed: int = 0,
    ):
        self._specs = {agent.name: agent for agent in agents}
        self._tools = {agent.name: agent.functions for agent in agents if agent.tools is not None}
        self._workflow, self._reader, self._limits = workflow, speaker.reader, limits
        self._vocabulary, self.randomness = speaker.vocabulary, randomness
        self.prompts, self.generator = speaker.prompts, speaker.generator
        self._users = users or UserState({})
        self.mode, self.keys, self.uses_tools = RunMode(), SeedKeys(seed), speaker.reader.uses_tools
        self.sees_images = any(self.prompts.for_agent(agent.name).sees_images(agent.name) for agent in agents)
        self._first_observations: list[tuple[tuple, Observation | PromptError]] = []  # a cache
        self.device_lock = threading.RLock()  # held while the model generates
        self._tokenizer_lock = threading.RLock()  # for code that is not thread-safe: tokenizers, and TRL's use of them
        self.dropped_turns = 0  # turns left out of observations because they did not fit the context window

    def changed(
        self,
        mode: RunMode | None = None,
        *,
        randomness: UserRandomness | None = None,
        keys: SeedKeys | None = None,
        generator: Generator | None = None,
        workflow: Workflow | None = None,
        max_turns: int | None = None,
    ) -> EpisodeRunner:
        """Return a changed copy, which counts dropped turns from 0. `max_turns` can only lower the limit."""
        other = copy.copy(self)
        limits = [limit for limit in (max_turns, self._limits.max_turns) if limit is not None]
        vars(other).update(
            mode=mode or self.mode,
            keys=keys or self.keys,
            randomness=randomness or self.randomness,
            generator=generator or self.generator,
            dropped_turns=0,
            _first_observations=[],
            _workflow=workflow or self._workflow,
            _limits=dataclasses.replace(self._limits, max_turns=min(limits, default=None)),
        )
        return other

    @property
    def _has_user_views(self) -> bool:
        views = [self.prompts.view, *(agent.view for agent in self._specs.values())]
        return any(view not in (None, team_view) for view in views)

    @property
    def _batches_episodes(self) -> bool:
        """`True` if episodes wait for each other, so that their requests share batches."""
        return self.generator.batches or self.mode.is_rehearsal

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        answer: KeyedAnswerFunction | None = None,
        reruns: Sequence[Rerun] | None = None,
        failures: dict[int, EpisodeError] | None = None,
        first: int = 0,
    ) -> list[Episode]:
        """
        Run one episode for each row, with separate random states for user code. `failures` collects errors by row;
        without it, the first error stops all episodes. `first` is the index of the first row over all processes.
        """
        return self._run_sync(rows, self.keys.next(first), answer, reruns, failures)

    async def run_again(
        self,
        rows: Sequence[dict[str, Any]],
        reruns: Sequence[Rerun],
        key: tuple,
        answer: KeyedAnswerFunction | None = None,
    ) -> list[Episode]:
        """Re-run recorded episodes, from code within [`~EpisodeRunner.run`]."""
        if self._batches_episodes:  # waiting episodes must not use the random states of user code
            return self._run_sync(rows, key, answer, reruns)
        return await self.collect(rows, key, answer, reruns)

    def _run_sync(self, rows, key, answer=None, reruns=None, failures=None) -> list[Episode]:
        async def collected() -> list[Episode]:
            async with self._connected_servers():
                return await self.collect(rows, key, answer, reruns, failures)

        with self.randomness.user_states():
            return run_to_completion(self._workflow, self._limits.workflow_timeout, collected)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[EpisodeSession]:
        """Connect to the servers, for episodes in the caller's event loop."""
        limiting = limit_blocking_code(self._workflow, self._limits.workflow_timeout)
        async with self._connected_servers(), limiting as limit:
            yield EpisodeSession(self, limit)

    def _connected_servers(self) -> contextlib.AbstractAsyncContextManager[Any]:
        return contextlib.nullcontext() if self.mode.is_rehearsal else self.generator.connected()

    async def collect(
        self,
        rows: Sequence[dict[str, Any]],
        key: tuple,
        answer: KeyedAnswerFunction | None = None,
        reruns: Sequence[Rerun] | None = None,
        failures: dict[int, EpisodeError] | None = None,
    ) -> list[Episode]:
        """Run episodes within a session, or within a run of other episodes."""
        answer_requests = answer or self.answer

        async def answer_all(requests: Sequence[Request]) -> Sequence[Turn | EndOfEpisode]:
            with self.randomness.trainer_states() if self._batches_episodes else contextlib.nullcontext():
                return await answer_requests(requests, key)

        def make_step_context(index: int) -> StepContext:
            episode_key = (*key[:-1], key[-1] + index)
            return EpisodeRandomness(make_seed(("users", *episode_key)), is_concurrent=self.mode.is_concurrent).active

        return await collect_async(
            self._workflow,
            rows,
            self._team_context(),
            answer_all,
            reruns,
            self._limits.workflow_timeout,
            failures,
            make_step_context=None if self._batches_episodes else make_step_context,
            together=self._batches_episodes,
        )

    def _team_context(self) -> TeamContext:
        is_rehearsal = self.mode.is_rehearsal
        scripts = {} if is_rehearsal else {name: self._run_reply for name, spec in self._specs.items() if spec.reply}
        return TeamContext(
            tuple(self._specs),
            self._tools,
            self._limits.tools,
            self.prompts.aliases,
            self._limits.max_turns,
            scripts,
            self.mode.trains and not is_rehearsal,
            self.count_tokens,
            self.sees_images,
        )

    def count_tokens(self, agent: str, messages: Messages, tools: Sequence[Function] = ()) -> int:
        """Count the tokens an agent is shown. Raises `PromptError` if they do not fit or cannot be rendered."""
        request = Request(Episode(messages, {}, 0), agent, (), tuple(tools), requested_turn=RequestedTurn(messages))
        with self._tokenizer_lock:
            (observation,) = self.prompts.build([request])
        return len(observation.ids)

    @contextlib.contextmanager
    def rehearsal_runner(self) -> Iterator[EpisodeRunner]:
        """Yield a runner that calls no server, and restore random states and user objects at the end."""
        state, randomness = self._users.state_dict(), UserRandomness(0, self.randomness.device)
        mode = dataclasses.replace(self.mode, is_rehearsal=True)
        try:
            with randomness.user_states():
                yield self.changed(mode, randomness=randomness, keys=SeedKeys(0))
        finally:
            self._users.load_state_dict(state)

    def observe(self, requests: Iterable[Request]) -> list[Observation]:
        """Build observations. Views are user code, so they run with the random states of user code."""
        user_states = contextlib.nullcontext() if self.mode.is_concurrent else self.randomness.user_states()
        with self._tokenizer_lock, user_states:
            if self.mode.listener is None:
                return self.prompts.build(requests)
            return list(map(self._observe_cached, requests))

    def _observe_cached(self, request: Request) -> Observation:
        """Return an observation. First ones are cached, since all samples of a question share them."""
        if request.seen:
            return self.prompts.build([request])[0]
        messages = request.requested_turn.messages if request.requested_turn is not None else None
        shown = (request.agent, request.episode.prompt, request.functions, messages)
        if (cached := next((value for key, value in self._first_observations if key == shown), None)) is None:
            try:
                (cached,) = self.prompts.build([request])
            except PromptError as error:
                cached = error
            self._first_observations.append((shown, cached))
        if isinstance(cached, PromptError):
            raise cached
        return copy.copy(cached)

    async def _run_locked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that tokenizes under a lock, and with a listener in another thread."""

        def locked() -> Any:
            with self._tokenizer_lock:
                return function(*arguments)

        return locked() if self.mode.listener is None else await asyncio.to_thread(locked)

    async def answer(self, requests: Sequence[Request], key: tuple) -> list[Turn | EndOfEpisode]:
        undeclared = next((request for request in requests if request.functions and not self.uses_tools), None)
        if undeclared is not None:
            raise ValueError(
                f"The workflow `{type(self._workflow).__name__}` passes undeclared tools to agent "
                f"{undeclared.agent!r} ({', '.join(map(tool_name, undeclared.functions))}), so calls of these tools "
                "would not be parsed. List all functions that the workflow passes as `tools=` in its `functions`."
            )
        if self._has_user_views:  # views may draw random numbers
            with contextlib.nullcontext() if self._batches_episodes else requests[0].episode.step_context():
                observations = self.observe(requests)
        else:
            observations = await self._run_locked(self.observe, requests)
        sampled = await self._sample(requests, observations, key)
        self.dropped_turns += sum(observation.dropped for observation in observations)
        turns = await self._run_locked(self._reader.read_samples, requests, observations, sampled, self.generator)
        return [self._finish_turn(*pair) for pair in zip(requests, turns, strict=True)]

    async def _sample(
        self, requests: Sequence[Request], observations: Sequence[Observation], key: tuple
    ) -> list[SampledTurn]:
        """Sample tokens for each request. There are none for a request whose episode ends instead."""
        mode, listener = self.mode, self.mode.listener

        sampled_by_index: dict[int, SampledTurn] = {}
        groups: dict[tuple, list[int]] = {}  # by sampling settings of requests, which training ignores
        for index, (request, observation) in enumerate(zip(requests, observations, strict=True)):
            if observation.problem is not None:
                continue
            observation.agent, observation.by_reference = request.agent, request.by_reference
            observation.key = (*turn_key(request, key), index)
            if listener is not None:
                observation.live = listener.turn_started(request, make_seed(observation.key))
            requested_turn = request.requested_turn
            own = tuple(requested_turn.sampling.items()) if requested_turn and not mode.trains else ()
            groups.setdefault(own, []).append(index)
        for sampling, indices in groups.items():
            options, group = dict(mode.options), [observations[index] for index in indices]
            if sampling:
                options |= decoding(dict(sampling))
            sampled = await self.generator.generate(group, **options)
            check_sampled(sampled, [observation.agent for observation in group], self._vocabulary)
            sampled_by_index |= zip(indices, sampled, strict=True)
        return [sampled_by_index.get(index, SampledTurn([])) for index in range(len(requests))]

    def _finish_turn(self, request: Request, turn: Turn | EndOfEpisode) -> Turn | EndOfEpisode:
        if self.mode.listener is not None:
            self.mode.listener.turn_ended(request, turn)
        if request.agent not in self.mode.silent or isinstance(turn, EndOfEpisode):
            return turn
        return dataclasses.replace(turn, text="", raw_text="", tool_calls=(), without_calls=None, audience=None)

    async def _run_reply(self, request: Request) -> Turn | EndOfEpisode:
        agent = self._specs[request.agent]
        function = cast(Callable, agent.reply)
        observe = functools.partial(self.observe, [request])
        (observation,) = observe() if self._has_user_views else await self._run_locked(observe)
        if observation.problem is not None:
            return EndOfEpisode(observation.problem, observation.is_too_long)
        content = observation.content
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else copy.deepcopy(content)
        try:
            text = await request.episode.write(function, messages)
        except Exception as error:
            raise RuntimeError(f"`reply` of agent {agent.name!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise TypeError(f"`reply` of agent {agent.name!r} must return a string, got {text!r}.")
        tokenize = self.prompts.for_agent(agent.name).tokenize_reply
        ids, is_truncated = await self._run_locked(tokenize, agent.name, text)
        turn = await self._run_locked(self._reader.read_reply, request, observation, text, ids, is_truncated)
        self.dropped_turns += observation.dropped
        return self._finish_turn(request, turn)
