# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft rehearse team.py`: the workflow once, with made-up turns."""

from ..reporting.transcripts import format_episode
from ..trainer import MARFTTrainer
from .train import TrainerCommand


class Command(TrainerCommand):
    """Print an episode on the first row of the dataset, in which every turn is made up."""

    def on(self, trainer: MARFTTrainer, path: str, code: str | None) -> None:
        row = dict(next(iter(trainer.train_dataset)))
        print(format_episode(trainer.parts.planner.rehearse(row).episode, title="rehearsal, made-up turns"))
