"""
What a central critic explains, and what it costs. Each agent sees only its own observations, and the return depends on
what another agent saw. Only the critic learns.

    python benchmarks/learning/central_critic.py [--seeds 5] [--steps 25] [--page | --check]
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.tiny import tiny_model, tiny_tokenizer
from marft_trl.workflows import EnvironmentLoop

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers.utils import logging


# `figures` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures


LAST = 5  # batches that the explained variance is a mean of


class Secret:
    """The scout sees whether there is gold; the miner speaks without knowing, and both receive what there is."""

    def reset(self, gold, **row):
        self.gold, self.number = gold, 0
        return {"scout": "There is gold." if gold else "There is sand."}

    def whose_turn(self):
        return ("scout", "miner")[self.number % 2]

    def step(self, turns):
        self.number += 1
        return None, float(self.gold) if self.number == 4 else 0.0, self.number == 4


def run(sees, seed, steps):
    """Explained variance and seconds of a step."""
    tokenizer = tiny_tokenizer(("There", "is", "gold", "sand", "scout", "miner", "environment"))
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        args = MARFTConfig(
            folder,
            advantage="gae",
            critic="shared",
            critic_sees=sees,
            num_generations=1,
            per_device_train_batch_size=64,
            learning_rate=0.0,
            critic_learning_rate=3e-3,
            lr_scheduler_type="constant",
            max_completion_length=4,
            max_steps=steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
        )
        trainer = MARFTTrainer(
            model=tiny_model(len(tokenizer), seed=seed),
            processing_class=tokenizer,
            agents=[AgentSpec("scout"), AgentSpec("miner")],
            workflow=EnvironmentLoop(Secret, turns="one", shows="own"),
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "Dig.", "gold": draw.randint(0, 1)} for _ in range(2000)]),
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
        )
        start = time.process_time()
        trainer.train()
        seconds = (time.process_time() - start) / steps
    logs = [
        log["critic/explained_variance"] for log in trainer.state.log_history if "critic/explained_variance" in log
    ]
    return round(statistics.mean(logs[-LAST:]), 4), round(seconds, 3)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    options = figures.parse(parser, repeats='`"history"`, seed 0')
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.check:
        recorded = figures.load("central_critic")
        figures.compare(recorded, recorded["runs"]["history"][0][0], run("history", 0, options.steps)[0])
        return
    runs = {
        sees: [run(sees, seed, options.steps) for seed in range(options.seeds)] for sees in ("observation", "history")
    }
    measurements = {"made": figures.made("python benchmarks/learning/central_critic.py"), "runs": runs}
    print(tables(measurements)["central_critic"])
    if options.page:
        figures.publish("central_critic", measurements)


def tables(measurements):
    """Means and ranges over seeds of the explained variance, and medians of the seconds of a step."""
    rows = []
    for sees, runs in measurements["runs"].items():
        shares = [share for share, _ in runs]
        spread = f"{statistics.mean(shares):.2f} ({min(shares):.2f} - {max(shares):.2f})"
        rows.append([f'`"{sees}"`', spread, f"{statistics.median(seconds for _, seconds in runs):.2f}"])
    return {"central_critic": figures.markdown(["`critic_sees`", "explained variance", "CPU seconds of a step"], rows)}


if __name__ == "__main__":
    main()
