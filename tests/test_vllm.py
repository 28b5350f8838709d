"""
Teams on a real vLLM server on the CPU (`make test-vllm`). Skipped unless `MARFT_VLLM_PYTHON` is the path of a Python
interpreter that has vLLM.
"""

import asyncio
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from marft_trl import AgentSpec, Sequential, Team
from marft_trl.extras.apps import ExternalApp
from marft_trl.extras.engines import vllm_command
from marft_trl.extras.engines.library import MismatchError
from marft_trl.extras.engines.server import AnswerError, GenerateRequest, RefusedError, ServerPool
from marft_trl.extras.engines.vllm_generator import FidelityError
from marft_trl.system.event_loop import run_coroutine
from marft_trl.team import TextDelta
from marft_trl.tiny import exact_answer, questions, tiny_agents, tiny_dataset, tiny_team_model

import openai
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file

from .helpers import lora, moved, moved_by_training, plain_logps, shake, team_trainer, weights
from .test_distributed import launch
from .test_serve import serving


PYTHON = os.environ.get("MARFT_VLLM_PYTHON")
SMOLLM2 = os.environ.get("MARFT_SMOLLM2")  # a folder made by `python -m marft_trl.extras.tasks.smollm2`
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="MARFT_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.timeout(1200),
]
QUESTIONS = [row["prompt"] for row in questions(100, seed=1)]
PORT = 8170 + 10 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])


