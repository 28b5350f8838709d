"""
Rollouts on vLLM servers: their share of the server's speed, the cost of waiting, and the gain of overlap.

    make benchmark-engines
    MARFT_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/servers/engines.py [--page]
    python benchmarks/servers/engines.py --parts barrier overlap      # need no vLLM

- `parity`: mean and largest difference between log-probabilities of a server and of the trainer.
- `efficiency`: tokens per second of rollouts, over those of a bare client that sends the recorded requests again, at
  the same concurrency and without waiting for the turns that they depend on. The two alternate.
- `publishing`: share of a training step that publishing takes, if every adapter has changed.
- `barrier`: time of rollouts in waves over that of streams, for an engine with given delays that computes nothing.
  The next line has the ratio in an exact simulation of both.
- `barrier-served`: the same on the server, with 4 turns whose lengths have a coefficient of variation of 1.
- `overlap`: steps per hour with `max_staleness` 1 over 0, where rollouts take as long as training. The server only
  waits, so it takes no CPU time from the trainer, like a server on other hardware.
- `overlap-served`: the same on the server. It prints the share of rollouts without overlap; choose `--iterations` so
  that it is about a half.

Each part prints ratios that were measured side by side. The server is started with the documented command,
for a tiny model on the CPU. By default, the parts are those whose figures do not depend on the speed of this server,
which stalls for seconds if it shares two cores with its client. `gpu_servers.py` runs the others.
"""

import argparse
import asyncio
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from pathlib import Path

from marft_trl import MARFTConfig, MARFTTrainer, Workflow
from marft_trl.episodes.collector import collect, collect_async
from marft_trl.episodes.records import TeamContext
from marft_trl.extras.engines.server import GenerateRequest, ServerPool, VLLMServer
from marft_trl.system.event_loop import run_coroutine
from marft_trl.tiny import tiny_agents, tiny_dataset

import numpy as np
import torch
from peft import LoraConfig
from transformers.utils import logging


# `figures` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures
from vllm_server import Server, tiny_base, vllm_version
from waiting_server import Engine


PEFT = LoraConfig(r=8, target_modules="all-linear")


def varied(completions, **kwargs):
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


# ---- Training ----


def make_trainer(options, folder, **settings):
    episodes = settings.pop("episodes", options.episodes)
    defaults = {
        "use_vllm": True,
        "vllm_server_base_url": options.url,
        "vllm_max_inflight": options.inflight,
        "per_device_train_batch_size": episodes,
        "num_generations": 4,
        "max_completion_length": options.new_tokens,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_steps": 10**6,
        **({"bf16": False} if options.device == "cpu" else {}),
    }
    args = MARFTConfig(folder, **{**defaults, **settings})
    agents = [type(agent)(agent.name, agent.system_prompt) for agent in tiny_agents()]
    return MARFTTrainer(options.model, varied, args, tiny_dataset(4096), agents=agents, peft_config=PEFT)


def timed(obj, name):
    """Wrap a method so that it records the seconds of each call, and return the list of them."""
    method, spent = getattr(obj, name), []

    def noted(*arguments, **named):
        start = time.monotonic()
        result = method(*arguments, **named)
        spent.append(time.monotonic() - start)
        return result

    setattr(obj, name, noted)
    return spent


# ---- Parts ----


