"""Servers that a training process starts: they end with the process and sleep while it trains."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from marft_trl.extras.engines.own_server import OwnServer
from marft_trl.extras.engines.server import EngineDownError, RefusedError, VLLMServer
from marft_trl.system.event_loop import run_coroutine

import pytest

from .helpers import config, eventually, moved_by_training, team_trainer


ROOT = Path(__file__).parents[1]


@pytest.fixture
def python(tmp_path, monkeypatch):
    """An interpreter with a fake vLLM."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexport PYTHONPATH={ROOT}\nexec {sys.executable} -m tests.scripts.fake_vllm "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "calls.json"))
    return str(path)


def read_record(tmp_path):
    return json.loads((tmp_path / "calls.json").read_text())


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid):
    return eventually(lambda: not is_alive(pid), seconds=20)


def make_server(python, tmp_path):
    return OwnServer(lambda port: ["--port", str(port)], python, tmp_path / "log", {"MARFT_GIVEN": "1"})


def test_closing_a_server_ends_the_processes_that_it_started(python, tmp_path, monkeypatch):
    for name, value in {"RANK": "3", "TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": "/nowhere"}.items():
        monkeypatch.setenv(name, value)
    server = make_server(python, tmp_path)
    server.wait(60)
    time.sleep(0.2)
    record = read_record(tmp_path)
    assert record["environment"]["VLLM_API_KEY"] == server.key and record["environment"]["MARFT_GIVEN"] == "1"
    assert record["environment"]["PYTHONPATH"] == str(ROOT)  # which the interpreter sets itself
    assert not {"RANK", "TORCHELASTIC_RUN_ID"} & record["environment"].keys()
    assert is_alive(record["child"])
    server.close()
    assert gone(record["child"])


def test_a_server_ends_when_the_owner_is_killed(python, tmp_path):
    owner = os.fork()
    if not owner:
        try:
            server = make_server(python, tmp_path)  # noqa: F841
            time.sleep(60)
        finally:
            os._exit(1)
    assert eventually((tmp_path / "calls.json").exists)
    child = read_record(tmp_path)["child"]
    assert is_alive(child)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert gone(child)


def test_a_server_that_does_not_start_says_why(python, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_FAILS", "1")
    message = r"(?s)`vllm_mode='colocate'`\) exited with status 1\. .*log.*no such model"
    with pytest.raises(EngineDownError, match=message):
        make_server(python, tmp_path).wait(60)


OWN = {"use_vllm": True, "vllm_mode": "colocate"}
# The tokens of the fake server are random
FAKED = {**OWN, "fidelity_tolerance": 1e9, "vllm_importance_sampling_mode": "token_truncate", "use_cpu": True}


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_server_sleeps_while_training_runs(model_folder, tmp_path, python, sleeps):
    settings = {**FAKED, "vllm_python": python, "vllm_enable_sleep_mode": sleeps, "vllm_max_model_length": 300}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    assert moved_by_training(trainer)
    time.sleep(0.2)
    record = read_record(tmp_path)
    flags, calls = record["arguments"], record["calls"]
    for flag, value in {"--max-model-len": "300", "--dtype": "float32", "--host": "127.0.0.1"}.items():
        assert flags[len(flags) - flags[::-1].index(flag)] == value
    assert ("--enable-sleep-mode" in flags) == sleeps == (record["environment"].get("VLLM_SERVER_DEV_MODE") == "1")
    asleep, loaded, turns = False, 0, 0
    for call in calls:
        if call in ("/sleep?level=1", "/wake_up"):
            assert asleep == (call == "/wake_up")
            asleep = not asleep
            assert not (asleep and loaded)  # adapters are reloaded and compared again after a sleep
        else:
            assert not asleep
            loaded += {"load": 1, "unload": -1}.get(call, 0)
            turns += call == "turn"
    assert turns == 32 and asleep == sleeps and loaded == 0
    assert calls.count("/wake_up") >= 2 * sleeps
    del trainer


def test_settings_that_contradict_a_colocated_server_are_refused(tmp_path, model_folder, monkeypatch):
    monkeypatch.delenv("MARFT_VLLM_PYTHON", raising=False)
    for settings, message in (
        ({"vllm_server_base_url": "http://a"}, "vllm_server_base_url"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2"),
        ({"vllm_enable_sleep_mode": True, "max_staleness": 1}, "cannot sleep"),
    ):
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **OWN, **settings)
    with pytest.raises(ImportError, match="set `vllm_python` to the interpreter"):
        team_trainer(model_folder, tmp_path, settings=OWN)
    with pytest.raises(ValueError, match="got '/nowhere/python', which is not an executable"):
        team_trainer(model_folder, tmp_path, settings={**OWN, "vllm_python": "/nowhere/python"})
    assert not os.listdir(tmp_path)


def test_a_port_that_another_program_answers_is_no_healthy_server(monkeypatch):
    async def refused(server, timeout):
        raise RefusedError("no such path", 404)

    monkeypatch.setattr(VLLMServer, "check_health", refused)
    server = object.__new__(OwnServer)
    server.url, server.key = "http://127.0.0.1:9", "key"
    assert run_coroutine(server._is_well) is False
