"""
Compare credit estimators with the truth, on teams so small that the truth can be computed.

    python benchmarks/learning/credit_fidelity.py
    python benchmarks/learning/credit_fidelity.py --teams chain --seeds 0 --prompts 200

Every turn is one of three tokens, policies and rewards are random (one draw for each seed), and the exact marginal
value of a turn, `Q(o, a) - V(o)` in its agent's own return, follows from enumeration. Four teams: a `chain` of two
agents, two agents in `parallel`, an `orchestrated` team in which the first turn decides who acts next, and a `game` of
two players with opposed rewards. Each estimator is run by the trainer itself and may generate the same number of
tokens for a prompt, that of `c3` with 8 alternatives and one completion of each; two rows with more completions are
marked. The critics of `gae` read all turns, and are first trained on 3,840 episodes, which are not counted.

- fidelity: correlation of estimated advantages with the truth, over all training rows.
- bias, spread: root mean square of the error of the mean advantage of a turn, and of the deviation around this mean,
  both after the rescaling that fits the means best, in units of the deviation of the true values.
- gradient: cosine of the gradient of `--batch` prompts, with respect to the logits of the policies, with the exact
  gradient.

The script writes `credit_fidelity.csv` and `credit_fidelity.png` into `--output_dir`.
"""

import argparse
import csv
import logging as python_logging
import statistics
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

import torch
from transformers.utils import logging


# The teams are in the tests, and `figures` in the folder above
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.small_teams import Drawing, Team, Truth, key_of, make, value_of

import figures


ALTERNATIVES = {"turn_candidates": 8, "num_generations": 1}
ESTIMATORS: dict[str, dict] = {
    "none (REINFORCE)": {"advantage": "none"},
    "group (GRPO, MAGRPO)": {"advantage": "group"},
    "leave_one_out (RLOO)": {"advantage": "leave_one_out"},
    "agent (Dr.MAS)": {"advantage": "agent"},
    "batch (REINFORCE++)": {"advantage": "batch", "num_generations": 1},
    "gae, lambda 0.95 (MAPPO)": {"advantage": "gae", "critic": "shared", "num_generations": 1},
    "gae, lambda 0": {"advantage": "gae", "critic": "shared", "num_generations": 1, "gae_lambda": 0.0},
    "counterfactual, leave_one_out": {"advantage": "leave_one_out", "credit": "counterfactual"},
    "removed, leave_one_out": {"advantage": "leave_one_out", "credit": "removed"},
    "removed, agent (CCPO)": {"advantage": "agent", "credit": "removed"},
    "removed, none": {"advantage": "none", "credit": "removed"},
    "turn (AT-GRPO)": {"advantage": "turn", **ALTERNATIVES},
    "c3": {"advantage": "c3", **ALTERNATIVES},
    "c3, 4 completions *": {"advantage": "c3", **ALTERNATIVES, "candidate_samples": 4},
    "c3, 16 completions *": {"advantage": "c3", **ALTERNATIVES, "candidate_samples": 16},
    "c3, 64 completions *": {"advantage": "c3", **ALTERNATIVES, "candidate_samples": 64},
}
GROUP_BASELINES = [name for name in ESTIMATORS if name.split()[0].rstrip(",") in ("group", "leave_one_out", "agent")]


def sized(settings: dict, size: int) -> dict:
    """Settings of an estimator, with groups of a size where it has groups."""
    batch = {"per_device_train_batch_size": 64}
    if "num_generations" not in settings:
        batch = {"per_device_train_batch_size": 64 * size, "num_generations": size}
    if settings["advantage"] == "gae":
        batch |= {"critic_learning_rate": 3e-2, "learning_rate": 0.0, "normalize_advantages": "none"}
        batch |= {"critic_sees": "history", "max_steps": 60, "logging_steps": 1000}
    return batch | settings


