# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Serve a team over HTTP: settings, request queue, routes, and whole or streamed answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import logging
import secrets
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from aiohttp import web
from yarl import URL

from ...config.team_setup import decoding
from ...episodes.live import LiveEpisode
from ...episodes.records import EndOfEpisode, Episode, PromptError, RequestedTurn
from ...team import Event, Team, TextDelta
from ...team.live import Question
from ...workflows import Sequential, Workflow
from ..engines.server import EngineDownError
from .connections import Connections, listen
from .external_app import OUTPUT, ExternalApp
from .http import ChatReplies, HTTPApplication, RequestOutcome, TextListener, get_api_key
from .requests import ChatReply, ChatRequest, RequestError, to_request_error, with_format
from .responses import ResponseStore
from .routing import AgentRule
from .session import logger as client_logger


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeSettings:
    """
    Address and limits of a team server.

    Args:
        name (`str`, *optional*, defaults to `"team"`): model name under which the team is served.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): address to listen on.
        port (`int`, *optional*, defaults to `8080`): port; 0 for any free one.
        api_key (`str`, *optional*): key that requests must send as `Authorization: Bearer ...`. Required unless `host`
            is a loopback address.
        show_turns (`bool`, *optional*, defaults to `True`): whether answers include the turns of teammates.
        max_running (`int`, *optional*, defaults to `64`): maximum number of answers that are generated concurrently.
        max_programs (`int`, *optional*, defaults to `8`): the same limit for a team whose workflow starts programs.
        max_waiting (`int`, *optional*, defaults to `256`): maximum number of questions in the queue. Further questions
            get status 503.
        max_turns (`int`, *optional*, defaults to `64`): maximum number of turns of an episode.
        timeout (`float`, *optional*, defaults to `600.0`): seconds after which a question is cancelled.
        max_body (`int`, *optional*, defaults to `1048576`): maximum size of a request in bytes. The default of a team
            that sees images is 16 times as large.
        grace (`float`, *optional*, defaults to `10.0`): seconds that running questions get to finish on shutdown.
        agent_of (`Callable[[AppRequest], str]`, *optional*): chooses the agent of a request, as for [`ExternalApp`].
            Defaults to the rule of the team's workflow, if it is a ready-made one.

    Raises:
        ValueError: other machines can reach the address and there is no key, or a limit is out of range.
    """

    name: str = "team"
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = field(default=None, repr=False)
    show_turns: bool = True
    max_running: int = 64
    max_programs: int = 8
    max_waiting: int = 256
    max_turns: int = 64
    timeout: float = 600.0
    max_body: int = 1 << 20
    grace: float = 10.0
    agent_of: AgentRule | None = None

    def __post_init__(self) -> None:
        if not self.is_loopback and not self.api_key:
            raise ValueError(
                f"Other machines can reach `host={self.host!r}`, so an API key is required. Set the environment "
                "variable `MARFT_API_KEY`, or leave `host` at '127.0.0.1', which only this machine can reach."
            )
        for name in ("max_running", "max_programs", "max_turns", "timeout", "max_body"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, got {getattr(self, name)!r}.")
        for name in ("max_waiting", "grace"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)!r}.")
        if not 0 <= self.port < 65536:
            raise ValueError(f"`port` must be from 0 to 65535, got {self.port!r}.")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)


