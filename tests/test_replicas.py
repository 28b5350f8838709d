"""Servers that fail: an incomplete answer is never a turn, and the run waits for a server that goes down."""

import asyncio
import time

from marft_trl.extras.engines import server as engine
from marft_trl.extras.engines.server import EngineDownError, GenerateRequest, ServerPool
from marft_trl.system.event_loop import run_coroutine

import pytest

from .vllm_server import FakeServer, answered, as_text, fake_servers, turn


def settings(servers, **changes):
    fast = {"server_timeout": 20.0, "health_timeout": 0.5, "request_timeout": 20.0}
    return engine.ServerSettings(tuple(server.url for server in servers), **{**fast, **changes})


@pytest.fixture
def server():
    with fake_servers() as (fake_server,):
        yield fake_server


def new_requests(count=24):
    return [GenerateRequest("a-v1", [1, 2, index], 12, {"seed": index, "temperature": 1.0}) for index in range(count)]


async def make_ready(server):
    if "a-v1" not in await server.models(5.0):
        await server.load("a-v1", "/somewhere", 5.0)


def generate(servers, requests=None, events=None, **changes):
    """Send all requests at once; `events` maps a number of answers to a function that is called then."""
    requests, events, done = requests or new_requests(), dict(events or {}), []

    async def send(pool, request):
        answer = await pool.generate(request)
        done.append(request)
        if len(done) in events:
            await asyncio.to_thread(events[len(done)])
        return answer

    async def run():
        async with ServerPool(settings(servers, **changes), make_ready) as pool:
            return await asyncio.gather(*[send(pool, request) for request in requests])

    return run_coroutine(run)


def expected(requests=None):
    return [turn(request.body())["choices"][0]["token_ids"] for request in requests or new_requests()]


def ids_of(answers):
    return [generated.ids for generated, _ in answers]


