# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Unmodified applications: their requests to an OpenAI-compatible endpoint are the turns of the team."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import hashlib
import inspect
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ...episodes.images import as_json
from ...episodes.live import LiveEpisode
from ...episodes.records import EndOfEpisode, RequestedTurn, Turn
from ...system.hints import checked_names
from ...system.watchdog import end_thread
from ...workflows.base import Workflow, callable_name, check_count
from .program import AppResult, Program
from .requests import ChatReply, ChatRequest, RequestError, to_request_error, with_format
from .routing import AgentRule, describe_rule, named_agents, rebuild_rule
from .session import AppEndpoint, Session, Waiting, settle_future, shared_keys


logger = logging.getLogger(__name__)

# Maximum number of consecutive requests without a turn: the time limit does not count the time of refusals
_MOST_REFUSED = 1000
_MOST_REASONS = 20  # maximum number of reasons of refused requests that are logged
OUTPUT = "application"  # source of the feedback that holds the output of an application. Agents do not see it


# Arguments that are set elsewhere, or have another name since 0.4
_ELSEWHERE = {
    **{
        name: f"It is an argument of commands: `ExternalApp(Program(command, {name}=...))`."
        for name in ("cwd", "copy_cwd", "env", "stdin_columns")
    },
    "holds_up": "It is named `max_wait_for_episodes` now.",
}