def measure(team: Team, name: str, budget: float, options) -> tuple[dict, float]:
    """The figures of an estimator, and tokens per prompt."""
    settings = dict(ESTIMATORS[name])
    per_episode = 2 if team.name != "orchestrated" else 1.7
    if settings.get("credit") in ("counterfactual", "removed"):
        per_episode *= 1.5 if settings["credit"] == "removed" else 2.5
    size = max(round(budget / per_episode), 2)
    with tempfile.TemporaryDirectory() as folder:
        world = make(team, folder, **sized(settings, size))
        truth, draw = Truth(team, world), Drawing(world, team.seed)
        trainer = world.trainer
        trainer.parts.runner.generator.generate = draw
        if settings["advantage"] == "gae":
            trainer.train()
        size = size if "num_generations" not in settings else 1
        episodes = size * options.prompts
        if settings["advantage"] in ("gae", "batch"):  # no groups: as many episodes as the budget allows
            episodes = options.prompts * max(round(budget / per_episode), 1)
        trainer.args.per_device_train_batch_size = episodes
        trainer.model.train()
        draw.tokens = 0
        (slice_,) = trainer.parts.batch_maker.for_training([{"prompt": "a"}] * episodes)
        rows = [row for row in slice_.rows if row.is_trained]
        tokens = draw.tokens / options.prompts
        group = episodes // options.prompts
        return quality(
            truth, [(row.episode // group, *key_of(row, world), value_of(row)) for row in rows], options
        ), tokens


def quality(truth: Truth, rows: list[tuple], options) -> dict:
    """
    Args:
        truth: exact values.
        rows: the prompt, the agent and what it saw, the turn, and the estimated advantage of each training row.
    """
    exact = torch.tensor([truth.advantages[(*key, turn)] for _, key, turn, _ in rows])
    got = torch.tensor([value for *_, value in rows])
    centred = got - got.mean(), exact - exact.mean()
    fidelity = (centred[0] @ centred[1] / (centred[0].norm() * centred[1].norm() + 1e-12)).item()
    cells = defaultdict(list)
    for (_, key, turn, value), true in zip(rows, exact.tolist(), strict=True):
        cells[key, turn].append((value, true))
    means = {cell: statistics.fmean(value for value, _ in pairs) for cell, pairs in cells.items()}
    products = [
        (len(pairs) * means[cell] * pairs[0][1], len(pairs) * means[cell] ** 2) for cell, pairs in cells.items()
    ]
    scale = sum(product for product, _ in products) / (sum(square for _, square in products) + 1e-12)
    total, bias, spread = len(rows), 0.0, 0.0
    for cell, pairs in cells.items():
        bias += len(pairs) * (scale * means[cell] - pairs[0][1]) ** 2
        spread += scale**2 * sum((value - means[cell]) ** 2 for value, _ in pairs)
    deviation = exact.pow(2).mean().sqrt().item()
    wanted, cosines = truth.gradient(), []
    by_prompt = defaultdict(list)
    for prompt, key, turn, value in rows:
        by_prompt[prompt // options.batch].append(value * truth.score(key, turn))
    for terms in by_prompt.values():
        gradient = torch.stack(terms).sum(dim=0)
        cosines.append((gradient @ wanted / (gradient.norm() * wanted.norm() + 1e-12)).item())
    return {
        "fidelity": fidelity,
        "bias": (bias / total) ** 0.5 / deviation,
        "spread": (spread / total) ** 0.5 / deviation,
        "gradient": statistics.fmean(cosines),
    }


COLUMNS = ("fidelity", "bias", "spread", "gradient")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teams", nargs="+", default=["chain", "parallel", "orchestrated", "game"])
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS)[:-1], help="all but the last unless named")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="prompts of a gradient")
    parser.add_argument("--output_dir", type=Path, default=Path("benchmark-output/credit_fidelity"))
    options = figures.parse(parser, repeats="the first estimator of the first team, seed 0")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    python_logging.disable(python_logging.WARNING)
    warnings.simplefilter("ignore")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    results = []
    for team in options.teams:
        budget = statistics.fmean(measure(Team(team, seed), "c3", 24, options)[1] for seed in options.seeds)
        print(f"\n{team}, {budget:.1f} tokens per prompt:\n", flush=True)
        if options.check:
            recorded, (name, *_) = figures.load("credit_fidelity"), options.estimators
            scores, tokens = measure(Team(team, 0), name, budget, options)
            (again,) = data([{"team": team, "estimator": name, "tokens": tokens, **scores}])["runs"][team][name]
            figures.compare(recorded, recorded["runs"][team][name][0], again)
            return
        for name in options.estimators:
            per_seed = [measure(Team(team, seed), name, budget, options) for seed in options.seeds]
            for seed, (scores, tokens) in zip(options.seeds, per_seed, strict=True):
                results.append({"team": team, "estimator": name, "seed": seed, "tokens": tokens, **scores})
            print(line(name, [scores for scores, _ in per_seed], statistics.fmean(t for _, t in per_seed)), flush=True)
    write(results, options)
    if options.page:
        figures.publish("credit_fidelity", data(results))


