# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The settings of a run, their defaults and what goes with what."""
