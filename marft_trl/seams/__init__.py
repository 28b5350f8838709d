# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Every place that changes how TRL, PEFT, transformers or bitsandbytes work, and every private name of theirs that is
used outside of an override. Each entry says which version it was checked against, what upstream does, and why.
The tests that guard the entries are in `tests/test_seams.py`, under the name of the entry.

Nothing else of this package is imported here, so that every module may use it.
"""
