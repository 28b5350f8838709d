# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Run the user's workflow on an episode: errors name the episode, and hanging episodes are detected."""

from __future__ import annotations

import asyncio
import inspect
import re
import sysconfig
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from ..system.event_loop import STARTED, StepContext, StepWrapper
from ..system.hints import brief, did_you_mean
from ..system.watchdog import TimeLimit
from .images import ImageError
from .live import LiveEpisode
from .records import Call, EndOfEpisode, Messages, Turn
from .state import EpisodeState


_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


class RunsEpisodes(Protocol):
    async def run(self, episode: LiveEpisode) -> None: ...

    def check(self, agents: Sequence[str]) -> None: ...


class EpisodeError(RuntimeError):
    """Raised if a workflow fails. The message contains the workflow, the episode and its prompt."""

    def __init__(self, message: str, episode: int | None = None):
        super().__init__(message)
        self.episode = episode


class EpisodeGuard:
    def __init__(
        self,
        workflow: RunsEpisodes,
        workflow_timeout: float | None,  # seconds that an episode may wait for what it calls
        limit: TimeLimit | None,
        failures: dict[int, EpisodeError] | None,
        make_step_context: Callable[[int], StepContext] | None,
    ):
        self._workflow, self._make_step_context, self.name = workflow, make_step_context, type(workflow).__name__
        self.workflow_timeout, self.limit = workflow_timeout, limit
        self.max_wait_for_episodes: float | None = getattr(workflow, "max_wait_for_episodes", None)
        self.tolerates = failures is not None  # whether the other episodes continue after an episode has failed
        self.failed = {} if failures is None else failures  # errors by position

    def run(self, episode: EpisodeState, is_over: asyncio.Event) -> Coroutine[Any, Any, None]:
        coroutine = _run_one(self._workflow, episode, is_over)
        if self._make_step_context is None:
            return coroutine
        episode.step_context = self._make_step_context(episode.index)
        return StepWrapper(coroutine, episode.step_context)

    def note(self, error: EpisodeError, replace: bool = False) -> None:
        """Record the first error of an episode, or the latest with `replace`. Raise it if errors end all episodes."""
        if not self.tolerates or error.episode is None:
            raise error
        if replace or error.episode not in self.failed:
            self.failed[error.episode] = error


async def _run_one(workflow: RunsEpisodes, episode: EpisodeState, is_over: asyncio.Event) -> None:
    STARTED.set(episode.started)
    try:
        if episode.may_have_images:
            episode.read_images()
        returned = await _unwrapped(workflow.run(LiveEpisode(episode)))
        answer = episode.answer
        if isinstance(returned, (Turn, str)) and answer is not None and returned not in (answer, answer.text):
            raise TypeError("`run` returned an answer, which has no effect. Set `episode.answer = turn` instead.")
    except EndOfEpisode as end:
        episode.overflowed = True  # parallel branches may be left where they are
        if not episode.turns:
            raise EpisodeError(
                f"Episode {episode.index} cannot start on the prompt {shorten(episode.prompt)}: {end}", episode.index
            ) from end
    except ImageError as error:
        place = f"Episode {episode.index}, on the prompt {shorten(str(episode.row['prompt']))}"
        raise EpisodeError(f"{place}: {error}", episode.index) from error
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_over.is_set():  # cancelled with the others
            raise
        raise EpisodeError(
            f"The workflow `{type(workflow).__name__}` failed in episode {episode.index} after "
            f"{len(episode.turns)} turns, on the prompt {shorten(episode.prompt)}{_place(error)}: "
            f"{type(error).__name__}: {error}" + _hint(error, episode.row),
            episode.index,
        ) from error
    finally:
        episode.has_ended = True
    if not episode.overflowed and (count := await episode.close_unawaited()) > 0:
        raise EpisodeError(
            f"The workflow `{type(workflow).__name__}` did not await {count} of its turns or calls in episode "
            f"{episode.index}, on the prompt {shorten(episode.prompt)}. Write `await episode.turn(...)` and "
            "`await episode.call(...)`.",
            episode.index,
        )
    if not episode.turns:
        raise EpisodeError(
            f"The workflow `{type(workflow).__name__}` ended episode {episode.index} without a turn, on the prompt "
            f"{shorten(episode.prompt)}. Call `await episode.turn(name)` at least once.",
            episode.index,
        )


def _is_in(file: str, folders: Sequence[str]) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)


