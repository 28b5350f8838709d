# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
from ..episodes.rehearsal import rehearse
from .base import Workflow, rebuild, together
from .by_column import ByColumn
from .environment import Environment, EnvironmentLoop
from .external_app import ExternalApp
from .graph import Graph
from .orchestrated import Orchestrated
from .ready_made import Debate, MixtureOfAgents, UntilApproved
from .sequential import Sequential


__all__ = [
    "ByColumn",
    "Debate",
    "Environment",
    "EnvironmentLoop",
    "ExternalApp",
    "Graph",
    "MixtureOfAgents",
    "Orchestrated",
    "Sequential",
    "UntilApproved",
    "Workflow",
    "rebuild",
    "rehearse",
    "together",
]
