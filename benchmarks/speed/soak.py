"""
A long run with injected errors: memory, open files and threads stay flat, every agent trains, nothing is NaN.

    python benchmarks/speed/soak.py [--steps 5000] [--output FOLDER]

A team of three, whose episodes differ in length, on an embedded model of one small layer. One reward in a hundred
raises, one episode in a hundred fails; both are skipped. A checkpoint is saved every 50 steps, and two are kept.
Prints the growth after a tenth of the steps, and writes `soak.json` and `soak.png`.
"""

import argparse
import json
import os
import random
import tempfile
import time
import warnings
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.tiny import tiny_dataset, tiny_model, tiny_tokenizer
from marft_trl.workflows import Workflow

import matplotlib
import torch
from peft import LoraConfig
from transformers import TrainerCallback


matplotlib.use("Agg")

import matplotlib.pyplot as plt


EVERY = 25  # steps between two measurements
NAMES = ["planner", "solver", "judge"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}


class Unsteady(Workflow):
    """A planner, and up to three turns of others. One episode in a hundred fails."""

    async def run(self, episode):
        await episode.turn("planner")
        for _ in range(random.randint(1, 3)):
            await episode.turn(random.choice(NAMES[1:]))
        if random.random() < 0.01:
            raise ConnectionError("the service of this episode does not answer")


def unsteady_reward(completions, **kwargs):
    """A reward that differs between completions, and raises for one completion in about a hundred."""
    sums = [sum(map(ord, str(completion))) for completion in completions]
    if any(total % 97 == 0 for total in sums):
        raise ConnectionError("the judge does not answer")
    return [float(total % 7) for total in sums]


class Measure(TrainerCallback):
    """Memory in MiB, open files and threads of this process."""

    def __init__(self):
        self.rows = []
        self.start = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % EVERY == 0:
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            memory, threads = int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"])
            files, seconds = len(os.listdir("/proc/self/fd")), time.monotonic() - self.start
            self.rows.append([state.global_step, memory, files, threads, seconds])


def make_trainer(folder: Path, steps: int, measure: Measure) -> MARFTTrainer:
    tokenizer = tiny_tokenizer()
    args = MARFTConfig(
        str(folder / "run"),
        max_steps=steps,
        num_train_epochs=steps,
        per_device_train_batch_size=8,
        num_generations=4,
        num_iterations=2,
        learning_rate=1e-4,
        beta=0.01,
        logging_steps=EVERY,
        save_strategy="steps",
        save_steps=50,
        save_total_limit=2,
        on_episode_error="skip",
        max_skipped_share=1.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return MARFTTrainer(
        model=tiny_model(len(tokenizer), **SIZES),
        processing_class=tokenizer,
        reward_funcs=unsteady_reward,
        args=args,
        train_dataset=tiny_dataset(500),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
        agents=[AgentSpec(name, max_completion_length=8) for name in NAMES],
        workflow=Unsteady(),
        callbacks=[measure],
    )


def picture(rows: list, path: Path) -> None:
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(8, 6))
    for axis, column, label in zip(axes, (1, 2, 3), ("memory (MiB)", "open files", "threads"), strict=True):
        axis.plot([row[0] for row in rows], [row[column] for row in rows])
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("optimizer steps")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--output", type=Path, default=Path("benchmark-output/soak"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    measure = Measure()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), options.steps, measure)
        before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
        left = sorted(path.name for path in (Path(folder) / "run").glob("checkpoint-*"))
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(before[name], value)}
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    first = next(row for row in measure.rows if row[0] >= options.steps // 10)
    last = measure.rows[-1]
    result = {
        "steps": options.steps,
        "minutes": round(last[4] / 60, 1),
        "memory in MiB, after a tenth and at the end": [round(first[1], 1), round(last[1], 1)],
        "open files": [first[2], last[2]],
        "threads": [first[3], last[3]],
        "agents that moved": [name for name in NAMES if any(f".{name}." in parameter for parameter in moved)],
        "base weights that moved": sum("lora_" not in parameter for parameter in moved),
        "logs with a NaN": sum(any(value != value for value in entry.values()) for entry in log),
        "episodes skipped, mean share": sum(entry.get("episodes/skipped", 0.0) for entry in log) / len(log),
        "rewards skipped, mean share": sum(entry.get("rewards/unsteady_reward/skipped", 0.0) for entry in log)
        / len(log),
        "checkpoints left": left,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "soak.json").write_text(json.dumps({**result, "rows": measure.rows}))
    picture(measure.rows, options.output / "soak.png")
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
