# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A team over HTTP: settings, request queue, routes, and answers as a whole or as streams."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import logging
import secrets
import signal
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
from .external_app import OUTPUT, ExternalApp
from .http import Answer, HTTPApplication, Outcome, Tell, key_of
from .requests import ChatReply, ChatRequest, RequestError, problem_of


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GatewaySettings:
    """
    Address and limits of a gateway.

    Args:
        name (`str`, *optional*, defaults to `"team"`): name of the team as a model.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): address to listen at.
        port (`int`, *optional*, defaults to `8080`): port; 0 for any free one.
        api_key (`str`, *optional*): key that requests bring as `Authorization: Bearer ...`. Demanded unless the
            address is one of this machine alone.
        show_turns (`bool`, *optional*, defaults to `True`): whether answers have the turns of teammates.
        max_running (`int`, *optional*, defaults to `64`): largest number of answers that are written at a time.
        max_programs (`int`, *optional*, defaults to `8`): the same for a team whose answers start programs.
        max_waiting (`int`, *optional*, defaults to `256`): largest number of questions that wait for others to end.
            Further ones are refused with status 503.
        max_turns (`int`, *optional*, defaults to `64`): largest number of turns of an episode.
        timeout (`float`, *optional*, defaults to `600.0`): seconds after which a question is given up.
        max_body (`int`, *optional*, defaults to `1048576`): largest number of bytes of a request.
        grace (`float`, *optional*, defaults to `10.0`): seconds that questions have left when the gateway ends.

    Raises:
        ValueError: the address is reachable by others and there is no key, or a limit is out of range.
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

    def __post_init__(self) -> None:
        if not self.is_loopback and not self.api_key:
            raise ValueError(
                f"`host={self.host!r}` can be reached by others, so an API key is needed: set the environment "
                "variable `MARFT_API_KEY`. Or leave `host` at '127.0.0.1', which only this machine reaches."
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
    """Whether a host is this machine, by its address or as `localhost`. Other names may mean anything."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


class RequestQueue:
    """
    Places for answers that are written at the same time.

    Args:
        places (`int`): number of places.
        waiting (`int`): largest number of questions that wait for some.
    """

    def __init__(self, places: int, waiting: int):
        self.places, self._free, self._most = places, asyncio.Semaphore(places), waiting
        self._first = asyncio.Lock()  # held by the question that has waited longest
        self.running = self.waiting = 0

    @contextlib.asynccontextmanager
    async def place(self, answers: int = 1) -> AsyncIterator[None]:
        """
        Asynchronous context manager: a place for each answer to a question, as soon as so many are free.

        Raises:
            RequestError: too many are waiting.
        """
        if (self._free.locked() or self._first.locked()) and self.waiting >= self._most:
            raise RequestError(
                f"{self.running} questions are being answered, and {self.waiting} wait. Ask again later.",
                503,
                code="overloaded",
            )
        self.waiting += 1
        taken = 0
        try:
            try:
                async with self._first:
                    while taken < answers:
                        await self._free.acquire()
                        taken += 1
            finally:
                self.waiting -= 1
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
        finally:
            for _ in range(taken):
                self._free.release()


class ServerMetrics:
    """What a gateway has done, in Prometheus' text format."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._turns: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def request(self, model: str, status: int, seconds: float) -> None:
        """A request has ended."""
        self._requests[model, status] += 1
        self._seconds[model] = self._seconds.get(model, 0.0) + seconds

    def episodes(self, episodes: Sequence[Episode]) -> None:
        """Episodes have ended."""
        for turn in (turn for episode in episodes for turn in episode.turns):
            self._turns[turn.agent] += 1
            self._tokens[turn.agent, "prompt"] += len(turn.prompt_ids)
            self._tokens[turn.agent, "completion"] += len(turn.completion_ids)

    def text(self, queue: RequestQueue) -> str:
        """All metrics, with the present lengths of a queue."""
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
    """What stands above a turn among the turns of teammates."""
    return f"{'' if is_first else chr(10) * 2}[{agent}]\n"


def thoughts(episode: Episode) -> str:
    """The turns before the answer, with their agents' names."""
    turns = [turn for turn in episode.turns if turn is not episode.answer]
    return "".join(heading(turn.agent, not number) + turn.text for number, turn in enumerate(turns))


def answer_text(episode: Episode) -> str:
    """The team's answer; empty if there was no turn."""
    return episode.answer.text if episode.answer is not None else ""


def tokens_of(episode: Episode) -> dict[str, dict[str, int]]:
    """Numbers of tokens of each agent."""
    agents: dict[str, dict[str, int]] = {}
    for turn in episode.turns:
        its = agents.setdefault(turn.agent, {"prompt_tokens": 0, "completion_tokens": 0})
        its["prompt_tokens"] += len(turn.prompt_ids)
        its["completion_tokens"] += len(turn.completion_ids)
    return agents


def as_data(episode: Episode) -> dict[str, Any]:
    """An episode as JSON: who said what, in order, and what they were told. The output of a program is not shown."""
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


