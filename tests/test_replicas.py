"""Servers that fail: what is no whole turn is never a turn, and a server that goes down is waited for."""

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
    with fake_servers() as (one,):
        yield one


def orders(count=24):
    return [GenerateRequest("a-v1", [1, 2, index], 12, {"seed": index, "temperature": 1.0}) for index in range(count)]


async def make_ready(server):
    if "a-v1" not in await server.models(5.0):
        await server.load("a-v1", "/somewhere", 5.0)


def generate(servers, asked=None, events=None, **changes):
    """Sends all orders at once; `events` maps a number of answers to what happens then."""
    asked, events, done = asked or orders(), dict(events or {}), []

    async def one(pool, order):
        found = await pool.generate(order)
        done.append(order)
        if len(done) in events:
            await asyncio.to_thread(events[len(done)])
        return found

    async def run():
        async with ServerPool(settings(servers, **changes), make_ready) as pool:
            return await asyncio.gather(*[one(pool, order) for order in asked])

    return run_coroutine(run)


def expected(asked=None):
    return [turn(order.body())["choices"][0]["token_ids"] for order in asked or orders()]


def ids_of(found):
    return [generated.ids for generated, _ in found]


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
        generate([server], orders(1))


def test_what_a_server_refuses_is_said_and_not_tried_again(server):
    server.fault = lambda body: answered(400, "Out of range float values are not JSON compliant: nan")
    with pytest.raises(engine.RefusedError, match="answered 400: Out of range float values"):
        generate([server], orders(1))
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
        assert ids_of(generate(servers, orders(60), max_inflight=5)) == expected(orders(60))
        assert all(server.most == 5 for server in servers)  # and no fewer: both are used


def test_requests_are_cancelled_with_their_episodes(server):
    server.delay = lambda body: 60.0

    async def run():
        async with ServerPool(settings([server]), lambda _: asyncio.sleep(0)) as pool:
            server.loaded["a-v1"] = ""
            tasks = [asyncio.ensure_future(pool.generate(order)) for order in orders(3)]
            await asyncio.sleep(0.3)
            tasks[0].cancel()
            await asyncio.sleep(0.1)
            assert tasks[0].cancelled() and not tasks[1].done()

    start = time.monotonic()
    run_coroutine(run)
    assert time.monotonic() - start < 30


def test_addresses_and_what_servers_tell():
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


def test_the_most_likely_tokens_are_those_without_the_sampled_one(server):
    """A server adds the token that it sampled, which may be as unlikely as any of a large vocabulary."""
    server.loaded["a"] = "/somewhere"
    likely = {token: -1.0 - token for token in range(20)}
    server.logps = lambda adapter, ids, temperature: {40_000: -25.0, **likely}

    async def ask():
        async with settings([server]).connected() as (one,):
            return await one.next_token("a", [1, 2], 1.0, 5.0)

    assert run_coroutine(ask) == likely


def test_connections_that_the_server_has_closed_are_not_used_again():
    """Also if this process was busy meanwhile, so that it has not seen them close. One attempt is enough."""
    server = FakeServer()
    server.keep_seconds = 0.2
    server.start().loaded["a-v1"] = "/somewhere"

    async def run():
        async with settings([server]).connected() as (client,):
            for _ in range(2):
                await asyncio.gather(*map(client.generate, orders()))
                time.sleep(1.0)

    run_coroutine(run)
    assert len(server.requests) == 48
    server.stop()


@pytest.mark.parametrize("how", ["slow", "answers 500"])
def test_a_request_that_always_fails_harms_no_other_and_ends(server, how):
    """The server is well, so its other requests go on."""
    server.delay = lambda body: 30.0 if how == "slow" and body["seed"] == 3 else 0.05
    if how != "slow":
        server.fault = lambda body: answered(500, "list index out of range") if body["seed"] == 3 else None
    asked, results = orders(12), []

    async def run():
        async with ServerPool(settings([server], request_timeout=0.6), make_ready) as them:
            results.extend(await asyncio.gather(*map(them.generate, asked), return_exceptions=True))

    run_coroutine(run)
    failed = results.pop(3)
    assert isinstance(failed, engine.AnswerError) and "vllm_request_timeout" in str(failed), failed
    del asked[3]
    assert ids_of(results) == expected(asked)
    assert sum(body["seed"] == 3 for body in server.requests) == 3
    assert len(server.requests) == 14  # none of the others was sent twice


@pytest.mark.parametrize("breaks_at", [None, 0, 3])
def test_a_streamed_turn_is_heard_once_also_if_it_is_asked_for_again(server, breaks_at):
    tries = []

    def breaks(count):
        if count == 0:
            tries.append(1)
        return len(tries) == 1 and count == breaks_at

    server.breaks = breaks
    heard: list[list[int]] = []

    async def run():
        async with ServerPool(settings([server]), make_ready) as pool:
            return await pool.generate(order, heard.append)

    order = next(one for one in orders() if len(expected([one])[0]) > 4)
    (generated, _), (ids,) = run_coroutine(run), expected([order])
    assert generated.ids == ids == [index for part in heard for index in part] and len(heard) > 2
    assert len(generated.logps) == len(ids) and len(tries) == (1 if breaks_at is None else 2)


def test_a_server_whose_engine_has_died_ends_the_run(server):
    """Its models are still listed, and nothing else works."""
    server.fault = lambda body: answered(500, "EngineCore encountered an issue")
    server.is_ill = True
    start = time.monotonic()
    with pytest.raises(EngineDownError, match="has not answered for 1 seconds"):
        generate([server], orders(2), server_timeout=1.0)
    assert time.monotonic() - start < 10 and len(server.requests) < 20
