# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""One run of a report: an arm with a seed, trained and evaluated."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, set_seed

from ...config.marft_config import MARFTConfig
from ...reporting.evaluation import FILE
from ...runs.run_folder import RunFolder
from ...system.files import write_atomically
from ...trainer import MARFTTrainer
from .arms import Arm, make_arms
from .experiment import Experiment, collect_settings, differences


# Files of a run: result, settings of the experiment, step at which the token budget ran out, training time, and
# metrics of all logged steps
RESULT, SETTINGS, BUDGET, CLOCK = "result.json", "settings.json", "budget.json", "seconds.json"
LOG = "log_history.json"
# Arms whose untrained state is a separate arm
EVALUATED_BEFORE = ("team", "solo")


class OtherExperimentError(ValueError):
    """Raised when a folder contains runs of a different experiment, which cannot be compared with this one."""


@dataclass(frozen=True)
class Cell:
    """An arm with a seed."""

    arm: str
    seed: int
    folder: Path

    @property
    def is_done(self) -> bool:
        return (self.folder / RESULT).exists()

    def result(self) -> dict[str, Any]:
        """`tokens` that were generated in training, `seconds`, `steps`, `curve` and `emptied` agents."""
        return json.loads((self.folder / RESULT).read_text(encoding="utf-8"))

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise an error if the folder has a run or a checkpoint with other or unknown settings."""
        file = self.folder / SETTINGS
        if not self.is_done and RunFolder(self.folder).newest() is None:
            return
        if not file.exists():
            raise OtherExperimentError(
                f"{self.folder} contains a run without {SETTINGS}. Delete the folder, or set another `output_dir`."
            )
        if changes := differences(json.loads(file.read_text(encoding="utf-8")), settings):
            shown = "; ".join(changes[:5]) + (f"; and {len(changes) - 5} more" if len(changes) > 5 else "")
            raise OtherExperimentError(
                f"The run in {self.folder} belongs to a different experiment: {shown}. Set another `output_dir`, or "
                "delete that folder."
            )

    def begin(self, settings: Mapping[str, Any]) -> bool:
        """Record the settings of a run. Returns `True` if the run resumes from a checkpoint."""
        self.check_settings(settings)
        resumes = RunFolder(self.folder).newest() is not None
        if not resumes:
            for name in (FILE, BUDGET, CLOCK):
                (self.folder / name).unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / SETTINGS, json.dumps(settings))
        return resumes


class TokenBudget(TrainerCallback):
    """Ends training after a number of generated tokens, once the last batch is used up, also in a resumed run."""

    def __init__(self, tokens: int, generated: Callable[[], int], updates: int, folder: Path):
        self._tokens, self._generated, self._file = tokens, generated, folder / BUDGET
        self._updates = updates  # per generation batch

    @property
    def last_step(self) -> int | None:
        """The step at which the budget ran out, if it has."""
        return json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else None

    def on_step_end(self, args, state, control, **kwargs):
        if self._generated() >= self._tokens and state.global_step % self._updates == 0:
            write_atomically(self._file, json.dumps(state.global_step))
            control.should_training_stop = True


class Clock(TrainerCallback):
    """Seconds of training, including those before the checkpoint of a resumed run."""

    def __init__(self, folder: Path):
        self._file, self._before, self._start = folder / CLOCK, 0.0, 0.0

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._start

    def on_train_begin(self, args, state, control, **kwargs):
        self._start = time.perf_counter()
        if state.global_step and self._file.exists():
            self._before = json.loads(self._file.read_text(encoding="utf-8")).get(str(state.global_step), 0.0)

    def on_save(self, args, state, control, **kwargs):
        write_atomically(self._file, json.dumps({str(state.global_step): self.seconds}))


def run_cell(experiment: Experiment, cell: Cell, emptied: Sequence[str] = ()) -> None:
    """Train and evaluate an arm. `emptied`: agents whose messages are empty in further evaluations."""
    (arm,) = (arm for arm in make_arms(experiment) if arm.name == cell.arm)
    settings = {"seed": cell.seed, "output_dir": str(cell.folder), "eval_k": experiment.args.eval_k or [1]}
    settings |= {"report_to": [], "push_to_hub": False, "load_best_model_at_end": False, "eval_strategy": "no"}
    changed = arm.changed(experiment).with_args(**settings)
    changed = changed.with_args(per_device_eval_batch_size=_eval_batch(changed.args))
    resumes = cell.begin(recorded(experiment, arm))
    callbacks: list[TrainerCallback] = [clock := Clock(cell.folder)]
    if arm.is_budgeted:
        team = Cell("team", cell.seed, cell.folder.parent / f"team-{cell.seed}").result()
        args = changed.args
        updates = max(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps, 1)
        budget = TokenBudget(team["tokens"], lambda: trainer.parts.reporter.generated_tokens, updates, cell.folder)
        callbacks.append(budget)
        changed = _without_end(changed, team["steps"], budget.last_step)
    trainer = changed.trainer()
    for callback in callbacks:
        trainer.add_callback(callback)
    if not resumes and cell.arm in EVALUATED_BEFORE:
        _evaluate(trainer, "start")
    set_seed(cell.seed)  # so that a previous evaluation does not change training
    trainer.train(resume_from_checkpoint=resumes or None)
    seconds = clock.seconds
    _evaluate(trainer, "end")
    if cell.arm == "team":
        trainer.save_model()
        for name in emptied:  # what it says, for teammates, for environments and as the answer
            with trainer.parts.evaluations.silence_agents(name):
                _evaluate(trainer, f"emptied:{name}")
    result = {
        "tokens": trainer.parts.reporter.generated_tokens,
        "seconds": round(seconds, 1),
        "steps": trainer.state.global_step,
        "curve": [[log["step"], log["reward"]] for log in trainer.state.log_history if "reward" in log],
        "rewards_differ": any(log.get("reward_std") for log in trainer.state.log_history),  # within a batch
        "emptied": list(emptied),
        **({"budget": team["tokens"]} if arm.is_budgeted else {}),
    }
    trainer.accelerator.end_training()
    write_atomically(cell.folder / LOG, json.dumps(trainer.state.log_history))
    write_atomically(cell.folder / RESULT, json.dumps(result))
    for folder in cell.folder.glob("checkpoint-*"):
        shutil.rmtree(folder)


def recorded(experiment: Experiment, arm: Arm) -> dict[str, Any]:
    """Return the settings to record with a run: the experiment's, or a variant's, whose function may change."""
    return collect_settings(arm.changed(experiment) if arm.is_variant else experiment)


def _eval_batch(args: MARFTConfig) -> int:
    """Return the evaluation batch size: as many episodes as training generates at once, which fit in memory."""
    several = args.num_generations_eval or args.num_generations
    most = max(args.per_device_eval_batch_size, args.per_device_train_batch_size * args.steps_per_generation)
    return max(most // several * several, args.per_device_eval_batch_size)


def _without_end(experiment: Experiment, steps: int, last: int | None) -> Experiment:
    """Return an experiment that trains until the budget is used up, with the warm-up of the team."""
    warmup = experiment.args.get_warmup_steps(steps)  # `steps`: of the team. `last`: where the budget ran out before
    schedule = "constant_with_warmup" if warmup else "constant"
    return experiment.with_args(max_steps=last or 100 * steps, lr_scheduler_type=schedule, warmup_steps=warmup)


def _evaluate(trainer: MARFTTrainer, name: str) -> None:
    """Evaluate with the same random numbers each time, so that equal policies get equal results."""
    set_seed(trainer.args.seed)
    with trainer.parts.evaluations.without_losses():  # a report does not use them
        trainer.evaluate(metric_key_prefix=name)
