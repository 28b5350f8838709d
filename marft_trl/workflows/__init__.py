# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Workflows: who acts next, and what each agent sees."""

from ..episodes.collector import rehearse
from .base import Workflow, rebuild, together
from .environment import Environment, EnvironmentLoop
from .orchestrated import Orchestrated
from .ready_made import ByColumn, Debate, Graph, MixtureOfAgents, Sequential, UntilApproved


__all__ = [
    "ByColumn",
    "Debate",
    "Environment",
    "EnvironmentLoop",
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
