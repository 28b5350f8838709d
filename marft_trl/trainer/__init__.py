# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer. Its names are imported when first used, so that a light import stays light."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from ..adapters.files import load_adapters
    from .marft_trainer import MARFTTrainer


__all__ = ["MARFTTrainer", "load_adapters"]


def __getattr__(name: str) -> Any:
    modules = {"MARFTTrainer": "marft_trl.trainer.marft_trainer", "load_adapters": "marft_trl.adapters.files"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(modules[name]), name)
    globals()[name] = value
    return value
