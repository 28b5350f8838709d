# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""OpenAI's API over HTTP: one application of aiohttp that reads requests and writes answers, for any backend."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from aiohttp import web

from . import chat, responses
from .requests import ChatReply, ChatRequest, RequestError, problem_of


# A further form of the API is a module with `read`, `answer`, `Stream`, `encoded`, `failed` and `END`, and a line here
DIALECTS: dict[str, Any] = {"/v1/chat/completions": chat, "/v1/responses": responses}
# Seconds in which a body has to arrive, and after which a stream without news gets a comment, for proxies
_SECONDS, _SILENCE = 60.0, 15.0
# Parts of a stream that are written at once
_AT_ONCE = 256
_CLIENT, _MODEL = web.RequestKey("marft_client", object), web.RequestKey("marft_model", str)
# Called with a further text of an answer (or, second, of what comes before it), its agent and the number of its turn
Tell = Callable[[str, bool, str, int], None]


class Answer(NamedTuple):
    """
    What a client gets.

    Args:
        messages: as many as the client has asked for.
        lost: called if the answer could not be sent.
    """

    messages: Sequence[ChatReply]
    lost: Callable[[], None] = lambda: None


class Outcome(NamedTuple):
    """
    How a request has ended.

    Args:
        model: name that was asked for; empty if it was not read.
        status: HTTP status; 499 if the client has gone.
        seconds: from its beginning.
        wrong: why it was refused.
    """

    model: str
    status: int
    seconds: float
    wrong: RequestError | None


class Client(Protocol):
    """Who may ask, for a request that was let in."""

    @property
    def models(self) -> Sequence[str]:
        """Names that may be asked for."""

    async def ask(self, asked: ChatRequest, body: bytes, is_again: bool, tell: Tell | None) -> Answer:
        """
        Answer a request.

        Args:
            is_again: whether the client says that it has tried before.
            tell: for a stream, may be called with texts as they grow.

        Raises:
            RequestError: it cannot be answered.
        """


class Backend(Protocol):
    """Who answers."""

    @property
    def timeout(self) -> float | None:
        """Seconds of an answer."""

    @property
    def max_body(self) -> int:
        """Bytes of a request."""

    @property
    def closes(self) -> bool:
        """Whether each request has a connection of its own."""

    @property
    def json_only(self) -> bool:
        """Whether a request has to say that it is JSON, which a page of another server cannot without asking first."""

    def admit(self, request: web.Request) -> Any:
        """
        The [`Client`] of a request, by its key, before anything of its body is read.

        Raises:
            RequestError: it has none.
        """

    def answering(self, request: web.Request) -> contextlib.AbstractContextManager[None]:
        """Context manager around the handling of a request."""

    def ended(self, request: web.Request, client: Any, outcome: Outcome) -> None:
        """A request has ended. `client`: as `admit` has returned it, `None` if it has not."""


