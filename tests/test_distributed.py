"""Two gloo processes with half the batch each equal one process with all of it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .scripts import train_canned


ROOT = Path(__file__).parent.parent
KINDS = ["orchestrated", "chain", "counterfactual", "tools", "opponents", "application", "dynamic", "four_bits"]
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def launch(processes: int, script: str, *arguments: str, timeout: int = 280, environment=None):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={port}"]
    defaults = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *(launcher if processes > 1 else []), script, *arguments]
    variables = {**os.environ, **defaults, **(environment or {})}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-20000:]  # of all processes
    return done


@pytest.mark.parametrize(
    ("kind", "loss_type"),
    [
        ("bases", "dapo"),  # as `ppo`, the second agent with its own model
        *(pytest.param(kind, "dapo", marks=pytest.mark.slow) for kind in ("ppo", "images")),
        *(pytest.param("uneven", name, marks=pytest.mark.slow) for name in ("dapo", "grpo", "bnpo")),
        *(pytest.param(kind, "grpo", marks=pytest.mark.slow) for kind in ("full", "sequential", "candidates")),
        *(pytest.param(kind, "dapo", marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_two_processes_equal_one(model_folder, tmp_path, kind, loss_type):
    train_canned.main(model_folder, str(tmp_path / "one"), kind, loss_type)
    launch(2, "tests/scripts/train_canned.py", model_folder, str(tmp_path / "two"), kind, loss_type)
    single, double = load_file(tmp_path / "one"), load_file(tmp_path / "two")
    start_differs = [name for name in single if "lora_B" in name and single[name].any()]
    assert single["evaluated"].tolist()[0] == double["evaluated"].tolist()[0] == 9  # each question once
    if kind != "full":
        assert any(".reasoner." in name for name in start_differs)
        assert any(".actor." in name for name in start_differs)
    if kind == "uneven":  # never spoke, so neither weight decay nor anything else has moved it
        idle = [name for name in single if ".idle." in name and not name.startswith("start/")]
        assert idle and all(torch.equal(double[name], double["start/" + name]) for name in idle)
    if kind == "dynamic":
        assert single["drawn"].max() > 1
    if kind == "tools":
        assert single["calls"].min() > 0 and single["calls"].max() < 8
    assert single.keys() == double.keys()
    for name, value in single.items():
        torch.testing.assert_close(double[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_sharded_launchers_are_refused_before_anything_is_loaded(tmp_path):
    """A real `accelerate launch --use_fsdp`, where the distributed type is not yet known to be FSDP."""
    script = tmp_path / "script.py"
    script.write_text(
        "from datasets import Dataset\n"
        "from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer\n"
        "MARFTTrainer('no/such-model', agents=[AgentSpec('solo')], reward_funcs=len,\n"
        "             args=MARFTConfig('out', use_cpu=True),\n"
        "             train_dataset=Dataset.from_dict({'prompt': ['x'] * 99}))\n"
    )
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    flags = "--use_fsdp --num_processes 1 --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags.split(), str(script)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode != 0
    assert "accelerate has no device to shard a model on" in done.stderr, done.stderr[-2000:]
