# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Chat APIs over HTTP: an aiohttp application that parses requests and writes responses of any backend."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from aiohttp import web

from . import chat, messages, responses
from .requests import ChatReply, ChatRequest, RequestError, to_request_error
from .routing import choose_agent


class ReplyStream(Protocol):
    """Events of a reply that is sent while it is generated."""

    def begin(self) -> list[dict[str, Any]]: ...
    def delta(self, text: str, is_answer: bool = True, agent: str = "", turn: int = 0) -> list[dict[str, Any]]: ...
    def end(self, reply: ChatReply) -> list[dict[str, Any]]: ...


class Dialect(Protocol):
    """A module that reads and writes a chat API. To add an API, write one and add its path to `DIALECTS`."""

    END: bytes  # sent after the last event of a stream

    def read(self, body: bytes, models: Sequence[str] | None, stored: Any) -> ChatRequest: ...
    def answer(self, identity: str, chat_request: ChatRequest, messages: Sequence[ChatReply]) -> dict[str, Any]: ...
    def stream(self, identity: str, chat_request: ChatRequest) -> ReplyStream: ...
    def encoded(self, event: Mapping[str, Any]) -> bytes: ...
    def failed(self, error: RequestError) -> dict[str, Any]: ...  # the event of an error within a stream
    def error_body(self, error: RequestError) -> dict[str, Any]: ...


DIALECTS: dict[str, Dialect] = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}
# Maximum seconds for reading a request body, and seconds between keep-alive comments in an idle stream, for proxies
_BODY_SECONDS, _KEEP_ALIVE_SECONDS = 60.0, 15.0
_MAX_CHUNKS_PER_WRITE = 256  # of a stream
CLIENT: web.RequestKey[Any] = web.RequestKey("marft_client", object)
_MODEL = web.RequestKey("marft_model", str)
# `on_text(text, is_answer, agent, turn)` is called with new text. `is_answer`: whether the text is part of the answer
TextListener = Callable[[str, bool, str, int], None]


class ChatReplies(NamedTuple):
    """Replies to a request, as many as the client requested (`n`)."""

    messages: Sequence[ChatReply]
    on_send_failed: Callable[[], None] = lambda: None  # called if the replies could not be sent


class RequestOutcome(NamedTuple):
    """Outcome of a request, for logs and metrics."""

    model: str  # empty if the request was not parsed
    status: int  # 499 if the client closed the connection
    seconds: float
    error: RequestError | None  # as sent to the client


