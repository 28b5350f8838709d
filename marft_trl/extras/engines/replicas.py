# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The servers of a team: each request goes to one of them, and is sent again while that server does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
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
        request_timeout: seconds after which a request for a turn is given up.
        server_timeout: seconds that requests wait while a server does not answer.
        max_inflight: largest number of requests at a server at the same time.
        health_timeout: seconds after which a server that does not say that it is well is down.
        own: the only server, if this process has started it for itself.
        sleep: whether it gives the memory of the device back while nothing is generated.
    """

    urls: tuple[str, ...]
    request_timeout: float = 600.0
    server_timeout: float = 240.0
    max_inflight: int = 256
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


class Replicas:
    """
    Connections to the servers of a team, for one event loop: `async with Replicas(...) as replicas`.

    A request goes to the server with the fewest requests and stays there. While that server does not answer, the
    request is sent again, with the same seed; the server first gets the adapters that it lacks.

    Args:
        make_ready: `await make_ready(server)` loads on a server what it lacks.
    """

    def __init__(self, settings: ServerSettings, make_ready: Callable[[VLLMServer], Awaitable[None]]):
        self._settings, self._make_ready = settings, make_ready
        self._running: dict[VLLMServer, int] = {}
        self._room = asyncio.Semaphore(settings.max_inflight * len(settings.urls))
        self._returns: dict[VLLMServer, asyncio.Task] = {}  # waits for servers that do not answer
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Replicas:
        servers = await self._stack.enter_async_context(self._settings.connected())
        self._running = dict.fromkeys(servers, 0)
        try:
            await asyncio.gather(*map(self._return_of, servers))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in self._returns.values():
            task.cancel()
        await asyncio.gather(*self._returns.values(), return_exceptions=True)
        await self._stack.aclose()

    async def generate(self, order: Order, hear: Callable[[list[int]], None] | None = None) -> tuple[Generated, str]:
        """
        Generate a turn.

        Returns: the turn, and the address of the server.

        Raises:
            EngineDownError: the server has not answered for `server_timeout` seconds.
            RefusedError: the server refused the request.
            AnswerError: a server that is well answered several times with something that is not a whole turn, or not
                in time.
        """
        async with self._room:
            server = min(self._running, key=self._running.__getitem__)
            self._running[server] += 1
            try:
                return await self._generate(server, order, hear), server.url
            finally:
                self._running[server] -= 1

    async def _generate(self, server: VLLMServer, order: Order, hear: Callable[[list[int]], None] | None) -> Generated:
        heard, bad = 0, 0
        failed: Exception

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
            try:
                return await server.generate(order, once())
            except UnknownAdapterError as error:  # it was started again
                bad, failed = bad + 1, error
                await self._return_of(server)
            except ServerDownError as error:
                failed = error
                if await self._is_well(server):  # it is this request that fails
                    bad += 1
                else:
                    logger.warning(f"{error} Its requests wait until it is back.")
                    await self._return_of(server)
            except AnswerError as error:
                bad, failed = bad + 1, error
            if bad >= _TRIES:
                self._give_up(failed)

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

    async def _is_well(self, server: VLLMServer) -> bool:
        try:
            await server.check_health(self._settings.health_timeout)
        except ServerDownError:
            return False
        except RefusedError:  # a proxy that does not pass the question on
            return True
        return True

    async def _return_of(self, server: VLLMServer) -> None:
        """Wait until a server answers and has all adapters. Requests that wait for the same one share the wait."""
        task = self._returns.get(server)
        if task is None or task.done():
            task = self._returns[server] = asyncio.ensure_future(self._revive(server))
        await asyncio.shield(task)

    async def _revive(self, server: VLLMServer) -> None:
        start, is_back = time.monotonic(), False
        while not is_back:
            try:
                with contextlib.suppress(RefusedError):  # a proxy that does not pass the question on
                    await server.check_health(self._settings.health_timeout)
                await self._make_ready(server)
                is_back = True
            except ServerDownError as error:
                if time.monotonic() - start > self._settings.server_timeout:
                    raise EngineDownError(
                        f"{server.url} has not answered for {self._settings.server_timeout:g} seconds "
                        f"(`vllm_server_timeout`). {error} Start it again with the same command and resume; nothing "
                        "was trained on the turns that are missing."
                    ) from error
                await asyncio.sleep(_PAUSE)


def addresses(
    urls: str | Sequence[str] | None, host: str, port: int, name: str = "vllm_server_base_url"
) -> tuple[str, ...]:
    """
    Addresses of servers, without a slash at their end.

    Args:
        urls: what the user passes.
        host, port: of a single server, if nothing is passed.
        name: name of what the user passes.

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
