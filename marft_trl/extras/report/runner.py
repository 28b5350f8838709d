# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Run the cells of a report, one for each arm and seed, and write the results."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...seams.libraries import get_logger
from ...system.child_processes import ChildProcesses
from .arms import Arm, check_arms, make_arms
from .cells import EVALUATED_BEFORE, Cell, recorded, run_cell
from .comparison import Comparison, compare, write_report
from .experiment import EVALUATION, Experiment, collect_settings, load_experiment


logger = get_logger(__name__)


def report(
    experiment: Experiment | str,
    output_dir: str = "report",
    seeds: Sequence[int] = (0, 1, 2),
    arms: Sequence[str] | None = None,
    workers: int = 1,
    margin: float = 0.02,
    settings: Mapping[str, Any] | None = None,
) -> Comparison:
    """
    Find out whether a team is worth it: train it, one agent with as many generated tokens, and teams with one thing
    changed, over seeds, and compare them on the same questions.

    Finished runs are not repeated, and an interrupted run resumes from its last checkpoint (`save_strategy`), so the
    same call resumes a report.

    Args:
        experiment ([`Experiment`] or `str`):
            Task, model, team and budget, or `"file.py:function"` of a function that returns them.
        output_dir (`str`, *optional*, defaults to `"report"`):
            Where runs, tables and pictures are written.
        seeds (`Sequence[int]`, *optional*, defaults to `(0, 1, 2)`):
            Seeds of the runs. With one seed, intervals do not contain the spread of training.
        arms (`Sequence[str]`, *optional*):
            Arms in addition to the trained team: `"untrained"`, `"solo"`, `"solo_untrained"`,
            `"anonymous"`, `"shared"` or `"own"`, `"frozen"`, `"without"` and `"emptied"`, each of all agents or,
            with a colon and a name, of one, and the names of the `variants` of the experiment. Defaults to all.
        workers (`int`, *optional*, defaults to `1`):
            Number of runs in parallel, each in its own process. More than one needs a named `experiment`.
        margin (`float`, *optional*, defaults to `0.02`):
            Smallest difference in accuracy that matters.
        settings (`dict`, *optional*):
            Arguments of the function that a named `experiment` is.

    Returns: the [`Comparison`]. `report.md`, `report.csv` and pictures are in `output_dir`.

    Raises:
        ValueError: an arm is unknown or cannot run, or `workers` is above 1 without a named experiment.
        RuntimeError: a run failed; the message contains its error. Other runs are finished and written first.
    """
    place = experiment if isinstance(experiment, str) else None
    made = load_experiment(experiment, settings) if isinstance(experiment, str) else experiment
    if workers > 1 and place is None:
        raise ValueError(f"`workers={workers}` needs a named `experiment`, such as 'file.py:function'.")
    folder, chosen = Path(output_dir), make_arms(made, arms)
    _check_arguments(seeds, margin, workers, chosen)
    check_arms(made, chosen)
    _check_schedule(made, chosen)
    if count := made.questions_in_both():
        logger.warning(
            f"{count} of the {len(made.eval_dataset)} evaluation questions are also training questions, so the "
            "report partly measures memorization. Remove them from `train_dataset`."
        )
    # Those with a budget come last, because the team's run with the same seed sets it
    ran = sorted((arm for arm in chosen if not arm.of and arm.skip_reason is None), key=lambda arm: arm.is_budgeted)
    cells = [Cell(arm.name, seed, folder / "runs" / f"{arm.folder}-{seed}") for arm in ran for seed in seeds]
    _check_runs_before(made, chosen, cells)
    waiting = [cell for cell in cells if not cell.is_done]
    _print_work(made, chosen, cells, waiting)
    if place is None or workers == 1:
        failed = _run_all(functools.partial(run_cell, made, emptied=_emptied(chosen)), waiting)
    else:
        failed = _side_by_side(place, settings, waiting, _emptied(chosen), workers)
    if "team" in failed:
        raise RuntimeError(failed["team"])
    kept = [replace(arm, skip_reason="its run failed") if arm.run in failed else arm for arm in chosen]
    comparison = compare(made, kept, folder / "runs", seeds, margin)
    write_report(comparison, folder)
    if failed:
        raise RuntimeError(
            f"{folder}/report.md was written without {', '.join(failed)}, whose runs failed. Repeat the call to run "
            "them again.\n" + "\n".join(failed.values())
        )
    return comparison


