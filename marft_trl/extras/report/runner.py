# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Runs the cells of a report, one for each arm and seed, and writes what came of them."""

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
from .comparison import Comparison, compare, write_pages
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

    A run that is done is not repeated, and one that was killed goes on from its last checkpoint (`save_strategy`), so
    the same call continues a report.

    Args:
        experiment ([`Experiment`] or `str`):
            Task, model, team and budget, or `"file.py:function"` of a function that returns them.
        output_dir (`str`, *optional*, defaults to `"report"`):
            Where runs, tables and pictures are written.
        seeds (`Sequence[int]`, *optional*, defaults to `(0, 1, 2)`):
            Seeds of the runs. With one seed, intervals do not contain the spread of training.
        arms (`Sequence[str]`, *optional*):
            Those that are wanted, besides the trained team: `"untrained"`, `"solo"`, `"solo_untrained"`,
            `"anonymous"`, `"shared"` or `"own"`, `"frozen"`, `"without"` and `"emptied"`, each of all agents or,
            with a colon and a name, of one, and the names of the `variants` of the experiment. Defaults to all.
        workers (`int`, *optional*, defaults to `1`):
            Number of runs side by side, as processes of their own. More than one needs a named `experiment`.
        margin (`float`, *optional*, defaults to `0.02`):
            Differences of accuracy below it are too small to matter.
        settings (`dict`, *optional*):
            Arguments of the function that a named `experiment` is.

    Returns: the [`Comparison`]. `report.md`, `report.csv` and pictures are in `output_dir`.

    Raises:
        ValueError: there is no such arm, an arm cannot run, or several workers have no named experiment.
        RuntimeError: a run has failed; the message has its error. Other runs are finished and written first.
    """
    place = experiment if isinstance(experiment, str) else None
    made = load_experiment(experiment, settings) if isinstance(experiment, str) else experiment
    if workers > 1 and place is None:
        raise ValueError("`workers` above 1 starts processes, which need `experiment='file.py:function'`.")
    folder, chosen = Path(output_dir), make_arms(made, arms)
    _check_arguments(seeds, margin, workers)
    _check_runs(chosen)
    check_arms(made, chosen)
    _check_schedule(made, chosen)
    _tell_of_overlap(made)
    cells = _cells(chosen, seeds, folder)
    _check_runs_before(made, chosen, cells)
    waiting = [cell for cell in cells if not cell.is_done]
    _tell_of_work(made, chosen, cells, waiting)
    if place is None or workers == 1:
        failed = _run_all(functools.partial(run_cell, made, emptied=_emptied(chosen)), waiting)
    else:
        failed = _side_by_side(place, settings, waiting, _emptied(chosen), workers)
    if "team" in failed:
        raise RuntimeError(failed["team"])
    kept = [replace(arm, skip_reason="its run has failed") if arm.run in failed else arm for arm in chosen]
    comparison = compare(made, kept, folder / "runs", seeds, margin)
    write_pages(comparison, folder)
    if failed:
        raise RuntimeError(
            f"{folder}/report.md was written without {', '.join(failed)}, whose runs have failed. The same call "
            "repeats them.\n" + "\n".join(failed.values())
        )
    return comparison


def _cells(arms: Sequence[Arm], seeds: Sequence[int], folder: Path) -> list[Cell]:
    """The runs. Those with a budget come last: it is known when the team has run with the same seed."""
    ran = sorted((arm for arm in arms if not arm.of and arm.skip_reason is None), key=lambda arm: arm.is_budgeted)
    return [Cell(arm.name, seed, folder / "runs" / f"{arm.folder}-{seed}") for arm in ran for seed in seeds]


def _check_arguments(seeds: Sequence[int], margin: float, workers: int) -> None:
    if isinstance(seeds, int) or not seeds or len({*seeds}) < len(seeds):
        raise ValueError(f"`seeds` must be different integers, such as (0, 1, 2), got {seeds!r}.")
    if not 0 <= margin < 1:
        raise ValueError(f"`margin` is a difference of two shares, at least 0 and below 1, got {margin!r}.")
    if workers < 1:
        raise ValueError(f"`workers` must be at least 1, got {workers!r}.")


def _tell_of_overlap(experiment: Experiment) -> None:
    count = experiment.questions_in_both()
    if count:
        logger.warning(
            f"{count} of the {len(experiment.eval_dataset)} evaluation questions are also training questions, so the "
            "report measures in part what was learned by heart. Leave them out of `train_dataset`."
        )


def _tell_of_work(experiment: Experiment, arms: Sequence[Arm], cells: Sequence[Cell], waiting: Sequence[Cell]) -> None:
    """Say how much there is to do, and how long it takes where runs that are done tell."""
    evaluations = sum(1 + (cell.arm in EVALUATED_BEFORE) for cell in waiting)
    evaluations += len(_emptied(arms)) * sum(cell.arm == "team" for cell in waiting)
    args = experiment.args
    questions = len(experiment.eval_dataset) * (args.num_generations_eval or args.num_generations)
    done = [cell.result()["seconds"] for cell in cells if cell.is_done]
    minutes = f", about {len(waiting) * sum(done) / len(done) / 60:.0f} minutes of training" if done else ""
    print(
        f"Report: {len(waiting)} of {len(cells)} trainings to do and {evaluations} evaluations of {questions} episodes"
        f"{minutes}. A report that is interrupted goes on with the same call.",
        flush=True,
    )


def _check_runs(arms: Sequence[Arm]) -> None:
    names = {arm.name for arm in arms}
    for arm in arms:
        if arm.of and arm.of not in names:
            raise ValueError(f"The arm {arm.name!r} is evaluated in the run of {arm.of!r}: name it too.")


def _check_schedule(experiment: Experiment, arms: Sequence[Arm]) -> None:
    """How long one agent trains is not known before, so no schedule can end with it."""
    budgeted = [arm for arm in arms if arm.is_budgeted and arm.skip_reason is None]
    kind = _schedule(experiment)
    for arm in budgeted:
        variant_kind = _schedule(arm.changed(experiment)) if arm.is_variant else kind
        if kind.startswith("constant") and not variant_kind.startswith("constant"):
            raise ValueError(
                f"`lr_scheduler_type` of the variant {arm.name!r} is {variant_kind!r}. It trains until it has "
                "generated as many tokens as the team, which is not known before: set `lr_scheduler_type="
                "'constant_with_warmup'`, or another `max_steps` than the team's, for which it is then trained."
            )
    if budgeted and not kind.startswith("constant"):
        raise ValueError(
            f"`lr_scheduler_type` of the experiment is {kind!r}. One agent trains until it has generated as many "
            "tokens as the team, which is not known before, so both need a rate that does not decay: set "
            "`lr_scheduler_type='constant_with_warmup'`, or leave out the arm `solo` (`arms`)."
        )


def _schedule(experiment: Experiment) -> str:
    return str(getattr(experiment.args.lr_scheduler_type, "value", experiment.args.lr_scheduler_type))


def _check_runs_before(experiment: Experiment, arms: Sequence[Arm], cells: Sequence[Cell]) -> None:
    """Runs that are there, whole or in part, are of the same experiment, and have all evaluations that are wanted."""
    settings = {arm.name: recorded(experiment, arm) for arm in arms if not arm.of and arm.skip_reason is None}
    for arm in arms:
        if arm.is_variant:
            _check_variant(arm.name, collect_settings(experiment), settings[arm.name])
    for cell in cells:
        cell.check_settings(settings[cell.arm])
        _check_budget(cell)
        missing = []
        if cell.arm == "team" and cell.is_done:
            missing = [name for name in _emptied(arms) if name not in cell.result()["emptied"]]
        if missing:
            raise ValueError(
                f"The run in {cell.folder} was not evaluated with empty messages of {', '.join(missing)}. Set another "
                "`output_dir`, leave out `emptied`, or delete that folder."
            )


def _check_variant(name: str, team: Mapping[str, Any], variant: Mapping[str, Any]) -> None:
    """A variant changes something, and is evaluated as the team is."""
    if team == variant:
        raise ValueError(f"The variant {name!r} changes nothing that the runs record: it would be the team again.")
    if other := [key for key in EVALUATION if team.get(key) != variant.get(key)]:
        raise ValueError(
            f"The variant {name!r} is evaluated otherwise than the team ({', '.join(other)}), so the two cannot be "
            "compared. Set the same in both."
        )


def _check_budget(cell: Cell) -> None:
    """A run whose budget was that of a team which is no longer there is not compared with another one."""
    team = Cell("team", cell.seed, cell.folder.parent / f"team-{cell.seed}")
    if not cell.is_done or not team.is_done or (budget := cell.result().get("budget")) is None:
        return
    if budget != team.result()["tokens"]:
        raise ValueError(
            f"The run in {cell.folder} had a budget of {budget:,} tokens, and the team with its seed has generated "
            f"{team.result()['tokens']:,}. Delete that folder, and the run is repeated."
        )


def _emptied(arms: Sequence[Arm]) -> list[str]:
    return [arm.name.partition(":")[2] for arm in arms if arm.name.startswith("emptied:") and arm.skip_reason is None]


def _run_all(run: Callable[[Cell], None], cells: Sequence[Cell]) -> dict[str, str]:
    """Run cells one after the other. Returns the errors of those that failed, by arm."""
    failed: dict[str, str] = {}
    start = time.monotonic()
    for number, cell in enumerate(cells):
        if number and len(cells) > 1:
            left = (time.monotonic() - start) / number * (len(cells) - number) / 60
            place = f"run {number + 1} of {len(cells)}, {cell.arm} with seed {cell.seed}"
            print(f"Report: {place}; about {left:.0f} min left", flush=True)
        try:
            run(cell)
        except Exception as error:
            logger.warning(f"The run of {cell.arm!r} with seed {cell.seed} has failed.", exc_info=True)
            message = f"The run of {cell.arm!r} with seed {cell.seed} has failed: {type(error).__name__}: {error}"
            failed.setdefault(cell.arm, message)
            if cell.arm == "team":  # all others are compared with it
                break
    return failed


def _side_by_side(
    place: str, settings: Mapping[str, Any] | None, cells: Sequence[Cell], emptied: Sequence[str], workers: int
) -> dict[str, str]:
    """Run cells in processes of their own. Returns the errors of those that failed, by arm."""
    threads = str(max((os.cpu_count() or 1) // workers, 1))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    teams: dict[int, Future] = {}
    children = ChildProcesses()

    def run(cell: Cell) -> None:
        cell_arguments = {
            "experiment": place,
            "settings": dict(settings or {}),
            "emptied": list(emptied),
            **cell.as_dict(),
        }
        cell.folder.mkdir(parents=True, exist_ok=True)
        with open(cell.folder / "log.txt", "a", encoding="utf-8") as log:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "marft_trl.extras.report",
                "--cell",
                json.dumps(cell_arguments),
            ]
            code = children.run(command, environment, log)
        if code:
            raise RuntimeError((cell.folder / "log.txt").read_text(encoding="utf-8")[-2000:])

    def wait_and_run(cell: Cell) -> dict[str, str]:
        # Teams are the first in the pool, so what waits for one never keeps it from running
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
