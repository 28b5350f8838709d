# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments in files, logs and copies: secrets stay where they were given."""

from __future__ import annotations

import copy

from ..system.redaction import is_published, without_paths, without_secrets


class Copies:
    """Mixin: secrets are kept in copies of the config, and removed from files and logs."""

    def __getstate__(self):
        # The Trainer pickles its arguments into `training_args.bin`, which is uploaded, so secrets are removed.
        state = {name: without_secrets(value) for name, value in self.__dict__.items()}
        return {**(without_paths(state) if is_published.get() else state), "hub_token": None}

    def to_dict(self):
        # Trackers log this dictionary, so secrets are removed
        return {name: without_secrets(value) for name, value in super().to_dict().items()}

    def __deepcopy__(self, memo):
        # By default, `copy` uses `__getstate__`, which would remove the token from the copy.
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __copy__(self):
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone
