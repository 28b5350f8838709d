"""
A served team under load: tokens per second of one client and of many, how soon a slot is free, memory.

    python benchmarks/servers/serving.py [--page]                         # the embedded team, on this machine's model
    python benchmarks/servers/serving.py --engine http://127.0.0.1:8000   # turns from a vLLM server, and the server
    python benchmarks/servers/serving.py --team FOLDER --model FOLDER

The server runs in its own process. Rounds with one client and with many clients alternate, so that the ratio compares
the same minutes. With `--engine`, the same number of clients request the same turns from the bare server.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from marft_trl import MARFTConfig, MARFTTrainer, Team
from marft_trl.tiny import exact_answer, questions, tiny_agents, tiny_dataset, tiny_team_model

import psutil
from aiohttp import ClientSession, TCPConnector
from peft import LoraConfig


# `figures` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures


QUESTIONS = [row["prompt"] for row in questions(200, seed=1)]


def saved_team(base: str, folder: Path) -> str:
    args = MARFTConfig(str(folder), report_to="none", per_device_train_batch_size=8)
    lora = LoraConfig(r=16, target_modules="all-linear")
    data = tiny_dataset(64)
    trainer = MARFTTrainer(
        base, agents=tiny_agents(), reward_funcs=exact_answer, args=args, train_dataset=data, peft_config=lora
    )
    trainer.save_model()
    return str(folder)


@contextlib.contextmanager
def served(team: str, base: str, engine: str | None):
    """Address and process of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "marft_trl", "serve", team, "--model", base, "--name", "team"]
    command += ["--port", str(port), *(["--engine", engine] if engine else [])]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            assert process.poll() is None, "the server has ended"
            time.sleep(0.2)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def body(question: str, **fields) -> dict:
    return {"model": "team", "messages": [{"role": "user", "content": question}], "temperature": 0, **fields}


async def load(url: str, clients: int, requests: int) -> tuple[float, dict[str, str]]:
    """Tokens per second of clients that each send one question at a time, and the answers."""
    answers: dict[str, str] = {}
    tokens = 0

    async def client(session, number):
        nonlocal tokens
        for index in range(requests):
            question = QUESTIONS[(number * requests + index) % len(QUESTIONS)]
            async with session.post(f"{url}/v1/chat/completions", json=body(question)) as response:
                reply = await response.json()
            assert response.status == 200, reply
            text = reply["choices"][0]["message"]["content"]
            assert answers.setdefault(question, text) == text
            tokens += reply["usage"]["completion_tokens"]

    async with ClientSession(connector=TCPConnector(limit=0)) as session:
        start = time.perf_counter()
        await asyncio.gather(*[client(session, number) for number in range(clients)])
        return tokens / (time.perf_counter() - start), answers


async def bare(engine: str, orders: list[dict], clients: int) -> float:
    """Tokens per second of a vLLM server that gets the same requests directly."""
    tokens, left = 0, list(orders)

    async def client(session):
        nonlocal tokens
        while left:
            async with session.post(f"{engine}/v1/completions", json=left.pop()) as response:
                tokens += (await response.json())["usage"]["completion_tokens"]

    async with ClientSession(connector=TCPConnector(limit=0)) as session:
        start = time.perf_counter()
        await asyncio.gather(*[client(session) for _ in range(clients)])
        return tokens / (time.perf_counter() - start)


def orders_of(engine: str, team: str, base: str, count: int) -> list[dict]:
    """The turns of a team as requests to its server, under the names that its adapters have there now."""
    with urllib.request.urlopen(f"{engine}/v1/models", timeout=10) as answer:
        names = [model["id"] for model in json.loads(answer.read())["data"]]
    loaded = Team.from_pretrained(team, base)
    turns = [turn for episode in loaded.run(QUESTIONS[:count], greedy=True) for turn in episode.turns]
    limits = {agent.name: agent.max_completion_length for agent in loaded.agents}
    return [
        {
            "model": next(name for name in names if f"-{turn.agent}-v" in name),
            "prompt": list(turn.prompt_ids),
            "max_tokens": limits[turn.agent] or 256,
            "temperature": 0,
            "ignore_eos": True,
            "stop_token_ids": [2],
            "logprobs": 0,
            "return_token_ids": True,
        }
        for turn in turns
    ]


