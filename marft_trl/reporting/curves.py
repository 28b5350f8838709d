# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Learning curves as CSV and PNG files."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path


def save_learning_curve(
    log_history: Sequence[dict], folder: str | os.PathLike, columns: Sequence[str] = ("reward", "entropy")
) -> None:
    """
    Write `learning_curve.csv` and `learning_curve.png` (one panel per column).

    Args:
        log_history (`Sequence[dict]`):
            `trainer.state.log_history`.
        folder (`str` or `os.PathLike`):
            Folder to write to.
        columns (`Sequence[str]`, *optional*, defaults to `("reward", "entropy")`):
            Names of the metrics to write. Metrics of an agent are named `agents/<name>/...`.

    Raises:
        ImportError: matplotlib is missing (`pip install marft-trl[plots]`). The CSV file is written nevertheless.
    """
    folder = Path(folder)
    entries = [entry for entry in log_history if any(column in entry for column in columns)]
    with open(folder / "learning_curve.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["step", *columns], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(entries)

    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.5 * len(columns)))
    for position, column in enumerate(columns, start=1):
        axes = figure.add_subplot(len(columns), 1, position)
        points = [(entry["step"], entry[column]) for entry in entries if entry.get(column) is not None]
        axes.plot([step for step, _ in points], [value for _, value in points])
        axes.set_ylabel(column)
        axes.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(folder / "learning_curve.png", dpi=120)
