# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer."""

from ..adapters.files import load_adapters
from .marft_trainer import MARFTTrainer


__all__ = ["MARFTTrainer", "load_adapters"]