class Server:
    """A vLLM server in a subprocess, started with the command that `vllm_command` returns."""

    def __init__(self, model, port, log, max_model_len=512):
        self.url, self._log = f"http://127.0.0.1:{port}", log
        limits = {"port": port, "max_model_len": max_model_len, "device": "cpu", "extra": ["--seed", "0"]}
        command = vllm_command(model, tiny_agents(), peft_config=lora(), **limits)
        variable, python, *rest = shlex.split(command)
        assert python == "python"
        name, value = variable.split("=")
        self._environment = {**os.environ, name: value, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self._environment["VLLM_SERVER_DEV_MODE"] = "1"  # so that tests can abort requests
        self._environment.pop("PYTHONPATH", None)
        self._command = [PYTHON, *rest]
        self.process = None

    def start(self):
        with open(self._log, "a") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True}
            self.process = subprocess.Popen(self._command, env=self._environment, **options)
        return self

    def wait(self, seconds=600):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return self
            except OSError:
                assert self.process.poll() is None, Path(self._log).read_text()[-3000:]
                time.sleep(0.5)
        raise TimeoutError(Path(self._log).read_text()[-3000:])

    def signal(self, number):
        os.killpg(self.process.pid, number)

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait()

    def post(self, path, body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    server = Server(model_folder, PORT, tmp_path_factory.mktemp("vllm") / "log").start().wait()
    yield server
    server.kill()


def served(model_folder, tmp_path, servers, *, settings=None, **arguments):
    urls = [server.url for server in (servers if isinstance(servers, list) else [servers])]
    fast = {"use_vllm": True, "vllm_server_base_url": urls, "vllm_server_timeout": 240.0, "max_completion_length": 24}
    return team_trainer(model_folder, tmp_path, settings={**fast, **(settings or {})}, **arguments)


def sampled(trainer):
    """Rows of a generation batch with the log-probabilities of the server and of the trainer."""
    trainer.model.train()
    rows = [trainer.train_dataset[index // 4] for index in range(16)]
    with torch.no_grad():
        slices = trainer.parts.batch_maker.for_training(rows)
    return [row for slice_ in slices for row in slice_.rows]


@torch.no_grad()
def perturb(trainer):
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            parameter.add_(0.05 * torch.randn_like(parameter))


def largest_difference(rows):
    """Of the log-probabilities of the server from those of the trainer."""
    return max((row.sampling_logps - row.old_per_token_logps).abs().max() for row in rows)


# ---- The server and the trainer compute the same ----


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_have_the_log_probabilities_of_the_trainer(model_folder, tmp_path, server, temperature):
    trainer = served(model_folder, tmp_path, server, settings={"temperature": temperature})
    perturb(trainer)
    rows = sampled(trainer)
    assert largest_difference(rows) < 1e-5
    assert {(row.sampled_by.server, row.sampled_by.version) for row in rows} == {(server.url, 0)}
    assert {row.agent for row in rows} == {"reasoner", "actor"} and len({row.sampled_by.seed for row in rows}) == 32
    assert any(row.completion_ids[-1].item() in trainer.eos_token_ids for row in rows)  # end tokens are part of turns
    trainer.parts.runner.generator.close()


def test_a_team_trains_and_only_adapters_that_moved_are_published(model_folder, tmp_path, server):
    agents = [*tiny_agents(), AgentSpec("judge", trainable=False)]
    trainer = served(model_folder, tmp_path, server, agents=agents, settings={"max_steps": 3})
    assert {name.split(".")[-2] for name in moved_by_training(trainer)} == {"reasoner", "actor"}
    logs = trainer.state.log_history[:3]
    assert all(log["sampling/sampling_logp_difference/max"] < 1e-5 for log in logs)
    assert all(abs(log["sampling/importance_sampling_ratio/mean"] - 1) < 1e-5 for log in logs)
    assert len(names_on(server)) == 1  # the adapters are taken from the server when training has ended
    assert not list((tmp_path / "_adapters").glob("*/*"))


def test_an_adapter_that_did_not_change_keeps_its_name(model_folder, tmp_path, server):
    trainer = served(model_folder, tmp_path, server)
    library = trainer.parts.runner.generator.library
    first = library.publish()
    assert library.publish() == first
    with torch.no_grad():
        next(iter(trainer.policies.parameters("actor").values())).add_(0.01)
    second = library.publish()
    assert second["reasoner"] is first["reasoner"]
    assert second["actor"].number == 1 and second["actor"].name != first["actor"].name
    assert Path(first["actor"].folder).exists()  # until the next time: a server may have been about to read it
    library.publish()
    assert not Path(first["actor"].folder).exists()
    library.close()


def saved(model_folder, folder, **arguments):
    """The trainer of a saved team."""
    settings = {"max_steps": 2, "learning_rate": 2e-2, "max_completion_length": 24}
    trainer = team_trainer(model_folder, folder, settings=settings, **arguments)
    trainer.train()
    trainer.save_model()
    return trainer


def test_a_loaded_team_generates_on_the_server(model_folder, tmp_path, server):
    """Greedy answers equal the local ones in lists, in streams and through the server; seeds; changed teams."""
    saved(model_folder, tmp_path)
    local = Team.from_pretrained(tmp_path, model=model_folder)

    def texts(episodes):
        return [[turn.text for turn in episode.turns] for episode in episodes]

    expected = texts(local.run(QUESTIONS, greedy=True))
    with Team.from_pretrained(tmp_path, model=model_folder, engine=server.url) as team:
        assert texts(team.run(QUESTIONS, greedy=True)) == expected
        assert texts(asyncio.run(team.arun(QUESTIONS, greedy=True))) == expected
        *events, answer = team.stream(QUESTIONS[0], greedy=True)
        parts = [
            "".join(event.text for event in events if isinstance(event, TextDelta) and event.turn == n) for n in (0, 1)
        ]
        assert parts == expected[0] and answer.text == expected[0][-1]
        assert texts(team.run(QUESTIONS[:4], seed=3)) == texts(asyncio.run(team.arun(QUESTIONS[:4], seed=3)))
        stream = team.stream(QUESTIONS[0])
        next(stream)
        stream.close()  # which aborts the request on the server
        with serving(team) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
            for question, turns in zip(QUESTIONS[:20], expected, strict=False):
                message = [{"role": "user", "content": question}]
                response = client.chat.completions.create(model="team", messages=message, temperature=0)
                assert response.choices[0].message.content == turns[-1]
                alone = client.chat.completions.create(model="reasoner", messages=message, temperature=0, stream=True)
                assert "".join(part.choices[0].delta.content or "" for part in alone) == turns[0]
        assert len(names_on(server)) == 3
    assert len(names_on(server)) == 1  # the base
    other = Team.from_pretrained(tmp_path, model=model_folder, engine=server.url)
    other.model.get_base_model().lm_head.weight.data.mul_(2.0)
    with pytest.raises(MismatchError, match="The log-probabilities of .* and the trainer differ by"):
        other("1 + 1 = ?")
    other.close()


def test_agents_decode_under_the_schema_of_a_request(model_folder, tmp_path, server):
    saved(model_folder, tmp_path)
    # Within an object, a model that knows no JSON may write spaces up to its limit
    response_format = {"type": "json_schema", "json_schema": {"name": "number", "schema": {"enum": [7]}}}
    with Team.from_pretrained(tmp_path, model=model_folder, engine=server.url) as team, serving(team) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        ask = functools.partial(client.chat.completions.create, messages=[{"role": "user", "content": QUESTIONS[0]}])
        for seed in range(3):
            answer = ask(model="actor", response_format=response_format, seed=seed)
            assert answer.choices[0].message.content == "7"
        assert ask(model="actor", seed=0).choices[0].message.content != "7"


def test_agents_that_share_an_adapter_generate_on_the_server(model_folder, tmp_path, server):
    trainer = saved(model_folder, tmp_path, agents=[replace(agent, adapter="team") for agent in tiny_agents()])

    def ids(team):
        return [[turn.completion_ids for turn in episode.turns] for episode in team.run(QUESTIONS, greedy=True)]

    with Team.from_pretrained(tmp_path, model=model_folder, engine=server.url) as team:
        assert ids(team) == ids(trainer.team)
        assert len(names_on(server)) == 2  # the base, and an adapter for both


def names_on(server):
    with urllib.request.urlopen(server.url + "/v1/models", timeout=20) as answer:
        return [model["id"] for model in json.loads(answer.read())["data"]]


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_application_trains_on_the_server(model_folder, tmp_path, server, staleness):
    """The turns are compared with the trainer's model, and two runs give the same weights."""

    async def app(row, endpoint):
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)

        async def ask(model, text):
            answer = await client.responses.create(model=model, input=text)
            return answer.output_text

        steps = await ask("reasoner", row["prompt"])
        await asyncio.gather(ask("actor", steps), ask("actor", f"again {steps}"))

    def trained(name):
        settings = {"max_steps": 2, "max_staleness": staleness}
        workflow = ExternalApp(app, together=0.6)
        trainer = served(model_folder, tmp_path / name, server, settings=settings, workflow=workflow)
        assert {weight_name.split(".")[-2] for weight_name in moved_by_training(trainer)} == {"reasoner", "actor"}
        return weights(trainer)

    assert not moved(trained("one"), trained("two"))


def test_stop_texts_and_counterfactuals_and_candidates(model_folder, tmp_path, server):
    agents = [AgentSpec("reasoner", stop=("1", ";")), AgentSpec("actor")]
    for settings in ({"credit": "counterfactual"}, {"advantage": "turn", "turn_candidates": 3}):
        trainer = served(model_folder, tmp_path / str(len(settings)), server, agents=agents, settings=settings)
        perturb(trainer)
        rows = sampled(trainer)
        for row in rows:
            text = trainer.processing_class.decode(row.completion_ids)
            if row.agent == "reasoner" and ("1" in text or ";" in text):
                assert min(text.find(stop) % 1000 for stop in "1;") >= len(text) - 4
        assert largest_difference(rows) < 1e-5
        trainer.parts.runner.generator.close()


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2, reason="MARFT_SMOLLM2 names no folder with the model")
def test_a_pretrained_team_trains_three_steps(tmp_path):
    """SmolLM2-135M: a real tokenizer, chat template and vocabulary of 49,152 tokens."""
    server = Server(SMOLLM2, PORT + 2, tmp_path / "log", max_model_len=1024).start().wait()
    agents = [
        AgentSpec("planner", system_prompt="Plan the solution in one sentence. Do not solve it."),
        AgentSpec("solver", system_prompt="Solve the problem with the plan. End with the number."),
    ]
    problems = [f"A box holds {i} red and {2 * i + 3} blue marbles — how many marbles?" for i in range(3, 19)]
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in problems])

    def digits(completions, **columns):
        return [float(sum(map(str.isdigit, answer[0]["content"]))) for answer in completions]

    settings = {"per_device_train_batch_size": 8, "max_completion_length": 32, "gradient_checkpointing": False}
    team = {"agents": agents, "train_dataset": dataset, "reward_funcs": digits, "settings": settings}
    try:
        trainer = served(SMOLLM2, tmp_path / "run", server, **team)
        changed = moved_by_training(trainer)
    finally:
        server.kill()
    assert {name.split(".")[-2] for name in changed} == {"planner", "solver"}
    logs = trainer.state.log_history[:3]
    assert [log["step"] for log in logs] == [1, 2, 3]
    differences = [[log[f"sampling/sampling_logp_difference/{key}"] for key in ("mean", "max")] for log in logs]
    assert all(mean < 1e-4 and most < 1e-3 for mean, most in differences), differences  # 30 layers in float32


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_team_of_the_quickstart_learns_on_a_server(tmp_path, staleness):
    """`benchmarks/servers/staleness.py` compares this with transformers, over five seeds."""
    model = str(tiny_team_model())
    server = Server(model, PORT + 3, tmp_path / "log").start().wait()
    settings = {
        **{"max_staleness": staleness, "max_steps": 16, "learning_rate": 1.5e-3, "per_device_train_batch_size": 64},
        **{"num_generations": 8, "num_generations_eval": 1, "per_device_eval_batch_size": 200},
        **{"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5, "gradient_checkpointing": False},
    }
    team = {"reward_funcs": exact_answer, "peft_config": lora(8), "train_dataset": tiny_dataset(1000, seed=0)}
    try:
        trainer = served(model, tmp_path, server, settings=settings, eval_dataset=tiny_dataset(400, seed=1), **team)
        before = trainer.evaluate()["eval_reward"]
        trainer.train()
        after = trainer.evaluate()["eval_reward"]
    finally:
        server.kill()
    assert after - before > 0.1, (before, after)  # three standard errors of the difference


# ---- Faults are detected ----


def broken(trainer, change):
    """Publish, with the files of the actor's adapter changed before the server reads them."""
    library = trainer.parts.runner.generator.library
    load = library._load

    async def damaged(server, version):
        if version.entry == "actor":
            change(Path(version.folder))
        await load(server, version)

    library._load = damaged
    try:
        library.publish()
    finally:
        library._load = load
        library.close()


def edit_tensors(change):
    def edit(folder):
        path = folder / "adapter_model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return edit


def edit_config(**changes):
    def edit(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


DAMAGE = {
    "half of its tensors": edit_tensors(lambda tensors: dict(sorted(tensors.items())[: len(tensors) // 2])),
    "other modules": edit_tensors(lambda tensors: {key.replace("q_", "x_"): value for key, value in tensors.items()}),
    "another alpha": edit_config(lora_alpha=64),
    "another rule for the rank": edit_config(use_rslora=True),
    "other numbers": edit_tensors(lambda tensors: {name: value + 0.05 for name, value in tensors.items()}),
    "all zeros": edit_tensors(lambda tensors: {name: value * 0 for name, value in tensors.items()}),
    "a truncated file": lambda folder: os.truncate(folder / "adapter_model.safetensors", 1000),
    "no weights": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "no folder": lambda folder: shutil.rmtree(folder),
    "a larger rank": edit_config(r=64),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_adapter_that_a_server_reads_wrongly_is_never_used(model_folder, tmp_path, server, damage):
    trainer = served(model_folder, tmp_path, server)
    perturb(trainer)
    with pytest.raises((MismatchError, RefusedError, AnswerError)) as error:
        broken(trainer, DAMAGE[damage])
    assert "actor" in str(error.value), error.value
    perturb(trainer)
    assert largest_difference(sampled(trainer)) < 1e-5
    trainer.parts.runner.generator.close()


def test_a_weight_that_is_not_finite_is_never_published(model_folder, tmp_path, server):
    trainer = served(model_folder, tmp_path, server)
    with torch.no_grad():
        next(iter(trainer.policies.parameters("actor").values())).view(-1)[3] = torch.nan
    with pytest.raises(FloatingPointError, match="adapter 'actor' has a weight that is not finite"):
        trainer.parts.runner.generator.library.publish()
    trainer.parts.runner.generator.close()


def test_a_wrong_adapter_is_caught_in_the_batch_that_it_sampled(model_folder, tmp_path, server):
    """Swap the names of two adapters after they were compared."""
    trainer = served(model_folder, tmp_path, server)
    for _ in range(100 if os.environ.get("MARFT_LONG") else 5):
        perturb(trainer)
        library = trainer.parts.runner.generator.library
        current = library.publish()
        library.adopt({"reasoner": current["actor"], "actor": current["reasoner"]})
        library.publish = lambda keep=(), versions=library.current: versions
        with pytest.raises(FidelityError, match=f"The log-probabilities of '(reasoner|actor)' on {server.url}"):
            sampled(trainer)
        del library.publish
        library.adopt(current)
    trainer.parts.runner.generator.close()


def test_an_aborted_turn_is_requested_again(model_folder, tmp_path, server):
    """vLLM answers an aborted request with status 200 and a part of the tokens."""
    generator = served(model_folder, tmp_path, server).parts.runner.generator
    settings = {"seed": 5, "temperature": 1.0, "ignore_eos": True, "top_p": 1.0}
    request = GenerateRequest(generator.library.publish()["actor"].name, [5, 6, 7], 400, settings)

    async def run(disturb):
        async with ServerPool(generator.servers, generator.library.make_ready) as pool:
            task = asyncio.ensure_future(pool.generate(request))
            if disturb:
                await asyncio.sleep(0.4)
                await asyncio.to_thread(server.post, "/abort_requests", {"request_ids": []})
            return (await task)[0].ids

    whole = run_coroutine(run, False)
    assert len(whole) == 400 and run_coroutine(run, True) == whole
    generator.close()


def test_a_turn_that_does_not_fit_is_refused_by_the_window_of_the_server(model_folder, tmp_path, server):
    agents = [AgentSpec("reasoner"), AgentSpec("actor")]
    trainer = served(model_folder, tmp_path, server, agents=agents, settings={"max_completion_length": 511})
    with pytest.raises(ValueError, match=r"512"):
        sampled(trainer)
    trainer.parts.runner.generator.close()


# ---- Servers that die, hang and come back ----


@contextmanager
def disturbed(at, action):
    """Call `action()` in a thread after request number `at`."""
    from marft_trl.extras.engines.server import VLLMServer

    generate, count = VLLMServer.generate, [0]

    async def counted(self, request):
        completions = await generate(self, request)
        count[0] += 1
        if count[0] == at:
            asyncio.get_running_loop().run_in_executor(None, action)
        return completions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VLLMServer, "generate", counted)
        yield count


def trained(model_folder, folder, servers, **settings):
    trainer = served(model_folder, folder, servers, settings={"max_steps": 2, **settings})
    trainer.train()
    return weights(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_server_that_is_lost_in_a_run_changes_nothing(model_folder, tmp_path, server, how):
    expected = trained(model_folder, tmp_path / "quiet", server)

    def lose():
        if how == "killed":
            server.kill()
            server.start()
        else:
            server.signal(signal.SIGSTOP)
            time.sleep(40)  # longer than the health check waits
            server.signal(signal.SIGCONT)

    with disturbed(20, lose) as count:
        disturbed_weights = trained(model_folder, tmp_path / how, server)
    server.wait()
    assert count[0] >= 20 and not moved(expected, disturbed_weights)


@pytest.mark.slow
def test_a_colocated_server_gives_the_same_weights(model_folder, tmp_path, server, monkeypatch):
    expected = trained(model_folder, tmp_path / "server", server)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512, "max_completion_length": 24}
    trainer = team_trainer(model_folder, tmp_path / "own", settings={**settings, "max_steps": 2})
    trainer.train()
    assert not moved(expected, weights(trainer))
    with pytest.raises(urllib.error.HTTPError, match="401"):  # requests without the key are refused
        urllib.request.urlopen(trainer.parts.runner.generator.servers.urls[0] + "/v1/models", timeout=10).close()


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "colocated"), [("0", False), ("1", False), ("0", True)])
def test_two_processes_equal_one(model_folder, tmp_path, server, staleness, colocated, monkeypatch):
    """On a shared server, and on servers that the processes start."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        url = "colocate" if colocated and processes == 2 else server.url
        arguments = [model_folder, str(tmp_path / str(processes)), url, staleness]
        launch(processes, "tests/scripts/train_served.py", *arguments)
    single, double = (load_file(tmp_path / name / "weights.safetensors") for name in "12")
    for name, value in single.items():
        torch.testing.assert_close(double[name], value, rtol=1e-5, atol=1e-6, msg=name)


# ---- Overlap ----


@pytest.mark.parametrize("staleness", [1, 2])
def test_training_while_servers_sample_does_not_depend_on_timing(model_folder, tmp_path, server, staleness):
    def train(name, delay):
        settings = {"max_steps": 5, "max_staleness": staleness}
        trainer = served(model_folder, tmp_path / name, server, settings=settings)
        step = trainer.training_step

        def slowly(*args, **kwargs):
            time.sleep(delay)
            return step(*args, **kwargs)

        trainer.training_step = slowly
        trainer.train()
        logs = [log for log in trainer.state.log_history if "sampling/staleness" in log]
        assert [log["sampling/staleness"] for log in logs] == [min(index, staleness) for index in range(5)]
        assert all(0.9 < log["sampling/importance_sampling_ratio/mean"] < 1.1 for log in logs)
        return weights(trainer)

    assert not moved(train("a", 0.0), train("b", 0.5))


def test_a_frozen_adapter_that_a_callback_changes_is_published(model_folder, tmp_path, server):
    """For example an opponent with past weights. The turns have the log-probabilities of the present weights."""
    agents = [*tiny_agents(), AgentSpec("rival", trainable=False)]
    workflow = Sequential(["reasoner", "actor", "rival"])
    trainer = served(model_folder, tmp_path, [server], settings={"max_steps": 2}, agents=agents, workflow=workflow)
    trainer.train()
    shake(trainer.model, 0.3, "lora_B.rival")
    for episode in trainer.team.run(["How many?"] * 6, seed=1):
        turn = episode.turns[2]
        row = SimpleNamespace(agent="rival", prompt_ids=torch.tensor(turn.prompt_ids))
        row.completion_ids = torch.tensor(turn.completion_ids)
        with torch.no_grad():
            expected = plain_logps(trainer, row)
        torch.testing.assert_close(torch.tensor(turn.logps), expected, rtol=0, atol=2e-3)


# ---- Teams of different models ----


def test_each_base_has_its_own_server(model_folder, deep_folder, tmp_path, server):
    """Turns have the log-probabilities of the agent's own model, and updates reach its server."""
    other = Server(deep_folder, PORT + 5, tmp_path / "log").start().wait()
    try:
        agents = tiny_agents()
        agents[1] = replace(agents[1], model=deep_folder)
        addresses = {"vllm_server_base_url": {model_folder: server.url, deep_folder: other.url}}
        trainer = served(
            model_folder, tmp_path / "run", [], settings={**addresses, "learning_rate": 1e-2}, agents=agents
        )
        for model in (trainer.model, *trainer.policies.further):
            shake(model, 0.05)
        rows = sampled(trainer)
        assert {row.agent for row in rows} == {"reasoner", "actor"} and largest_difference(rows) < 1e-3
        before = [weight.clone() for weight in trainer.policies.parameters("actor").values()]
        trainer.train()
        assert not all(map(torch.equal, before, trainer.policies.parameters("actor").values()))
        assert largest_difference(sampled(trainer)) < 1e-3
        trainer.save_model()
        bases = [base.name for base in trainer.manifest().bases]
        folders, urls = (
            dict(zip(bases, pair, strict=True)) for pair in ((model_folder, deep_folder), (server.url, other.url))
        )
        with Team.from_pretrained(trainer.args.output_dir, model=folders, engine=urls) as team:
            assert team(QUESTIONS[0], greedy=True) == trainer.team(QUESTIONS[0], greedy=True)
    finally:
        other.kill()
