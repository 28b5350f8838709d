# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Runs many episodes at once: workflows in, finished episodes out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..episodes import EndOfEpisode, Episode, Messages, Seen, Turn
from ..loops import run_coroutine
from ..tools import ToolLimits
from ..workflows.base import Workflow
from .replay import Found, Replay


# Rounds of the event loop without a new request after which all that can run has run. A coroutine awaiting another
# runs on at once; only `asyncio.gather` and futures need a round or two to start or resume what they hold.
_QUIET_ROUNDS = 4
# Seconds between two looks at what else an episode may be waiting for
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
# Seconds that a cancelled workflow has for cleaning up
_LAST_WORDS = 1.0


@dataclass(eq=False)
class Request:
    """A turn that an episode is waiting for."""

    episode: Episode
    agent: str
    seen: tuple[Seen, ...]
    reply: asyncio.Future
    by_reference: bool = False  # the agent's reference answers
    fed: int = 0  # entries of the episode's `fed` when it was asked
    found: Found | None = None  # a recorded reply
    functions: tuple[Callable, ...] = ()  # that it may call
    after: Turn | None = None  # the turn that called functions, from which it goes on
    order: int = 0  # the how manyth turn of its episode it was asked for

    def answered(self, text: str, seen: Sequence[Seen] | None = None, **fields: Any) -> Turn:
        """
        The turn that answers with a text.

        Args:
            text (`str`): what the agent says.
            seen (`Sequence[Turn]`, *optional*): what it was shown; what was asked for unless given.
            fields: other fields of the [`Turn`].
        """
        shown = self.seen if seen is None else seen
        return Turn(
            self.agent,
            text,
            index=-1,
            sees=tuple(item.index for item in shown if isinstance(item, Turn)),
            hears=tuple(item.index for item in shown if not isinstance(item, Turn)),
            **fields,
        )


# Answers requests, in order. The turns it returns need no right `index`; the collector numbers them. An `EndOfEpisode`
# in place of a turn ends that episode.
Answer = Callable[[Sequence[Request]], Sequence["Turn | EndOfEpisode"]]


class EpisodeError(RuntimeError):
    """A workflow failed; the message names the episode, its prompt and the workflow."""


def collect(
    workflow: Workflow,
    rows: Sequence[dict[str, Any]],
    agents: Sequence[str],
    answer: Answer,
    replays: Sequence[Replay] | None = None,
    tools: Mapping[str, Sequence[Callable]] | None = None,
    limits: ToolLimits | None = None,
    aliases: Mapping[str, str] | None = None,
    patience: float | None = None,
) -> list[Episode]:
    """
    Run the workflow once on every row, all at once.

    Whenever every live episode waits for a turn, the waiting requests are handed over together, in the order of the
    episodes, so that agents and parallel branches share batches.

    Args:
        workflow ([`Workflow`]):
            Decides who acts next and what each sees.
        rows (`Sequence[dict]`):
            Dataset rows with a `prompt`; each becomes one episode.
        agents (`Sequence[str]`):
            Names of the agents of the team, in order.
        answer (`Callable`):
            Turns requests into turns, in order.
        replays (`Sequence[Replay]`, *optional*):
            For each row, replies that are known already. They cost no generation.
        tools (`Mapping[str, Sequence[Callable]]`, *optional*):
            For each agent, functions that it may call.
        limits ([`ToolLimits`], *optional*):
            What these may cost.
        aliases (`Mapping[str, str]`, *optional*):
            The names under which agents know one another, where they are not their own.
        patience (`float`, *optional*):
            Seconds that an episode waits for a function that it has called, or for anything else that is neither a
            turn nor a tool. No limit unless given.

    Returns: one finished episode per row, in order.

    Raises:
        EpisodeError: the workflow raised, hangs, or ended without a single turn.
    """

    shared = tuple(agents), dict(tools or {}), limits or ToolLimits(), dict(aliases or {})
    return run_coroutine(_collect, workflow, rows, answer, replays, shared, patience)


async def _collect(workflow, rows, answer, replays, shared, patience) -> list[Episode]:
    waiting: list[Request] = []

    async def speak(
        episode: Episode,
        agent: str,
        seen: Sequence[Seen],
        functions: Sequence[Callable] = (),
        after: Turn | None = None,
        order: int = 0,
    ) -> Turn:
        future = asyncio.get_running_loop().create_future()
        request = Request(episode, agent, tuple(seen), future, fed=len(episode.fed))
        request.functions, request.after, request.order = tuple(functions), after, order
        waiting.append(request)
        return await request.reply

    episodes = [Episode(row["prompt"], row, index, speak, *shared) for index, row in enumerate(rows)]
    is_over = asyncio.Event()
    tasks = [asyncio.ensure_future(_run_one(workflow, episode, is_over)) for episode in episodes]
    watch = _Watch(workflow, patience)
    try:
        while not all(task.done() for task in tasks):
            await _settle(tasks, waiting, episodes, watch)
            failed = next((task for task in tasks if task.done() and task.exception()), None)
            if failed is not None:
                failed.result()  # raises
            # A branch that ended its episode has cancelled what other branches of it were waiting for
            live = [one for one in waiting if not one.reply.done() and not tasks[one.episode.index].done()]
            batch = sorted(live, key=lambda request: (request.episode.index, request.order))
            waiting.clear()
            _answer_all(batch, answer, replays)
        for task in tasks:
            task.result()
    finally:
        is_over.set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS)
        for task in tasks:
            _ = task.cancelled() or (task.done() and task.exception())  # else asyncio complains of it
    return episodes


