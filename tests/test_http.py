"""The HTTP application with a minimal backend: what holds for all backends and all forms of the API."""

import asyncio
import contextlib
import json
from unittest.mock import AsyncMock

from marft_trl.extras.apps import http
from marft_trl.extras.apps.connections import Connections
from marft_trl.extras.apps.requests import ChatReply, RequestError
from marft_trl.extras.apps.responses import ResponseStore

import pytest
from aiohttp import ClientSession, web


BODIES = {
    "/v1/chat/completions": {"model": "a", "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "a", "input": "x"},
    "/v1/messages": {"model": "a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}
both = pytest.mark.parametrize("path", BODIES)


class Backend:
    timeout, max_body, closes_connections, json_only, models, agent_of = 20.0, 1 << 20, False, True, ["a"], None

    def __init__(self, ask):
        self._ask, self.outcomes, self.num_lost, self.responses = ask, [], 0, ResponseStore(1 << 20)
        self.connections = Connections()

    def admit(self, request):
        return self

    def as_shown(self, text):
        return text

    def ended(self, request, client, outcome):
        self.outcomes.append(outcome)

    async def answer(self, request, body, is_retry, on_text):
        return http.ChatReplies([await self._ask(on_text)], self._lost)

    def _lost(self):
        self.num_lost += 1


def served(backend, talk, prefix="", cancels=True):
    """Runs `talk(session, url)` against a backend, whose application may be mounted below a prefix."""

    async def run():
        app = http.HTTPApplication(backend).application()
        if prefix:
            outer = web.Application()
            outer.add_subapp(prefix, app)
            app = outer
        runner = web.AppRunner(app, handler_cancellation=cancels, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with ClientSession() as session:
                return await asyncio.wait_for(talk(session, f"http://127.0.0.1:{runner.addresses[0][1]}{prefix}"), 20)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def send(backend, path, prefix="", method="POST", **request):
    async def talk(session, url):
        async with session.request(method, url + path, **request) as response:
            return response.status, response.headers, (await response.read()).decode()

    return served(backend, talk, prefix)


def streamed(backend, path):
    status, _, text = send(backend, path, json={**BODIES[path], "stream": True})
    return status, text


def texts_of(stream):
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    chat = [part["choices"][0]["delta"].get("content") for part in events if part.get("choices")]
    blocks = [event["delta"].get("text") for event in events if event.get("type") == "content_block_delta"]
    responses = [event["delta"] for event in events if event.get("type") == "response.output_text.delta"]
    return [text for text in chat + blocks + responses if text]


@both
def test_an_answer_grows_and_is_sent_once(path):
    async def grows(on_text):
        on_text("thought", False, "b", 0)
        on_text("one ", True, "a", 1)
        await asyncio.sleep(0)
        on_text("two", True, "a", 1)
        return ChatReply("one two")

    assert texts_of(streamed(Backend(grows), path)[1]) == ["one ", "two"]
    at_once = Backend(AsyncMock(return_value=ChatReply("one two")))
    assert texts_of(streamed(at_once, path)[1]) == ["one two"]


@both
def test_streams_send_keep_alives_while_teammates_speak(path, monkeypatch):
    """Forms of the API that do not stream teammates would otherwise send nothing for minutes."""
    monkeypatch.setattr(http, "_KEEP_ALIVE_SECONDS", 0.05)

    async def long(on_text):
        for _ in range(20):
            on_text("thought", False, "b", 0)
            await asyncio.sleep(0.02)
        return ChatReply("done")

    stream = streamed(Backend(long), path)[1]
    assert texts_of(stream) == ["done"]
    assert path == "/v1/chat/completions" or ": keep-alive" in stream


@both
def test_connection_errors_of_a_backend_are_not_lost_clients(path):
    """A tool's database, after the first text: the client gets an error, and the stream ends."""

    async def fails(on_text):
        on_text("one", True, "a", 0)
        await asyncio.sleep(0.1)
        raise ConnectionError("the database is away")

    backend = Backend(fails)
    status, stream = streamed(backend, path)
    assert status == 200 and "See error" in stream and "database" not in stream and not backend.num_lost

    assert streamed(Backend(AsyncMock(side_effect=ConnectionError("the database is away"))), path)[0] == 500


@both
@pytest.mark.parametrize("when", ["waiting", "streaming", "writing"])
def test_disconnected_clients_are_logged_with_status_499(path, when):
    gone = asyncio.Event()

    async def waits(on_text):
        if when == "streaming":
            on_text("one", True, "a", 0)
        gone.set()
        for _ in range(100):
            await asyncio.sleep(0.05 if when == "writing" else 0.6)
            if when == "writing":
                on_text("more", True, "a", 0)

    backend = Backend(waits)

    async def talk(session, url):
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(0.3):
                async with session.post(url + path, json={**BODIES[path], "stream": True}) as response:
                    await response.read()
        while not backend.outcomes:  # for as long as `served` gives it
            await asyncio.sleep(0.02)

    served(backend, talk, cancels=when != "writing")
    (outcome,) = backend.outcomes
    assert outcome.status == 499 and outcome.error is None and gone.is_set()


@both
@pytest.mark.parametrize("prefix", ["", "/team"])
def test_bodies_without_a_json_content_type_are_refused(path, prefix):
    """A page of another site can send plain text without a CORS preflight."""

    body = {"data": json.dumps(BODIES[path]), "headers": {"Content-Type": "text/plain"}}
    assert send(Backend(None), path, prefix, **body)[0] == 415  # nothing is called


def test_unknown_paths_name_the_known_paths():
    status, _, message = send(Backend(None), "/v1/nothing", method="GET")
    assert status == 404 and all(path in message for path in BODIES) and "reward" not in message


@both
def test_refusals_of_a_backend_keep_their_status(path):
    backend = Backend(AsyncMock(side_effect=RequestError("It is full.", 503, code="overloaded")))
    status, headers, text = send(backend, path, json=BODIES[path])
    error = json.loads(text)["error"]
    kind = "overloaded_error" if path == "/v1/messages" else "overloaded"
    assert (status, headers["Retry-After"], error.get("code") or error["type"]) == (503, "1", kind)
    assert backend.outcomes[0].error.status == 503
