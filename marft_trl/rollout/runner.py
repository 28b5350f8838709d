# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Runs the workflow of a team: builds observations, generates turns and returns finished episodes."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from ..adapters.copies import PastCopies
from ..agents import AgentSpec
from ..config.team_setup import decoding
from ..episodes.collector import Request, collecting, limited_by, limiting, run_unblocked
from ..episodes.guard import EpisodeError
from ..episodes.records import Completion, EndOfEpisode, Episode, PromptError, TeamContext
from ..episodes.rerun import Rerun
from ..episodes.tools import ToolLimits, tool_name
from ..prompts.builder import Observation, PromptBuilder, Query
from ..prompts.views import team_view
from ..system.event_loop import StepContext
from ..system.randomness import EpisodeRandomness, UserRandomness, UserState, seed_of
from ..workflows import Workflow
from .generator import Generator, LiveTurn, Observed, Sampled, check_sampled
from .turn_reader import TurnReader


# `await answering(requests, key)` turns requests into completions, in order
Answering = Callable[[Sequence[Request], tuple], Coroutine[Any, Any, Sequence[Completion | EndOfEpisode]]]


def place_of(request: Request, key: tuple) -> tuple:
    """Place of a turn in a run, the same for any number of processes. `key`: of its episodes, see [`RunKeys`]."""
    return (*key[:-1], key[-1] + request.episode.index, request.number)


class Follower(Protocol):
    """Follows the turns of one call of [`~EpisodeRunner.collect`]. Its methods are called in the event loop."""

    def begins(self, request: Request, seed: int) -> LiveTurn:
        """A turn is to be sampled, from a seed. Returns who follows it."""

    def ended(self, request: Request, completion: Completion | EndOfEpisode) -> None:
        """A turn was sampled, or written by a function."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """
    Limits of an episode.

    Args:
        tools ([`ToolLimits`]): of tool calls.
        patience (`float`, *optional*): maximum time in seconds that a workflow may wait for something that is neither
            a turn nor a tool (`workflow_timeout`).
        max_turns (`int`, *optional*): largest number of turns.
        vocabulary (`int`, *optional*): number of token ids of the model.
    """

    tools: ToolLimits
    patience: float | None = None
    max_turns: int | None = None
    vocabulary: int | None = None


@dataclasses.dataclass(frozen=True)
class RunMode:
    """
    What episodes are run for.

    Args:
        options (`Mapping[str, Any]`, *optional*): further options of the generator.
        trains (`bool`, *optional*, defaults to `False`): whether turns are trained on.
        rehearses (`bool`, *optional*, defaults to `False`): whether turns are made up, and no server is asked.
        next_to_training (`bool`, *optional*, defaults to `False`): whether other threads or tasks use the random
            states of users' code meanwhile.
        silent (`frozenset[str]`, *optional*): agents whose turns are empty for teammates, environments and answers.
        follower ([`Follower`], *optional*): is told of turns while they are sampled.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trains: bool = False
    rehearses: bool = False
    next_to_training: bool = False
    silent: frozenset[str] = frozenset()
    follower: Follower | None = None


