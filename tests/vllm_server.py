"""A small HTTP server with vLLM's routes, which fails in the ways that tests ask for. It has no model."""

import asyncio
import json
import random
import threading
from contextlib import contextmanager

from aiohttp import web


class FakeServer:
    """
    Args:
        port (`int`): 0 for any free one.

    Attributes:
        loaded (`dict[str, str]`): folder of each adapter.
        requests (`list[dict]`): bodies of requests for turns.
        fault (`Callable`): `fault(body)` returns the answer to a request for a turn, or `None` for the usual one.
        calls (`list[str]`): other requests, in order.
        breaks (`Callable`): `breaks(count)` returns whether the connection breaks after `count` tokens of a stream.
        keep_seconds (`float`): after which an idle connection is closed.
        delay (`Callable`): `delay(body)` returns the seconds that a turn takes.
        logps (`Callable`): `logps(adapter, ids, temperature)` returns log-probabilities of next tokens by their ids.
    """

    def __init__(self, port=0):
        self.port, self.loaded, self.requests, self.calls = port, {}, [], []
        self.fault, self.delay = lambda body: None, lambda body: 0.0
        self.logps = lambda adapter, ids, temperature: {5: -1.0 / temperature}
        self.breaks, self.streams = lambda count: False, 0
        self.is_ill = self.hangs = False
        self.takes_adapters, self.keep_seconds = True, 75.0
        self.running = self.most = 0
        self.max_loras = 4
        self._loop, self._runner = asyncio.new_event_loop(), None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        if not self._thread.is_alive():
            self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def stop(self):
        """Close the port and all connections, as a process that dies does."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)

    async def _start(self):
        app = web.Application(client_max_size=1 << 28)
        for path, answer in {"/health": self._health, "/v1/models": self._models, "/metrics": self._metrics}.items():
            app.router.add_get(path, answer)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        for path in ("/sleep", "/wake_up"):
            app.router.add_post(path, self._sleep)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, keepalive_timeout=self.keep_seconds)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _still(self):
        while self.hangs:
            await asyncio.sleep(0.02)

    async def _health(self, request):
        if self.is_ill:
            return answered(503, "EngineDeadError")
        await self._still()
        return web.Response()

    async def _models(self, request):
        await self._still()
        models = [{"id": "base", "max_model_len": 512}, *({"id": name} for name in self.loaded)]
        return web.json_response({"data": models})

    async def _metrics(self, request):
        return web.Response(text=f'vllm:lora_requests_info{{max_lora="{self.max_loras}",running=""}} 1.0\n')

    async def _load(self, request):
        body = await request.json()
        if not self.takes_adapters:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.calls.append("load")
        self.loaded[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success")

    async def _sleep(self, request):
        self.calls.append(request.path_qs)
        return web.json_response({})

    async def _unload(self, request):
        if self.loaded.pop((await request.json())["lora_name"], None) is not None:
            self.calls.append("unload")
        return web.Response(text="Success")

    async def _complete(self, request):
        await self._still()
        body = await request.json()
        if body["model"] not in self.loaded:
            return answered(404, f"The model `{body['model']}` does not exist.")
        if body["logprobs"]:
            logps = self.logps(body["model"], body["prompt"], body["temperature"])
            logprobs = {"top_logprobs": [{f"token_id:{token}": logp for token, logp in logps.items()}]}
            return web.json_response({"choices": [{"logprobs": logprobs}]})
        self.requests.append(body)
        self.calls.append("turn")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay(body))
            await self._still()
            answer = self.fault(body)
        finally:
            self.running -= 1
        if body.get("stream"):
            return await self._stream(request, turn(body))
        return web.json_response(turn(body)) if answer is None else answer

    async def _stream(self, request, completion):
        """The turn token by token; the connection breaks after `count` tokens if `self.breaks(count)`."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        (choice,) = completion["choices"]
        self.streams += 1
        size = self.streams  # of the parts of the first stream 1 token, of the second 2 tokens, ...
        for count in range(0, len(choice["token_ids"]), size):
            if self.breaks(count):
                request.transport.abort()
                return response
            ids = choice["token_ids"][count : count + size]
            is_last = count + size >= len(choice["token_ids"])
            chunk = {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}}
            chunk["finish_reason"] = choice["finish_reason"] if is_last else None
            await response.write(f"data: {json.dumps({'choices': [chunk]})}\n\n".encode())
        await response.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')
        return response


def turn(body, **changes):
    """The answer to a request: tokens that its seed and its prompt determine."""
    draw = random.Random(str((body["seed"], body["prompt"], body["model"])))
    ids = [draw.randrange(3, 300) for _ in range(draw.randrange(1, body["max_tokens"] + 1))]
    reason = "length" if len(ids) == body["max_tokens"] else "stop"
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}, "finish_reason": reason}
    return {"choices": [{**choice, **changes}]}


def answered(status, message):
    """An error that a server answers."""
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def as_text(body):
    return web.Response(text=body if isinstance(body, str) else json.dumps(body))


@contextmanager
def fake_servers(count=1):
    servers = [FakeServer().start() for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.hangs = False
            server.stop()
