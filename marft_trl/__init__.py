# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Multi-agent reinforcement fine-tuning of LLM teams for the Hugging Face stack."""

from .agents import AgentSpec
from .configs import MARFTConfig
from .episodes import Episode, Turn
from .manifest import TeamManifest
from .team import Team
from .trainer import MARFTTrainer, load_adapters
from .workflows import Sequential, Workflow


__version__ = "0.2.0.dev0"
__all__ = [
    "AgentSpec",
    "Episode",
    "MARFTConfig",
    "MARFTTrainer",
    "Sequential",
    "Team",
    "TeamManifest",
    "Turn",
    "Workflow",
    "load_adapters",
]
