"""
Rollouts on vLLM servers: how much of a server's speed they reach, what waiting costs, and what overlap gains.

    MARFT_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/engines.py
    python benchmarks/engines.py --parts barrier      # needs no server

- `efficiency`: tokens per second of rollouts, over those of a bare client that sends the recorded requests again, at
  the same concurrency and without waiting for the turns that they depend on. Both are run in turns.
- `publishing`: share of a training step that publishing takes, if every adapter has changed.
- `overlap`: steps per hour with `max_staleness` 1 over 0. It prints the share of rollouts without overlap; choose
  `--iterations` so that it is about a half.
- `barrier`: time of rollouts in waves over that of streams, for an engine with given delays that computes nothing.
  Beside it stands what an exact simulation of both gives.

Each part prints ratios that were measured side by side. The server is started with the command that users are given,
for a tiny model on the CPU; `--url` takes a server that runs, and `--model` its base.
"""

import argparse
import asyncio
import os
import shlex
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
import warnings
from pathlib import Path

import numpy as np
from peft import LoraConfig
from transformers.utils import logging

from marft_trl import MARFTConfig, MARFTTrainer, Workflow
from marft_trl.engine.server import VLLMServer
from marft_trl.episodes.collector import collect, collect_streams
from marft_trl.episodes.live import Setting
from marft_trl.event_loop import run_coroutine
from marft_trl.rollout import vllm_command
from marft_trl.tiny import tiny_agents, tiny_dataset, tiny_model, tiny_tokenizer


PEFT = LoraConfig(r=8, target_modules="all-linear")


def varied(completions, **kwargs):
    return [float(sum(map(ord, str(one))) % 7) for one in completions]


# ---- A server ----


