# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The endpoint of a process: a server on the loopback device, in its own thread, that all episodes share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from ...system.child_processes import keep
from .connections import Connections, files_to_use, listen
from .requests import RequestError, read_object
from .session import AppEndpoint, Session, forget_shared_keys, logger, mark_of_process


if TYPE_CHECKING:
    from aiohttp import web

    from .http import RequestOutcome


_FILES = 24  # open files of an episode: those of a client, of its event loop or of the pipes of a program


class Endpoint:
    """The server. Requests without the key of a running episode are refused before their body is read."""

    # Each request has its own connection. Otherwise, Python would close the idle connections of clients that are never
    # closed whenever it collects them, in any thread, this one included, and other connections with them
    timeout, max_body, closes_connections, json_only = None, 16 << 20, True, False
    _process_endpoint: ClassVar[tuple[int, Endpoint] | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def get_or_start(cls) -> Endpoint:
        """Return the endpoint of this process, and start it if there is none."""
        with cls._lock:
            if cls._process_endpoint is None or cls._process_endpoint[0] != os.getpid():  # a fork has no threads
                cls._process_endpoint = (os.getpid(), cls())
            return cls._process_endpoint[1]

    def __init__(self) -> None:
        for name in ("NO_PROXY", "no_proxy"):  # requests of functions and programs go to it directly
            hosts = os.environ.get(name, "")
            if "127.0.0.1" not in hosts.split(","):
                os.environ[name] = ",".join(filter(None, [hosts, "127.0.0.1"]))
        keep(mark_of_process())  # programs that functions start, too, since they have a key
        self._sessions: dict[str, Session] = {}
        self.at_once = max(1, files_to_use() // _FILES)  # maximum number of concurrent episodes
        self.connections = Connections()
        # By event loop and application; the key of the limit that all applications share is the endpoint
        self._places: Any = weakref.WeakKeyDictionary()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(
            lambda loop, context: logger.error(context["message"], exc_info=context.get("exception"))
        )
        threading.Thread(target=self._loop.run_forever, name="marft-endpoint", daemon=True).start()
        try:
            self.base_url = f"http://127.0.0.1:{self.run(self._start()).result()}/v1"
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    def places_of(self, app: Any, limit: int, is_rerun: bool = False) -> asyncio.Semaphore:
        """The semaphore of an application. Re-runs have another: episodes that wait for them keep their places."""
        by_app = self._places.setdefault(asyncio.get_running_loop(), weakref.WeakKeyDictionary())
        return by_app.setdefault(app, {}).setdefault(is_rerun, asyncio.Semaphore(limit))

    @contextlib.contextmanager
    def open(self, session: Session) -> Iterator[AppEndpoint]:
        """Accept requests with the key of a session."""
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

    async def _start(self) -> int:
        """Accept connections, and return the port."""
        from aiohttp import web

        settings: dict[str, Any] = {"access_log": None, "auto_decompress": False, "logger": logger}
        runner = web.AppRunner(self._application(), handler_cancellation=True, **settings)
        await runner.setup()
        (listening,) = await listen("127.0.0.1", 0)
        self._accepting = asyncio.ensure_future(self.connections.accept(listening, runner.server))
        return listening.getsockname()[1]

    def _application(self) -> web.Application:
        from .http import CLIENT, HTTPApplication, read_body

        async def reward(request: web.Request) -> web.Response:
            from aiohttp import web

            body = read_object(await read_body(request))
            if set(body) != {"reward"}:
                raise RequestError('The body must be {"reward": ...} with a number, or with numbers by agent name.')
            request[CLIENT].reward(body["reward"])
            return web.json_response({"status": "ok"})

        app = HTTPApplication(self).application()
        app.router.add_post("/v1/reward", reward)
        return app

    # ---- As a backend ----

    def admit(self, request: web.Request) -> Session:
        from .http import get_api_key

        session = self._sessions.get(get_api_key(request))
        if session is None:
            text = "The API key does not belong to a running episode. Use that in OPENAI_API_KEY or ANTHROPIC_API_KEY."
            raise RequestError(text, 401, code="invalid_api_key")
        return session

    def ended(self, request: web.Request, client: Session | None, outcome: RequestOutcome) -> None:
        if client is not None and outcome.error is not None:
            client.refuse(outcome.error)