def _check_arguments(seeds: Sequence[int], margin: float, workers: int, arms: Sequence[Arm]) -> None:
    if isinstance(seeds, int) or not seeds or len({*seeds}) < len(seeds):
        raise ValueError(f"`seeds` must be distinct integers, such as (0, 1, 2), got {seeds!r}.")
    if not 0 <= margin < 1:
        raise ValueError(f"`margin` must be at least 0 and below 1, got {margin!r}.")
    if workers < 1:
        raise ValueError(f"`workers` must be at least 1, got {workers!r}.")
    names = {arm.name for arm in arms}
    for arm in arms:
        if arm.of and arm.of not in names:
            raise ValueError(f"The arm {arm.name!r} is evaluated in the run of {arm.of!r}. Add {arm.of!r} to `arms`.")


def _print_work(experiment: Experiment, arms: Sequence[Arm], cells: Sequence[Cell], waiting: Sequence[Cell]) -> None:
    """Print the number of runs, and an estimate of their time if some are finished."""
    evaluations = sum(1 + (cell.arm in EVALUATED_BEFORE) for cell in waiting)
    evaluations += len(_emptied(arms)) * sum(cell.arm == "team" for cell in waiting)
    args = experiment.args
    questions = len(experiment.eval_dataset) * (args.num_generations_eval or args.num_generations)
    done = [cell.result()["seconds"] for cell in cells if cell.is_done]
    minutes = f", about {len(waiting) * sum(done) / len(done) / 60:.0f} minutes of training" if done else ""
    print(
        f"Report: {len(waiting)} of {len(cells)} training runs to do and {evaluations} evaluations of {questions} "
        f"episodes{minutes}. Repeat the call to resume an interrupted report.",
        flush=True,
    )


def _check_schedule(experiment: Experiment, arms: Sequence[Arm]) -> None:
    """Check for a constant learning rate: the number of steps of a single agent is not known in advance."""
    for arm in (arm for arm in arms if arm.is_budgeted and arm.skip_reason is None):
        kind, place, trained = _schedule(experiment), "experiment", "single agent"
        other = "leave the arm `solo` out of `arms`"
        if arm.is_variant and kind.startswith("constant"):
            kind, place, trained = _schedule(arm.changed(experiment)), f"variant {arm.name!r}", "variant"
            other = "a `max_steps` that differs from the team's"
        if not kind.startswith("constant"):
            raise ValueError(
                f"`lr_scheduler_type` of the {place} must not decay, got {kind!r}: the {trained} trains until it has "
                "generated as many tokens as the team, in an unknown number of steps. Set "
                f"`lr_scheduler_type='constant_with_warmup'`, or {other}."
            )


def _schedule(experiment: Experiment) -> str:
    return str(getattr(experiment.args.lr_scheduler_type, "value", experiment.args.lr_scheduler_type))


def _check_runs_before(experiment: Experiment, arms: Sequence[Arm], cells: Sequence[Cell]) -> None:
    """Check that existing runs belong to the same experiment, and have all requested evaluations."""
    settings = {arm.name: recorded(experiment, arm) for arm in arms if not arm.of and arm.skip_reason is None}
    for arm in arms:
        if arm.is_variant:
            _check_variant(arm.name, collect_settings(experiment), settings[arm.name])
    for cell in cells:
        cell.check_settings(settings[cell.arm])
        _check_budget(cell)
        emptied = _emptied(arms) if cell.arm == "team" and cell.is_done else []
        if missing := [name for name in emptied if name not in cell.result()["emptied"]]:
            raise ValueError(
                f"The run in {cell.folder} was not evaluated with empty messages of {', '.join(missing)}. Set another "
                "`output_dir`, leave the arm `emptied` out of `arms`, or delete that folder."
            )