def is_loopback(host: str | None) -> bool:
    """Whether a host is a loopback address or `localhost`. Other names may resolve to any address."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


class RequestQueue:
    """Limits the numbers of answers that are generated concurrently, and of questions that wait."""

    def __init__(self, places: int, waiting: int):
        self.places, self._free, self._max_waiting = places, asyncio.Semaphore(places), waiting
        self._queue_lock = asyncio.Lock()  # held by the question that has waited longest
        self.running = self.waiting = 0

    @contextlib.asynccontextmanager
    async def place(self, answers: int = 1) -> AsyncIterator[None]:
        """Wait for a slot for each answer, and hold the slots. Raises a [`RequestError`] if the queue is full."""
        if (self._free.locked() or self._queue_lock.locked()) and self.waiting >= self._max_waiting:
            busy = f"{self.running} questions are running and {self.waiting} are waiting"
            raise RequestError(f"The server is full: {busy}. Retry later.", 503, code="overloaded")
        self.waiting += 1
        async with contextlib.AsyncExitStack() as slots:
            try:
                async with self._queue_lock:
                    for _ in range(answers):
                        await slots.enter_async_context(self._free)
            finally:
                self.waiting -= 1
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1


class ServerMetrics:
    """Counters of a team server, in the text format of Prometheus."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._turns: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def request(self, model: str, status: int, seconds: float) -> None:
        self._requests[model, status] += 1
        self._seconds[model] = self._seconds.get(model, 0.0) + seconds

    def episodes(self, episodes: Sequence[Episode]) -> None:
        for turn in (turn for episode in episodes for turn in episode.turns):
            self._turns[turn.agent] += 1
            self._tokens[turn.agent, "prompt"] += len(turn.prompt_ids)
            self._tokens[turn.agent, "completion"] += len(turn.completion_ids)

    def text(self, queue: RequestQueue) -> str:
        lines = [
            "# TYPE marft_requests_running gauge",
            f"marft_requests_running {queue.running}",
            "# TYPE marft_requests_waiting gauge",
            f"marft_requests_waiting {queue.waiting}",
            "# TYPE marft_requests_total counter",
            *(f'marft_requests_total{{model="{m}",status="{s}"}} {n}' for (m, s), n in self._requests.items()),
            "# TYPE marft_request_seconds_total counter",
            *(f'marft_request_seconds_total{{model="{m}"}} {n:.6f}' for m, n in self._seconds.items()),
            "# TYPE marft_turns_total counter",
            *(f'marft_turns_total{{agent="{agent}"}} {n}' for agent, n in self._turns.items()),
            "# TYPE marft_tokens_total counter",
            *(f'marft_tokens_total{{agent="{agent}",kind="{k}"}} {n}' for (agent, k), n in self._tokens.items()),
        ]
        return "\n".join(lines) + "\n"


def heading(agent: str, is_first: bool) -> str:
    return ("" if is_first else "\n\n") + f"[{agent}]\n"


def thoughts(episode: Episode) -> str:
    """Return the turns before the answer, with the names of their agents."""
    turns = [turn for turn in episode.turns if turn is not episode.answer]
    return "".join(heading(turn.agent, not number) + turn.text for number, turn in enumerate(turns))


def count_tokens(episode: Episode) -> dict[str, dict[str, int]]:
    agents: dict[str, dict[str, int]] = {}
    for turn in episode.turns:
        usage = agents.setdefault(turn.agent, {"prompt_tokens": 0, "completion_tokens": 0})
        usage["prompt_tokens"] += len(turn.prompt_ids)
        usage["completion_tokens"] += len(turn.completion_ids)
    return agents


def as_data(episode: Episode) -> dict[str, Any]:
    """Return an episode as JSON data: turns and feedback, in order, without the output of programs."""
    return {
        "turns": [
            {
                "agent": turn.agent,
                "text": turn.text,
                "sees": list(turn.sees),
                "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls],
                "truncated": turn.truncated,
                "is_answer": turn is episode.answer,
                "prompt_tokens": len(turn.prompt_ids),
                "completion_tokens": len(turn.completion_ids),
            }
            for turn in episode.turns
        ],
        "feedback": [{"source": item.agent, "text": item.text} for item in episode.feedback if item.agent != OUTPUT],
    }


_PUBLIC_PATHS = ("/", "/health")  # need no key
_UNSUPPORTED = "unsupported_parameter"
_MOST_STORED = 64 << 20  # bytes of the stored responses of all clients


