"""
The grids behind the page "Choose": presets, learning rates, adapters, and whether a team is worth it.

    python benchmarks/choose.py presets                  # runs what is not done, then prints the table
    python benchmarks/choose.py presets --page           # writes docs/reports/data/presets.json and the page, too
    python benchmarks/choose.py presets --tables         # the table, from the data file
    python benchmarks/choose.py rates --check "no preset/r=8, 1e-3/0"    # one run once more: are its answers the same?

Every setting of a grid is a report of `marft_trl.extras.report`: arms are trained until they have generated as many
tokens as the setting's first one, the team, with the same seed, and are evaluated on the same questions. A run that is
done is not repeated, and one that was interrupted goes on from its last checkpoint. What came of the runs is kept in
`--output_dir`. The settings that are run take the place of those in `docs/reports/data/<grid>.json`, from which tables
are made. `--page` writes this file, and the tables of `docs/reports/choices.md`.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from marft_trl.extras.report import report
from marft_trl.extras.report.arms import make_arms
from marft_trl.extras.report.cells import Cell, run_cell
from marft_trl.extras.report.comparison import shown
from marft_trl.reporting import interval, paired_difference
from marft_trl.reporting.evaluation import scores

import figures
import numpy as np
import torch
from choose_grids import GRIDS


ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reports" / "choices.md"
DATA = ROOT / "docs" / "reports" / "data"
MADE = "made.json"  # in the folder of a run
NOT_RECORDED = "not recorded"


# Arms that every report has
ALSO = {"sharing": ["shared"], "worth": ["solo"]}


def label(given):
    """Name of a setting."""
    return ", ".join("no preset" if value is None else str(value) for value in given.values())


def arms_of(grid, experiment):
    """Names of the arms that a grid compares."""
    return [arm.name for arm in make_arms(experiment) if arm.is_variant or arm.name in ("team", *ALSO.get(grid, ()))]


def collected(grid, setting, folder):
    """What came of the arms of a setting, all of whose runs are done."""
    return {
        arm: [{"seed": place.seed, **outcome(place)} for place in places]
        for arm, places in cells_of(grid, setting, folder).items()
    }


def cells_of(grid, setting, folder):
    """The runs of a setting, by arm."""
    make, _, seeds = GRIDS[grid]
    runs = folder / label(setting) / "runs"
    return {arm: [Cell(arm, seed, runs / f"{arm}-{seed}") for seed in seeds] for arm in arms_of(grid, make(**setting))}


def outcome(place):
    """What came of a run: the share of right samples of each question, and what it took."""
    result = place.result()
    measures = {"right": ("avg", "end"), **{f"maj@{k}": (f"maj@{k}", "end") for k in votes_of(place)}}
    if place.arm in ("team", "solo"):
        measures["start"] = ("avg", "start")
    of_questions = {
        key: scores([place.folder], measure, name=when)[0].round(4).tolist()
        for key, (measure, when) in measures.items()
    }
    made = place.folder / MADE
    return {
        **of_questions,
        **{key: result[key] for key in ("tokens", "steps", "seconds")},
        "rewards": [round(reward, 4) for _, reward in result["curve"]],
        "made": json.loads(made.read_text(encoding="utf-8")) if made.exists() else NOT_RECORDED,
    }


def votes_of(place):
    """Numbers of votes that an arm is measured with, besides single answers."""
    return (3,) if place.arm.startswith("solo") and "worth" in place.folder.parts else ()


def matrix(runs, key="right"):
    return np.array([run[key] for run in runs])


def run(grid, folder, workers, chosen=None):
    """Run the settings of a grid, all or those chosen, and return what came of them."""
    (_, given, seeds), found = GRIDS[grid], {}
    if unknown := {*(chosen or ())} - {label(one) for one in given}:
        raise SystemExit(f"no setting of {grid}: {', '.join(unknown)}; there are {'; '.join(map(label, given))}")
    for one in given:
        if chosen and label(one) not in chosen:
            continue
        cells = cells_of(grid, one, folder)
        new = [cell for runs in cells.values() for cell in runs if not cell.is_done]
        report(
            f"{Path(__file__).with_name('choose_grids.py')}:{grid}", output_dir=str(folder / label(one)), seeds=seeds,
            arms=[arm for arm in cells if arm != "team"],  # which every report has
            workers=workers, settings=one,
        )  # fmt: skip
        for cell in new:
            (cell.folder / MADE).write_text(json.dumps(made_with()), encoding="utf-8")
        found[label(one)] = collected(grid, one, folder)
    return found


def kept(grid):
    """What the data file has."""
    file = DATA / f"{grid}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(file, found):
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1)
    text = text.replace("\n     ", " ").replace("\n    ]", " ]")  # lists of numbers on one line
    file.write_text(text + "\n", encoding="utf-8")


def rows(arms):
    """Runs and measure of each line: every arm, and the most frequent of three answers where it was measured."""
    for name, runs in arms.items():
        yield name, runs, "right"
        if "maj@3" in runs[0]:
            yield f"{name}, most frequent of 3", runs, "maj@3"


def table(grid, found):
    """A Markdown table of the runs: accuracies by setting, and the difference of each arm and the first one."""
    sign, words = (1, "the team minus it") if grid == "worth" else (-1, "minus the first")
    lines = [
        f"| setting | arm | right answers | {words} | tokens | updates | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for setting, arms in found.items():
        for name, runs, key in rows(arms):
            pair = [matrix(arms["team"]), matrix(runs, key)][::sign]
            over = shown(paired_difference(*pair), signed=True) if name != "team" else ""
            means = [statistics.fmean(one[key] for one in runs) for key in ("tokens", "steps", "seconds")]
            cells = [setting, FIRST.get(grid, name) if name == "team" else name, shown(interval(matrix(runs, key)))]
            lines.append(f"| {' | '.join([*cells, over, *(f'{mean:,.0f}' for mean in means)])} |")
    return "\n".join(lines)


def pooled(found):
    """Differences to the first arm over all settings, by arm: a run of a setting counts as a seed."""
    lines = ["| arm | minus the first, all settings | runs |", "|---|---|---|"]
    for name in dict.fromkeys(name for arms in found.values() for name in arms if name != "team"):
        both = [arms for arms in found.values() if name in arms]
        ours, theirs = (np.concatenate([matrix(arms[one]) for arms in both]) for one in (name, "team"))
        lines.append(f"| {name} | {shown(paired_difference(ours, theirs), signed=True)} | {len(ours)} |")
    return "\n".join(lines)


def falls(found):
    """How far the reward of each run ends below its best."""
    lines = ["| setting | arm | below its best at the end |", "|---|---|---|"]
    for setting, arms in found.items():
        for name, runs in arms.items():
            ends = ", ".join(f"{100 * fall(run['rewards']):.0f}" for run in runs)
            lines.append(f"| {setting} | {FIRST['sharing'] if name == 'team' else name} | {ends} |")
    return "\n".join(lines)


def fall(rewards, window=4):
    """How far the mean reward of the last batches is below the best mean of as many batches in a row."""
    means = [statistics.fmean(rewards[i : i + window]) for i in range(max(len(rewards) - window + 1, 1))]
    return max(means) - means[-1]


def against_best(found):
    """For each rank, every rate and the best one."""
    lines = ["| setting | rank | best rate | the others minus it |", "|---|---|---|---|"]
    for setting, arms in found.items():
        ranks = {}
        for name, runs in arms.items():
            rank, rate = (FIRST["rates"] if name == "team" else name).split(", ")
            ranks.setdefault(rank, {})[rate] = matrix(runs)
        for rank, rates in ranks.items():
            best = max(rates, key=lambda rate: rates[rate].mean())
            others = [
                f"{rate}: {shown(paired_difference(right, rates[best]), signed=True)}"
                for rate, right in sorted(rates.items(), key=lambda one: float(one[0]))
                if rate != best
            ]
            lines.append(f"| {setting} | {rank} | {best} | {'; '.join(others)} |")
    return "\n".join(lines)


# What the first arm is called
FIRST = {"presets": "no preset", "rates": "r=8, 1e-3", "sharing": "own", "worth": "team"}


def made_with():
    """Processor and versions of runs."""
    made = figures.made("")
    return f"{made['processor']}, {figures.shown(made['versions'])}"


def processors(found):
    """Which settings ran on which processor, with which versions."""
    named = {}
    for setting, arms in found.items():
        for name in dict.fromkeys(run.get("made", NOT_RECORDED) for runs in arms.values() for run in runs):
            named.setdefault(name, []).append(setting)
    shown_names = (f"{name} (`{'`, `'.join(settings)}`)" for name, settings in named.items())
    return f"Processors: {'; '.join(shown_names)}."


def page_of(grid, found):
    """The tables of a grid."""
    tables = [table(grid, found)]
    if grid == "presets" and len(found) > 1:
        tables.append(pooled(found))
    if grid == "rates":
        tables.append(against_best(found))
    if grid == "sharing":
        tables.append(falls(found))
    return "\n\n".join([*tables, processors(found)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", choices=list(GRIDS))
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--page", action="store_true", help="write the data file and the page")
    parser.add_argument("--check", metavar="SETTING/ARM/SEED", help="repeat one run and compare")
    parser.add_argument("--settings", nargs="+", metavar="SETTING", help="of the grid; all by default")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path("benchmark-output/choose"))
    options = parser.parse_args()
    folder = options.output_dir / options.grid
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of each run
    if options.check:
        setting, arm, seed = options.check.split("/")
        with tempfile.TemporaryDirectory() as folder:
            check(options.grid, setting, arm, seed, Path(folder) / options.grid)
        return
    found = kept(options.grid)
    if not options.tables:
        found |= run(options.grid, folder, options.workers, options.settings)
    tables = page_of(options.grid, found)
    print(tables)
    if options.page:
        write(DATA / f"{options.grid}.json", found)
        PAGE.write_text(figures.pasted(PAGE.read_text(encoding="utf-8"), options.grid, tables), encoding="utf-8")


def check(grid, setting, arm, seed, folder):
    """
    Repeat a run, as far as its arm is not trained with the budget of another, and compare its answers.

    Raises:
        SystemExit: a figure differs. Other processors round differently.
    """
    make, given, _ = GRIDS[grid]
    (one,) = (one for one in given if label(one) == setting)
    recorded = kept(grid)[setting]
    place = Cell(arm, int(seed), folder / "runs" / f"{arm}-{seed}")
    before = next(run for run in recorded[arm] if run["seed"] == int(seed))
    if arm != "team":  # its budget is what the team has generated
        team = next(run for run in recorded["team"] if run["seed"] == int(seed))
        budget = Cell("team", int(seed), folder / "runs" / f"team-{seed}").folder
        budget.mkdir(parents=True, exist_ok=True)
        (budget / "result.json").write_text(json.dumps({key: team[key] for key in ("tokens", "steps")}))
    run_cell(make(**one), place)
    after = outcome(place)
    compared = [key for key in before if key not in ("seed", "seconds", "made")]
    different = [key for key in compared if before[key] != after.get(key)]
    for key in compared:
        print(f"{key}: {f'{before[key]} before, {after.get(key)} now' if key in different else 'the same'}")
    if different:
        raise SystemExit(f"{setting}/{arm}/{seed} differs in {', '.join(different)}.")


if __name__ == "__main__":
    main()
