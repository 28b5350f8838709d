# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft plan team.py`: what a run will do."""

from ..trainer import MARFTTrainer
from .train import TrainerCommand


class Command(TrainerCommand):
    """Print the plan of a run."""

    def on(self, trainer: MARFTTrainer, path: str, code: str | None) -> None:
        print(trainer.plan())
