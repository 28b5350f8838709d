"""
A server with vLLM's routes that computes nothing: it waits as long as an engine with given delays would take.

    python benchmarks/servers/waiting_server.py --port 8310 --base 10 --per_row 0.02
"""

import argparse
import asyncio
import math
import random
import time

from aiohttp import web


class Engine:
    """
    An engine that computes a token of all rows in `base + per_row * rows` milliseconds, in real time. It sleeps.

    Args:
        slots (`int`): rows at the same time.
        base (`float`): milliseconds of a step.
        per_row (`float`): milliseconds of a step for each row.
    """

    def __init__(self, slots=256, base=10.0, per_row=0.02):
        self._slots, self._base, self._per_row = slots, base, per_row
        self._queue, self._running = [], None

    @property
    def is_running(self):
        return self._running is not None

    async def generate(self, length):
        """Wait as long as a turn of `length` tokens takes."""
        done = asyncio.get_running_loop().create_future()
        self._queue.append([length, done])
        if self._running is None:
            self._running = asyncio.ensure_future(self._run())
        await done

    async def _run(self):
        due = time.monotonic()
        while self._queue:
            active = self._queue[: self._slots]
            steps = min(length for length, _ in active)
            seconds = steps * (self._base + self._per_row * len(active)) / 1000
            due = max(due, time.monotonic() - 0.01) + seconds
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            for entry in active:
                entry[0] -= steps
            for entry in [entry for entry in active if not entry[0]]:
                self._queue.remove(entry)
                entry[1].set_result(None)
            for _ in range(12):  # let the episodes send their next requests
                await asyncio.sleep(0)
        self._running = None


def application(engine, vocabulary, length):
    """The routes that a trainer uses. Every turn has `length` tokens, or the requested number if `length` is 0."""
    loaded = set()

    async def models(request):
        names = [{"id": "base", "max_model_len": 100_000}, *({"id": name} for name in loaded)]
        return web.json_response({"data": names})

    async def load(request):
        loaded.add((await request.json())["lora_name"])
        return web.Response(text="Success")

    async def unload(request):
        loaded.discard((await request.json())["lora_name"])
        return web.Response(text="Success")

    async def complete(request):
        body = await request.json()
        if body["logprobs"]:  # at a high temperature all tokens are about as likely
            top_logprobs = {"token_id:5": -6.0 if body["temperature"] > 1 else -3.0}
            return web.json_response({"choices": [{"logprobs": {"top_logprobs": [top_logprobs]}}]})
        count = min(length or body["max_tokens"], body["max_tokens"])
        await engine.generate(count)
        draw = random.Random(body["seed"])
        choice = {
            "token_ids": [draw.randrange(20, vocabulary) for _ in range(count)],
            "logprobs": {"token_logprobs": [-math.log(vocabulary)] * count},
            "finish_reason": "length" if count == body["max_tokens"] else "stop",
        }
        return web.json_response({"choices": [choice]})

    async def nothing(request):
        return web.Response()

    app = web.Application(client_max_size=1 << 28)
    routes = [web.get("/health", nothing), web.get("/metrics", nothing), web.get("/v1/models", models)]
    routes += [web.post("/v1/load_lora_adapter", load), web.post("/v1/unload_lora_adapter", unload)]
    app.add_routes([*routes, web.post("/v1/completions", complete)])
    return app


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8310)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--base", type=float, default=10.0, help="milliseconds of a step")
    parser.add_argument("--per_row", type=float, default=0.02, help="milliseconds of a step for each row")
    parser.add_argument("--vocabulary", type=int, default=90)
    parser.add_argument("--length", type=int, default=0, help="tokens of a turn; 0: the requested number")
    options = parser.parse_args()
    engine = Engine(options.slots, options.base, options.per_row)
    app = application(engine, options.vocabulary, options.length)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
