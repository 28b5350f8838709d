"""Trains a team whose rewards fall while one of two processes has no signal; prints the trials of each."""

import os
import sys

from marft_trl.runs import collapse
from marft_trl.tiny import tiny_agents, tiny_dataset
from tests.helpers import team_trainer


calls = 0


def reward(completions, **kwargs):
    """Half a point, and from the sixth batch on none; groups of the second process have no signal."""
    global calls
    calls += 1
    spread = 0.02 if os.environ["RANK"] == "0" else 0.0
    return [(0.0 if calls >= 6 else 0.5) + spread * (place % 4) for place in range(len(completions))]


def main(model, folder):
    collapse.WINDOW, collapse.DROP = 2, 0.2
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
    settings |= {"on_collapse": "restore", "max_steps": 6, "use_cpu": True}
    trainer = team_trainer(
        model, folder, agents=tiny_agents(), reward_funcs=reward, settings=settings, train_dataset=tiny_dataset(64)
    )
    watch, trials = trainer.parts.collapse, []
    attempt = watch._try

    def trying(rows):
        trials.append((trainer.state.global_step, trainer.parts.state.micro_step % 4))
        return attempt(rows)

    watch._try = trying
    trainer.train()
    for line in trainer.parts.processes.gather([f"{trials}"]):
        print("TRIALS", line) if trainer.parts.processes.is_main else None


if __name__ == "__main__":
    main(*sys.argv[1:])
