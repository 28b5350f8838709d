# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Servers of one team: a request goes to one that works, and waits while none does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ...system.event_loop import run_coroutine
from .own_server import OwnServer
from .server import (
    AnswerError,
    EngineDownError,
    Generated,
    Order,
    RefusedError,
    ServerDownError,
    UnknownAdapterError,
    VLLMServer,
)


logger = logging.getLogger(__name__)

# How often a request is repeated whose answer is no turn, or whose adapter the server does not have
_TRIES = 3
# Seconds between two looks at a server that is down
_PAUSE = 0.5


@dataclass(frozen=True)
class ServerSettings:
    """
    The servers of a team.

    Args:
        urls (`tuple[str, ...]`): their addresses.
        request_timeout (`float`): seconds after which a request for a turn is given up.
        server_timeout (`float`): seconds that requests wait while no server works.
        max_inflight (`int`): largest number of requests at a server at the same time.
        health_seconds (`float`): seconds between two looks at a server that has requests.
        health_timeout (`float`): seconds after which a server that does not say that it is well is down.
        own ([`OwnServer`], *optional*): the only server, if this process has started it for itself.
        sleep (`bool`): whether it gives the memory of the device back while nothing is generated.
    """

    urls: tuple[str, ...]
    request_timeout: float = 600.0
    server_timeout: float = 240.0
    max_inflight: int = 256
    health_seconds: float = 5.0
    health_timeout: float = 20.0
    own: OwnServer | None = None
    sleep: bool = False

    @contextlib.asynccontextmanager
    async def connected(self):
        """Asynchronous context manager: the [`VLLMServer`] of each address, for the present event loop."""
        from aiohttp import ClientSession, TCPConnector

        key = os.environ.get("VLLM_API_KEY") if self.own is None else self.own.key
        async with ClientSession(connector=TCPConnector(limit=0)) as session:
            yield [VLLMServer(url, session, self.request_timeout, key) for url in self.urls]


class _Replica:
    """A server, the requests that it works on, and whether it works."""

    def __init__(self, server: VLLMServer):
        self.server = server
        self.running: set[asyncio.Task] = set()
        self.given_up: set[asyncio.Task] = set()
        self.looks_at: asyncio.Task | None = None
        self.is_up = True
        self.problem = ""