async def seconds_until_free(url: str) -> list[float]:
    """Seconds from the moment a client disconnects until its slot is free."""
    seconds = []

    async def running(session) -> float:
        async with session.get(f"{url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("marft_requests_running ")))

    async with ClientSession() as session:
        for number in range(20):
            response = await session.post(f"{url}/v1/chat/completions", json=body(QUESTIONS[number], stream=True))
            await response.content.readline()
            response.close()
            start = time.perf_counter()
            while await running(session):
                await asyncio.sleep(0.002)
            seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--team")
    parser.add_argument("--model")
    parser.add_argument("--engine")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    options = figures.parse(parser)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        base = options.model or tiny_team_model()
        team = options.team or saved_team(base, Path(folder) / "team")
        with served(team, base, options.engine) as (url, process):
            asyncio.run(load(url, 4, 4))
            expected, bares, orders = {}, [], []
            before = process.memory_info().rss / 1e6
            for _ in range(options.rounds):
                single, single_answers = asyncio.run(load(url, 1, 2 * options.requests))
                many, answers = asyncio.run(load(url, options.clients, options.requests))
                expected |= single_answers
                assert all(expected.setdefault(question, text) == text for question, text in answers.items())
                memory = process.memory_info().rss / 1e6
                rounds.append([round(single, 1), round(many, 1), round(memory, 1)])
                print(f"tokens per second: 1 client {single:.0f}, {options.clients} clients {many:.0f}", end="; ")
                print(f"{memory:.0f} MB")
                if options.engine:
                    orders = orders or orders_of(options.engine, team, base, len(QUESTIONS))
                    repeats = -(-options.clients * options.requests // len(QUESTIONS))
                    direct = asyncio.run(bare(options.engine, orders * repeats, options.clients))
                    bares.append(many / direct)
                    print(f"  the server alone, {options.clients} clients: {direct:.0f}", flush=True)
            if bares:
                print(f"to the server alone: {', '.join(f'{ratio:.2f}' for ratio in bares)}")
            print("every greedy answer was the same alone and among others")
            freed = asyncio.run(seconds_until_free(url))
    measurements = {
        "made": figures.made("python benchmarks/servers/serving.py"),
        **{"clients": options.clients, "requests": options.requests, "megabytes before": round(before, 1)},
        "columns": ["tokens per second of one client", "of many", "megabytes of the server"],
        "rounds": rounds,
        "seconds until free": [round(seconds, 4) for seconds in freed],
    }
    print(tables(measurements)["serving"])
    if options.page:
        figures.publish("serving", measurements)


def tables(measurements):
    """Ranges over rounds."""
    single, many, memory = zip(*measurements["rounds"], strict=True)
    freed, clients, requests = measurements["seconds until free"], measurements["clients"], measurements["requests"]

    def spread(values, form="{:,.0f}"):
        return " to ".join(dict.fromkeys(map(form.format, (min(values), max(values)))))

    rows = [
        [f"tokens per second, one client ({len(single)} rounds)", spread(single)],
        [f"tokens per second, {clients} clients with {requests} questions each", spread(many)],
        ["ratio within a round", spread([b / a for a, b in zip(single, many, strict=True)], "{:.1f}")],
        [
            f"seconds until the slot of a client that has left is free, {len(freed)} times",
            f"median {statistics.median(freed):.3f}, most {max(freed):.3f}",
        ],
        [
            "memory of the server",
            f"{measurements['megabytes before']:.0f} MB before, {spread(memory)} MB after each of {len(single)} "
            f"rounds of {(clients + 2) * requests:,} questions",
        ],
    ]
    return {"serving": figures.markdown(["", ""], rows)}


if __name__ == "__main__":
    main()