def parity(options):
    """Differences between log-probabilities of a server and of the trainer, after the adapters have moved."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder, episodes=options.episodes // 4, max_steps=4, logging_steps=1)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "sampling/staleness" in log]
    name = "sampling/sampling_logp_difference"
    report("parity: mean difference of log-probabilities", [log[f"{name}/mean"] for log in logs], "{:.2g}")
    report("parity: largest difference of log-probabilities", [log[f"{name}/max"] for log in logs], "{:.2g}")


def efficiency(options):
    """Tokens per second of rollouts over those of a client that only sends requests."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder)
        runner = trainer.parts.runner
        rows = [trainer.train_dataset[index // 4] for index in range(options.episodes)]
        runner.generator.publish()
        requests, generate = [], VLLMServer.generate

        async def recorded(self, request, on_tokens=None):
            requests.append(request)
            return await generate(self, request, on_tokens)

        async def replay(bodies):
            from aiohttp import ClientSession, TCPConnector

            limit = asyncio.Semaphore(trainer.args.vllm_max_inflight)
            async with ClientSession(connector=TCPConnector(limit=0, force_close=True)) as session:

                async def send(body):
                    async with limit, session.post(options.url + "/v1/completions", json=body) as answer:
                        return len((await answer.json())["choices"][0]["token_ids"])

                return sum(await asyncio.gather(*map(send, bodies)))

        ratios, own, bare_own, rates = [], [], [], []
        for _ in range(options.rounds + 1):  # the first one warms up
            requests.clear()
            VLLMServer.generate = recorded
            start, cpu = time.monotonic(), time.process_time()
            episodes = runner.run(rows)
            seconds, cpu = time.monotonic() - start, time.process_time() - cpu
            VLLMServer.generate = generate
            tokens = sum(len(turn.completion_ids) for episode in episodes for turn in episode.turns)
            start, before = time.monotonic(), time.process_time()
            others = run_coroutine(replay, [request.body() for request in requests])
            bare = time.monotonic() - start
            bare_own.append(1000 * (time.process_time() - before) / len(requests))
            ratios.append((tokens / seconds) / (others / bare))
            own.append(1000 * cpu / len(requests))
            rates.append(tokens / seconds)
        runner.generator.close()
    report("efficiency: rollouts / bare client", ratios[1:])
    report("efficiency: milliseconds of CPU per turn", own[1:], "{:.2f}")
    report("efficiency: milliseconds of CPU per turn, bare client", bare_own[1:], "{:.2f}")
    report("efficiency: tokens per second", rates[1:], "{:.0f}")


def publishing(options):
    """Share of a step that publishing takes."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder, max_steps=options.rounds + 2)
        spent = timed(trainer.parts.runner.generator.library, "publish")
        start = time.monotonic()
        trainer.train()
        step = (time.monotonic() - start) / (options.rounds + 2)
    report("publishing: share of a step", [seconds / step for seconds in spent[2:]])


def steps_per_second(options, staleness, iterations, steps=6, **settings):
    """Steps per second of a training run, and the mean seconds of the rollouts of a step."""
    sizes = {"episodes": options.episodes // 4, "max_steps": steps * iterations, "num_iterations": iterations}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder, max_staleness=staleness, **sizes, **settings)
        spent = timed(trainer.parts.rollouts, "run")
        start = time.monotonic()
        trainer.train()
        return steps / (time.monotonic() - start), statistics.fmean(spent[1:])


def compare_overlap(options, name, **settings):
    ratios, shares = [], []
    for _ in range(options.rounds):
        slow, rollouts = steps_per_second(options, 0, options.iterations, **settings)
        fast, _ = steps_per_second(options, 1, options.iterations, **settings)
        ratios.append(fast / slow)
        shares.append(rollouts * slow)
    report(f"{name}: steps per hour, max_staleness 1 / 0", ratios)
    report(f"{name}: rollouts as a share of a step without overlap", shares, "{:.0%}")


def overlap(options):
    """Steps per hour with one batch ahead over those without, on a server that only waits."""
    saved_options = vars(options).copy()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_base(folder)
        options.model, options.device = model, "cpu"
        foreign = {"fidelity_tolerance": 1e9}  # its log-probabilities come from no model
        with waiting(options, base=0.0, per_row=0.0):  # all that a step takes besides the engine
            pace, rollouts = steps_per_second(options, 0, options.iterations, **foreign)
        missing = max(0.0, 1 / pace - 2 * rollouts)  # then rollouts take half of a step
        base = 1000 * missing / (2 * options.new_tokens)  # two turns, one after the other
        with waiting(options, base=base, per_row=0.0):
            compare_overlap(options, "overlap", **foreign)
    vars(options).update(saved_options)


@contextlib.contextmanager
def waiting(options, **delays):
    """Run a server that only waits within the context."""
    port = options.port + 10
    flags = [text for name, value in delays.items() for text in (f"--{name}", str(value))]
    script = str(Path(__file__).with_name("waiting_server.py"))
    process = subprocess.Popen([sys.executable, script, "--port", str(port), "--vocabulary", "390", *flags])
    options.url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(options.url + "/health", timeout=5).close()
                break
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def overlap_served(options):
    """Steps per hour with one batch ahead over those without."""
    compare_overlap(options, "overlap on the server")


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


class Timed:
    """
    Rollouts whose turns have lengths of a table.

    Args:
        table (`np.ndarray` of shape `(E, T)`): lengths of turns.
        engine (`Callable`): an asynchronous context manager whose value has `await generate(length)`.
    """

    def __init__(self, table, engine):
        self._table, self._count, self._engine = table, table.shape[1], engine
        self._rows = [{"prompt": str(index)} for index in range(len(table))]
        self._setting = TeamContext(("a",))

    def _length(self, request):
        return int(self._table[request.episode.index, len(request.episode.turns)])

    def waves(self):
        """Seconds if all episodes wait for one another after each turn."""

        async def compute(engine, requests):
            await asyncio.gather(*[engine.generate(self._length(request)) for request in requests])

        loop, entered = asyncio.new_event_loop(), self._engine()
        thread = threading.Thread(target=loop.run_forever)  # a generator that blocks
        thread.start()

        def wait(coroutine):
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

        engine = wait(entered.__aenter__())

        def answer(requests):
            wait(compute(engine, requests))
            return [request.make_turn("x") for request in requests]

        start = time.monotonic()
        collect(Turns(self._count), self._rows, self._setting, answer)
        seconds = time.monotonic() - start
        wait(entered.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        return seconds

    def streams(self):
        """Seconds, if no episode waits."""

        async def run():
            async with self._engine() as engine:

                async def answer(requests):
                    await asyncio.gather(*[engine.generate(self._length(request)) for request in requests])
                    return [request.make_turn("x") for request in requests]

                start = time.monotonic()
                await collect_async(Turns(self._count), self._rows, self._setting, answer)
                return time.monotonic() - start

        return run_coroutine(run)


@contextlib.asynccontextmanager
async def delays():
    """An engine that computes nothing. Wait at the end until it is idle."""
    engine = Engine()
    yield engine
    while engine.is_running:
        await asyncio.sleep(0)


def barrier(options):
    """Waves over streams."""
    for count, cv in ((2, 1.0), (4, 0.3), (4, 1.0), (4, 2.0), (8, 1.0)):
        expected, measured = [], []
        for seed in range(options.rounds):
            table = lengths(np.random.default_rng(seed), (256, count), cv)
            expected.append(simulated(table, True) / simulated(table, False))
            rollouts = Timed(table, delays)
            measured.append(rollouts.waves() / rollouts.streams())
        share = statistics.median(measured) / statistics.median(expected)
        report(f"barrier, {count} turns, cv {cv:g}: waves / streams", measured)
        print(f"  simulated {statistics.median(expected):.2f}; reached {share:.2f} of it")


def barrier_served(options):
    """Waves over streams, on the server."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder)
        generator, draw = trainer.parts.runner.generator, np.random.default_rng(0)
        name = generator.library.publish()["actor"].name
        settings = {"temperature": 1.0, "ignore_eos": True, "seed": 0}

        @contextlib.asynccontextmanager
        async def served():
            class Client:
                async def generate(self, length):
                    await pool.generate(GenerateRequest(name, [5, 6, 7], length, settings))

            async with ServerPool(generator.servers, generator.library.make_ready) as pool:
                yield Client()

        ratios = []
        for _ in range(options.rounds):
            table = np.minimum(lengths(draw, (options.inflight, 4), 1.0, options.new_tokens), 900)
            rollouts = Timed(table, served)
            ratios.append(rollouts.waves() / rollouts.streams())
        trainer.parts.runner.generator.close()
    report(f"barrier on the server, 4 turns, cv 1, {options.inflight} episodes: waves / streams", ratios)


RESULTS = {}  # what was reported: values of all rounds and their format, by name


def report(name, ratios, form="{:.3f}"):
    RESULTS[name] = ratios, form
    median, low, high = median_and_range(ratios, form)
    print(f"{name}: {median} ({low} - {high}, {len(ratios)} rounds)", flush=True)


def median_and_range(values, form="{:.2f}"):
    """Texts of the median, the smallest and the largest value."""
    return [form.format(value) for value in (statistics.median(values), min(values), max(values))]


def tables(measurements):
    """Medians and ranges of the figures for users of servers."""
    results = measurements["results"]

    def cell(name, *form):
        values = next(values for key, values in results.items() if key.startswith(name))
        return "{} ({} - {})".format(*median_and_range(values, *form))

    parity = [cell(f"parity: {kind}", "{:.1e}").partition(" ")[0] for kind in ("mean", "largest")]
    rows = [
        ["difference of log-probabilities between server and trainer, mean and largest", ", ".join(parity)],
        ["publishing, as a share of a step", cell("publishing", "{:.1%}")],
        [
            "time if all episodes wait for the slowest at each turn / if none waits, as in training; "
            "4 turns of uneven length (simulated server)",
            cell("barrier, 4 turns, cv 1:"),
        ],
        [
            "steps per hour with `max_staleness=1` / with 0: server on other hardware (simulated)",
            cell("overlap: steps per hour"),
        ],
    ]
    return {"servers": figures.markdown(["what", "figure"], rows)}


PARTS = {
    **{"parity": parity, "efficiency": efficiency, "publishing": publishing, "barrier": barrier},
    **{"barrier-served": barrier_served, "overlap": overlap, "overlap-served": overlap_served},
}
ALONE = {"barrier", "overlap"}  # parts that need no vLLM


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--inflight", type=int, default=256, help="turns at the server at the same time")
    parser.add_argument("--iterations", type=int, default=3, help="updates on a batch, in the parts of overlap")
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def run_parts(options):
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    for part in options.parts:
        PARTS[part](options)


if __name__ == "__main__":
    parser = arguments()
    parser.set_defaults(episodes=256, inflight=64, new_tokens=32)  # for two cores; `gpu_servers.py` has more
    parser.set_defaults(parts=["parity", "publishing", "barrier", "overlap"])
    options = figures.parse(parser, free=("port",))
    options.device = "cpu"
    torch.set_num_threads(1)
    if set(options.parts) <= ALONE:
        run_parts(options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            options.model = tiny_base(folder)
            with Server(options.model, PEFT, folder, options.port) as server:
                options.url = server.url
                run_parts(options)
    if options.page:
        made = figures.made("make benchmark-engines")
        made["versions"]["vllm"] = vllm_version()
        results = {name: [float(f"{value:.4g}") for value in values] for name, (values, _) in RESULTS.items()}
        figures.publish("servers", {"made": made, "results": results})