def _check_variant(name: str, team: Mapping[str, Any], variant: Mapping[str, Any]) -> None:
    """Check that a variant changes a setting, and has the evaluation settings of the team."""
    if team == variant:
        raise ValueError(f"The variant {name!r} changes no recorded setting, so it would only repeat the team's run.")
    if other := [key for key in EVALUATION if team.get(key) != variant.get(key)]:
        raise ValueError(
            f"The variant {name!r} and the team have different evaluation settings ({', '.join(other)}), so they "
            "cannot be compared. Use the same settings for both."
        )


def _check_budget(cell: Cell) -> None:
    """Check that the budget of a run is that of the current team run, which may have been repeated."""
    team = Cell("team", cell.seed, cell.folder.parent / f"team-{cell.seed}")
    if not cell.is_done or not team.is_done or (budget := cell.result().get("budget")) is None:
        return
    if budget != team.result()["tokens"]:
        raise ValueError(
            f"The run in {cell.folder} had a budget of {budget:,} tokens, but the team with the same seed generated "
            f"{team.result()['tokens']:,}. Delete that folder to repeat the run."
        )


def _emptied(arms: Sequence[Arm]) -> list[str]:
    return [arm.name.partition(":")[2] for arm in arms if arm.name.startswith("emptied:") and arm.skip_reason is None]


def _run_all(run: Callable[[Cell], None], cells: Sequence[Cell]) -> dict[str, str]:
    """Run cells one after the other. Returns the errors of those that failed, by arm."""
    failed: dict[str, str] = {}
    start = time.monotonic()
    for number, cell in enumerate(cells):
        if number:
            left = (time.monotonic() - start) / number * (len(cells) - number) / 60
            place = f"run {number + 1} of {len(cells)}, {cell.arm} with seed {cell.seed}"
            print(f"Report: {place}; about {left:.0f} min left", flush=True)
        try:
            run(cell)
        except Exception as error:
            logger.warning(f"The run of {cell.arm!r} with seed {cell.seed} failed.", exc_info=True)
            message = f"The run of {cell.arm!r} with seed {cell.seed} failed: {type(error).__name__}: {error}"
            failed.setdefault(cell.arm, message)
            if cell.arm == "team":  # all others are compared with it
                break
    return failed


def _side_by_side(
    place: str, settings: Mapping[str, Any] | None, cells: Sequence[Cell], emptied: Sequence[str], workers: int
) -> dict[str, str]:
    """Run cells in separate processes. Returns the errors of those that failed, by arm."""
    environment = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // workers, 1)), **os.environ}
    teams: dict[int, Future] = {}
    children = ChildProcesses()

    def run(cell: Cell) -> None:
        values = {"arm": cell.arm, "seed": cell.seed, "folder": str(cell.folder), "emptied": list(emptied)}
        values |= {"experiment": place, "settings": dict(settings or {})}
        cell.folder.mkdir(parents=True, exist_ok=True)
        log_file, number = cell.folder / "log.txt", cells.index(cell) + 1
        print(f"Report: run {number} of {len(cells)}, {cell.arm} with seed {cell.seed}: {log_file}", flush=True)
        with open(log_file, "a", encoding="utf-8") as log:
            command = [sys.executable, "-W", "ignore", "-m", "marft_trl.extras.report", "--cell", json.dumps(values)]
            if children.run(command, environment, log):
                raise RuntimeError(log_file.read_text(encoding="utf-8")[-2000:])

    def wait_and_run(cell: Cell) -> dict[str, str]:
        # Teams come first in the pool, so runs that wait for a team never block it
        if cell.arm != "team" and cell.seed in teams and teams[cell.seed].result():
            return {}
        return _run_all(run, [cell])

    with ThreadPoolExecutor(workers) as pool, children:
        running = []
        try:
            for cell in cells:
                running.append(pool.submit(wait_and_run, cell))
                if cell.arm == "team":
                    teams[cell.seed] = running[-1]
            return {arm: message for item in running for arm, message in item.result().items()}
        except BaseException:  # such as Ctrl+C
            pool.shutdown(wait=False, cancel_futures=True)
            raise