class HTTPApplication:
    """The routes of the API."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def application(self) -> web.Application:
        """The application of aiohttp, to which a backend may add routes of its own."""
        app = web.Application(client_max_size=self._backend.max_body, middlewares=[self._around])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._model)
        for path, dialect in DIALECTS.items():
            app.router.add_post(path, self._handler(dialect))
        return app

    @web.middleware
    async def _around(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        start, status, client, wrong = time.monotonic(), 499, None, None
        headers: dict[str, str] = {}
        try:
            try:
                client = request[_CLIENT] = self._backend.admit(request)
                with self._backend.answering(request):
                    response = await handler(request)
            except web.HTTPException as error:
                routes = {route.canonical for route in request.app.router.resources()}
                there = f" There are {', '.join(sorted(routes))}." if error.status == 404 else ""
                wrong = RequestError(f"{error.reason}.{there}", error.status)
                headers = {key: value for key, value in error.headers.items() if key == "Allow"}
            except _Gone:  # whoever asked has closed the connection
                raise ConnectionResetError from None
            except Exception as error:
                wrong = _described(error)
                headers = {"Retry-After": "1"} if wrong.status == 503 else {}
            if wrong is not None:
                response = web.json_response(wrong.body(), status=wrong.status, headers=headers)
            if self._backend.closes and not response.prepared:
                response.force_close()
            status = response.status
            return response
        finally:
            outcome = Outcome(request.get(_MODEL, ""), status, time.monotonic() - start, wrong)
            self._backend.ended(request, client, outcome)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(chat.models(client_of(request).models))

    async def _model(self, request: web.Request) -> web.Response:
        name, known = request.match_info["name"], client_of(request).models
        if name not in known:
            there = ", ".join(map(repr, known))
            raise RequestError(f"There is no {name[:80]!r}; there are {there}.", 404, "model", "model_not_found")
        return web.json_response(chat.model(name))

    def _handler(self, dialect: Any) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            if self._backend.json_only and request.content_type != "application/json":
                raise RequestError("`Content-Type` must be `application/json`.", 415)
            client, body = client_of(request), await body_of(request)
            asked = dialect.read(body, client.models)
            request[_MODEL] = asked.model
            is_again = request.headers.get("x-stainless-retry-count", "0") not in ("0", "")
            identity = secrets.token_hex(12)
            if asked.stream:
                return await self._streamed(request, dialect, dialect.Stream(identity, asked), asked, body, is_again)
            async with asyncio.timeout(self._backend.timeout):
                found = await client.ask(asked, body, is_again, None)
            response = web.json_response(dialect.answer(identity, asked, found.messages))
            if self._backend.closes:
                response.force_close()
            try:
                await response.prepare(request)
                await response.write_eof()
            except ConnectionError as error:
                found.lost()
                raise _Gone from error
            except asyncio.CancelledError:
                found.lost()
                raise
            return response

        return answer

    async def _streamed(
        self, request: web.Request, dialect: Any, stream: Any, asked: ChatRequest, body: bytes, is_again: bool
    ) -> web.StreamResponse:
        """
        The answer as server-sent events. A client that reads slowly holds nobody up: what answers does not wait for
        it.
        """
        texts: asyncio.Queue[tuple[str, bool, str, int] | None] = asyncio.Queue()
        work = asyncio.ensure_future(
            client_of(request).ask(asked, body, is_again, lambda *text: texts.put_nowait(text))
        )
        work.add_done_callback(lambda _: texts.put_nowait(None))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        if self._backend.closes:
            response.force_close()
        try:
            try:
                async with asyncio.timeout(self._backend.timeout):
                    first = await texts.get()
                    if first is None:  # nothing was sent yet, so an error has a status
                        await work
                    with _sending():
                        await response.prepare(request)
                        await response.write(b"".join(map(dialect.encoded, stream.begin())))
                    await _write(response, texts, lambda text: map(dialect.encoded, stream.delta(*text)), first)
                    (said,) = (await work).messages
                    with _sending():
                        await response.write(b"".join(map(dialect.encoded, stream.end(said))))
            except _Gone:
                raise
            except Exception as error:
                if not response.prepared:
                    raise
                with _sending():
                    await response.write(dialect.encoded(dialect.failed(_described(error))))
            try:
                async with asyncio.timeout(self._backend.timeout):
                    with _sending():
                        await response.write(dialect.END)
                        await response.write_eof()
            except TimeoutError:  # of a client that reads nothing
                response.force_close()
            return response
        except (_Gone, asyncio.CancelledError):
            if work.done() and not work.cancelled() and work.exception() is None:
                work.result().lost()
            raise
        finally:
            work.cancel()
            await asyncio.wait([work])
            if not work.cancelled():
                work.exception()  # else asyncio logs it


class _Gone(Exception):
    """The client has closed its connection."""


@contextlib.contextmanager
def _sending() -> Iterator[None]:
    """Context manager: errors of the connection are those of the client, and of nothing that answers it."""
    try:
        yield
    except ConnectionError as error:
        raise _Gone from error


async def _write(response: web.StreamResponse, texts: asyncio.Queue, encoded: Callable[[Any], Any], text: Any) -> None:
    """Write texts as they come. What has come meanwhile is written at once. Some forms leave texts out."""
    loop = asyncio.get_running_loop()
    silent_at = loop.time() + _SILENCE
    while text is not None:
        written = list(encoded(text))
        while len(written) < _AT_ONCE and not texts.empty() and (text := texts.get_nowait()) is not None:
            written += encoded(text)
        while True:
            if written:
                with _sending():
                    await response.write(b"".join(written))
                silent_at = loop.time() + _SILENCE
            if text is None:
                return
            try:
                # Not `wait_for`: Python 3.11's forgets a cancellation that comes together with a text
                async with asyncio.timeout_at(silent_at):
                    text = await texts.get()
                break
            except TimeoutError:
                written = [b": still at it\n\n"]


def client_of(request: web.Request) -> Any:
    """The client that a request was admitted for."""
    return request[_CLIENT]


def key_of(request: web.Request) -> str:
    """The key of a request; empty without one."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def body_of(request: web.Request) -> bytes:
    """
    The body of a request.

    Raises:
        RequestError: it does not arrive in time, or is compressed: a few bytes would make any number of them.
    """
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError("A compressed body is not read. Leave `Content-Encoding` out.", 415)
    try:
        async with asyncio.timeout(_SECONDS):
            return await request.read()
    except TimeoutError as error:
        raise RequestError(f"The request did not arrive within {_SECONDS:g} seconds.", 408) from error


def _described(error: Exception) -> RequestError:
    """An error as one that a client is told."""
    if isinstance(error, TimeoutError):
        return RequestError("The answer took too long.", 504, code="timeout")
    if isinstance(error, web.RequestPayloadError):
        return RequestError(f"The body cannot be read: {error}")
    return problem_of(error)