# What anybody may ask without a key
_OPEN = ("/", "/health")
_UNSUPPORTED = "unsupported_parameter"


def serve(team: Team, settings: GatewaySettings | None = None) -> None:
    """
    Serve a team until the process is told to end.

    Args:
        team ([`Team`]): the team.
        settings ([`GatewaySettings`], *optional*): address and limits.
    """
    asyncio.run(_serve(team, settings or GatewaySettings()))


async def _serve(team: Team, settings: GatewaySettings) -> None:
    is_told, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, is_told.set)
    runner = web.AppRunner(
        application(team, settings),
        handler_cancellation=True,
        shutdown_timeout=settings.grace,
        access_log=None,
        auto_decompress=False,  # a few bytes would become any number of them before the key is looked at
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
        url = URL.build(scheme="http", host=settings.host, port=runner.addresses[0][1])  # port 0 is any
        logger.info(f"Serving {team!r} on {str(url).rstrip('/')}.")
        await is_told.wait()
    finally:
        await runner.cleanup()


def application(team: Team, settings: GatewaySettings | None = None) -> web.Application:
    """
    The gateway as an application of aiohttp, to be run or mounted by others. Run it with `handler_cancellation=True`,
    so that questions end when nobody waits for the answer.

    Args:
        team ([`Team`]): the team.
        settings ([`GatewaySettings`], *optional*): address and limits.

    Raises:
        ValueError: an agent has the name of the team.
    """
    return _TeamBackend(team, settings or GatewaySettings()).application()


class _Alone(Workflow):
    """One agent answers by itself."""

    def __init__(self, agent: str):
        self.agent = agent

    async def run(self, episode: LiveEpisode) -> None:
        await episode.turn(self.agent)


class _OnMessages(Workflow):
    """An agent is asked on the messages of a request."""

    def __init__(self, asked: ChatRequest):
        self._asked = asked

    async def run(self, episode: LiveEpisode) -> None:
        asked = self._asked
        try:
            await episode.turn_on(asked.model, RequestedTurn(asked.messages, asked.tools, asked.stop))
        except EndOfEpisode as end:
            raise PromptError(str(end), end.is_too_long) from end


class _TeamBackend:
    """Answers for a team: its own workflow, or one of its agents."""

    def __init__(self, team: Team, settings: GatewaySettings):
        names = [agent.name for agent in team.agents]
        if settings.name in names:
            raise ValueError(f"The team cannot be served as {settings.name!r}, the name of an agent. Set `name`.")
        self._team, self._settings = team, settings
        self.timeout, self.max_body = settings.timeout, settings.max_body
        self.closes, self.json_only = False, True
        starts = isinstance(team.workflow, ExternalApp) and team.workflow.starts_programs
        places = min(settings.max_running, settings.max_programs) if starts else settings.max_running
        self._queue, self._counters = RequestQueue(places, settings.max_waiting), ServerMetrics()
        self._page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        self._ends = False

    @property
    def _workflows(self) -> dict[str, Workflow | None]:
        """What may be asked: the team, by its own workflow, and each of its present agents."""
        agents: dict[str, Workflow | None] = {agent.name: _Alone(agent.name) for agent in self._team.agents}
        workflow = self._team.workflow
        if isinstance(workflow, ExternalApp) and workflow.app is None:  # nobody knows whom to ask in which order
            return agents
        return {self._settings.name: None, **agents}

    def _is_direct(self, model: Any) -> bool:
        """Whether an agent is asked as in its training: on the messages that an application has written."""
        return isinstance(self._team.workflow, ExternalApp) and model in [agent.name for agent in self._team.agents]

    def application(self) -> web.Application:
        """The application."""
        app = HTTPApplication(self).application()
        app.router.add_get("/", self._show_page)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.cleanup_ctx.append(self._connected)
        app.on_shutdown.append(self._end)
        return app

    async def _connected(self, _: web.Application) -> AsyncIterator[None]:
        async with self._team.live.connected():
            yield

    async def _end(self, _: web.Application) -> None:
        self._ends = True

    # ---- As a backend ----

    def admit(self, request: web.Request) -> _TeamBackend:
        """
        Raises:
            RequestError: the request has no key, or comes from a page of another server.
        """
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            raise RequestError("Pages of other servers may not ask this one.", 403, code="forbidden_origin")
        key = self._settings.api_key
        if key is None and not is_loopback(_host_of(request)):
            # A page elsewhere whose name is made to mean this machine (DNS rebinding) has an origin of the same name
            raise RequestError(f"There is no {request.host[:80]!r} here.", 403, code="forbidden_host")
        if key is not None and request.path not in _OPEN:
            given = key_of(request).encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, key.encode()):
                raise RequestError(
                    "A key is needed: send it as `Authorization: Bearer ...`.", 401, code="invalid_api_key"
                )
        return self

    def answering(self, request: web.Request) -> contextlib.AbstractContextManager[None]:
        """Nothing is done around a request."""
        return contextlib.nullcontext()

    def ended(self, request: web.Request, client: _TeamBackend | None, outcome: Outcome) -> None:
        """Count a request."""
        if request.method == "POST":
            self._counters.request(outcome.model, outcome.status, outcome.seconds)

    @property
    def models(self) -> Sequence[str]:
        """The team, and its agents."""
        return list(self._workflows)

    async def ask(self, asked: ChatRequest, body: bytes, is_again: bool, tell: Tell | None) -> Answer:
        """Answers of the team, or of an agent: of an application, on the messages as they are."""
        is_direct = self._is_direct(asked.model)
        if is_direct:
            asked.check_turn()
            if asked.tools and not self._team.workflow.uses_tools:
                raise RequestError("The team was not trained with `tools` in requests.", 400, "tools", _UNSUPPORTED)
        else:
            _check_question(asked)
        asked = dataclasses.replace(asked, show_turns=asked.show_turns and self._settings.show_turns)
        live = None if tell is None or is_direct else self._told(asked, tell)
        episodes = await self._episodes(asked, live)
        return Answer([_message(episode, asked, is_direct) for episode in episodes])

    # ---- Routes ----

    async def _show_page(self, request: web.Request) -> web.Response:
        rules = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        headers = {"Content-Security-Policy": rules, "X-Content-Type-Options": "nosniff"}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ending" if self._ends else "ok"}, status=503 if self._ends else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self._counters.text(self._queue))

    # ---- Answers ----

    async def _episodes(self, asked: ChatRequest, tell: Callable[[Event], None] | None) -> list[Episode]:
        is_direct = self._is_direct(asked.model)
        ask = Question(
            [{**asked.row, "prompt": asked.messages} for _ in range(asked.count)],
            secrets.randbits(62) if asked.seed is None else asked.seed,
            decoding(asked.sampling),
            _OnMessages(asked) if is_direct else self._workflows[asked.model],
            asked.max_tokens,
            self._settings.max_turns,
        )
        if asked.count > self._queue.places:
            raise RequestError(f"`n` must be at most {self._queue.places} here, got {asked.count}.", field="n")
        try:
            async with self._queue.place(asked.count):
                episodes = await self._team.live.run(ask, tell)
        except EngineDownError as error:
            raise RequestError(str(problem_of(error)), 503, code="engine_down") from error
        self._counters.episodes(episodes)
        return episodes

    def _told(self, asked: ChatRequest, tell: Tell) -> Callable[[Event], None]:
        """What hears of the events of an episode: the answering turn is the answer, others come before it."""
        answering, speaks = self._answering_turn(asked.model), None

        def hear(event: Event) -> None:
            nonlocal speaks
            if not isinstance(event, TextDelta):
                return
            text, is_answer = event.text, event.turn == answering
            if not is_answer:
                if not asked.show_turns:
                    return
                if speaks != event.turn:  # branches may speak at the same time
                    text, speaks = heading(event.agent, speaks is None) + text, event.turn
            tell(text, is_answer, event.agent, event.turn)

        return hear

    def _answering_turn(self, model: str) -> int | None:
        """Number of the turn that is the answer, where it is known before."""
        workflow, agents = self._workflows[model] or self._team.workflow, self._team.agents
        if any(agent.tools for agent in agents):
            return None
        if isinstance(workflow, _Alone):
            return 0
        if type(workflow) is Sequential:
            return len(workflow.agents or agents) * workflow.rounds - 1
        return None


