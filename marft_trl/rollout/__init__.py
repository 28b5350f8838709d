# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""From dataset rows to episodes with rewards: prompts, generation, re-runs, reward functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from ..servers.command import vllm_command

__all__ = ["vllm_command"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from ..servers import command

        return getattr(command, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
