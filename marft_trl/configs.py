# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments: the public door to `config`."""

from .config.marft_config import MARFTConfig


__all__ = ["MARFTConfig"]
