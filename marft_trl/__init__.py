# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Multi-agent reinforcement fine-tuning of LLM teams for the Hugging Face stack.

As in TRL, names are imported when they are first used, so that `import marft_trl` loads no model library.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from .seams.bitsandbytes import load_bitsandbytes_when_used


if TYPE_CHECKING:
    from .adapters.manifest import TeamManifest
    from .agents import AgentSpec
    from .config.marft_config import MARFTConfig
    from .episodes import Episode, LiveEpisode, Turn
    from .rewards.endpoint import endpoint_reply
    from .runs.run import RunInterrupted
    from .team import Team
    from .trainer import MARFTTrainer, load_adapters
    from .workflows import Sequential, Workflow


__version__ = "0.4.0.dev0"
_MODULES = {
    "AgentSpec": "agents",
    "Episode": "episodes",
    "LiveEpisode": "episodes",
    "MARFTConfig": "configs",
    "MARFTTrainer": "trainer",
    "endpoint_reply": "rewards.endpoint",
    "RunInterrupted": "runs.run",
    "Sequential": "workflows",
    "Team": "team",
    "TeamManifest": "adapters.manifest",
    "Turn": "episodes",
    "Workflow": "workflows",
    "load_adapters": "adapters.files",
}
__all__ = [
    "AgentSpec",
    "Episode",
    "LiveEpisode",
    "MARFTConfig",
    "MARFTTrainer",
    "RunInterrupted",
    "Sequential",
    "Team",
    "TeamManifest",
    "Turn",
    "Workflow",
    "endpoint_reply",
    "load_adapters",
]


load_bitsandbytes_when_used()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
