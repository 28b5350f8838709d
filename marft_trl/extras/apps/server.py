# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The endpoint of a process: one server on the loopback device, in a thread of its own, for all of its episodes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ...system.child_processes import keep
from ...system.files import spare_files
from .requests import RequestError, read_object
from .session import AppEndpoint, Session, forget_shared_keys, logger, mark_of_process


if TYPE_CHECKING:
    from aiohttp import web

    from .http import Outcome


_BACKLOG = 1024
# Open files of an episode at a time, with those of a client, of its event loop or of the pipes of a program, and those
# that are left to the rest of the run
_FILES, _RESERVE = 24, 64
# Seconds between two looks for room for a further connection, and before a further try where files are missing
_PAUSE, _AGAIN = 0.01, 0.2
# Seconds after which a connection without a valid request may have to make room
_SILENT = 1.0


class Endpoint:
    """
    The server. Episodes are told apart by their keys; a request without the key of an episode that is running is
    refused before anything of it is read. Each request has a connection of its own, which its client closes with the
    answer: idle ones of clients that are never closed would be closed when Python collects them, in whichever thread,
    this one included, and take connections of others with them.

    Attributes:
        at_once: largest number of episodes at a time, by how many files this process may open.
    """

    timeout, max_body, closes_connections, json_only = None, 16 << 20, True, False
    _process_endpoint: ClassVar[tuple[int, Endpoint] | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def get_or_start(cls) -> Endpoint:
        """The endpoint of this process, started when it is first used."""
        with cls._lock:
            if cls._process_endpoint is None or cls._process_endpoint[0] != os.getpid():  # a fork has no threads
                cls._process_endpoint = (os.getpid(), cls())
            return cls._process_endpoint[1]

    def __init__(self) -> None:
        _go_directly()
        keep(mark_of_process())  # programs that functions start, too, since they have a key
        self._sessions: dict[str, Session] = {}
        files = (spare := spare_files()) - max(_RESERVE, spare // 8)
        self.at_once, self._most_connections = max(1, files // _FILES), max(_FILES, files // 2)
        self._places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._places = weakref.WeakKeyDictionary()
        # Connections, the oldest first, with whether a request is being answered
        self._silent_since: dict[Any, float] = {}  # of each connection; infinite while a request is answered
        self._loop = asyncio.new_event_loop()
        started: Future[int] = Future()
        threading.Thread(target=self._work, args=(started,), name="marft-endpoint", daemon=True).start()
        self.base_url = f"http://127.0.0.1:{started.result()}/v1"

    def places(self) -> asyncio.Semaphore:
        """Places of the episodes that run at a time, in the event loop of the caller."""
        return self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.at_once))

    @contextlib.contextmanager
    def open(self, session: Session) -> Iterator[AppEndpoint]:
        """Context manager: the key of a session is known."""
        if not self._sessions:
            forget_shared_keys()
        self._sessions[session.secret] = session
        try:
            yield AppEndpoint(self.base_url, session.secret)
        finally:
            del self._sessions[session.secret]

    def run(self, job: Coroutine[Any, Any, Any]) -> Future:
        """Run a coroutine in the event loop of the server, which nothing blocks."""
        return asyncio.run_coroutine_threadsafe(job, self._loop)

    def _work(self, started: Future[int]) -> None:
        from aiohttp import web

        async def start() -> int:
            app = self._application()
            runner = web.AppRunner(
                app, handler_cancellation=True, access_log=None, auto_decompress=False, logger=logger
            )
            await runner.setup()
            listening = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
            listening.setblocking(False)
            self._accepting = asyncio.ensure_future(self._accept(listening, cast(web.Server, runner.server)))
            return listening.getsockname()[1]

        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(
            lambda loop, context: logger.error(context["message"], exc_info=context.get("exception"))
        )
        try:
            started.set_result(self._loop.run_until_complete(start()))
        except BaseException as error:
            started.set_exception(error)
            return
        self._loop.run_forever()

    async def _accept(self, listening: socket.socket, server: web.Server) -> None:
        """
        Take connections, no more than there are files for: the oldest silent one makes room for the next. Those of
        asyncio's servers have no limit, and where files are missing, a thousand lines are logged a second.
        """
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listening)
                transport, _ = await self._loop.connect_accepted_socket(server, connection)
            except OSError:
                logger.exception("A connection could not be taken.")
                await asyncio.sleep(_AGAIN)
                continue
            self._silent_since[transport] = time.monotonic()
            while len(self._open_connections()) > self._most_connections:
                oldest = min(self._silent_since, key=self._silent_since.__getitem__)
                if time.monotonic() - self._silent_since[oldest] > _SILENT:
                    oldest.abort()
                else:  # further clients wait in the backlog
                    await asyncio.sleep(_PAUSE)

    def _open_connections(self) -> dict[Any, float]:
        for closed in [connection for connection in self._silent_since if connection.is_closing()]:
            del self._silent_since[closed]
        return self._silent_since

    def _application(self) -> web.Application:
        from .http import HTTPApplication, get_client, read_body

        async def reward(request: web.Request) -> web.Response:
            from aiohttp import web

            body = read_object(await read_body(request))
            if set(body) != {"reward"}:
                raise RequestError(
                    'The body must be {"reward": ...}: a number, or an object of numbers by names of agents.'
                )
            get_client(request).reward(body["reward"])
            return web.json_response({"status": "ok"})

        app = HTTPApplication(self).application()
        app.router.add_post("/v1/reward", reward)
        return app

    # ---- As a backend ----

    def admit(self, request: web.Request) -> Session:
        """The session of a key."""
        from .http import get_api_key

        session = self._sessions.get(get_api_key(request))
        if session is None:
            raise RequestError(
                "The key is that of no running episode. It is in the environment variable OPENAI_API_KEY of the "
                "application, and ends with the episode.",
                401,
                code="invalid_api_key",
            )
        return session

    @contextlib.contextmanager
    def answering(self, request: web.Request) -> Iterator[None]:
        """Context manager: a connection is not silent."""
        transport = request.transport
        if transport in self._silent_since:  # else its client is gone already
            self._silent_since[transport] = math.inf
        try:
            yield
        finally:
            if transport in self._silent_since:
                self._silent_since[transport] = time.monotonic()  # until its client has closed it

    def ended(self, request: web.Request, client: Session | None, outcome: Outcome) -> None:
        """Tell a session of what was refused."""
        if client is not None and outcome.error is not None:
            client.refuse(outcome.error)


def _go_directly() -> None:
    """Requests to this machine go to no proxy, of functions and of programs."""
    for name in ("NO_PROXY", "no_proxy"):
        known = os.environ.get(name, "")
        if "127.0.0.1" not in known.split(","):
            os.environ[name] = ",".join(filter(None, [known, "127.0.0.1"]))