def _host_of(request: web.Request) -> str | None:
    """The name or address under which a client has asked, without the port."""
    try:
        return URL(f"http://{request.host}").host
    except ValueError:
        return None


def _check_question(asked: ChatRequest) -> None:
    """
    Raises:
        RequestError: a request asks a team, or an agent of it, for what only applications have.
    """
    has_calls = any(message["role"] == "tool" or message.get("tool_calls") for message in asked.messages)
    for name, value in {"tools": asked.tools, "stop": asked.stop, "messages": has_calls}.items():
        if value:
            why = "Calls of tools in messages are" if name == "messages" else f"`{name}` is"
            text = f"{why} not supported: a team has the tools and the stop texts of its training."
            raise RequestError(text, 400, name, _UNSUPPORTED)
    if any(message["role"] == "user" and not message["content"].strip() for message in asked.messages):
        raise RequestError("A message of the user is empty, so there is nothing to answer.", field="messages")


def _message(episode: Episode, asked: ChatRequest, is_direct: bool) -> ChatReply:
    """The answer of an episode."""
    turn, tokens = episode.answer, tokens_of(episode)
    mark = f"{secrets.token_hex(6)}_"
    said = ChatReply.of(turn, asked.stop, mark) if turn is not None else ChatReply("")
    read = sum(counts["prompt_tokens"] for counts in tokens.values())
    written = sum(counts["completion_tokens"] for counts in tokens.values())
    if is_direct:
        return dataclasses.replace(said, read=read, written=written)
    before, turns = (thoughts(episode), as_data(episode)) if asked.show_turns else ("", None)
    return ChatReply(answer_text(episode), (), said.is_cut, read, written, before, turns, tokens)
