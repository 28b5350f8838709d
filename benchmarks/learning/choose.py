"""
The grids behind the page "Choose": presets, learning rates, adapters, and whether a team is worth it.

    python benchmarks/learning/choose.py presets            # run the missing settings, then print the table
    python benchmarks/learning/choose.py presets --page     # also write docs/reports/data/presets.json and the page
    python benchmarks/learning/choose.py presets --tables   # the table, from the data file
    python benchmarks/learning/choose.py rates --check "no preset/r=8, 1e-3/0"   # repeat one run, compare its answers

Every setting of a grid is a report of `marft_trl.extras.report`: arms are trained until they have generated as many
tokens as the first arm of the setting, the team, with the same seed, and are evaluated on the same questions. Finished
runs are not repeated, and an interrupted run resumes from its last checkpoint. Results are stored in `--output_dir`.
They replace those of the same settings in `docs/reports/data/<grid>.json`, from which the tables are made. `--page`
writes this file and the tables of `docs/reports/choices.md`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from marft_trl.extras.report import report
from marft_trl.extras.report.arms import make_arms
from marft_trl.extras.report.cells import Cell, run_cell
from marft_trl.extras.report.comparison import shown
from marft_trl.reporting import interval, paired_difference
from marft_trl.reporting.evaluation import scores

import numpy as np
import torch


# `figures` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures
from choose_grids import DUOS, GRIDS, SEARCHED, TEAMS, TEAMS_OF_SIZES, best_rates, end_reward


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reports" / "choices.md"
DATA = ROOT / "docs" / "reports" / "data"
MADE = "made.json"  # in the folder of a run
NOT_RECORDED = "not recorded"


# Arms that every report has
ALSO = {"sharing": ["shared"], "worth": ["solo"], "parts": ["solo"]}


def label(setting):
    """Name of a setting."""
    return ", ".join("no preset" if value is None else str(value) for value in setting.values())


def arms_of(grid, experiment):
    """Names of the arms that a grid compares."""
    return [arm.name for arm in make_arms(experiment) if arm.is_variant or arm.name in ("team", *ALSO.get(grid, ()))]


def collected(grid, setting, folder):
    """Results of each arm of a setting, after all runs have finished."""
    return {
        arm: [{"seed": cell.seed, **outcome(cell)} for cell in cells]
        for arm, cells in cells_of(grid, setting, folder).items()
    }


def cells_of(grid, setting, folder):
    """The runs of a setting, by arm."""
    make, _, seeds = GRIDS[grid]
    runs = folder / label(setting) / "runs"
    return {arm: [Cell(arm, seed, runs / f"{arm}-{seed}") for seed in seeds] for arm in arms_of(grid, make(**setting))}


def outcome(cell):
    """Results of a run: the share of right samples of each question, tokens, steps and seconds."""
    result = cell.result()
    measures = {"right": ("avg", "end"), **{f"maj@{k}": (f"maj@{k}", "end") for k in votes_of(cell)}}
    if cell.arm in ("team", "solo"):
        measures["start"] = ("avg", "start")
    of_questions = {
        key: scores([cell.folder], measure, name=when)[0].round(4).tolist()
        for key, (measure, when) in measures.items()
    }
    made_file = cell.folder / MADE
    return {
        **of_questions,
        **{key: result[key] for key in ("tokens", "steps", "seconds")},
        "rewards": [round(reward, 4) for _, reward in result["curve"]],
        "made": json.loads(made_file.read_text(encoding="utf-8")) if made_file.exists() else NOT_RECORDED,
    }


def votes_of(cell):
    """Numbers of votes for which an arm is evaluated, in addition to single answers."""
    return (3,) if cell.arm.startswith("solo") and "worth" in cell.folder.parts else ()


def matrix(runs, key="right"):
    return np.array([run[key] for run in runs])


def run(grid, folder, workers, chosen=None):
    """Run all settings of a grid, or the chosen ones, and return the results."""
    (_, settings, seeds), outcomes = GRIDS[grid], {}
    if unknown := {*(chosen or ())} - {label(setting) for setting in settings}:
        raise SystemExit(f"no setting of {grid}: {', '.join(unknown)}; there are {'; '.join(map(label, settings))}")
    for setting in settings:
        if chosen and label(setting) not in chosen:
            continue
        cells = cells_of(grid, setting, folder)
        new = [cell for runs in cells.values() for cell in runs if not cell.is_done]
        report(
            f"{Path(__file__).with_name('choose_grids.py')}:{grid}", output_dir=str(folder / label(setting)),
            seeds=seeds, workers=workers, settings=setting,
            arms=[arm for arm in cells if arm != "team"],  # which every report has
        )  # fmt: skip
        for cell in new:
            (cell.folder / MADE).write_text(json.dumps(made_with()), encoding="utf-8")
        outcomes[label(setting)] = collected(grid, setting, folder)
    return outcomes


def load_outcomes(grid):
    """Load the data file of a grid."""
    file = DATA / f"{grid}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(file, outcomes):
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(outcomes, indent=1)
    text = text.replace("\n     ", " ").replace("\n    ]", " ]")  # lists of numbers on one line
    file.write_text(text + "\n", encoding="utf-8")


def rows(arms):
    """Name, runs and metric of each line: every arm, and the most frequent of three answers where it was evaluated."""
    for name, runs in arms.items():
        yield name, runs, "right"
        if "maj@3" in runs[0]:
            yield f"{name}, most frequent of 3", runs, "maj@3"


def table(grid, outcomes):
    """A Markdown table of the runs: accuracies by setting, and the difference between each arm and the first one."""
    sign, words = (1, "the team minus it") if grid in ("worth", "parts") else (-1, "minus the first")
    lines = [
        f"| setting | arm | right answers | {words} | tokens | updates |",
        "|---|---|---|---|---|---|",
    ]
    for setting, arms in outcomes.items():
        for name, runs, key in rows(arms):
            pair = [matrix(arms["team"]), matrix(runs, key)][::sign]
            over = shown(paired_difference(*pair), signed=True) if name != "team" else ""
            means = [statistics.fmean(run[key] for run in runs) for key in ("tokens", "steps")]
            cells = [setting, FIRST.get(grid, name) if name == "team" else name, shown(interval(matrix(runs, key)))]
            lines.append(f"| {' | '.join([*cells, over, *(f'{mean:,.0f}' for mean in means)])} |")
    return "\n".join(lines)


def pooled(outcomes, over="all settings"):
    """Differences to the first arm over all settings, by arm: a run of a setting counts as a seed."""
    lines = [f"| arm | minus the first, {over} | runs |", "|---|---|---|"]
    for name in dict.fromkeys(name for arms in outcomes.values() for name in arms if name != "team"):
        compared = [arms for arms in outcomes.values() if name in arms]
        ours, baseline = (np.concatenate([matrix(arms[arm]) for arms in compared]) for arm in (name, "team"))
        lines.append(f"| {name} | {shown(paired_difference(ours, baseline), signed=True)} | {len(ours)} |")
    return "\n".join(lines)


def pooled_teams(outcomes):
    """The team minus one agent with as many tokens over several settings: a run of a setting counts as a seed."""
    parts = [setting for setting, arms in outcomes.items() if "solo, told all" in arms]
    informed = {setting: "solo, told all" if setting in parts else "solo" for setting in outcomes}
    rows = {
        "sees what the team sees": informed,
        "sees what the team sees, where each agent of the team sees all": {
            setting: arm for setting, arm in informed.items() if setting not in parts
        },
        "sees one of two parts": dict.fromkeys(parts, "solo"),
    }
    lines = ["| one agent that | the team minus it, all settings | runs |", "|---|---|---|"]
    for name, compared in rows.items():
        team, one = (
            np.concatenate([matrix(outcomes[setting][arm]) for setting, arm in arms.items()])
            for arms in (dict.fromkeys(compared, "team"), compared)
        )
        lines.append(f"| {name} | {shown(paired_difference(team, one), signed=True)} | {len(team)} |")
    return "\n".join(lines)


def of_turns(outcomes):
    """
    The team minus each other arm, and one adapter minus an agent that sees one part, over all settings: a run of a
    setting counts as a seed.
    """
    one_adapter = "one adapter, both turns"
    pairs = [("team", one_adapter), ("team", "solo"), ("team", "solo, told all"), (one_adapter, "solo")]
    lines = ["| arm | minus | points, all settings | runs |", "|---|---|---|---|"]
    for arm, baseline in pairs:
        right, right_of_baseline = (
            np.concatenate([matrix(arms[name]) for arms in outcomes.values()]) for name in (arm, baseline)
        )
        difference = shown(paired_difference(right, right_of_baseline), signed=True)
        title = FIRST["parts"] if arm == "team" else arm
        lines.append(f"| {title} | {baseline} | {difference} | {len(right)} |")
    return "\n".join(lines)


def orders(outcomes):
    """The large model first minus the large model second, for each setting and budget."""
    lines = ["| setting | equal | large first minus large second |", "|---|---|---|"]
    for setting, arms in outcomes.items():
        for budget, suffix in (("tokens", ""), ("compute", ", equal compute")):
            names = (f"large first, small second{suffix}", f"small first, large second{suffix}")
            difference = paired_difference(*(matrix(arms[name]) for name in names))
            lines.append(f"| {setting} | {budget} | {shown(difference, signed=True)} |")
    return "\n".join(lines)


def draw_sizes(outcomes, path):
    """Right answers of each team of sizes, by setting and budget."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(outcomes), figsize=(4.5 * len(outcomes), 3), sharex=True, sharey=True)
    names = ["team", *TEAMS_OF_SIZES]
    for panel, (setting, arms) in zip(np.atleast_1d(panels), outcomes.items(), strict=True):
        for shift, suffix in ((-0.15, ""), (0.15, ", equal compute")):
            found = [interval(matrix(arms.get(f"{name}{suffix}", arms["team"]))) for name in names]
            middle, low, high = 100 * np.array([(found_of.mean, found_of.low, found_of.high) for found_of in found]).T
            places = np.arange(len(names)) + shift
            label = suffix.removeprefix(", ") or "equal tokens"
            panel.errorbar(middle, places, xerr=(middle - low, high - middle), fmt="o", capsize=3, label=label)
        panel.set_title(setting)
        panel.set_yticks(range(len(names)), [FIRST["sizes"], *TEAMS_OF_SIZES])
        panel.set_xlabel("right answers (%), five seeds")
        panel.grid(alpha=0.3)
    np.atleast_1d(panels)[0].invert_yaxis()
    np.atleast_1d(panels)[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def rewards_of_rates(outcomes):
    """The mean reward at the end of the runs of `search`, and the rate chosen for each kind of adapters."""
    lines = [f"| team | adapters | {' | '.join(SEARCHED)} | rate |", "|---" * (3 + len(SEARCHED)) + "|"]
    for team, arms in outcomes.items():
        for kind, chosen in best_rates(arms).items():
            rewards = (f"{end_reward(arms, kind, rate):.3f}" for rate in SEARCHED)
            lines.append(f"| {team} | {kind} | {' | '.join(rewards)} | {chosen} |")
    return "\n".join(lines)


def against_best(outcomes):
    """For each rank, the best rate, and the differences of the other rates to it."""
    lines = ["| setting | rank | best rate | the others minus it |", "|---|---|---|---|"]
    for setting, arms in outcomes.items():
        ranks = {}
        for name, runs in arms.items():
            rank, rate = (FIRST["rates"] if name == "team" else name).split(", ")
            ranks.setdefault(rank, {})[rate] = matrix(runs)
        for rank, rates in ranks.items():
            best = max(rates, key=lambda rate: rates[rate].mean())
            others = [
                f"{rate}: {shown(paired_difference(right, rates[best]), signed=True)}"
                for rate, right in sorted(rates.items(), key=lambda pair: float(pair[0]))
                if rate != best
            ]
            lines.append(f"| {setting} | {rank} | {best} | {'; '.join(others)} |")
    return "\n".join(lines)


# What the first arm is called
FIRST = {
    "search": "own, 1e-3",
    "tuned": "own",
    "presets": "no preset",
    "rates": "r=8, 1e-3",
    "sharing": "own",
    "worth": "team",
    "parts": "team, own adapters",
    "sizes": "two large",
}


def made_with():
    """Processor and versions of runs."""
    made = figures.made("")
    return f"{made['processor']}, {figures.shown(made['versions'])}"


def processors(outcomes):
    """Which settings ran on which processor."""
    named = {}
    for setting, arms in outcomes.items():
        for name in dict.fromkeys(run.get("made", NOT_RECORDED) for runs in arms.values() for run in runs):
            named.setdefault(name.partition(", torch")[0], []).append(setting)  # versions are in the data
    if len(named) == 1:
        return f"Processor: {next(iter(named))}."
    shown_names = (f"{name} (`{'`, `'.join(settings)}`)" for name, settings in named.items())
    return f"Processors: {'; '.join(shown_names)}."


def page_of(grid, outcomes):
    """The tables of a grid."""
    tables = [rewards_of_rates(outcomes) if grid == "search" else table(grid, outcomes)]
    if grid == "presets" and len(outcomes) > 1:
        tables.append(pooled(outcomes))
    if grid == "tuned":
        for teams in (DUOS, TEAMS):  # of a model
            compared = [team for team in teams if team in outcomes]
            pool = {team: {arm: outcomes[team][arm] for arm in ("team", "one adapter")} for team in compared}
            tables += [pooled(pool, " and ".join(pool))] if len(pool) > 1 else []
    if grid == "worth" and len(outcomes) > 1:
        tables.append(pooled_teams(outcomes))
    if grid == "rates":
        tables.append(against_best(outcomes))
    if grid == "parts" and len(outcomes) > 1:
        tables.append(of_turns(outcomes))
    if grid == "sizes":
        tables.append(orders(outcomes))
    return "\n\n".join([*tables, processors(outcomes)])


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
    outcomes = load_outcomes(options.grid)
    if not options.tables:
        outcomes |= run(options.grid, folder, options.workers, options.settings)
    tables = page_of(options.grid, outcomes)
    print(tables)
    if options.page:
        write(DATA / f"{options.grid}.json", outcomes)
        if options.grid == "sizes":
            draw_sizes(outcomes, PAGE.with_name("sizes.png"))
        PAGE.write_text(figures.pasted(PAGE.read_text(encoding="utf-8"), options.grid, tables), encoding="utf-8")


def check(grid, setting, arm, seed, folder):
    """
    Repeat a run and compare its answers. The token budget of an arm is that of the recorded team.

    Raises:
        SystemExit: a figure differs. Other processors round differently.
    """
    make, settings, _ = GRIDS[grid]
    (arguments,) = (arguments for arguments in settings if label(arguments) == setting)
    recorded = load_outcomes(grid)[setting]
    cell = Cell(arm, int(seed), folder / "runs" / f"{arm}-{seed}")
    before = next(run for run in recorded[arm] if run["seed"] == int(seed))
    if arm != "team":  # its budget is what the team has generated
        team = next(run for run in recorded["team"] if run["seed"] == int(seed))
        budget = Cell("team", int(seed), folder / "runs" / f"team-{seed}").folder
        budget.mkdir(parents=True, exist_ok=True)
        (budget / "result.json").write_text(json.dumps({key: team[key] for key in ("tokens", "steps")}))
    run_cell(make(**arguments), cell)
    after = outcome(cell)
    compared = [key for key in before if key not in ("seed", "seconds", "made")]
    different = [key for key in compared if before[key] != after.get(key)]
    for key in compared:
        print(f"{key}: {f'{before[key]} before, {after.get(key)} now' if key in different else 'the same'}")
    if different:
        raise SystemExit(f"{setting}/{arm}/{seed} differs in {', '.join(different)}.")


if __name__ == "__main__":
    main()