class Server:
    """A vLLM server for the tiny model, started here."""

    def __init__(self, folder, port):
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(folder)
        tiny_model(len(tokenizer)).save_pretrained(folder)
        self.url, self.model = f"http://127.0.0.1:{port}", folder
        command = vllm_command(folder, tiny_agents(), peft_config=PEFT, port=port, max_model_len=1024, device="cpu")
        assignment, _, *flags = shlex.split(command)
        name, value = assignment.split("=")
        environment = {**os.environ, name: value, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
        self._log = Path(folder) / "server.log"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [os.environ["MARFT_VLLM_PYTHON"], *flags],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(600):
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return
            except OSError:
                assert self._process.poll() is None, self._log.read_text()[-3000:]
                time.sleep(0.5)

    def stop(self):
        os.killpg(self._process.pid, signal.SIGKILL)


def make_trainer(options, folder, **settings):
    episodes = settings.pop("episodes", options.episodes)
    args = MARFTConfig(
        folder,
        use_vllm=True,
        vllm_server_base_url=options.url,
        vllm_max_inflight=options.inflight,
        per_device_train_batch_size=episodes,
        num_generations=4,
        max_completion_length=options.new_tokens,
        learning_rate=1e-3,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **{"max_steps": 10**6, **settings},
    )
    agents = [type(agent)(agent.name, agent.system_prompt) for agent in tiny_agents()]
    team = {"agents": agents, "peft_config": PEFT, "processing_class": tiny_tokenizer()}
    return MARFTTrainer(options.model, varied, args, tiny_dataset(4096), **team)


# ---- Parts ----


def efficiency(options):
    """Tokens per second of rollouts over those of a client that only sends requests."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder)
        runner = trainer.parts.runner
        rows = [trainer.train_dataset[index // 4] for index in range(options.episodes)]
        runner.publish()
        orders, generate = [], VLLMServer.generate

        async def recorded(self, order):
            orders.append(order)
            return await generate(self, order)

        async def replay(bodies):
            from aiohttp import ClientSession, TCPConnector

            limit = asyncio.Semaphore(trainer.args.vllm_max_inflight)
            async with ClientSession(connector=TCPConnector(limit=0)) as session:

                async def send(body):
                    async with limit, session.post(options.url + "/v1/completions", json=body) as answer:
                        return len((await answer.json())["choices"][0]["token_ids"])

                return sum(await asyncio.gather(*map(send, bodies)))

        ratios, own = [], []
        for _ in range(options.rounds + 1):  # the first one warms up
            orders.clear()
            VLLMServer.generate = recorded
            start, cpu = time.monotonic(), time.process_time()
            episodes = runner.run(rows)
            seconds, cpu = time.monotonic() - start, time.process_time() - cpu
            VLLMServer.generate = generate
            tokens = sum(len(turn.completion_ids) for episode in episodes for turn in episode.turns)
            start = time.monotonic()
            others = run_coroutine(replay, [order.body() for order in orders])
            bare = time.monotonic() - start
            ratios.append((tokens / seconds) / (others / bare))
            own.append(1000 * cpu / len(orders))
        runner.close()
    report("efficiency: rollouts / bare client", ratios[1:])
    print(f"  own CPU per turn: {statistics.median(own[1:]):.2f} ms; {tokens / seconds:.0f} tokens/s")


def publishing(options):
    """Share of a step that publishing takes."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder, max_steps=options.rounds + 2)
        library, spent = trainer.parts.runner.generator.library, []
        publish = library.publish

        def timed(*arguments):
            start = time.monotonic()
            found = publish(*arguments)
            spent.append(time.monotonic() - start)
            return found

        library.publish = timed
        start = time.monotonic()
        trainer.train()
        step = (time.monotonic() - start) / (options.rounds + 2)
    report("publishing: share of a step", [one / step for one in spent[2:]])


def overlap(options):
    """Steps per hour with one batch ahead over those without."""

    def steps_per_second(staleness, iterations, steps=6):
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(
                options,
                folder,
                episodes=options.episodes // 4,
                max_steps=steps * iterations,
                num_iterations=iterations,
                max_staleness=staleness,
            )
            spent, run = [], trainer.parts.rollouts.run

            def timed(*arguments, **named):
                start = time.monotonic()
                found = run(*arguments, **named)
                spent.append(time.monotonic() - start)
                return found

            trainer.parts.rollouts.run = timed
            start = time.monotonic()
            trainer.train()
            return steps / (time.monotonic() - start), sum(spent[1:]) / (steps - 1)

    iterations, ratios = options.iterations, []
    for _ in range(options.rounds):
        slow, rollouts = steps_per_second(0, iterations)
        fast, _ = steps_per_second(1, iterations)
        ratios.append(fast / slow)
    report("overlap: steps per hour, max_staleness 1 / 0", ratios)
    print(f"  rollouts take {rollouts * slow:.0%} of a step without overlap")


class Turns(Workflow):
    """Episodes of a number of turns."""

    def __init__(self, count):
        self.count = count

    async def run(self, episode):
        for _ in range(self.count):
            await episode.turn("a")


def lengths(draw, shape, cv, mean=30):
    """Lengths of turns with a coefficient of variation, log-normal."""
    sigma = np.sqrt(np.log(1 + cv**2))
    return np.maximum(1, draw.lognormal(np.log(mean) - sigma**2 / 2, sigma, shape)).astype(int)


def simulated(table, in_waves, slots=256, base=10.0, per_row=0.02):
    """Milliseconds of an engine that computes a token of all rows in `base + per_row * rows` milliseconds."""
    left, turn = table[:, 0].copy(), np.zeros(len(table), int)
    clock = 0.0
    while True:
        waiting = np.flatnonzero(turn < table.shape[1])
        if not len(waiting):
            return clock
        if in_waves:
            first = turn[waiting].min()
            waiting = waiting[turn[waiting] == first]
        active = waiting[:slots]
        steps = left[active].min()
        clock += steps * (base + per_row * len(active))
        left[active] -= steps
        done = active[left[active] == 0]
        turn[done] += 1
        more = done[turn[done] < table.shape[1]]
        left[more] = table[more, turn[more]]


class Engine:
    """The engine of [`simulated`], in real time: it sleeps, and computes nothing."""

    def __init__(self, slots=256, base=10.0, per_row=0.02):
        self._slots, self._base, self._per_row = slots, base, per_row
        self._queue, self._running = [], None

    @property
    def is_running(self):
        return self._running is not None

    async def generate(self, length):
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
            for _ in range(12):  # episodes go on at once
                await asyncio.sleep(0)
        self._running = None


class Timed:
    """Rollouts whose turns take times of a table, by the [`Engine`]."""

    def __init__(self, table):
        self._table, self._count = table, table.shape[1]
        self._rows = [{"prompt": str(index)} for index in range(len(table))]
        self._setting = Setting(("a",))

    def _length(self, request):
        return int(self._table[request.episode.index, len(request.episode.turns)])

    def waves(self):
        """Seconds, if all episodes wait for one another."""

        async def compute(asked):
            engine = Engine()
            await asyncio.gather(*[engine.generate(self._length(one)) for one in asked])
            while engine.is_running:
                await asyncio.sleep(0)

        def answer(requests):
            loop = asyncio.new_event_loop()  # of another thread: a generator that blocks
            thread = threading.Thread(target=lambda: loop.run_until_complete(compute(requests)))
            thread.start()
            thread.join()
            loop.close()
            return [one.completed("x") for one in requests]

        start = time.monotonic()
        collect(Turns(self._count), self._rows, self._setting, answer)
        return time.monotonic() - start

    def streams(self):
        """Seconds, if no episode waits."""

        async def run():
            engine = Engine()

            async def answer(requests):
                await asyncio.gather(*[engine.generate(self._length(one)) for one in requests])
                return [one.completed("x") for one in requests]

            return await collect_streams(Turns(self._count), self._rows, self._setting, answer)

        start = time.monotonic()
        run_coroutine(run)
        return time.monotonic() - start


def barrier(options):
    """Waves over streams."""
    for count, cv in ((2, 1.0), (4, 0.3), (4, 1.0), (4, 2.0), (8, 1.0)):
        expected, measured = [], []
        for seed in range(options.rounds):
            table = lengths(np.random.default_rng(seed), (256, count), cv)
            expected.append(simulated(table, True) / simulated(table, False))
            timed = Timed(table)
            measured.append(timed.waves() / timed.streams())
        share = statistics.median(measured) / statistics.median(expected)
        report(f"barrier, {count} turns, cv {cv:g}: waves / streams", measured)
        print(f"  simulated {statistics.median(expected):.2f}; reached {share:.2f} of it")


def report(name, ratios):
    spread = f"{min(ratios):.3f} - {max(ratios):.3f}, {len(ratios)} rounds"
    print(f"{name}: {statistics.median(ratios):.3f} ({spread})", flush=True)


PARTS = {"efficiency": efficiency, "publishing": publishing, "overlap": overlap, "barrier": barrier}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--url", help="address of a server that runs")
    parser.add_argument("--model", help="its base")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--inflight", type=int, default=256, help="turns at the server at the same time")
    parser.add_argument("--iterations", type=int, default=3, help="updates on a batch, in the part `overlap`")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        server = None
        if set(options.parts) - {"barrier"} and options.url is None:
            server = Server(folder, options.port)
            options.url, options.model = server.url, server.model
        try:
            for part in options.parts:
                PARTS[part](options)
        finally:
            if server is not None:
                server.stop()