def _place(error: BaseException) -> str:
    """The last line of the user's code in the traceback of an error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_in(frame.filename, (_PACKAGE,))]
    own = [frame for frame in frames if not _is_in(frame.filename, _LIBRARIES)]
    frame = next(iter(reversed(own or frames)), None)
    return f" ({Path(frame.filename).name}, line {frame.lineno}, in `{frame.name}`)" if frame else ""


def _hint(error: BaseException, row: Mapping[str, Any]) -> str:
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    key = re.escape(str(error.args[0])) if isinstance(error, KeyError) and error.args else None
    if key is not None and re.search(rf"\brow\[[\"']{key}[\"']\]", frames[-1].line or "" if frames else ""):
        return f". The row has {', '.join(map(repr, row))}.{did_you_mean(error.args[0], row)}"
    if "can't be used in 'await' expression" in text:
        return ". Only `episode.turn`, `episode.call` and `together` are awaited."
    if "a coroutine or an awaitable is required" in text:
        return ". `together` takes turns that are not awaited yet: `together([episode.turn(...), ...])`."
    if isinstance(error, TypeError) and "string indices must be integers" in text:
        return (
            ". The episode's prompt is a string because the dataset's prompts are strings. If the workflow expects "
            'messages, write the prompts as `[{"role": "user", "content": question}]`.'
        )
    if isinstance(error, (AttributeError, TypeError)) and re.search("'coroutine' object|a coroutine", text):
        return " An `await` is missing: write `turn = await episode.turn(...)`."
    return ""


async def _unwrapped(run: Coroutine[Any, Any, Any]) -> Any:
    """Run a workflow. An `EndOfEpisode` in a branch of an `asyncio.TaskGroup` ends the episode."""
    if not inspect.isawaitable(run):
        raise TypeError(f"`run` returned {run!r}, which cannot be awaited. Write `async def run(self, episode):`.")
    try:
        return await run
    except BaseExceptionGroup as group:
        ended, others = group.split(EndOfEpisode)
        end: BaseException | None = ended
        while isinstance(end, BaseExceptionGroup):
            end = end.exceptions[0]
        raise group if end is None or others is not None else end from None


class HangDetector:
    """Detects episodes that hang. Tool calls are not watched, since they have their own time limit."""

    def __init__(self, guard: EpisodeGuard):
        self._name, self._workflow_timeout, self._limit = guard.name, guard.workflow_timeout, guard.limit
        # Waits by episode and kind, each with the number of turns and the state at which it began
        self._waits: dict[tuple[int, str], tuple[tuple[int, int], Call]] = {}
        self._looked = 0.0  # time of the latest look

    def begin(self) -> None:
        self._looked = time.monotonic()  # the time of generation does not count
        if self._limit is not None:
            self._limit.restart()

    def check(self, episodes: Sequence[EpisodeState], elsewhere: Sequence[int]) -> None:
        """
        Raise for an episode that waits too long `elsewhere`, for something other than a turn. A wait for a turn
        neither counts nor restarts the limit, since the turn may be refused.
        """
        if self._limit is not None:
            self._limit.restart()  # the event loop is not blocked
        if self._workflow_timeout is None:
            return
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        answered = sum(episode.answered_calls for episode in episodes)
        for episode in (episodes[index] for index in elsewhere):
            for wait, what, limit in self._list_waits(episode, answered, len(episodes)):
                wait.seconds = 0.0 if wait.seconds is None else wait.seconds + passed
                if wait.seconds > limit:
                    raise EpisodeError(
                        f"The workflow `{self._name}` hangs in episode {episode.index} after "
                        f"{len(episode.turns)} turns, on the prompt {shorten(episode.prompt)}: it has waited "
                        f"{limit:g} seconds for {what}. Add a time limit to this wait, or increase "
                        "`workflow_timeout`.",
                        episode.index,
                    )

    def _list_waits(self, episode: EpisodeState, answered: int, count: int) -> Iterator[tuple[Call, str, float]]:
        """Yield the waits of an episode: each wait, what the episode waits for, and the limit in seconds."""
        limit = cast(float, self._workflow_timeout)
        yield from ((call, f"`{call.name}`", limit) for call in episode.calling)
        if episode.busy or episode.calling:
            return
        if episode.waits_for is not None:
            yield self._wait(episode, "application"), episode.waits_for, limit
            return
        # The first restarts when a call of any episode returns: this one may queue. The second bounds the whole wait
        what = "something that is neither a turn nor a tool"
        yield self._wait(episode, "any", answered), what, limit
        yield self._wait(episode, "own", episode.answered_calls), what, limit * count

    def _wait(self, episode: EpisodeState, kind: str, state: int = 0) -> Call:
        """Return the wait of an episode. It restarts after every turn of the episode and every change of the state."""
        key, since = (episode.index, kind), (len(episode.turns), state)
        if key not in self._waits or self._waits[key][0] != since:
            self._waits[key] = since, Call(kind)
        return self._waits[key][1]


def shorten(prompt: str | Messages, limit: int = 80) -> str:
    text = prompt if isinstance(prompt, str) else " / ".join(str(message.get("content")) for message in prompt)
    return repr(brief(text, limit))
