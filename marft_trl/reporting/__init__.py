# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Reports for people: metrics, evaluation, transcripts, plans, model cards."""
