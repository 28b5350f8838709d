# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft eval team.py`: the metrics of the team that a script has trained, on its evaluation dataset."""

import re
from collections.abc import Sequence
from pathlib import Path

from ..metrics.intervals import interval
from ..trainer import MARFTTrainer
from ..weights.adapters import load_adapter_weights
from ..weights.manifest import MANIFEST_NAME
from .command import UsageError
from .train import TrainerCommand


# Metrics that are printed after all others, in this order
_LAST = (
    "agents/",
    "completions/",
    "entropy|clip_ratio|frac_|context/",
    "loss$|_time$|num_tokens|runtime|per_second|epoch",
)


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
        print(f"Evaluating the team in {folder}", flush=True)
        metrics = trainer.evaluate()
        width = max(map(len, metrics))
        for name in sorted(metrics, key=_place):  # in the order of `evaluate` otherwise
            value, scores = metrics[name], trainer.parts.reporter.question_means.get(name)
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            print(f"{name:{width}}  {text}{_interval_of(scores) if scores else ''}")


def _place(metric: str) -> int:
    """How far down a metric is printed: what the team is worth first, and last what the evaluation took."""
    return next((place for place, pattern in enumerate(_LAST, start=1) if re.search(pattern, metric)), 0)


def _interval_of(scores: Sequence[float]) -> str:
    bounds = (0.0, 1.0) if min(scores) >= 0.0 and max(scores) <= 1.0 else None
    found = interval(scores, bounds=bounds)
    return f"  [{found.low:.4g}, {found.high:.4g}]"
