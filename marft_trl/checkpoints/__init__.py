# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints on disk: the commit of a checkpoint, the folder of a run, and changes between a checkpoint and a run."""
