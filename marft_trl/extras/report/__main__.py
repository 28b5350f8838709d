# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Is the team worth it?

    python -m marft_trl.extras.report --config report.yaml
    python -m marft_trl.extras.report --experiment my_task.py:make --seeds 0 1 2 --workers 2 --output_dir report
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trl import TrlParser

from .cells import Cell, run_cell
from .comparison import as_markdown
from .experiment import load_experiment
from .runner import report


@dataclass
class ReportArguments:
    """Arguments of [`report`]."""

    experiment: str = field(
        metadata={"help": "'file.py:function' or 'module:function' that returns the `Experiment`."}
    )
    settings: dict | None = field(default=None, metadata={"help": "Arguments of the function, as JSON."})
    output_dir: str = field(default="report", metadata={"help": "Folder of runs, tables and pictures."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Seeds of the runs."})
    arms: list[str] | None = field(default=None, metadata={"help": "Arms besides the trained team (default: all)."})
    workers: int = field(default=1, metadata={"help": "Number of runs in parallel."})
    margin: float = field(default=0.02, metadata={"help": "Smallest difference in accuracy that matters."})


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--cell"]:  # one run, for `workers`
        values = json.loads(arguments[1])
        experiment = load_experiment(values["experiment"], values["settings"])
        run_cell(experiment, Cell(values["arm"], values["seed"], Path(values["folder"])), values["emptied"])
        return
    (args,) = TrlParser(ReportArguments).parse_args_and_config(arguments)
    print(as_markdown(report(**vars(args))))


if __name__ == "__main__":
    main()
