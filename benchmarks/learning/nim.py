"""
Self-play in the game of `examples/self_play.py`, over several seeds: winnable games that are not lost to a perfect
player, before training, after it, and after twice as many steps. The opponents in training are the same policy, past
copies of it, and a perfect player.

    python benchmarks/learning/nim.py [--opponents self copies perfect] [--seeds 5] [--steps 60] [--games 200]
        [--jobs 2] [--page | --check]
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.utils import logging


# The game is in the examples, and `figures` in the folder above
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures
import self_play


class Measure(TrainerCallback):
    """Records the shares of games not lost, greedy and sampled, at some steps."""

    def __init__(self, steps, measure):
        self.steps, self.measure, self.found = steps, measure, []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.steps:
            self.found.append(self.measure())


def run(opponent, seed, steps, games):
    """Shares `(greedy, sampled)` before training, after `steps` and after twice as many."""
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model, tokenizer = self_play.taught_model(seed)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/base")
        silent = {"disable_tqdm": True, "report_to": [], "logging_steps": 1000}
        trainer = self_play.make_trainer(model, tokenizer, f"{folder}/out", opponent, seed, 2 * steps, **silent)

        def measure():
            trainer.save_model(f"{folder}/team")
            arguments = {"folder": f"{folder}/team", "model": f"{folder}/base", "tokenizer": tokenizer, "count": games}
            return [self_play.share_not_lost(**arguments, greedy=greedy) for greedy in (True, False)]

        measured = Measure([steps, 2 * steps], measure)
        before = measure()
        trainer.add_callback(measured)
        trainer.train()
    return [before, *measured.found]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opponents", nargs="+", default=["self", "copies", "perfect"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--games", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    options = figures.parse(parser, repeats="the same policy, seed 0")
    if options.check:
        recorded = figures.load("self_play")
        figures.compare(recorded, recorded["runs"]["self"][0], run("self", 0, options.steps, options.games))
        return
    runs = {opponent: [] for opponent in options.opponents}
    jobs = [(opponent, seed) for opponent in options.opponents for seed in range(options.seeds)]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        started = [(*job, pool.submit(run, *job, options.steps, options.games)) for job in jobs]
        for opponent, seed, running in started:
            runs[opponent].append(running.result())
            print(f"{opponent}, seed {seed}: {runs[opponent][-1]}", file=sys.stderr, flush=True)
    measurements = {"made": figures.made("python benchmarks/learning/nim.py"), "steps": options.steps, "runs": runs}
    print(tables(measurements)["self_play"])
    if options.page:
        figures.publish("self_play", measurements)


def tables(measurements):
    """Medians and ranges over seeds of the shares of games not lost, with greedy and with sampled moves."""
    names = {"self": "the same policy", "copies": "past copies", "perfect": "a perfect player"}
    rows = []
    for opponent, runs in measurements["runs"].items():
        for index, moves in enumerate(("greedy", "sampled")):
            shares = [[measured[moment][index] for measured in runs] for moment in range(3)]
            cells = [f"{statistics.median(values):.1%} ({min(values):.1%} - {max(values):.1%})" for values in shares]
            rows.append([names[opponent], moves, *cells])
    steps = measurements["steps"]
    columns = ["opponent in training", "moves", "before", f"{steps} steps", f"{2 * steps} steps"]
    return {"self_play": figures.markdown(columns, rows)}


if __name__ == "__main__":
    main()