class RunKeys:
    """
    Places of runs, from which seeds are made.

    Args:
        base: what the places begin with.
    """

    def __init__(self, *base: Any):
        self._base, self._runs = base, 0

    def next(self, first: int) -> tuple:
        """
        Place of the next run.

        Args:
            first (`int`): position of its first row among those of all processes, the last part of the place.
        """
        self._runs += 1
        return (*self._base, self._runs - 1, first)

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {"runs": self._runs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._runs = state["runs"]


class EpisodeRunner:
    """
    Runs the workflow on dataset rows.

    Args:
        prompts ([`PromptBuilder`]): builds the observations of agents.
        reader ([`TurnReader`]): makes turns of sampled tokens.
        randomness ([`UserRandomness`]): random states of workflows, environments, tools and views.
        users ([`UserState`], *optional*): state of users' objects, which a rehearsal leaves as it is.
        seed (`int`, *optional*, defaults to `0`): seed of turns that servers sample.
        mode ([`RunMode`], *optional*): what episodes are run for. [`~EpisodeRunner.changed`] makes a runner with
            another one.

    Attributes:
        dropped_turns (`int`): number of turns that were not shown because they did not fit the model's window.
        device (`threading.RLock`): held while a model acts.
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec],
        workflow: Workflow,
        prompts: PromptBuilder,
        generator: Generator,
        reader: TurnReader,
        randomness: UserRandomness,
        limits: Limits,
        users: UserState | None = None,
        seed: int = 0,
        copies: PastCopies | None = None,
        mode: RunMode | None = None,
    ):
        self._specs = {agent.name: agent for agent in agents}
        self._workflow, self._reader, self._limits, self.copies = workflow, reader, limits, copies
        self.prompts, self.generator, self.randomness = prompts, generator, randomness
        self._users = users or UserState({})
        self.mode, self.keys = mode or RunMode(), RunKeys(seed)
        self._begun: list[tuple[Query, Observation | PromptError]] = []  # first observations of a question
        self.device = threading.RLock()
        self._lock = threading.RLock()  # of what is not made for several threads: tokenizers, and TRL's use of them
        self.dropped_turns = 0

    def changed(
        self,
        mode: RunMode | None = None,
        *,
        randomness: UserRandomness | None = None,
        keys: RunKeys | None = None,
        generator: Generator | None = None,
        workflow: Workflow | None = None,
        max_turns: int | None = None,
    ) -> EpisodeRunner:
        """
        A runner of the same team, which differs in what is given. It counts its own dropped turns.

        Args:
            max_turns (`int`, *optional*): largest number of turns, where it is below that of the team.
        """
        other = copy.copy(self)
        limits = [limit for limit in (max_turns, self._limits.max_turns) if limit is not None]
        vars(other).update(
            mode=mode or self.mode,
            keys=keys or self.keys,
            randomness=randomness or self.randomness,
            generator=generator or self.generator,
            dropped_turns=0,
            _begun=[],
            _workflow=workflow or self._workflow,
            _limits=dataclasses.replace(self._limits, max_turns=min(limits, default=None)),
        )
        return other

    @property
    def uses_tools(self) -> bool:
        """`True` if the tokenizer was prepared for tools."""
        return self._reader.uses_tools

    @property
    def _shows_views(self) -> bool:
        """`True` if code of users makes observations."""
        views = [self.prompts.view, *(agent.view for agent in self._specs.values())]
        return any(view not in (None, team_view) for view in views)

    @property
    def _waits(self) -> bool:
        """`True` if episodes wait for one another, to be asked together."""
        return self.generator.batches or self.mode.rehearses

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
            answer (`Callable`, *optional*): `await answer(requests, key)` turns requests into completions, in place
                of [`~EpisodeRunner.answer`].
            reruns (`Sequence[Rerun]`, *optional*): for each row, the recorded episode that is run again.
            failures (`dict[int, EpisodeError]`, *optional*): gets the errors of episodes that fail, while the others
                go on. If left out, the first error ends all.
            first (`int`, *optional*, defaults to `0`): position of the first row among those of all processes.
        """
        return self._run_here(rows, self.keys.next(first), answer, reruns, failures)

    async def run_again(
        self, rows: Sequence[dict[str, Any]], reruns: Sequence[Rerun], key: tuple, answer: Answering | None = None
    ) -> list[Episode]:
        """
        Run recorded episodes again, within [`~EpisodeRunner.run`].

        Args:
            key (`tuple`): place of the re-runs in the run.
        """
        if self._waits:  # on the random states of users, which the waiting episodes must not draw from meanwhile
            return self._run_here(rows, key, answer, reruns)
        return await self.collect(rows, key, answer, reruns)

    def _run_here(self, rows, key, answer=None, reruns=None, failures=None) -> list[Episode]:
        async def collected() -> list[Episode]:
            async with self._servers():
                return await self.collect(rows, key, answer, reruns, failures)

        with self.randomness.theirs():
            return run_unblocked(self._workflow, self._limits.patience, collected)

    # ---- Episodes in an event loop of the caller's ----

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Asynchronous context manager around [`~EpisodeRunner.collect`]."""
        async with self.open() as within:
            with within():
                yield

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Callable[[], contextlib.AbstractContextManager[None]]]:
        """
        Like [`~EpisodeRunner.connected`], for episodes of several tasks of the event loop. Gives what makes the
        context manager around each call of [`~EpisodeRunner.collect`].
        """
        async with self._servers(), limiting(self._workflow, self._limits.patience) as limit:
            yield functools.partial(limited_by, limit)

    def _servers(self) -> contextlib.AbstractAsyncContextManager[Any]:
        return contextlib.nullcontext() if self.mode.rehearses else self.generator.connected()

    async def collect(
        self,
        rows: Sequence[dict[str, Any]],
        key: tuple,
        answer: Answering | None = None,
        reruns: Sequence[Rerun] | None = None,
        failures: dict[int, EpisodeError] | None = None,
    ) -> list[Episode]:
        """Like [`~EpisodeRunner.run`], with a key of [`~RunKeys.next`]."""
        ask, patience = answer or self.answer, self._limits.patience

        async def answered(requests: Sequence[Request]) -> Sequence[Completion | EndOfEpisode]:
            with self.randomness.ours() if self._waits else contextlib.nullcontext():
                return await ask(requests, key)

        def around(index: int) -> StepContext:
            place = (*key[:-1], key[-1] + index)
            return EpisodeRandomness(seed_of(("users", *place)), is_beside=self.mode.next_to_training).active

        return await collecting(
            self._workflow,
            rows,
            self._setting(key),
            answered,
            reruns,
            patience,
            failures,
            around=None if self._waits else around,
            together=self._waits,
        )

    def _setting(self, key: tuple) -> TeamContext:
        tools = {name: agent.functions for name, agent in self._specs.items() if agent.functions}
        rehearses = self.mode.rehearses
        scripts = {} if rehearses else {name: self._write for name, spec in self._specs.items() if spec.reply}
        limits, aliases = self._limits, self.prompts.aliases
        draw = functools.partial(self._drawn, key)
        trains = self.mode.trains and not rehearses
        return TeamContext(tuple(self._specs), tools, limits.tools, aliases, limits.max_turns, scripts, draw, trains)

    def _drawn(self, key: tuple, index: int) -> Mapping[str, int]:
        """The past copies that agents act with in an episode of a run."""
        return self.copies.draw((*key[:-1], key[-1] + index)) if self.copies is not None else {}

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[EpisodeRunner]:
        """
        Context manager: a runner for a rehearsal, which leaves random states and the state of users' objects as they
        are, and asks no server.
        """
        state, randomness = self._users.state_dict(), UserRandomness(0, self.randomness.device)
        mode = dataclasses.replace(self.mode, rehearses=True)
        try:
            with randomness.theirs():
                yield self.changed(mode, randomness=randomness, keys=RunKeys(0))
        finally:
            self._users.load_state_dict(state)

    def observe(self, queries: Iterable[Query | tuple]) -> list[Observation]:
        """Build observations. Views are users' code, so they run with the random states for users' code."""
        users = contextlib.nullcontext() if self.mode.next_to_training else self.randomness.theirs()
        with self._lock, users:
            return self.prompts.build(queries) if self.mode.follower is None else list(map(self._observed, queries))

    def _observed(self, query: Query | tuple) -> Observation:
        """The observation of a query. Several answers to a question begin with the same one, which is built once."""
        asked = Query(*query)
        if asked.seen:
            return self.prompts.build([asked])[0]
        if (same := next((found for known, found in self._begun if known == asked), None)) is None:
            try:
                (same,) = self.prompts.build([asked])
            except PromptError as error:
                same = error
            self._begun.append((asked, same))
        if isinstance(same, PromptError):
            raise same
        return copy.copy(same)

    async def _unblocked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call what tokenizes. In an event loop that others wait for, it is called in a thread."""

        def locked() -> Any:
            with self._lock:
                return function(*arguments)

        return locked() if self.mode.follower is None else await asyncio.to_thread(locked)

    def query(self, request: Request) -> Query:
        """Return the inputs of the observation of a request."""
        agent = self._specs[request.agent]
        messages = request.given.messages if request.given is not None else None
        return Query(agent, request.episode.prompt, request.seen, request.functions, request.ask.after, messages)

    async def answer(self, requests: Sequence[Request], key: tuple) -> list[Completion | EndOfEpisode]:
        """
        Completions for waiting requests: observe, generate, decode.

        Args:
            key (`tuple`): place of their episodes in the run.
        """
        undeclared = next((value for value in requests if value.functions and not self.uses_tools), None)
        if undeclared is not None:
            raise ValueError(
                f"The workflow `{type(self._workflow).__name__}` gives agent {undeclared.agent!r} tools "
                f"({', '.join(map(tool_name, undeclared.functions))}) that the trainer was not told of, so no calls "
                "would be read. Set its `functions` to what it passes as `tools=`."
            )
        queries = list(map(self.query, requests))
        if self._shows_views:  # which may draw
            with contextlib.nullcontext() if self._waits else requests[0].episode.around():
                observations = self.observe(queries)
        else:
            observations = await self._unblocked(self.observe, queries)
        sampled = await self._sample(requests, observations, key)
        self.dropped_turns += sum(observation.dropped for observation in observations)
        completed = await self._unblocked(self._reader.sampled, requests, observations, sampled, self.generator)
        return [self._audible(request, item) for request, item in zip(requests, completed, strict=True)]

    async def _sample(
        self, requests: Sequence[Request], observations: Sequence[Observation], key: tuple
    ) -> list[Sampled]:
        """A completion for each request. It is empty if the episode of the request ends instead."""
        mode, follower = self.mode, self.mode.follower

        def observed(index: int, request: Request, observation: Observation) -> Observed:
            place, its_copy = (*place_of(request, key), index), request.episode.copies.get(request.agent)
            live = follower.begins(request, seed_of(place)) if follower is not None else None
            return Observed(request.agent, observation.ids, place, request.by_reference, its_copy, live)

        asked = {
            index: observed(index, request, observation)
            for index, (request, observation) in enumerate(zip(requests, observations, strict=True))
            if observation.problem is None
        }
        found: dict[int, Sampled] = {}
        kinds: dict[tuple, list[int]] = {}  # other programs may ask for settings of their own, but not in training
        for index in asked:
            given = requests[index].given
            kinds.setdefault(tuple(given.sampling.items()) if given and not mode.trains else (), []).append(index)
        for kind, indices in kinds.items():
            options, some = {**mode.options, **decoding(dict(kind))}, [asked[index] for index in indices]
            sampled = await self.generator.generate(some, **options)
            check_sampled(sampled, [item.agent for item in some], self._limits.vocabulary)
            found |= zip(indices, sampled, strict=True)
        return [found.get(index, Sampled([])) for index in range(len(requests))]

    def _audible(self, request: Request, completion: Completion | EndOfEpisode) -> Completion | EndOfEpisode:
        """A completion, without its text if its agent is silent."""
        if self.mode.follower is not None:
            self.mode.follower.ended(request, completion)
        if request.agent not in self.mode.silent or isinstance(completion, EndOfEpisode):
            return completion
        return dataclasses.replace(completion, text="", raw_text="", tool_calls=(), without_calls=None)

    async def _write(self, request: Request) -> Completion | EndOfEpisode:
        """The completion of a request by the function of its agent (`AgentSpec.reply`)."""
        agent = self._specs[request.agent]
        function = cast(Callable, agent.reply)
        query = [self.query(request)]
        (observation,) = self.observe(query) if self._shows_views else await self._unblocked(self.observe, query)
        if observation.problem is not None:
            return EndOfEpisode(observation.problem, observation.is_too_long)
        shown = observation.content
        messages = [{"role": "user", "content": shown}] if isinstance(shown, str) else copy.deepcopy(shown)
        try:
            text = await request.episode.write(function, messages)
        except Exception as error:
            raise RuntimeError(f"`reply` of agent {agent.name!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise TypeError(f"`reply` of agent {agent.name!r} must return the text of a turn, got {text!r}.")
        ids, is_cut = await self._unblocked(self.prompts.written, agent.name, text)
        completed = await self._unblocked(self._reader.written, request, observation, text, ids, is_cut)
        self.dropped_turns += observation.dropped
        return self._audible(request, completed)