ONE_LOGP = {"logprobs": {"token_logprobs": [-1.0]}}
FAULTS = {
    "aborted": lambda body: as_text(turn(body, finish_reason="abort")),
    "without a reason": lambda body: as_text(turn(body, finish_reason=None)),
    "without tokens": lambda body: as_text(turn(body, token_ids=None)),
    "no token at all": lambda body: as_text(turn(body, token_ids=[], logprobs={"token_logprobs": []})),
    "without log-probabilities": lambda body: as_text(turn(body, logprobs=None)),
    "fewer log-probabilities": lambda body: as_text(turn(body, token_ids=[5, 6], **ONE_LOGP)),
    "not a number": lambda body: as_text(turn(body, token_ids=[5], logprobs={"token_logprobs": [float("nan")]})),
    "a missing number": lambda body: as_text(turn(body, token_ids=[5], logprobs={"token_logprobs": [None]})),
    "shortened": lambda body: as_text(turn(body, token_ids=[5], finish_reason="length", **ONE_LOGP)),
    "two choices": lambda body: as_text({"choices": turn(body)["choices"] * 2}),
    "no JSON": lambda body: as_text("<html>proxy</html>"),
    "half of JSON": lambda body: as_text('{"choices": [{"token_ids": [1, 2'),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_answer_that_is_no_whole_turn_is_never_a_turn(server, name):
    seen = set()

    def first_time(body):
        if body["seed"] % 3 == 0 and body["seed"] not in seen:
            seen.add(body["seed"])
            return FAULTS[name](body)

    server.fault = first_time
    assert ids_of(generate([server])) == expected() and len(seen) == 8
    server.fault = FAULTS[name]
    with pytest.raises(engine.AnswerError, match="127.0.0.1"):
        generate([server], new_requests(1))


def test_a_refused_request_raises_and_is_not_retried(server):
    server.fault = lambda body: answered(400, "Out of range float values are not JSON compliant: nan")
    with pytest.raises(engine.RefusedError, match="answered 400: Out of range float values"):
        generate([server], new_requests(1))
    assert len(server.requests) == 1


@pytest.mark.parametrize("how", ["dies", "hangs", "comes back empty"])
def test_the_run_waits_for_the_only_server(server, how):
    server.delay = lambda body: 0.02 * (1 + body["seed"] % 5)

    def fails():
        if how == "comes back empty":
            server.loaded.clear()
            return
        if how == "dies":
            server.stop()
            server.loaded.clear()
        server.hangs = how == "hangs"
        time.sleep(1.0)
        server.hangs = False
        if how == "dies":
            server.start()

    assert ids_of(generate([server], events={5: fails}, max_inflight=4)) == expected()
    assert server.loaded


def test_a_server_that_stays_away_ends_the_run():
    with fake_servers(2) as servers:
        for server in servers:
            server.delay = lambda body: 0.02

        def fails():
            for server in servers:
                server.stop()

        start = time.monotonic()
        with pytest.raises(EngineDownError, match="has not answered for 1 seconds.*vllm_server_timeout") as error:
            generate(servers, events={3: fails}, max_inflight=2, server_timeout=1.0)
        assert any(server.url in str(error.value) for server in servers) and time.monotonic() - start < 10
        for server in servers:
            server.start()


def test_a_server_gets_no_more_requests_than_it_can_take():
    with fake_servers(2) as servers:
        for server in servers:
            server.delay = lambda body: 0.1
        assert ids_of(generate(servers, new_requests(60), max_inflight=5)) == expected(new_requests(60))
        assert all(server.most == 5 for server in servers)  # both servers are used


def test_requests_are_cancelled_with_their_episodes(server):
    server.delay = lambda body: 60.0

    async def run():
        async with ServerPool(settings([server]), lambda _: asyncio.sleep(0)) as pool:
            server.loaded["a-v1"] = ""
            tasks = [asyncio.ensure_future(pool.generate(request)) for request in new_requests(3)]
            await asyncio.sleep(0.3)
            tasks[0].cancel()
            await asyncio.sleep(0.1)
            assert tasks[0].cancelled() and not tasks[1].done()

    start = time.monotonic()
    run_coroutine(run)
    assert time.monotonic() - start < 30


def test_server_addresses_and_context_lengths():
    assert engine.parse_addresses(None, "localhost", 8000) == ("http://localhost:8000",)
    assert engine.parse_addresses("http://a:1/", "", 0) == ("http://a:1",)
    assert engine.parse_addresses(["http://a:1/v1", "https://b"], "", 0) == ("http://a:1", "https://b")
    assert engine.parse_addresses("http://a:1, http://b:2", "", 0) == ("http://a:1", "http://b:2")
    for wrong in (["localhost:8000"], ["http://a", "http://a/"], "ftp://a"):
        with pytest.raises(ValueError, match="vllm_server_base_url"):
            engine.parse_addresses(wrong, "", 0)
    with fake_servers() as (server,):
        assert engine.find_max_model_len(settings([server])) == 512
        url = server.url
    with pytest.raises(EngineDownError, match=f"no vLLM server at {url}.*vllm_command"):
        engine.find_max_model_len(engine.ServerSettings((url,), server_timeout=0.3))


def test_the_most_likely_tokens_leave_out_the_sampled_token(server):
    """vLLM adds the sampled token to the top log-probabilities, even if it is very unlikely."""
    server.loaded["a"] = "/somewhere"
    likely = {token: -1.0 - token for token in range(20)}
    server.logps = lambda adapter, ids, temperature: {40_000: -25.0, **likely}

    async def ask():
        async with settings([server]).connected() as (client,):
            return await client.next_token("a", [1, 2], 1.0, 5.0)

    assert run_coroutine(ask) == likely


def test_connections_that_the_server_has_closed_are_not_used_again():
    """Also if this process was busy and has not seen them close. No request needs a second attempt."""
    server = FakeServer()
    server.keep_seconds = 0.2
    server.start().loaded["a-v1"] = "/somewhere"

    async def run():
        async with settings([server]).connected() as (client,):
            for _ in range(2):
                await asyncio.gather(*map(client.generate, new_requests()))
                time.sleep(1.0)

    run_coroutine(run)
    assert len(server.requests) == 48
    server.stop()


@pytest.mark.parametrize("how", ["slow", "answers 500"])
def test_a_request_that_always_fails_harms_no_other_and_ends(server, how):
    """The server is healthy, so the other requests continue."""
    server.delay = lambda body: 30.0 if how == "slow" and body["seed"] == 3 else 0.05
    if how != "slow":
        server.fault = lambda body: answered(500, "list index out of range") if body["seed"] == 3 else None
    requests, results = new_requests(12), []

    async def run():
        async with ServerPool(settings([server], request_timeout=0.6), make_ready) as pool:
            results.extend(await asyncio.gather(*map(pool.generate, requests), return_exceptions=True))

    run_coroutine(run)
    failed = results.pop(3)
    assert isinstance(failed, engine.AnswerError) and "vllm_request_timeout" in str(failed), failed
    del requests[3]
    assert ids_of(results) == expected(requests)
    assert sum(body["seed"] == 3 for body in server.requests) == 3
    assert len(server.requests) == 14  # none of the others was sent twice


@pytest.mark.parametrize("breaks_at", [None, 0, 3])
def test_a_streamed_turn_is_received_once_even_if_it_is_requested_again(server, breaks_at):
    tries = []

    def breaks(count):
        if count == 0:
            tries.append(1)
        return len(tries) == 1 and count == breaks_at

    server.breaks = breaks
    heard: list[list[int]] = []

    async def run():
        async with ServerPool(settings([server]), make_ready) as pool:
            return await pool.generate(request, heard.append)

    request = next(candidate for candidate in new_requests() if len(expected([candidate])[0]) > 4)
    (generated, _), (ids,) = run_coroutine(run), expected([request])
    assert generated.ids == ids == [index for part in heard for index in part] and len(heard) > 2
    assert len(generated.logps) == len(ids) and len(tries) == (1 if breaks_at is None else 2)


def test_a_server_whose_engine_has_died_ends_the_run(server):
    """It still lists the models, and nothing else works."""
    server.fault = lambda body: answered(500, "EngineCore encountered an issue")
    server.is_ill = True
    start = time.monotonic()
    with pytest.raises(EngineDownError, match="has not answered for 1 seconds"):
        generate([server], new_requests(2), server_timeout=1.0)
    assert time.monotonic() - start < 10 and len(server.requests) < 20


def test_another_kind_of_server_needs_only_its_own_client(server, monkeypatch):
    keys = []

    class OtherServer(engine.VLLMServer):
        """Has another field for the adapter of a request, and its own key."""

        key_variable = "OTHER_API_KEY"

        def __init__(self, url, session, timeout, key=None):
            super().__init__(url, session, timeout, key)
            keys.append(key)

        async def generate(self, request, on_tokens=None):
            body = {**request.body(), "adapter": request.adapter}
            return engine.whole_turn(await self._post("/v1/completions", body, self._timeout), request, self.url)

    monkeypatch.setenv("OTHER_API_KEY", "other")
    assert ids_of(generate([server], kind=OtherServer)) == expected()
    assert {body["adapter"] for body in server.requests} == {"a-v1"} and keys == ["other"]
