"""
Write the tables and the picture of `make real` into the pages, from its finished reports in `real-output`.

    make real && python benchmarks/learning/real_page.py --page
    python benchmarks/learning/real_page.py --check

Reports with other settings than those of `make real` raise an error.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from marft_trl.extras.report import shown
from marft_trl.extras.report.cells import Cell, run_cell
from marft_trl.extras.report.experiment import collect_settings
from marft_trl.reporting.evaluation import scores
from marft_trl.reporting.metrics import interval, paired_difference

import torch


# `figures` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures


FAMILIES = {
    "chain_sum": "two one-digit terms",
    "basic_arithmetic": "the same with + and *",
    "letter_counting": "texts of three to six words",
    "two_steps": "three one-digit terms, which the actor does not see",
}
SEEDS = (0, 1, 2)


def measured(family, folder):
    """Scores of questions, tokens and seconds of training, by arm and seed."""
    import real

    experiment, arms = real.make(family), {}
    for arm in ("team", "solo"):
        cells = [Cell(arm, seed, folder / "runs" / f"{arm}-{seed}") for seed in SEEDS]
        for cell in cells:
            cell.check_settings(collect_settings(experiment))
        results = [cell.result() for cell in cells]
        before, after = (scores([cell.folder for cell in cells], name=name).tolist() for name in ("start", "end"))
        arms[arm] = {"untrained": before, "trained": after}
        arms[arm] |= {name: [result[name] for result in results] for name in ("tokens", "seconds")}
    return {"constant": real.constant_accuracy(experiment.eval_dataset["answer"]), **arms}


def tables(measurements):
    """Accuracies, and differences of the trained team, with 95 % intervals over questions and seeds."""
    accuracies, differences = [], []
    for family, arms in measurements["families"].items():
        team, solo = arms["team"], arms["solo"]
        shares = [team["untrained"], team["trained"], solo["untrained"], solo["trained"]]
        cells = [shown(interval(share)) for share in shares]
        accuracies.append([f"`{family}`, {FAMILIES[family]}", *cells, f"{100 * arms['constant']:.1f}"])
        gains = [paired_difference(team["trained"], other) for other in (team["untrained"], solo["trained"])]
        costs = [
            ", ".join(f"{statistics.mean(arm[name]):,.0f}" for arm in (team, solo)) for name in ("tokens", "seconds")
        ]
        differences.append([f"`{family}`", *(shown(gain, signed=True) for gain in gains), *costs])
    columns = ["family", "untrained", "trained", "one agent, untrained", "one agent, as many tokens", "constant"]
    of_differences = ["family", "trained minus untrained", "team minus one agent"]
    of_differences += ["tokens of the team, of one agent", "seconds of training"]
    return {
        "real accuracy": figures.markdown(columns, accuracies),
        "real differences": figures.markdown(of_differences, differences),
    }


def check():
    """Repeat a run."""
    import real

    torch.set_num_threads(1)
    recorded = figures.load("real")
    team = recorded["families"]["chain_sum"]["team"]
    with tempfile.TemporaryDirectory() as folder:
        cell = Cell("team", 0, Path(folder))
        run_cell(real.make("chain_sum"), cell)
        after = [scores([cell.folder], name=name)[0].tolist() for name in ("start", "end")]
        figures.compare(
            recorded,
            [team["untrained"][0], team["trained"][0], team["tokens"][0]],
            [*after, cell.result()["tokens"]],
        )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("real-output"), help="folder of the reports")
    options = figures.parse(parser, repeats="the team on `chain_sum`, seed 0")
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    if options.check:
        check()
        return
    families = {family: measured(family, options.output_dir / family) for family in FAMILIES}
    measurements = {"made": figures.made("make real && python benchmarks/learning/real_page.py"), "families": families}
    print("\n\n".join(tables(measurements).values()))
    if options.page:
        figures.publish("real", measurements)
        shutil.copy(options.output_dir / "real.png", figures.DATA.parent)


if __name__ == "__main__":
    main()