class ExternalApp(Workflow):
    """
    Runs an application that talks to models through a client of OpenAI or Anthropic. Each request for the model name
    of an agent is a turn of that agent; the application decides who is asked, with which messages, and when the
    episode ends. It needs no change but the base URL and the key, which it finds in `OPENAI_BASE_URL` and
    `OPENAI_API_KEY`, or in `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`.

    ```python
    trainer = MARFTTrainer(
        model="Qwen/Qwen2.5-1.5B-Instruct",
        agents=[AgentSpec("planner"), AgentSpec("solver")],  # the model names that the application asks for
        workflow=ExternalApp("python my_app.py --question={prompt}"),
        reward_funcs=score,
        ...
    )
    ```

    An episode ends when the program or function does. A program that ends with another status than 0, or a function
    that raises, is a failed episode (`on_episode_error`); one that gets no turn for `workflow_timeout` seconds, too.

    Args:
        app (`str`, `Sequence[str]`, [`Program`] or `Callable`):
            A command, in which `{column}` stands for a value of the row; a [`Program`], which is a command with a
            folder, variables or standard input; or a function `app(row, endpoint)` of the dataset row and the
            [`AppEndpoint`]. A function may be `async`; others run in their own thread for each episode.
        answer (`str`, *optional*):
            Name of the agent whose last turn is the team's answer. Defaults to whoever speaks last.
        tools (`bool`, *optional*, defaults to `False`):
            Whether requests bring tools. The chat template has to support them.
        earns (`bool`, *optional*, defaults to `False`):
            Whether the application rewards itself: it posts `{"reward": 1.0}`, or numbers by names of agents, to
            `{base_url}/reward`, or a function returns them.
        together (`float`, *optional*, defaults to `0.02`):
            Seconds to wait for further requests of an episode. Requests that arrive in this time are parallel turns,
            which are sampled together.
        max_wait_for_episodes (`float`, *optional*, defaults to `60.0`):
            Seconds that requests of other episodes wait for one that computes, so that results do not depend on how
            long anything takes. After that they are answered without it, with a warning. `None` for no limit.
        max_concurrent_episodes (`int`, *optional*):
            Maximum number of episodes of a batch that run at the same time, for applications that need much memory or
            a license. Re-runs for credit, which run within episodes, have as many places of their own. By default, the
            limit on open files bounds it.
        agent_of (`Callable[[AppRequest], str]`, *optional*):
            Chooses the agent that answers a request, such as [`BySystemPrompt`] or [`ByTools`]. By default, the name
            of the model is the name of the agent.
    """

    acts_outside = True
    uses_tools = False  # set by `tools`
    described = {"answer": str, "tools": bool, "agent_of": dict[str, Any]}

    @checked_names("ExternalApp", elsewhere=_ELSEWHERE)
    def __init__(
        self,
        app: str | Sequence[str] | Program | Callable | None,
        answer: str | None = None,
        tools: bool = False,
        earns: bool = False,
        together: float = 0.02,
        max_wait_for_episodes: float | None = 60.0,
        max_concurrent_episodes: int | None = None,
        agent_of: AgentRule | None = None,
    ):
        is_command = isinstance(app, str) or (isinstance(app, Sequence) and all(isinstance(part, str) for part in app))
        if is_command and app:
            app = Program(cast(Any, app))
        if app is not None and (not callable(app) or isinstance(app, type)) and not isinstance(app, Program):
            raise TypeError(
                "`app` must be a command such as 'python my_app.py --question={prompt}', a `Program`, or a function "
                f"`app(row, endpoint)`, got {app!r}."
            )
        if not together >= 0:
            raise ValueError(f"`together` must be at least 0 seconds, got {together!r}.")
        if max_concurrent_episodes is not None:
            check_count("max_concurrent_episodes", max_concurrent_episodes, self)
        self.app, self.answer, self.uses_tools, self.earns = app, answer, bool(tools), bool(earns)
        self.together, self.max_wait_for_episodes = together, max_wait_for_episodes
        self.max_concurrent_episodes, self.agent_of = max_concurrent_episodes, agent_of
        if agent_of is not None and not callable(agent_of):
            raise TypeError(f"`agent_of` must be a function of an `AppRequest`, got {agent_of!r}.")
        self._told: set[str] = set()
        self._reasons: set[str] = set()  # of refused requests

    @property
    def starts_programs(self) -> bool:
        """`True` if an episode starts a program."""
        return isinstance(self.app, Program)

    def check(self, agents: Sequence[str]) -> None:
        known = ", ".join(map(repr, agents))
        if self.answer is not None and self.answer not in agents:
            raise ValueError(f"`answer` of `ExternalApp` must be an agent of the team ({known}), got {self.answer!r}.")
        if unknown := [name for name in named_agents(self.agent_of) if name not in agents]:
            raise ValueError(f"`agent_of` must choose agents of the team ({known}), got {unknown[0]!r}.")

    def named_agents(self) -> list[str]:
        return list(dict.fromkeys([*([self.answer] if self.answer is not None else []), *named_agents(self.agent_of)]))

    def links(self, agents: Sequence[str]) -> list[tuple[str, str]]:
        return []  # the application is not started for a picture

    def describe(self) -> dict:
        """Leave out the application: otherwise, loading a team from elsewhere would run its code."""
        rule = describe_rule(self.agent_of)
        description = {"class": self.class_name, "answer": self.answer, "tools": self.uses_tools}
        return description if rule is None else {**description, "agent_of": rule}

    @classmethod
    def from_description(cls, arguments: Mapping[str, Any], environment_factory: Any = None) -> Workflow:
        rule = rebuild_rule(arguments["agent_of"]) if "agent_of" in arguments else None
        return super().from_description({**arguments, "app": None, "agent_of": rule}, environment_factory)

    async def run(self, episode: LiveEpisode) -> None:
        if self.app is None:
            raise ValueError(
                "The saved team does not include its application. Pass `workflow=ExternalApp(...)`, or request its "
                "agents by name, for example with `marft serve`."
            )
        from .server import Endpoint

        server = Endpoint.get_or_start()
        places = server.places_of(server, server.at_once)
        if places.locked():
            self.say_once(
                f"Only {server.at_once} episodes of {self.name} run at a time, because more could exceed the limit on "
                "open files of this process. Raise the limit (`ulimit -n`) to run more at a time."
            )
        limit: Any = contextlib.nullcontext()
        if self.max_concurrent_episodes is not None:
            limit = server.places_of(self, self.max_concurrent_episodes, episode.state.is_rerun)
        episode.state.is_queued = True
        async with limit, places:
            episode.state.is_queued = False
            await self._run(episode, server)

    async def _run(self, episode: LiveEpisode, server: Any) -> None:
        session = Session(episode.agents, self.uses_tools, self.earns, self.agent_of, episode.state.count_tokens)
        with server.open(session) as endpoint:
            running = asyncio.ensure_future(self._result(episode, endpoint, server))
            try:
                await _Conversation(self, episode, session).hold(running)
            except BaseException:
                running.cancel()
                await asyncio.wait([running])
                raise
            self.check_keys(running.exception())
        if (error := running.exception()) is not None and session.refused:
            error.add_note(f"The last request of the application was refused: {session.refused}")
        self._finish(episode, session, running.result())

    async def _result(self, episode: LiveEpisode, endpoint: AppEndpoint, server: Any) -> AppResult:
        row = dict(episode.row)
        app = cast("Program | Callable", self.app)
        if isinstance(app, Program):
            return await asyncio.wrap_future(server.run(app.run(row, endpoint)))
        if inspect.iscoroutinefunction(app) or inspect.iscoroutinefunction(type(app).__call__):
            value = app(row, endpoint)
        else:
            value = await _in_own_thread(functools.partial(app, row, endpoint))
        try:
            return AppResult(value=await value if inspect.isawaitable(value) else value)
        except SystemExit as end:  # in a task, it would end the event loop
            raise RuntimeError(f"the application called `sys.exit({end.code!r})`") from end

    def _finish(self, episode: LiveEpisode, session: Session, result: AppResult) -> None:
        session.counts["lineages"] = len({turn.lineage for turn in episode.turns})
        for name, number in list(session.counts.items()):
            episode.count(f"app/{name}", number)
        refused = f" Its last request was refused: {session.refused}" if session.refused else ""
        if result.problem is not None:
            raise RuntimeError(result.problem + refused)
        if not episode.turns:
            why = refused or " It sent no request: check that it reads OPENAI_BASE_URL and OPENAI_API_KEY."
            output = f" Output: {result.said}" if result.said else ""
            raise RuntimeError(f"The application ended without a turn.{why}{output}")
        if result.left:
            episode.count("app/left_behind", result.left)
            self.say_once(
                f"Terminated {result.left} process{'es' * (result.left > 1)} that the application {self.name} left "
                "running. Wait for child processes in the application."
            )
        if session.first_refused is not None:
            self._warn_of_refused(session)
        episode.environment = result
        if answers := [turn for turn in episode.turns if turn.agent == self.answer]:
            episode.answer = answers[-1]
        for reward, turn in session.rewards:
            episode.earn(turn or episode.turns[-1], reward)
        value = result.value
        if self.earns and value is not None:
            if not isinstance(value, (int, float, Mapping)) or isinstance(value, bool) or value == {}:
                raise TypeError(
                    f"{self.name} must return a number, numbers by names of agents, or `None`, got {value!r}."
                )
            episode.earn(episode.turns[-1], value)
        elif self.earns and not session.rewards:
            raise RuntimeError("the application reported no reward, which `earns=True` requires. Post or return it.")
        if result.said:
            episode.observe(result.said, source=OUTPUT)

    def check_keys(self, cause: BaseException | None = None) -> None:
        """Raise a `RuntimeError` if a function has stored its API key where all episodes of this process read it."""
        if callable(self.app) and (places := shared_keys()):
            raise RuntimeError(
                f"{self.name} stored the API key of an episode in {' and '.join(places)}, which all episodes of this "
                "process share, so their turns would be mixed up. Pass `base_url=endpoint.base_url, "
                "api_key=endpoint.api_key` to the client, and `env={**os.environ, **endpoint.variables}` to programs."
            ) from cause

    def _warn_of_refused(self, session: Session) -> None:
        """Warn of refusals, once for each reason: applications often go on without an answer."""
        reason = re.sub(r"\d+", "0", session.first_refused or "")  # which may name sizes and places
        if reason not in self._reasons and len(self._reasons) < _MOST_REASONS:
            self._reasons.add(reason)
            total = session.counts["requests"] + session.counts["refused"]
            logger.warning(
                f"{session.counts['refused']} of {total} requests of the application {self.name} in an episode were "
                f"refused. The first: {session.first_refused}"
            )

    def say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)

    @property
    def name(self) -> str:
        """Name of the application in messages."""
        if not isinstance(self.app, Program):
            return f"`{callable_name(cast(Callable, self.app))}`"
        command = self.app.command
        return f"`{command if isinstance(command, str) else ' '.join(command)}`"


