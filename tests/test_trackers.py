"""Trackers, offline: metrics of agents arrive in trackio, TensorBoard and Weights & Biases; episodes are traces."""

import json
import math
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from marft_trl import Sequential
from marft_trl.reporting.transcripts import Transcript, as_trace
from marft_trl.workflows import rehearse

import pytest

from .test_transcripts import episode_with_everything


ROOT = Path(__file__).parents[1]
RUN = """
import sys
from tests.helpers import team_trainer
from marft_trl.tiny import exact_answer
folder, model, tracker = sys.argv[1:]
settings = {"max_steps": 2, "report_to": [tracker], "run_name": "a run", "logging_steps": 1, "log_completions": True,
            "num_completions_to_print": 3, "project": "teams"}
trainer = team_trainer(model, folder, settings=settings, reward_funcs=exact_answer)
trainer.train()
"""


def run(model, folder, tracker, **variables):
    pytest.importorskip(tracker)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(folder / "out"), model, tracker]
    process = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=250)
    assert process.returncode == 0, process.stderr[-3000:]


def test_an_episode_is_a_trace_with_a_span_for_each_turn():
    transcript = Transcript.of(
        episode_with_everything(), {"exact": 1.0}, "step 3", [0.5, None, [1.0, -2.0]], reward=1.5, reference="north"
    )
    trace = as_trace(replace(transcript, updates=2), {"planner": "both", "solver": "both"})
    speakers = [(message["role"], message.get("name")) for message in trace["messages"]]
    assert speakers[:3] == [("user", None), ("assistant", "planner"), ("user", "environment")]
    assert speakers[3:] == [("assistant", "solver"), ("user", "tool"), ("assistant", "solver")]
    rewards = {"reward": 1.5, "reward/exact": 1.0}
    assert trace["metadata"] == {"title": "step 3", "updates": 2, "right answer": "north", **rewards}
    kinds = [(span["kind"], span.get("model"), span["metadata"]["advantage"]) for span in trace["spans"]]
    generated = [("generation", "both@2", advantage) for advantage in (0.5, None, -0.5)]
    assert kinds[::2] == generated and kinds[1::2] == [("tool", None, None)] * 2
    assert trace["spans"][-1]["output"] == "through the door"
    assert json.loads(json.dumps(trace)) == trace
    silent = Transcript.of(rehearse(Sequential(), ["solver"], lambda *_: "", "q"), advantages=[[]])
    assert as_trace(silent, {})["spans"][0]["metadata"]["advantage"] is None


@pytest.mark.slow
def test_trackio_has_the_metrics_and_the_episodes(model_folder, tmp_path):
    run(model_folder, tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    (file,) = (tmp_path / "trackio").glob("*teams*.db")
    with sqlite3.connect(file) as database:
        logged = [json.loads(metrics) for (metrics,) in database.execute("SELECT metrics FROM metrics ORDER BY step")]
        traces = database.execute("SELECT messages, metadata, spans FROM traces").fetchall()
    steps = [step for step in logged if "train/reward" in step]
    assert len(steps) == 2 and all("train/agents/reasoner/grad_norm" in step for step in steps)
    assert len(traces) == 6  # three of each step
    messages, metadata, spans = map(json.loads, traces[0])
    assert [message.get("name") for message in messages] == [None, "reasoner", "actor"]
    assert metadata["reward"] in (0.0, 1.0) and metadata["right answer"]
    assert [span["model"] for span in spans] == ["reasoner@0", "actor@0"] and spans[1]["input"]


@pytest.mark.slow
def test_tensorboard_has_the_metrics(model_folder, tmp_path):
    run(model_folder, tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (tmp_path / "out").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    for name in ("train/reward", "train/agents/reasoner/grad_norm", "train/agents/actor/completions/mean_length"):
        assert [scalar.step for scalar in events.Scalars(name)] == [1, 2]
        assert all(math.isfinite(scalar.value) for scalar in events.Scalars(name))


@pytest.mark.slow
def test_wandb_has_the_metrics_offline(model_folder, tmp_path):
    run(model_folder, tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    (file,) = tmp_path.rglob("run-*.wandb")
    content = file.read_bytes()
    for name in (b"train/reward", b"agents/reasoner/grad_norm", b"a run"):
        assert name in content, name
