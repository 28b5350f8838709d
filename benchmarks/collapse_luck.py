"""
How often a run whose team does not change is called a collapse, and how soon one that falls is noticed.

    python benchmarks/collapse_luck.py

Feeds simulated rewards to what watches a run: every episode of a batch of 128 is right with probability 0.5, and 200
batches make a run of `--runs`. Evaluations come every ten batches. Columns: trials in a run, share of runs in which
adapters were restored although nothing had fallen, and share of runs that fall to 0.15 after 100 batches in which all
of this was undone, with the batches that it took (median).

The second table is of runs that only warn, with other rewards: of 400 batches, 4 prompts with 8 episodes or 32 prompts
with one. Columns: share of runs in which a fall was said (calmly; capital letters need an evaluation), and the batch
(median). The team falls in those whose name says so, after 200 batches.
"""

import argparse
import contextlib
import logging
import statistics
import types

from marft_trl.runs import collapse
from marft_trl.runs.collapse import Falls

import numpy as np
import torch


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
        run = types.SimpleNamespace(
            metrics=types.SimpleNamespace(add=lambda *one: None),
            processes=self,
            settings=types.SimpleNamespace(group_size=lambda training: 1),
            state=types.SimpleNamespace(optimizer_step=0),
        )
        self.watch = collapse.Restoring(run, self.error, policies=self, best=self.best, act=self.act)
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


def solved_or_not(draws, share, usual):
    chances = np.where(draws.random(4) < share, usual, draws.random(4))
    return draws.random((4, 8)) < chances[:, None]


def chance(value, shape=(4, 8)):
    return lambda draws, batch: draws.random(shape) < (value(batch) if callable(value) else value)


REWARDS = {
    "1 of 500 right": chance(0.002, (32, 1)),
    "1 of 200 right": chance(0.005, (32, 1)),
    "1 of 100 right": chance(0.01, (32, 1)),
    "prompts mostly impossible": lambda draws, batch: solved_or_not(draws, 0.9, 0.0),
    "prompts nearly all solved": lambda draws, batch: solved_or_not(draws, 0.9, 1.0),
    "Student's t, 1.2 degrees": lambda draws, batch: draws.standard_t(1.2, (4, 8)),
    "Pareto, 1.2": lambda draws, batch: draws.pareto(1.2, (4, 8)),
    "log-normal by prompt": lambda draws, batch: np.exp(2 * draws.normal(size=(4, 1))) * draws.random((4, 8)),
    "1 of 300 loses 10": lambda draws, batch: np.where(draws.random((32, 1)) < 0.003, -10.0, 0.0),
    "one prompt of 8 episodes": lambda draws, batch: draws.random((1, 8)) < draws.random(),
    "half right": chance(0.5),
    "dense": lambda draws, batch: draws.normal(0.5, 0.1, (4, 8)),
    "two tasks, 8 batches each in turns": chance(lambda batch: 0.8 if batch // 8 % 2 else 0.2),
    "two tasks, 50 batches each in turns": chance(lambda batch: 0.8 if batch // 50 % 2 else 0.2),
    "in order of difficulty": chance(lambda batch: 0.9 - 0.002 * batch),
    "falls from 0.5 to 0.05": chance(lambda batch: 0.5 if batch < 200 else 0.05),
    "falls within 40 batches": chance(lambda batch: min(max(0.5 - (batch - 200) * 0.45 / 40, 0.05), 0.5)),
    "falls, dense": lambda draws, batch: draws.normal(0.5 if batch < 200 else 0.2, 0.1, (4, 8)),
}


def batch_of_fall(draw, number):
    """The batch after which a run says that it has fallen, or `None`."""
    draws, falls = np.random.default_rng(number), Falls(8, 0.1, 5.0)
    for batch in range(400):
        rewards = draw(draws, batch)
        falls.see(torch.tensor(rewards).reshape(-1), rewards.shape[1])
        if falls.has_lasted:
            return batch
    return None


def data(runs):
    print("\n| rewards | a fall is said | after batch |\n|---|---|---|")
    for name, draw in REWARDS.items():
        found = [batch_of_fall(draw, number) for number in range(runs)]
        known = [batch for batch in found if batch is not None]
        print(f"| {name} | {len(known) / runs:.0%} | {statistics.median(known) if known else '-'} |", flush=True)


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
    data(options.runs)


if __name__ == "__main__":
    main()