def serve(team: Team, settings: ServeSettings | None = None) -> None:
    """
    Serve a team until the process gets SIGINT or SIGTERM.

    Args:
        team ([`Team`]): the team.
        settings ([`ServeSettings`], *optional*): address and limits.
    """
    asyncio.run(_serve(team, settings or ServeSettings()))


async def _serve(team: Team, settings: ServeSettings) -> None:
    stop_requested, loop = asyncio.Event(), asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stop_requested.set)
    async with listening(team, settings) as url:
        logger.info(f"Serving {team!r} on {url}.")
        await stop_requested.wait()


@contextlib.asynccontextmanager
async def listening(team: Team, settings: ServeSettings) -> AsyncIterator[str]:
    """Serve a team within the context, in the current event loop. Yields its URL."""
    backend = _TeamBackend(team, settings)
    runner = web.AppRunner(
        backend.application(),
        handler_cancellation=True,
        shutdown_timeout=settings.grace,
        access_log=None,
        auto_decompress=False,  # a small body could expand without limit before the key is checked
        logger=client_logger,
    )
    await runner.setup()
    sockets: list[socket.socket] = []
    tasks: list[asyncio.Task] = []
    try:
        sockets = await listen(settings.host, settings.port)
        accept = backend.connections.accept
        tasks = [asyncio.ensure_future(accept(open_socket, runner.server)) for open_socket in sockets]
        yield str(URL.build(scheme="http", host=settings.host, port=sockets[0].getsockname()[1])).rstrip("/")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for open_socket in sockets:
            open_socket.close()
        await runner.cleanup()


def application(team: Team, settings: ServeSettings | None = None) -> web.Application:
    """
    Make an aiohttp application that serves the team, to run or to mount in another application. Run it with
    `handler_cancellation=True`, so that a question is cancelled when its client disconnects.

    Args:
        team ([`Team`]): the team.
        settings ([`ServeSettings`], *optional*): address and limits.

    Raises:
        ValueError: an agent has the name of the team.
    """
    return _TeamBackend(team, settings or ServeSettings()).application()


class _RequestedTurnWorkflow(Workflow):
    """An agent takes a turn on the messages of a request."""

    def __init__(self, chat_request: ChatRequest):
        self._chat_request = chat_request

    async def run(self, episode: LiveEpisode) -> None:
        request = self._chat_request
        try:
            messages = with_format(request.messages, request.schema)
            await episode.turn_on(request.model, RequestedTurn(messages, request.tools, request.stop))
        except EndOfEpisode as end:
            raise PromptError(str(end), end.is_too_long) from end


