# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Episodes of a team in an event loop: many questions at a time, whose turns are sampled together."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..episodes.records import Episode
from ..rollout.generator import Generator
from ..rollout.runner import EpisodeRunner
from ..workflows import Workflow
from .events import Answer, Event, Narrator


@dataclass(frozen=True)
class Ask:
    """
    What a team is asked, and how.

    Args:
        rows (`Sequence[dict]`): dataset rows with a `prompt`. Each gives an episode.
        seed (`int`): answers depend on it, and not on what is answered beside them.
        options (`Mapping[str, Any]`): options of the generator: `greedy`, or `sampling`.
        workflow ([`Workflow`], *optional*): in place of that of the team.
        max_tokens (`int`, *optional*): largest number of tokens of a turn, where it is below that of its agent.
        max_turns (`int`, *optional*): largest number of turns of an episode.
    """

    rows: Sequence[dict[str, Any]]
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    workflow: Workflow | None = None
    max_tokens: int | None = None
    max_turns: int | None = None


class _Connection:
    """What the tasks of an event loop use together."""

    def __init__(self) -> None:
        self.users = 0
        self.opening = asyncio.Lock()
        self.stack = contextlib.AsyncExitStack()
        self.within: Callable[[], contextlib.AbstractContextManager[None]] | None = None


class LiveTeam:
    """
    Runs episodes of a team in the caller's event loop. Any number may run at the same time, in any number of tasks;
    they wait for one another only in so far as the model or the servers do.

    Args:
        runner ([`EpisodeRunner`]): of the team.
        generator ([`Generator`]): samples turns of episodes that do not wait for one another.
    """

    def __init__(self, runner: EpisodeRunner, generator: Generator):
        self._runner, self._generator = runner, generator
        self.running = 0  # number of asks under way
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection]
        self._connections = weakref.WeakKeyDictionary()

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Callable[[], contextlib.AbstractContextManager[None]]]:
        """
        Asynchronous context manager: connections to servers, or the thread of the model, are kept. Without it, they
        are made for each call of [`~LiveTeam.run`] that finds none.
        """
        loop = asyncio.get_running_loop()
        connection = self._connections.setdefault(loop, _Connection())
        connection.users += 1
        try:
            async with connection.opening:
                if connection.within is None:
                    runner = self._runner.live(self._generator, {})
                    self._generator.publish(alone=True)
                    connection.within = await connection.stack.enter_async_context(runner.open())
            yield connection.within
        finally:
            connection.users -= 1
            if not connection.users:
                self._connections.pop(loop, None)
                await connection.stack.aclose()

    async def run(self, ask: Ask, tell: Callable[[Event], None] | None = None) -> list[Episode]:
        """
        Finished episodes, in order.

        Args:
            ask ([`Ask`]): the questions. Cancel the task to end them: their turns end with the next token.
            tell (`Callable[[Event], None]`, *optional*): is told what happens, of an ask with one row.
        """
        narrator = Narrator(self._runner.prompts.tokenizer, tell, ask.max_tokens)
        runner = self._runner.live(self._generator, ask.options, narrator, ask.workflow, ask.max_turns)
        with runner.seeded(ask.seed):
            key = runner.next_key(0)
        async with self.connected() as within:
            self.running += 1
            try:
                with within():
                    return await runner.collect(ask.rows, key)
            finally:
                self.running -= 1
                narrator.leave()

    async def stream(self, ask: Ask) -> AsyncIterator[Event]:
        """Events of an episode, the last of them an [`Answer`]. Whoever stops listening ends it."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        task = asyncio.ensure_future(self.run(ask, events.put_nowait))
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            (episode,) = await task
            yield Answer(episode.answer.text if episode.answer is not None else "", episode)
        finally:
            task.cancel()
            await asyncio.wait([task])
            _ = task.cancelled() or task.exception()  # else asyncio logs it


def from_thread(events: Callable[[], AsyncIterator[Event]]) -> Iterator[Event]:
    """
    Events of an asynchronous stream, for code that is not asynchronous. The stream runs in a thread.

    Args:
        events (`Callable`): makes the stream.
    """
    found: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
    begun: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = queue.SimpleQueue()

    async def listen() -> None:
        begun.put((asyncio.get_running_loop(), asyncio.current_task()))  # type: ignore[arg-type]
        async with contextlib.aclosing(events()) as stream:  # type: ignore[type-var]
            async for event in stream:
                found.put(event)

    def run() -> None:
        try:
            asyncio.run(listen())
            found.put(None)
        except BaseException as error:
            found.put(error)

    thread = threading.Thread(target=run, name="marft-stream", daemon=True)
    thread.start()
    loop, task = begun.get()
    try:
        while (event := found.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
