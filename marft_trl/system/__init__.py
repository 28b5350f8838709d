# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Processes, threads, time limits, randomness and secrets: what users' code and machines do to a run."""