class _TeamBackend:
    """Answers requests with the workflow of a team, or with one of its agents."""

    def __init__(self, team: Team, settings: ServeSettings):
        self._agent_names = [agent.name for agent in team.agents]
        if settings.name in self._agent_names:
            raise ValueError(f"`name={settings.name!r}` is the name of an agent. Choose another `name` for the team.")
        self._team, self._settings = team, settings
        has_large_requests = team.sees_images and settings.max_body == ServeSettings.max_body
        self.timeout, self.max_body = settings.timeout, settings.max_body * (16 if has_large_requests else 1)
        self.closes_connections, self.json_only = False, True
        starts_programs = isinstance(team.workflow, ExternalApp) and team.workflow.starts_programs
        max_running = min(settings.max_running, settings.max_programs) if starts_programs else settings.max_running
        self._queue, self._counters = RequestQueue(max_running, settings.max_waiting), ServerMetrics()
        self._page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        self._is_shutting_down = False
        self.connections, self.responses = Connections(), ResponseStore(_MOST_STORED)
        self.agent_of: AgentRule | None = settings.agent_of or getattr(team.workflow, "agent_of", None)
        # The models that clients can request: the team, with its own workflow, and each of its agents
        self._workflows: dict[str, Workflow | None] = {name: Sequential([name]) for name in self._agent_names}
        if not isinstance(team.workflow, ExternalApp) or team.workflow.app is not None:  # else nobody decides who acts
            self._workflows = {settings.name: None, **self._workflows}
        self.models = list(self._workflows)

    def application(self) -> web.Application:
        app = HTTPApplication(self).application()
        app.router.add_get("/", self._show_page)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.cleanup_ctx.append(self._connected)
        app.on_shutdown.append(self._on_shutdown)
        return app

    async def _connected(self, _: web.Application) -> AsyncIterator[None]:
        async with self._team.live.connected():
            yield

    async def _on_shutdown(self, _: web.Application) -> None:
        self._is_shutting_down = True

    # ---- Backend interface ----

    as_shown = str  # requests are read as they were sent

    def admit(self, request: web.Request) -> _TeamBackend:
        """Check the API key and the origin: web pages of other origins are refused."""
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            raise RequestError("Web pages of another origin cannot use this server.", 403, code="forbidden_origin")
        key = self._settings.api_key
        if key is None and not is_loopback(_get_host(request)):
            # After DNS rebinding, a foreign page reaches this machine under its own name, so origin and host are equal
            raise RequestError(
                f"Unknown host {request.host[:80]!r}. Use 'localhost', or set an API key.", 403, code="forbidden_host"
            )
        if key is not None and request.path not in _PUBLIC_PATHS:
            request_key = get_api_key(request).encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(request_key, key.encode()):
                text = "Missing or invalid API key: use `Authorization: Bearer ...` or `x-api-key`."
                raise RequestError(text, 401, code="invalid_api_key")
        return self

    def ended(self, request: web.Request, client: _TeamBackend | None, outcome: RequestOutcome) -> None:
        if request.method == "POST":
            self._counters.request(outcome.model, outcome.status, outcome.seconds)

    async def count_tokens(self, chat_request: ChatRequest) -> int:
        """Count the tokens that an agent is shown; for the team, its first agent."""
        agent = chat_request.model if chat_request.model in self._agent_names else self._agent_names[0]
        try:
            async with self._queue.place():
                messages = with_format(chat_request.messages, chat_request.schema)
                return await self._team.live.count_tokens(agent, messages, chat_request.tools)
        except PromptError as error:
            raise to_request_error(error) from error

    async def answer(
        self, chat_request: ChatRequest, body: bytes, is_retry: bool, on_text: TextListener | None
    ) -> ChatReplies:
        # Agents of an application act on the messages of a request, as in training
        is_direct = isinstance(self._team.workflow, ExternalApp) and chat_request.model in self._agent_names
        if is_direct:
            chat_request.check_turn()
            if chat_request.tools and not self._team.workflow.uses_tools:
                raise RequestError("The team was not trained with `tools` in requests.", 400, "tools", _UNSUPPORTED)
        else:
            _check_question(chat_request)
        shows = chat_request.show_turns and self._settings.show_turns
        chat_request = dataclasses.replace(chat_request, show_turns=shows)
        live = None if on_text is None or is_direct else self._event_handler(chat_request, on_text)
        workflow = _RequestedTurnWorkflow(chat_request) if is_direct else self._workflows[chat_request.model]
        episodes = await self._run_episodes(chat_request, workflow, live)
        return ChatReplies([_reply(episode, chat_request, is_direct) for episode in episodes])

    async def _show_page(self, request: web.Request) -> web.Response:
        rules = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        headers = {"Content-Security-Policy": rules, "X-Content-Type-Options": "nosniff"}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _health(self, request: web.Request) -> web.Response:
        status, code = ("ending", 503) if self._is_shutting_down else ("ok", 200)
        return web.json_response({"status": status}, status=code)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self._counters.text(self._queue))

    async def _run_episodes(
        self, chat_request: ChatRequest, workflow: Workflow | None, on_event: Callable[[Event], None] | None
    ) -> list[Episode]:
        if self._team.sees_images and not chat_request.row.keys().isdisjoint(
            ("image", "images")
        ):  # may name local files
            raise RequestError("`row` must not have images. Send them as parts of messages.", field="row")
        prompt = with_format(chat_request.messages, chat_request.schema)
        question = Question(
            [{**chat_request.row, "prompt": prompt} for _ in range(chat_request.count)],
            secrets.randbits(62) if chat_request.seed is None else chat_request.seed,
            decoding(chat_request.sampling),
            workflow,
            chat_request.max_tokens,
            self._settings.max_turns,
            chat_request.schema if chat_request.model in self._agent_names else None,
        )
        if chat_request.count > self._queue.places:
            raise RequestError(f"`n` must be at most {self._queue.places}, got {chat_request.count}.", field="n")
        try:
            async with self._queue.place(chat_request.count):
                episodes = await self._team.live.run(question, on_event)
        except EngineDownError as error:
            raise RequestError(str(to_request_error(error)), 503, code="engine_down") from error
        self._counters.episodes(episodes)
        return episodes

    def _event_handler(self, chat_request: ChatRequest, on_text: TextListener) -> Callable[[Event], None]:
        """Return a handler that streams the answer, and the turns of teammates before it."""
        answer_at, current_turn = self._answering_turn(chat_request.model), None

        def on_event(event: Event) -> None:
            nonlocal current_turn
            if not isinstance(event, TextDelta):
                return
            text, is_answer = event.text, event.turn == answer_at
            if not is_answer:
                if not chat_request.show_turns:
                    return
                if current_turn != event.turn:  # branches may generate at the same time
                    text, current_turn = heading(event.agent, current_turn is None) + text, event.turn
            on_text(text, is_answer, event.agent, event.turn)

        return on_event

    def _answering_turn(self, model: str) -> int | None:
        """Return the index of the turn that will be the answer, or `None` if it is not known in advance."""
        workflow, agents = self._workflows[model] or self._team.workflow, self._team.agents
        if any(agent.tools for agent in agents) or type(workflow) is not Sequential:
            return None
        return len(workflow.agents or agents) * workflow.rounds - 1