def line(name: str, results: list[dict], tokens: float) -> str:
    """A row of the table: median and range over seeds."""
    cells = [f"{tokens:.0f}"]
    for column in COLUMNS:
        values = [result[column] for result in results]
        cells.append(f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})")
    return f"| {name} | " + " | ".join(cells) + " |"


def write(results: list[dict], options) -> None:
    """The table, the figures of every run, and a picture."""
    with open(options.output_dir / "credit_fidelity.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(results[0]))
        writer.writeheader()
        writer.writerows(results)
    draw_picture(results, options)


def data(results: list[dict]) -> dict:
    """Content of the data file: the figures of each team, estimator and seed."""
    runs: dict = {}
    for result in results:
        values = [round(float(result[column]), 4) for column in ("tokens", *COLUMNS)]
        runs.setdefault(result["team"], {}).setdefault(result["estimator"], []).append(values)
    return {
        "made": figures.made("python benchmarks/learning/credit_fidelity.py"),
        "columns": ["tokens", *COLUMNS],
        "runs": runs,
    }


def tables(measurements: dict) -> dict[str, str]:
    """Two teams with all columns, two with their fidelity, and how often `c3` is above the group baselines."""
    texts = {}
    for team in ("chain", "game"):
        lines = []
        for name, runs in measurements["runs"][team].items():
            results = [dict(zip(measurements["columns"], run, strict=True)) for run in runs]
            lines.append(line(name, results, statistics.fmean(run["tokens"] for run in results)))
        columns = ["estimator", *measurements["columns"]]
        texts[f"fidelity {team}"] = "\n".join([figures.markdown(columns, []), *lines])
    short = ("parallel", "orchestrated")
    rows = []
    for name in measurements["runs"]["parallel"]:
        cells = [short_cells(measurements["runs"][team][name]) for team in short]
        rows.append([name, *(cell for pair in cells for cell in pair)])
    columns = ["estimator", *(f"{team}: {column}" for team in short for column in ("tokens", "fidelity"))]
    texts["fidelity others"] = figures.markdown(columns, rows)
    rows = []
    for name in [name for name in measurements["runs"]["chain"] if name.startswith("c3")]:
        rows.append([name, *(seeds_above(runs, name) for runs in measurements["runs"].values())])
    texts["fidelity seeds"] = figures.markdown(["estimator", *measurements["runs"]], rows)
    return texts


def short_cells(runs: list[list[float]]) -> tuple[str, str]:
    """Tokens and fidelity: mean; median and range over seeds."""
    values = [fidelity for _, fidelity, *_ in runs]
    spread = f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"
    return f"{statistics.fmean(tokens for tokens, *_ in runs):.0f}", spread


def seeds_above(runs: dict[str, list], name: str) -> int:
    """Number of seeds in which an estimator has a higher fidelity than every group baseline."""
    return sum(
        run[1] > max(runs[baseline][seed][1] for baseline in GROUP_BASELINES) for seed, run in enumerate(runs[name])
    )


def draw_picture(results: list[dict], options) -> None:
    """Fidelity of each estimator, a panel for each team, a dot for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(options.teams), figsize=(3.2 * len(options.teams) + 2, 4.2), sharey=True, squeeze=False
    )
    for axis, team in zip(axes[0], options.teams, strict=True):
        for place, name in enumerate(reversed(options.estimators)):
            values = [run["fidelity"] for run in results if run["team"] == team and run["estimator"] == name]
            axis.plot(values, [place] * len(values), "o", color="#33628d", alpha=0.6)
        axis.set_yticks(range(len(options.estimators)), list(reversed(options.estimators)))
        axis.set_title(team)
        axis.set_xlim(-0.25, 1.0)
        axis.grid(axis="x", alpha=0.3)
        axis.set_xlabel("fidelity")
    figure.tight_layout()
    figure.savefig(options.output_dir / "credit_fidelity.png", dpi=110)


if __name__ == "__main__":
    main()
