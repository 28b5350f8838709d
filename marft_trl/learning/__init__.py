# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""From episodes to gradients: credit, advantages, rows, micro-batches, log-probabilities, losses, updates."""
