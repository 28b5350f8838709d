"""Resumes a run from each of its steps and compares everything that its checkpoints hold."""

import functools
import itertools
import json
import shutil
from pathlib import Path

from marft_trl import AgentSpec
from marft_trl.runs.run_folder import RUN_NAME
from marft_trl.tiny import tiny_dataset
from marft_trl.workflows import Graph, Orchestrated, Sequential

import torch
from safetensors.torch import load_file

from .helpers import StopAt, lora, team_trainer


STEPS = 12
LENGTHS = {"planner": 4, "solver": 5, "judge": 3}
AGENTS = [AgentSpec(name, max_completion_length=length) for name, length in LENGTHS.items()]
WORKFLOWS = {
    "sequential": lambda: Sequential(["planner", "solver", "judge"]),
    "graph": lambda: Graph({"planner": [], "solver": [], "judge": ["planner", "solver"]}),
    "orchestrated": lambda: Orchestrated("planner", ["solver", "judge"], max_turns=3, fallback="solver"),
}
METHODS = {
    "grpo": {"num_generations": 2},
    "ppo": {"advantage": "gae", "critic": "shared", "num_generations": 1, "critic_learning_rate": 1e-2},
}
# Method, workflow, `num_iterations`, `steps_per_generation`, passes over the dataset: 48 settings
SETTINGS = list(itertools.product(METHODS, WORKFLOWS, (1, 2), (1, 4), (1, 3)))
# Keys of logs that measure time
_TIMES = ("time", "runtime", "per_second", "duration")


def trainer_of(setting, model, folder, callbacks=None, **changes):
    """A trainer for one of the [`SETTINGS`]. Every third step is logged, so resumes cut windows of logs."""
    method, workflow, iterations, per_generation, passes = setting
    settings = {"max_steps": STEPS, "num_train_epochs": 100, "per_device_train_batch_size": 4, "beta": 0.02}
    settings |= {"num_iterations": iterations, "steps_per_generation": per_generation, "logging_steps": 3}
    settings |= {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "cosine", "learning_rate": 1e-2}
    settings |= METHODS[method]
    prompts = 4 // settings["num_generations"]
    # `num_iterations` steps for each `prompts` prompts
    rows = max(STEPS // passes * prompts // iterations, prompts * per_generation)
    defaults = {"agents": AGENTS, "workflow": WORKFLOWS[workflow](), "train_dataset": tiny_dataset(rows)}
    defaults["peft_config"] = lora(2, lora_dropout=0.1)  # draws random numbers in every pass
    defaults["settings"] = {**settings, **changes.pop("settings", {})}
    return team_trainer(model, folder, callbacks=callbacks, **{**defaults, **changes})


def inexact_points(make, folder: Path, points, ahead: int | None = None) -> list[str]:
    """
    Resumes a run, of `make(folder, callbacks, settings=)`, from steps of one that was not interrupted, and compares
    checkpoints so many steps `ahead`, or the last ones. Returns a line for each point at which the runs differ.
    """
    whole = folder / "whole"
    make(whole, None).train()
    wrong = []
    for point in points:
        last = STEPS if ahead is None else min(point + ahead, STEPS)
        cut = folder / "cut"
        shutil.copytree(whole / f"checkpoint-{point}", cut / f"checkpoint-{point}")
        shutil.copy(whole / RUN_NAME, cut / RUN_NAME)
        make(cut, [StopAt(last)], settings={"save_steps": last}).train(resume_from_checkpoint=True)
        differing = differences(whole / f"checkpoint-{last}", cut / f"checkpoint-{last}")
        wrong += [f"resumed from {point}, at {last}: {', '.join(differing)}"] if differing else []
        shutil.rmtree(cut)
    return wrong


def differences(first: Path, second: Path) -> list[str]:
    left, right = contents(first), contents(second)
    return sorted({name for name in left.keys() | right.keys() if not _same(left.get(name), right.get(name))})


def contents(folder: Path) -> dict:
    """Weights, optimizer, schedule, random states, rows, states of owners, logs: by file and name."""
    saved = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            saved |= {f"{name}:{key}": tensor for key, tensor in load_file(path).items()}
        elif path.suffix in (".pt", ".pth"):
            saved |= _flat(name, torch.load(path, weights_only=False))
        elif path.name == "trainer_state.json":
            state = json.loads(path.read_text())
            saved |= _flat(name, {key: state[key] for key in ("global_step", "epoch", "num_input_tokens_seen")})
            saved |= _flat(f"{name}:log", [_without_times(entry) for entry in state["log_history"]])
        elif path.name.startswith("marft_rollouts"):
            saved |= _flat(name, _without_times(json.loads(path.read_text())))
    return saved


def _without_times(value):
    if isinstance(value, dict):
        return {key: _without_times(child) for key, child in value.items() if not any(time in key for time in _TIMES)}
    return [_without_times(child) for child in value] if isinstance(value, list) else value


def _flat(name, value) -> dict:
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        return {name: value}
    return functools.reduce(lambda flat, part: flat | _flat(f"{name}/{part[0]}", part[1]), parts, {name: len(value)})


def _same(first, second) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        is_alike = first.dtype == second.dtype and first.shape == second.shape
        return is_alike and first.numpy().tobytes() == second.numpy().tobytes()
    if hasattr(first, "tobytes") and hasattr(second, "tobytes"):  # NumPy
        return first.tobytes() == second.tobytes()
    return type(first) is type(second) and (first == second or (first != first and second != second))
