# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What a person is told of a run: metrics, evaluation, transcripts, plans, model cards."""