class Replicas:
    """
    Connections to the servers of a team, for one event loop: `async with Replicas(...) as replicas`.

    Every server is made ready before its first request, and again when it has been down. A request to a server that
    goes down is sent to another one. It is the same request with the same seed, so it gives the same turn.

    Args:
        settings ([`ServerSettings`]): addresses and limits.
        make_ready (`Callable`): `await make_ready(server)` loads on a server what it lacks.
    """

    def __init__(self, settings: ServerSettings, make_ready: Callable[[VLLMServer], Awaitable[None]]):
        self._settings, self._make_ready = settings, make_ready
        self._replicas: list[_Replica] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._helpers: set[asyncio.Task] = set()
        self._all_down_since: float | None = None
        self._error: BaseException | None = None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Replicas:
        servers = await self._stack.enter_async_context(self._settings.connected())
        self._replicas = [_Replica(server) for server in servers]
        for replica in self._replicas:
            replica.is_up = False
        try:
            await asyncio.gather(*[self._first_look(replica) for replica in self._replicas])
        except BaseException:
            await self.__aexit__()
            raise
        for replica in self._replicas:
            if not replica.is_up:
                self._help(self._revive(replica))
            self._help(self._watch(replica))
        self._note_whether_all_are_down()
        return self

    async def __aexit__(self, *error: Any) -> None:
        looks = [replica.looks_at for replica in self._replicas if replica.looks_at is not None]
        tasks = [*self._helpers, *looks, *(task for replica in self._replicas for task in replica.running)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stack.aclose()

    async def generate(self, order: Order, hear: Callable[[list[int]], None] | None = None) -> tuple[Generated, str]:
        """
        Generate a turn.

        Args:
            order ([`Order`]): what is asked for.
            hear (`Callable`, *optional*): called with the newest tokens while they arrive.

        Returns: the turn, and the address of the server.

        Raises:
            EngineDownError: no server has worked for `server_timeout` seconds.
            RefusedError: a server refused the request.
            AnswerError: servers that are well answered several times with something that is not a whole turn, or not
                in time.
        """
        bad: list[Exception] = []
        tried: set[str] = set()
        heard = 0

        def once() -> Callable[[list[int]], None] | None:
            """What hears of the tokens of one try. A further try gives the same ones again."""
            again = heard

            def hear_new(ids: list[int]) -> None:
                nonlocal heard, again
                old, again = min(again, len(ids)), max(again - len(ids), 0)
                heard += len(ids) - old
                if hear is not None and len(ids) > old:
                    hear(ids[old:])

            return None if hear is None else hear_new

        while True:
            replica = await self._free(tried)
            task = asyncio.ensure_future(replica.server.generate(order, once()))
            replica.running.add(task)
            try:
                return await task, replica.server.url
            except asyncio.CancelledError:
                if task not in replica.given_up:  # the episode is cancelled, not the server
                    raise
            except ServerDownError as error:
                if await self._is_well(replica):  # it is this request that fails
                    bad.append(error)
                else:
                    self._down(replica, error)
            except UnknownAdapterError as error:
                bad.append(error)
                self._down(replica, error)
            except AnswerError as error:
                bad.append(error)
            finally:
                task.cancel()
                replica.running.discard(task)
                replica.given_up.discard(task)
                self._wake()
            tried.add(replica.server.url)
            if len(bad) >= _TRIES:
                self._give_up(bad[-1])

    def _give_up(self, error: Exception) -> NoReturn:
        """
        Raises:
            AnswerError: requests for a turn have failed several times on servers that are well.
        """
        if not isinstance(error, ServerDownError):
            raise error
        raise AnswerError(
            f"{error} This was the {_TRIES}rd try, and the server says that it is well. If turns need longer than "
            f"{self._settings.request_timeout:g} seconds, with the time that they wait in the server, set a larger "
            "`vllm_request_timeout`, or a smaller `vllm_max_inflight`."
        ) from error

    async def _is_well(self, replica: _Replica) -> bool:
        """Whether a server that is up says that it is well. Requests that fail together ask once."""
        if not replica.is_up:
            return False
        if replica.looks_at is None or replica.looks_at.done():
            look = replica.server.check_health(self._settings.health_timeout)
            replica.looks_at = asyncio.ensure_future(look)
        try:
            await asyncio.shield(replica.looks_at)
        except ServerDownError:
            return False
        except RefusedError:  # a proxy that does not pass the question on
            return True
        return True

    async def _free(self, tried: Collection[str] = ()) -> _Replica:
        """A server that works and has room, the one with the fewest requests; if possible, none that was `tried`."""
        while True:
            if self._error is not None:
                raise self._error
            up = [one for one in self._replicas if one.is_up]
            up = [one for one in up if one.server.url not in tried] or up
            free = [one for one in up if len(one.running) < self._settings.max_inflight]
            if free:
                return min(free, key=lambda replica: len(replica.running))
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():  # it was this one's turn: the next one takes it
                    self._wake()
                raise

    def _wake(self, all_of_them: bool = False) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                if not all_of_them:
                    return

    # ---- Servers that go down and come back ----

    def _help(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)

    async def _first_look(self, replica: _Replica) -> None:
        try:
            await self._make_ready(replica.server)
        except ServerDownError as error:
            replica.problem = str(error)
            logger.warning(f"{error} Its requests go to another server, or wait until it is back.")
        else:
            replica.is_up = True

    async def _watch(self, replica: _Replica) -> None:
        """Look from time to time whether a server that has requests is well: one that hangs closes no connection."""
        while True:
            await asyncio.sleep(self._settings.health_seconds)
            if replica.is_up and replica.running:
                try:
                    await replica.server.check_health(self._settings.health_timeout)
                except ServerDownError as error:
                    self._down(replica, error)
                except RefusedError:  # a proxy that does not pass the question on
                    return

    def _down(self, replica: _Replica, error: Exception) -> None:
        if not replica.is_up:
            return
        replica.is_up, replica.problem = False, str(error)
        logger.warning(f"{error} Its requests go to another server, or wait until it is back.")
        for task in replica.running:
            replica.given_up.add(task)
            task.cancel()
        self._note_whether_all_are_down()
        self._help(self._revive(replica))

    def _note_whether_all_are_down(self) -> None:
        if any(replica.is_up for replica in self._replicas):
            self._all_down_since = None
        elif self._all_down_since is None:
            self._all_down_since = time.monotonic()

    async def _revive(self, replica: _Replica) -> None:
        while True:
            try:
                await replica.server.check_health(self._settings.health_timeout)
                await self._make_ready(replica.server)
            except ServerDownError as error:
                replica.problem = str(error)
            except Exception as error:  # it came back with other settings, or other files
                self._end(error)
                return
            else:
                replica.is_up = True
                self._note_whether_all_are_down()
                logger.warning(f"{replica.server.url} works again.")
                self._wake(all_of_them=True)
                return
            since = self._all_down_since
            if since is not None and time.monotonic() - since > self._settings.server_timeout:
                self._end(EngineDownError(self._describe()))
                return
            await asyncio.sleep(_PAUSE)

    def _describe(self) -> str:
        problems = " ".join(replica.problem for replica in self._replicas)
        return (
            f"No vLLM server has worked for {self._settings.server_timeout:g} seconds (`vllm_server_timeout`). "
            f"{problems} Start it again with the same command; nothing was trained on the turns that are missing."
        )

    def _end(self, error: BaseException) -> None:
        self._error = self._error or error
        self._wake(all_of_them=True)


def addresses(
    urls: str | Sequence[str] | None, host: str, port: int, name: str = "vllm_server_base_url"
) -> tuple[str, ...]:
    """
    Addresses of servers, without a slash at their end.

    Args:
        urls (`str` or `Sequence[str]`, *optional*): what the user passes.
        host, port: of a single server, if nothing is passed.
        name (`str`, *optional*, defaults to `"vllm_server_base_url"`): name of what the user passes.

    Raises:
        ValueError: one is not an HTTP address, or there twice.
    """
    # TRL's default means all addresses of a server, and a client can only reach one: that of this machine
    host = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104
    given = [urls] if isinstance(urls, str) else list(urls or [f"http://{host}:{port}"])
    found = [url.strip().rstrip("/").removesuffix("/v1") for text in given for url in text.split(",")]
    for url in found:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`{name}` must be addresses such as 'http://host:8000', got {url!r}.")
    if len(set(found)) < len(found) or not found:
        raise ValueError(f"`{name}` must name every server once, got {given!r}.")
    return tuple(found)


# What is said after some seconds without a server
_HOW_TO_START = (
    "The command that starts one is what `marft_trl.extras.engines.vllm_command(model, agents, args, peft_config)` "
    "returns; another address is set as `vllm_server_base_url='http://host:8000'`. Or set `vllm_mode='colocate'` and "
    "`vllm_python`, and the trainer starts a server on its own GPU."
)
_SILENCE = 5.0  # seconds


def longest_turn(settings: ServerSettings) -> int | None:
    """
    Wait until all servers run, and ask how long an observation and a turn may be together.

    Returns: the smallest number of tokens of all servers, or `None` if none tells.

    Raises:
        EngineDownError: a server has not answered for `server_timeout` seconds.
    """
    return run_coroutine(_longest_turn, settings)


async def _longest_turn(settings: ServerSettings) -> int | None:
    start = time.monotonic()
    async with settings.connected() as servers:
        found = await asyncio.gather(*[_models_of(server, settings, start) for server in servers])
    lengths = [model.get("max_model_len") for models in found for model in models.values()]
    return min((length for length in lengths if length), default=None)


async def _models_of(server: VLLMServer, settings: ServerSettings, start: float) -> dict[str, dict[str, Any]]:
    was_told = False
    while True:
        try:
            return await server.models(settings.health_timeout)
        except ServerDownError as error:
            waited = time.monotonic() - start
            if waited > settings.server_timeout:
                raise EngineDownError(
                    f"There is no vLLM server at {server.url} after {settings.server_timeout:g} seconds "
                    f"(`vllm_server_timeout`): {error} {_HOW_TO_START}"
                ) from error
            if not was_told and waited > _SILENCE:
                was_told = True
                logger.warning(
                    f"No vLLM server answers at {server.url} yet; training begins when one does, for up to "
                    f"{settings.server_timeout:g} seconds (`vllm_server_timeout`). {_HOW_TO_START}"
                )
            await asyncio.sleep(_PAUSE)
