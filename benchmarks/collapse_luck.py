"""
How often a run whose team does not change is called a collapse, and how soon one that falls is noticed.

    python benchmarks/collapse_luck.py

Feeds simulated rewards to what watches a run: every episode of a batch of 128 is right with probability 0.5, and 200
batches make a run of `--runs`. Evaluations come every ten batches. Columns: trials in a run, share of runs in which
adapters were restored although nothing had fallen, and share of runs that fall to 0.15 after 100 batches in which all
of this was undone, with the batches that it took (median).
"""

import argparse
import contextlib
import logging
import statistics
import types

import numpy as np
import torch

from marft_trl.trainer import collapse


class Adapters:
    """Copies of adapters without weights."""

    def __init__(self, count):
        self.names, self.adapters = [f"agent-{number}" for number in range(count)], []

    def take(self):
        self.adapters = self.names

    def restore(self, name):
        self.restored = True

    def weights(self, name):
        return []


class Run:
    """A run in which each episode is right with some probability; all adapters fall together."""

    have_gradients, is_main = False, True

    def __init__(self, draws, count, evaluated, episodes=128):
        self.draws, self.episodes, self.evaluated = draws, episodes, evaluated
        self.chance, self.now, self.acted = 0.5, 0.5, 0
        self.best, self.count, self.step = Adapters(count), count, 0
        args = types.SimpleNamespace(on_collapse="restore", collapse_drop=0.1, collapse_window=8)
        self.watch = collapse.Collapse(
            best=self.best,
            policies=self,
            act=self.act,
            forget=lambda adapters, step: None,
            error_of_evaluation=self.error,
            step=lambda: self.step,
            args=args,
            metrics=types.SimpleNamespace(add=lambda *one: None),
            processes=self,
        )
        self.watch.on_train_begin(None, None, None)

    def gather(self, items):
        return items

    def agents_of(self, name):
        return [name]

    @contextlib.contextmanager
    def with_weights(self, name, weights):
        kept = self.now
        if self.count == 1 or kept != self.chance:  # the last of them brings all back
            self.now = self.chance
        yield
        self.now = kept

    def rewards(self, count):
        return torch.tensor(self.draws.random(count) < self.now, dtype=torch.float)

    def act(self, rows):
        self.acted += 1
        return self.rewards(self.episodes)

    def error(self):
        return 0.5 / self.evaluated**0.5

    def batch(self):
        """Whether adapters were restored."""
        self.step += 1
        is_undone = self.watch.is_undone(types.SimpleNamespace(drawn=None, rewards=self.rewards(self.episodes)), [{}])
        if self.evaluated and self.step % 10 == 0:
            state = types.SimpleNamespace(global_step=self.step, max_steps=10**9)
            reward = self.rewards(self.evaluated).mean().item()
            self.watch.on_evaluate(None, state, None, {"eval_reward": reward})
        return is_undone


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    collapse.logger = logging.getLogger("quiet")
    draws = np.random.default_rng(0)
    print("| adapters | evaluation episodes | trials in a run | wrongly restored | fall undone | batches |")
    print("|---|---|---|---|---|---|")
    for count in (1, 2, 4, 8):
        for evaluated in (0, 64, 200, 500):
            trials, wrong, found = [], 0, []
            for _ in range(options.runs):
                still = Run(draws, count, evaluated)
                wrong += sum(still.batch() for _ in range(200)) > 0
                trials.append(still.acted / (count + 2 if count > 1 else 2))
                falls = Run(draws, count, evaluated)
                [falls.batch() for _ in range(100)]
                falls.now = 0.15
                found.append(next((number for number in range(1, 51) if falls.batch()), None))
            known = [number for number in found if number is not None]
            shares = f"{wrong / options.runs:.0%} | {len(known) / options.runs:.0%}"
            median = f"{statistics.median(known):g}" if known else "-"
            print(
                f"| {count} | {evaluated or '-'} | {statistics.mean(trials):.1f} | {shares} | {median} |", flush=True
            )


if __name__ == "__main__":
    main()
