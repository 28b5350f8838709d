# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft eval team.py`: the metrics of the team that a script has trained, on its evaluation dataset."""

from pathlib import Path

from ..trainer import MARFTTrainer
from ..weights.adapters import load_adapter_weights
from ..weights.manifest import MANIFEST_NAME
from .command import UsageError
from .train import TrainerCommand


class Command(TrainerCommand):
    """Evaluate a team with the weights in its output folder."""

    def on(self, trainer: MARFTTrainer, path: str, code: str | None) -> None:
        folder = Path(trainer.args.output_dir or ".")
        if not (folder / MANIFEST_NAME).is_file():
            raise UsageError(f"There is no team in {folder} yet: `marft train {path}` trains it.")
        if trainer.eval_dataset is None:
            raise UsageError(f"{path} has no `eval_dataset`. Pass one to the trainer.")
        if not trainer.policies.has_adapters:
            raise UsageError(f"The agents of {path} share one fully trained policy: pass {folder} as its model.")
        missing = [name for name in trainer.policies.names if not (folder / name).is_dir()]
        if missing:
            raise UsageError(f"The team in {folder} is another one: it has no adapter {missing[0]!r}.")
        for name in trainer.policies.names:
            load_adapter_weights(trainer.model, name, folder / name)
        metrics = trainer.evaluate()
        width = max(map(len, metrics))
        for name, value in sorted(metrics.items()):
            print(f"{name:{width}}  {value:.4g}" if isinstance(value, float) else f"{name:{width}}  {value}")