class HTTPApplication:
    """
    Routes of the API. The backend has these members:

    - `timeout`: maximum seconds for an answer, or `None`; `max_body`: maximum size of a request body in bytes;
    - `closes_connections`: whether to close the connection after each request;
    - `json_only`: whether to require `Content-Type: application/json`, which needs preflight from other sites;
    - `admit(request)`: returns the client by its API key, before the body is read, or raises a [`RequestError`];
    - `connections`: the [`Connections`] of requests, which are marked as active while they are handled;
    - `ended(request, client, outcome)`: called at the end. `client` is `None` if `admit` failed.

    A client has the names of its `models`, its latest `responses`, `as_shown(text)`, which changes bodies, `agent_of`,
    which chooses the agent of a request (`None`: the model names it), and the coroutines `count_tokens(chat_request)`
    and `answer(chat_request, body, is_retry, on_text)`, which may raise a [`RequestError`]. `answer` returns
    [`ChatReplies`], and calls `on_text`, if not `None`, with new text.
    """

    def __init__(self, backend: Any):
        self._backend = backend

    def application(self) -> web.Application:
        """Make the aiohttp application. The backend may add more routes."""
        app = web.Application(client_max_size=self._backend.max_body, middlewares=[self._around])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._model)
        for path, dialect in DIALECTS.items():
            app.router.add_post(path, functools.partial(self._answer, dialect))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        return app

    @web.middleware
    async def _around(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        start, status, client, request_error = time.monotonic(), 499, None, None
        headers: dict[str, str] = {}
        try:
            try:
                client = request[CLIENT] = self._backend.admit(request)
                with self._backend.connections.answering(request.transport):
                    response = await handler(request)
            except web.HTTPException as error:
                routes = {route.canonical for route in request.app.router.resources()}
                there = f" Available routes: {', '.join(sorted(routes))}." if error.status == 404 else ""
                there += f" A request has at most {self._backend.max_body:,} bytes." if error.status == 413 else ""
                request_error = RequestError(f"{error.reason}.{there}", error.status)
                headers = {key: value for key, value in error.headers.items() if key == "Allow"}
            except _ClientDisconnected:  # the client closed the connection
                raise ConnectionResetError from None
            except Exception as error:
                request_error = _to_client_error(error)
                headers = {"Retry-After": "1"} if request_error.status == 503 else {}
            if request_error is not None:
                dialect = next((dialect for path, dialect in DIALECTS.items() if path in request.path), chat)
                body = dialect.error_body(request_error)
                response = web.json_response(body, status=request_error.status, headers=headers)
            if self._backend.closes_connections and not response.prepared:
                response.force_close()
            status = response.status
            return response
        finally:
            outcome = RequestOutcome(request.get(_MODEL, ""), status, time.monotonic() - start, request_error)
            self._backend.ended(request, client, outcome)

    async def _models(self, request: web.Request) -> web.Response:
        models = [chat.model(name) for name in request[CLIENT].models]
        return web.json_response({"object": "list", "data": models, "has_more": False})

    async def _model(self, request: web.Request) -> web.Response:
        name, known = request.match_info["name"], request[CLIENT].models
        if name not in known:
            there = ", ".join(map(repr, known))
            raise RequestError(f"Unknown model {name[:80]!r}. Models: {there}.", 404, "model", "model_not_found")
        return web.json_response(chat.model(name))

    async def _read(self, request: web.Request, dialect: Dialect) -> tuple[ChatRequest, ChatRequest, bytes]:
        """Read a request. Returns it as the client wrote it, the same for the agent that answers, and the body."""
        if self._backend.json_only and request.content_type != "application/json":
            raise RequestError("`Content-Type` must be `application/json`.", 415)
        client, body = request[CLIENT], await read_body(request)
        body = client.as_shown(body.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        if client.agent_of is None:
            chat_request = routed = dialect.read(body, client.models, client.responses)
        else:
            chat_request = dialect.read(body, None, client.responses)
            routed = await choose_agent(client.agent_of, chat_request, request.headers.copy(), client.models)
        request[_MODEL] = routed.model
        return chat_request, routed, body

    async def _count_tokens(self, request: web.Request) -> web.Response:
        _, routed, _ = await self._read(request, messages)
        async with asyncio.timeout(self._backend.timeout):
            return web.json_response({"input_tokens": await request[CLIENT].count_tokens(routed)})

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        chat_request, routed, body = await self._read(request, dialect)
        is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("0", "")
        reply_id = secrets.token_hex(12)
        answer = functools.partial(request[CLIENT].answer, routed, body, is_retry)
        if chat_request.stream:
            return await self._streamed(request, dialect, dialect.stream(reply_id, chat_request), answer)
        async with asyncio.timeout(self._backend.timeout):
            replies = await answer(None)
        response = web.json_response(dialect.answer(reply_id, chat_request, replies.messages))
        if self._backend.closes_connections:
            response.force_close()
        try:
            with _sending():
                await response.prepare(request)
                await response.write_eof()
        except (_ClientDisconnected, asyncio.CancelledError):
            replies.on_send_failed()
            raise
        return response

    async def _streamed(
        self, request: web.Request, dialect: Dialect, stream: ReplyStream, answer: Callable[[TextListener], Any]
    ) -> web.StreamResponse:
        """Send server-sent events. Generation does not wait for a client that reads slowly."""
        texts: asyncio.Queue[tuple[str, bool, str, int] | None] = asyncio.Queue()
        work = asyncio.ensure_future(answer(lambda *text: texts.put_nowait(text)))
        work.add_done_callback(lambda _: texts.put_nowait(None))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        if self._backend.closes_connections:
            response.force_close()
        try:
            try:
                async with asyncio.timeout(self._backend.timeout):
                    first = await texts.get()
                    if first is None:  # nothing was sent yet, so an error can set the HTTP status
                        await work
                    with _sending():
                        await response.prepare(request)
                        await response.write(b"".join(map(dialect.encoded, stream.begin())))
                    await _write(response, texts, lambda text: map(dialect.encoded, stream.delta(*text)), first)
                    (reply,) = (await work).messages
                    with _sending():
                        await response.write(b"".join(map(dialect.encoded, stream.end(reply))))
            except Exception as error:
                if isinstance(error, _ClientDisconnected) or not response.prepared:
                    raise
                with _sending():
                    await response.write(dialect.encoded(dialect.failed(_to_client_error(error))))
            try:
                async with asyncio.timeout(self._backend.timeout):
                    with _sending():
                        await response.write(dialect.END)
                        await response.write_eof()
            except TimeoutError:  # the client does not read
                response.force_close()
            return response
        except (_ClientDisconnected, asyncio.CancelledError):
            if work.done() and not work.cancelled() and work.exception() is None:
                work.result().on_send_failed()
            raise
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


class _ClientDisconnected(Exception):
    """The client has closed its connection."""


@contextlib.contextmanager
def _sending() -> Iterator[None]:
    """Turn connection errors into `_ClientDisconnected`, to tell them from errors of the backend."""
    try:
        yield
    except ConnectionError as error:
        raise _ClientDisconnected from error


async def _write(response: web.StreamResponse, texts: asyncio.Queue, encoded: Callable[[Any], Any], text: Any) -> None:
    """Write text as it arrives, with all pending text in one write. Some endpoints skip part of the text."""
    loop = asyncio.get_running_loop()
    silent_at = loop.time() + _KEEP_ALIVE_SECONDS
    while text is not None:
        written = list(encoded(text))
        while len(written) < _MAX_CHUNKS_PER_WRITE and not texts.empty() and (text := texts.get_nowait()) is not None:
            written += encoded(text)
        while True:
            if written:
                with _sending():
                    await response.write(b"".join(written))
                silent_at = loop.time() + _KEEP_ALIVE_SECONDS
            if text is None:
                return
            try:
                # Not `wait_for`: in Python 3.11, it loses a cancellation that arrives together with a text
                async with asyncio.timeout_at(silent_at):
                    text = await texts.get()
                break
            except TimeoutError:
                written = [b": keep-alive\n\n"]


def get_api_key(request: web.Request) -> str:
    """Return the API key as OpenAI's or Anthropic's clients send it, or an empty string."""
    if key := request.headers.get("x-api-key"):
        return key.strip()
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def read_body(request: web.Request) -> bytes:
    if request.headers.get("Content-Encoding", "identity") != "identity":  # a few bytes could expand to any size
        raise RequestError("Compressed request bodies are not supported. Remove the header `Content-Encoding`.", 415)
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.read()
    except TimeoutError as error:
        raise RequestError(f"The request did not arrive within {_BODY_SECONDS:g} seconds.", 408) from error


def _to_client_error(error: Exception) -> RequestError:
    if isinstance(error, TimeoutError):
        return RequestError("The answer took too long.", 504, code="timeout")
    if isinstance(error, web.RequestPayloadError):
        return RequestError(f"The body cannot be read: {error}")
    return to_request_error(error)
