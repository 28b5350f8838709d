# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""From dataset rows to episodes with rewards: generation, re-runs, reward functions."""
