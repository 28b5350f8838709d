# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Is the team worth it? Trains a team, single agents and teams with one thing changed, and compares them."""

from ...system.child_processes import ChildProcesses
from .comparison import save_picture, shown
from .experiment import Experiment, load_experiment
from .runner import report


__all__ = ["ChildProcesses", "Experiment", "load_experiment", "report", "save_picture", "shown"]