async def _run_one(workflow: Workflow, episode: Episode, is_over: asyncio.Event) -> None:
    try:
        await workflow.run(episode)
    except EndOfEpisode as end:
        episode.overflowed = True
        if not episode.turns:
            raise EpisodeError(
                f"Episode {episode.index} cannot begin, on the prompt {_brief(episode.prompt)}: {end}"
            ) from None
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_over.is_set():  # it was us
            raise
        raise EpisodeError(
            f"The workflow `{type(workflow).__name__}` failed in episode {episode.index} after "
            f"{len(episode.turns)} turns, on the prompt {_brief(episode.prompt)}: {type(error).__name__}: {error}"
        ) from error
    if not episode.turns:
        raise EpisodeError(
            f"The workflow `{type(workflow).__name__}` ended episode {episode.index} without a turn, on the prompt "
            f"{_brief(episode.prompt)}. Let at least one agent speak with `await episode.turn(name)`."
        )


async def _settle(tasks, waiting, episodes, watch) -> None:
    """Run the loop until every live episode waits for a turn, or one has failed."""
    quiet, pause = 0, _SHORTEST_PAUSE
    watch.begin()
    while True:
        known = len(waiting)
        await asyncio.sleep(0)
        quiet = quiet + 1 if len(waiting) == known else 0
        if quiet < _QUIET_ROUNDS:
            continue
        # Tools of one branch are waited for, so that batches do not depend on how long they take
        blocked = {request.episode.index for request in waiting if not request.episode.busy}
        elsewhere = [index for index, task in enumerate(tasks) if not task.done() and index not in blocked]
        if not elsewhere or any(task.done() and task.exception() for task in tasks):
            return
        watch.look(episodes, elsewhere)
        # A workflow awaits something of its own, a web service say: look again as soon as anything may have moved.
        await asyncio.wait([tasks[i] for i in elsewhere], timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        quiet, pause = 0, min(2 * pause, _LONGEST_PAUSE)


class _Watch:
    """Tells episodes that hang from ones that wait. Tools have limits of their own."""

    def __init__(self, workflow: Workflow, patience: float | None):
        self._workflow = workflow
        self._patience = patience
        # What has been waited for, with the first look at it: functions, and episodes that wait for something else
        self._since: dict[Any, float] = {}

    def begin(self) -> None:
        self._since.clear()  # the time of generation does not count

    def look(self, episodes: Sequence[Episode], elsewhere: Sequence[int]) -> None:
        """
        Look at episodes that wait for something that is no turn.

        Args:
            episodes (`Sequence[Episode]`): all of them.
            elsewhere (`Sequence[int]`): which of them wait.

        Raises:
            EpisodeError: one has waited for too long.
        """
        if self._patience is None:
            return
        now, answered = time.monotonic(), sum(episode.answered_calls for episode in episodes)
        found: dict[Any, tuple[Episode, str, float]] = {}
        for episode in (episodes[index] for index in elsewhere):
            for call in episode.calling:
                found[call] = episode, f"`{call.name}`", self._patience
            if not episode.busy and not episode.calling:
                what, state = "something that is neither a turn nor a tool", (episode.index, len(episode.turns))
                # While calls of others are answered it may wait for its turn to call, though not for ever
                found[state, answered] = episode, what, self._patience
                found[state, "own", episode.answered_calls] = episode, what, self._patience * len(episodes)
        self._since = {awaited: self._since.get(awaited, now) for awaited in found}
        for awaited, (episode, what, patience) in found.items():
            if now - self._since[awaited] > patience:
                raise EpisodeError(
                    f"The workflow `{type(self._workflow).__name__}` hangs in episode {episode.index} after "
                    f"{len(episode.turns)} turns, on the prompt {_brief(episode.prompt)}: it has waited for "
                    f"{what} for {patience:g} seconds. Give what it waits for a time limit of its own, or set "
                    "a larger `workflow_timeout`."
                )


def _answer_all(batch: Sequence[Request], answer: Answer, replays: Sequence[Replay] | None) -> None:
    """Reply to a wave of requests, from recordings where there are some, so that turns keep the recorded order."""
    if replays is not None:
        for request in batch:
            request.found, request.by_reference = replays[request.episode.index].find(request.agent, request.seen)
    asked = [request for request in batch if request.found is None]
    answers = iter(answer(asked)) if asked else iter(())
    for request in batch:
        if request.found is None:
            turn = next(answers)
        else:
            replay = replays[request.episode.index]  # type: ignore[index]
            turn = replay.place(request.found, len(request.episode.turns), request.seen)
        if isinstance(turn, EndOfEpisode):
            request.reply.set_exception(turn)
            continue
        object.__setattr__(turn, "index", len(request.episode.turns))
        object.__setattr__(turn, "fed", request.fed)
        request.episode.add(turn, request.seen)
        request.reply.set_result(turn)


def _brief(prompt: str | Messages, limit: int = 80) -> str:
    text = prompt if isinstance(prompt, str) else " / ".join(str(message.get("content")) for message in prompt)
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
