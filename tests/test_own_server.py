"""Servers that training processes start for themselves: they end with them, and sleep while training runs."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from marft_trl.extras.engines.own_server import OwnServer
from marft_trl.extras.engines.server import EngineDownError

import pytest

from .helpers import config, moved, team_trainer, weights


ROOT = Path(__file__).parents[1]


@pytest.fixture
def python(tmp_path, monkeypatch):
    """An interpreter that seems to have vLLM."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexport PYTHONPATH={ROOT}\nexec {sys.executable} -m tests.scripts.fake_vllm "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "calls.json"))
    return str(path)


def known(tmp_path):
    return json.loads((tmp_path / "calls.json").read_text())


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid, seconds=20):
    end = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_alive(pid)


def own(python, tmp_path):
    return OwnServer(lambda port: ["--port", str(port)], python, tmp_path / "log", {"MARFT_GIVEN": "1"})


def test_a_server_ends_with_all_its_processes(python, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    server = own(python, tmp_path)
    server.wait(60)
    time.sleep(0.2)
    found = known(tmp_path)
    assert found["environment"]["VLLM_API_KEY"] == server.key and found["environment"]["MARFT_GIVEN"] == "1"
    assert found["environment"]["PYTHONPATH"] == str(ROOT)  # which the interpreter sets itself
    assert not {"RANK", "TORCHELASTIC_RUN_ID"} & found["environment"].keys()
    assert is_alive(found["child"])
    server.close()
    assert gone(found["child"])


def test_a_server_ends_when_its_owner_is_killed(python, tmp_path):
    owner = os.fork()
    if not owner:
        try:
            server = own(python, tmp_path)  # noqa: F841
            time.sleep(60)
        finally:
            os._exit(1)
    end = time.monotonic() + 60
    while not (tmp_path / "calls.json").exists() and time.monotonic() < end:
        time.sleep(0.05)
    child = known(tmp_path)["child"]
    assert is_alive(child)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert gone(child)


def test_a_server_that_does_not_start_says_why(python, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_FAILS", "1")
    message = r"(?s)`vllm_mode='colocate'`\) exited with status 1\. .*log.*no such model"
    with pytest.raises(EngineDownError, match=message):
        own(python, tmp_path).wait(60)


def colocated(model, folder, python, *, settings=None, **arguments):
    given = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_python": python,
        "fidelity_tolerance": 1e9,  # its tokens are no model's
        "vllm_importance_sampling_mode": "token_truncate",
    }
    return team_trainer(model, folder, settings={**given, **(settings or {})}, **arguments)


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_server_sleeps_while_training_runs(model_folder, tmp_path, python, sleeps):
    settings = {"vllm_enable_sleep_mode": sleeps, "max_steps": 2, "use_cpu": True, "vllm_max_model_length": 300}
    trainer = colocated(model_folder, tmp_path, python, settings=settings)
    before = weights(trainer)
    trainer.train()
    assert moved(before, weights(trainer))
    time.sleep(0.2)
    found = known(tmp_path)
    flags, calls = found["arguments"], found["calls"]
    for flag, value in {"--max-model-len": "300", "--dtype": "float32", "--host": "127.0.0.1"}.items():
        assert flags[len(flags) - flags[::-1].index(flag)] == value
    assert ("--enable-sleep-mode" in flags) == sleeps == (found["environment"].get("VLLM_SERVER_DEV_MODE") == "1")
    asleep, loaded, turns = False, 0, 0
    for call in calls:
        if call in ("/sleep?level=1", "/wake_up"):
            assert asleep == (call == "/wake_up")
            asleep = not asleep
            assert not (asleep and loaded)  # what is loaded anew is compared anew
        else:
            assert not asleep
            loaded += {"load": 1, "unload": -1}.get(call, 0)
            turns += call == "turn"
    assert turns == 32 and asleep == sleeps and loaded == 0
    assert calls.count("/wake_up") >= 2 * sleeps
    del trainer


def test_what_does_not_go_with_a_server_of_its_own(tmp_path, model_folder, monkeypatch):
    monkeypatch.delenv("MARFT_VLLM_PYTHON", raising=False)
    mode = {"use_vllm": True, "vllm_mode": "colocate"}
    for settings, message in {
        ("vllm_server_base_url", "http://a"): "vllm_server_base_url",
        ("vllm_tensor_parallel_size", 2): "vllm_tensor_parallel_size=2",
    }.items():
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **mode, **dict([settings]))
    with pytest.raises(ValueError, match="cannot sleep"):
        config(tmp_path, **mode, vllm_enable_sleep_mode=True, max_staleness=1)
    with pytest.raises(ImportError, match="set `vllm_python` to the interpreter"):
        team_trainer(model_folder, tmp_path, settings=mode)
    with pytest.raises(ValueError, match="got '/nowhere/python', which is not an executable"):
        team_trainer(model_folder, tmp_path, settings={**mode, "vllm_python": "/nowhere/python"})
    assert not os.listdir(tmp_path)
