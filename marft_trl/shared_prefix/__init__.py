# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Passes in which rows share what they have in common at their beginning."""