def _get_host(request: web.Request) -> str | None:
    """Return the host name or address that a client used, without the port."""
    try:
        return URL(f"http://{request.host}").host
    except ValueError:
        return None


def _check_question(chat_request: ChatRequest) -> None:
    """Raise a [`RequestError`] if the request uses a feature that only agents of applications support."""
    has_calls = any(message["role"] == "tool" or message.get("tool_calls") for message in chat_request.messages)
    for name, value in {"tools": chat_request.tools, "stop": chat_request.stop, "messages": has_calls}.items():
        if value:
            why = "Tool calls in messages are" if name == "messages" else f"`{name}` is"
            text = f"{why} not supported: a team uses the tools and stop strings that it was trained with."
            raise RequestError(text, 400, name, _UNSUPPORTED)
    contents = [message["content"] for message in chat_request.messages if message["role"] == "user"]
    if any(isinstance(content, str) and not content.strip() for content in contents):
        raise RequestError("A user message is empty.", field="messages")


def _reply(episode: Episode, chat_request: ChatRequest, is_direct: bool) -> ChatReply:
    turn, tokens, mark = episode.answer, count_tokens(episode), f"{secrets.token_hex(6)}_"
    reply = ChatReply.from_turn(turn, chat_request.stop, mark) if turn is not None else ChatReply("")
    read = sum(counts["prompt_tokens"] for counts in tokens.values())
    written = sum(counts["completion_tokens"] for counts in tokens.values())
    if is_direct:
        return dataclasses.replace(reply, read=read, written=written)
    earlier_turns, turns = (thoughts(episode), as_data(episode)) if chat_request.show_turns else ("", None)
    text = turn.text if turn is not None else ""
    return ChatReply(text, (), reply.is_truncated, read, written, earlier_turns, turns, tokens)
