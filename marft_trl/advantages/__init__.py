# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""From rewards to advantages: credit, baselines, and estimation with a critic."""