class _Conversation:
    """The requests of one episode as they become turns."""

    def __init__(self, app: ExternalApp, episode: LiveEpisode, session: Session):
        self._app, self._episode, self._session = app, episode, session
        self._replies = _Replies()
        self._num_lineages = 0
        self._continued: set[int] = set()  # turns after which their conversation went on
        self._open: list[Waiting] = []
        self._refused = 0  # requests since the latest turn
        self._tasks: set[asyncio.Task] = set()

    async def hold(self, running: asyncio.Future) -> None:
        """Answer requests until the application has ended."""
        self._episode.state.waits_for = self._app.name
        inbox = self._session.inbox
        arrival = asyncio.ensure_future(inbox.get())
        try:
            while not running.done():
                await asyncio.wait({running, arrival, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
                if self._refused >= _MOST_REFUSED:
                    why = f" Its last request was refused: {self._session.refused}" if self._session.refused else ""
                    raise RuntimeError(f"the application sent {self._refused} requests in a row without a turn.{why}")
                if not arrival.done():
                    continue
                self._app.check_keys()
                batch = [arrival.result()]
                if self._app.together:
                    await asyncio.sleep(self._app.together)
                batch += [inbox.get_nowait() for _ in range(inbox.qsize())]
                arrival = asyncio.ensure_future(inbox.get())
                self._open = [waiting for waiting in self._open if not waiting.is_settled] + batch
                for waiting in sorted(batch, key=lambda waiting: waiting.order):
                    if not waiting.is_gone:
                        waiting.task = asyncio.ensure_future(self._answer(waiting))
                        self._tasks.add(waiting.task)
                        waiting.task.add_done_callback(self._tasks.discard)
        finally:
            left = [arrival.result()] if arrival.done() and not arrival.cancelled() else []
            left += [inbox.get_nowait() for _ in range(inbox.qsize())]
            tasks = [arrival, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for waiting in {*self._open, *left}:
                waiting.settle(RequestError("The episode has ended.", 401, code="invalid_api_key"))

    async def _answer(self, waiting: Waiting) -> None:
        self._refused += 1
        try:
            turn = await self._turn(waiting.chat_request, waiting.seen)
            reply = ChatReply.from_turn(turn, waiting.chat_request.stop)
            self._replies.add(turn, reply, waiting.chat_request)
            self._refused = 0
            waiting.settle((reply, turn))
        except asyncio.CancelledError:
            waiting.settle(RequestError("The request was canceled.", 409))
            raise
        except (Exception, EndOfEpisode) as error:
            waiting.settle(to_request_error(error))

    async def _turn(self, chat_request: ChatRequest, seen: tuple[Turn, ...]) -> Turn:
        ignored = ["seed"] if chat_request.seed is not None else []
        if self._episode.state.trains:
            ignored += [*chat_request.sampling, *(["max_tokens"] if chat_request.max_tokens is not None else [])]
        for name in ignored:
            self._app.say_once(
                f"The application sends `{name}`, which is ignored in training: agents sample with their own settings "
                "and the seed of the run."
            )
        prefixes = _prefixes(chat_request.messages)
        earlier = self._find_earlier(chat_request, prefixes)
        if earlier is None or earlier.lineage is None:
            lineage, self._num_lineages = self._num_lineages, self._num_lineages + 1
        else:
            lineage = earlier.lineage
            self._continued.add(earlier.index)
        messages = self._replies.with_turns(chat_request.model, chat_request.messages, prefixes)
        requested_turn = RequestedTurn(
            with_format(messages, chat_request.schema),
            chat_request.tools,
            chat_request.stop,
            chat_request.sampling,
            chat_request.max_tokens,
            lineage,
        )
        try:
            return await self._episode.turn_on(chat_request.model, requested_turn, sees=seen)
        except BaseException:
            if earlier is not None:
                self._continued.discard(earlier.index)
            raise

    def _find_earlier(self, chat_request: ChatRequest, prefixes: Sequence[bytes]) -> Turn | None:
        """
        Return the turn whose conversation a request continues: the agent's latest turn in the messages, after what the
        agent was shown for it. Of two conversations that were the same so far, ids of calls tell which one is meant,
        and else it is one that was not continued.
        """
        best, found = (False, 0, False), None
        for count, answer in enumerate(chat_request.messages):
            if answer["role"] != "assistant":
                continue
            ids = [call.get("id") for call in answer.get("tool_calls") or ()]
            for turn, reply in self._replies.after(chat_request.model, prefixes[count], answer):
                rank = (ids == [call.id for call in reply.calls], count, turn.index not in self._continued)
                if rank >= best:
                    best, found = rank, turn
        return found


def _prefixes(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return a digest of the messages before each position, and of all of them."""
    digest = hashlib.sha256()
    found = [digest.digest()]
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True, default=as_json).encode("utf-8", "surrogatepass") + b"\n")
        found.append(digest.digest())
    return found


class _Replies:
    """
    The replies of an episode, by what they say and by the messages before them. Conversations have hundreds of turns,
    and each request brings all of them again, so nothing is compared one by one.
    """

    def __init__(self) -> None:
        self._by_key: dict[tuple, list[tuple[Turn, ChatReply]]] = {}

    def add(self, turn: Turn, reply: ChatReply, chat_request: ChatRequest) -> None:
        before, reply_key = _prefixes(chat_request.messages)[-1], _said_by(reply)
        keys: list[tuple] = [(chat_request.model, before, reply_key)]
        if reply.text == ChatReply.from_turn(turn).text:  # not one that is shown without its stop string
            ids = tuple(call.id for call in reply.calls)
            keys += [("turn", turn.agent, reply_key, *more) for more in ((ids, before), (ids,), (None, before), ())]
        for key in keys:
            self._by_key.setdefault(key, []).append((turn, reply))

    def after(self, model: str, before: bytes, message: Mapping[str, Any]) -> Sequence[tuple[Turn, ChatReply]]:
        """Replies to requests for a model with the messages `before` that say what a message says."""
        return self._by_key.get((model, before, _said(message)), ())

    def with_turns(
        self, agent: str, messages: Sequence[dict[str, Any]], prefixes: Sequence[bytes]
    ) -> list[dict[str, Any]]:
        """Return the messages, with those that are unchanged earlier turns of the agent replaced by these turns."""
        found: list[dict[str, Any]] = []
        used: set[int] = set()
        for number, message in enumerate(messages):
            turn = self._find_turn(agent, message, prefixes[number], used) if message["role"] == "assistant" else None
            used |= {turn.index} if turn is not None else set()
            found.append(message if turn is None else {**message, "content": turn})
        return found

    def _find_turn(self, agent: str, message: Mapping[str, Any], before: bytes, used: set[int]) -> Turn | None:
        """
        Return the turn of a message: of several with the same text and calls, by ids or the messages before it. It
        does not depend on which conversation went on first, so that a re-run finds the recorded turns.
        """
        reply_key = _said(message)
        ids = tuple(call.get("id") for call in message.get("tool_calls") or ())
        for more in ((ids, before), (ids,), (None, before), ()):
            alike = self._by_key.get(("turn", agent, reply_key, *more), ())
            # Several after the same messages are used in their order; else the latest one is meant
            in_order = alike if before in more else reversed(alike)
            turn = next((turn for turn, _ in in_order if turn.index not in used), None)
            if turn is not None:
                return turn
        return None


def _said(message: Mapping[str, Any]) -> tuple[str, str]:
    """Text and calls of a message of the assistant, as a key."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"], json.dumps([[call["name"], call["arguments"]] for call in functions], sort_keys=True)


def _said_by(reply: ChatReply) -> tuple[str, str]:
    """Text and calls of a reply, as the same key."""
    return reply.text, json.dumps([[call.name, json.loads(call.arguments)] for call in reply.calls], sort_keys=True)


async def _in_own_thread(function: Callable[[], Any]) -> Any:
    """Run a function in its own thread while other episodes continue. Cancellation interrupts it."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    outcome: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        try:
            value, error = context.run(function), None
        except BaseException as caught:
            value, error = None, caught if isinstance(caught, Exception) else RuntimeError(repr(caught))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle_future, outcome, value, error)

    thread = threading.Thread(target=work, name="marft-app", daemon=True)
    thread.start()
    try:
        return await outcome
    except asyncio.CancelledError:
        end_thread(thread)
        raise
