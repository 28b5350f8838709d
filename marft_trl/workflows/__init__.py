# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
from .base import Workflow, rehearse
from .sequential import Sequential


__all__ = ["Sequential", "Workflow", "rehearse"]
