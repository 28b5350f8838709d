# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The course of a run: checkpoints, what a resume compares, signals, collapse."""
