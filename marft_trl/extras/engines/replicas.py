# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""vLLM servers of a team: distribute requests, and retry them while a server does not respond."""

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
    GeneratedTurn,
    GenerateRequest,
    RefusedError,
    ServerDownError,
    UnknownAdapterError,
    VLLMServer,
)


logger = logging.getLogger(__name__)

# Maximum number of failures of a request: an invalid response, or an adapter that the server does not have
_MAX_FAILURES = 3
# Seconds between two health checks of a server that is down
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class ServerSettings:
    """
    Settings of the servers of a team.

    Args:
        request_timeout: seconds after which a request for a turn is given up.
        server_timeout: seconds that requests wait while a server does not answer.
        max_inflight: maximum number of concurrent requests per server.
        health_timeout: seconds without a response to a health check after which a server is considered down.
        own: the only server, if this process started it.
        sleep: whether the own server frees its device memory while nothing is generated.
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
        """Asynchronous context manager that yields a [`VLLMServer`] per address, for the current event loop."""
        from aiohttp import ClientSession, TCPConnector

        key = os.environ.get("VLLM_API_KEY") if self.own is None else self.own.key
        async with ClientSession(connector=TCPConnector(limit=0)) as session:
            yield [VLLMServer(url, session, self.request_timeout, key) for url in self.urls]


class ServerPool:
    """
    Connections to the servers of a team, for one event loop: `async with ServerPool(...) as pool`.

    A request goes to the server with the fewest requests and stays there. If that server goes down, the request is
    sent again with the same seed when the server is back and has all adapters.

    Args:
        make_ready: `await make_ready(server)` loads missing adapters on a server.
    """

    def __init__(self, settings: ServerSettings, make_ready: Callable[[VLLMServer], Awaitable[None]]):
        self._settings, self._make_ready = settings, make_ready
        self._running: dict[VLLMServer, int] = {}
        self._slots = asyncio.Semaphore(settings.max_inflight * len(settings.urls))
        self._waits: dict[VLLMServer, asyncio.Task] = {}  # tasks that wait for servers that are down
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ServerPool:
        servers = await self._stack.enter_async_context(self._settings.connected())
        self._running = dict.fromkeys(servers, 0)
        try:
            await asyncio.gather(*map(self._wait_until_ready, servers))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in self._waits.values():
            task.cancel()
        await asyncio.gather(*self._waits.values(), return_exceptions=True)
        await self._stack.aclose()

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[list[int]], None] | None = None
    ) -> tuple[GeneratedTurn, str]:
        """
        Generate a turn.

        Returns: the turn, and the address of the server.

        Raises:
            EngineDownError: the server has not answered for `server_timeout` seconds.
            RefusedError: the server refused the request.
            AnswerError: a healthy server sent incomplete turns several times, or did not respond in time.
        """
        async with self._slots:
            server = min(self._running, key=self._running.__getitem__)
            self._running[server] += 1
            try:
                return await self._generate(server, request, on_tokens), server.url
            finally:
                self._running[server] -= 1

    async def _generate(
        self, server: VLLMServer, request: GenerateRequest, on_tokens: Callable[[list[int]], None] | None
    ) -> GeneratedTurn:
        num_heard, num_failures = 0, 0
        failed: Exception

        def make_listener() -> Callable[[list[int]], None] | None:
            """Make the listener of an attempt. It skips tokens that earlier attempts have already passed on."""
            repeated = num_heard

            def on_new_tokens(ids: list[int]) -> None:
                nonlocal num_heard, repeated
                old, repeated = min(repeated, len(ids)), max(repeated - len(ids), 0)
                num_heard += len(ids) - old
                if on_tokens is not None and len(ids) > old:
                    on_tokens(ids[old:])

            return None if on_tokens is None else on_new_tokens

        while True:
            try:
                return await server.generate(request, make_listener())
            except UnknownAdapterError as error:  # the server was restarted
                num_failures, failed = num_failures + 1, error
                await self._wait_until_ready(server)
            except ServerDownError as error:
                failed = error
                if await self._is_healthy(server):  # only this request fails
                    num_failures += 1
                else:
                    logger.warning(f"{error} Requests to this server wait until it is back.")
                    await self._wait_until_ready(server)
            except AnswerError as error:
                num_failures, failed = num_failures + 1, error
            if num_failures >= _MAX_FAILURES:
                self._give_up(failed)

    def _give_up(self, error: Exception) -> NoReturn:
        """
        Raises:
            AnswerError: requests for a turn failed several times on healthy servers.
        """
        if not isinstance(error, ServerDownError):
            raise error
        raise AnswerError(
            f"{error} The request failed {_MAX_FAILURES} times, although the server is healthy. If turns need more "
            f"than {self._settings.request_timeout:g} seconds, including the time in the server's queue, increase "
            "`vllm_request_timeout` or lower `vllm_max_inflight`."
        ) from error

    async def _is_healthy(self, server: VLLMServer) -> bool:
        try:
            await server.check_health(self._settings.health_timeout)
        except ServerDownError:
            return False
        except RefusedError:  # from a proxy that does not forward health checks
            return True
        return True

    async def _wait_until_ready(self, server: VLLMServer) -> None:
        """Wait until a server responds and has all adapters. Requests to the same server share the wait."""
        task = self._waits.get(server)
        if task is None or task.done():
            task = self._waits[server] = asyncio.ensure_future(self._poll_until_ready(server))
        await asyncio.shield(task)

    async def _poll_until_ready(self, server: VLLMServer) -> None:
        start, is_back = time.monotonic(), False
        while not is_back:
            try:
                with contextlib.suppress(RefusedError):  # from a proxy that does not forward health checks
                    await server.check_health(self._settings.health_timeout)
                await self._make_ready(server)
                is_back = True
            except ServerDownError as error:
                if time.monotonic() - start > self._settings.server_timeout:
                    raise EngineDownError(
                        f"{server.url} has not answered for {self._settings.server_timeout:g} seconds "
                        f"(`vllm_server_timeout`). {error} Restart it with the same command, and resume the run. The "
                        "missing turns were not used for training."
                    ) from error
                await asyncio.sleep(_POLL_SECONDS)


def parse_addresses(
    urls: str | Sequence[str] | None, host: str, port: int, name: str = "vllm_server_base_url"
) -> tuple[str, ...]:
    """
    Parse the addresses of servers. Trailing slashes and `/v1` are removed.

    Args:
        urls: addresses from the user: a sequence, or a string with commas.
        host, port: address of a single server, used if `urls` is empty.
        name: name of the setting, for error messages.

    Raises:
        ValueError: an address is not an HTTP address or is repeated.
    """
    # TRL's default 0.0.0.0 is an address to bind to, not to connect to. It stands for this machine
    host = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104
    passed = [urls] if isinstance(urls, str) else list(urls or [f"http://{host}:{port}"])
    found = [url.strip().rstrip("/").removesuffix("/v1") for text in passed for url in text.split(",")]
    for url in found:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`{name}` must contain addresses such as 'http://host:8000', got {url!r}.")
    if len(set(found)) < len(found) or not found:
        raise ValueError(f"`{name}` must list every server exactly once, got {passed!r}.")
    return tuple(found)


# Advice in messages about a missing server
_START_ADVICE = (
    "Start a server with the command from `marft_trl.extras.engines.vllm_command(model, agents, args, peft_config)`, "
    "or set the address of another server: `vllm_server_base_url='http://host:8000'`. With `vllm_mode='colocate'` and "
    "`vllm_python`, the trainer starts a server on its own GPU."
)
_WARN_AFTER_SECONDS = 5.0  # seconds without a server before a warning


def find_max_model_len(settings: ServerSettings) -> int | None:
    """
    Wait until all servers run, and return the maximum number of tokens of an observation and its turn.

    Returns: the smallest limit of all servers, or `None` if no server reports a limit.

    Raises:
        EngineDownError: a server has not answered for `server_timeout` seconds.
    """
    return run_coroutine(_find_max_model_len, settings)


async def _find_max_model_len(settings: ServerSettings) -> int | None:
    start = time.monotonic()
    async with settings.connected() as servers:
        found = await asyncio.gather(*[_wait_for_models(server, settings, start) for server in servers])
    lengths = [model.get("max_model_len") for models in found for model in models.values()]
    return min((length for length in lengths if length), default=None)


async def _wait_for_models(server: VLLMServer, settings: ServerSettings, start: float) -> dict[str, dict[str, Any]]:
    has_warned = False
    while True:
        try:
            return await server.models(settings.health_timeout)
        except ServerDownError as error:
            waited = time.monotonic() - start
            if waited > settings.server_timeout:
                raise EngineDownError(
                    f"Found no vLLM server at {server.url} within {settings.server_timeout:g} seconds "
                    f"(`vllm_server_timeout`): {error} {_START_ADVICE}"
                ) from error
            if not has_warned and waited > _WARN_AFTER_SECONDS:
                has_warned = True
                logger.warning(
                    f"Waiting for a vLLM server at {server.url}, for up to {settings.server_timeout:g} seconds "
                    f"(`vllm_server_timeout`). {_START_ADVICE}"
                )
            await asyncio.sleep(_POLL_SECONDS)
