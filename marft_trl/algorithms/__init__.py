# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What users choose by name: baselines, credit, levels, critics. And the formulas, as pure functions of tensors."""
