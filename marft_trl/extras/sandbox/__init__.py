# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A sandbox for untrusted Python programs, and the reward for code that runs in it."""

from .code import code_reward, get_code_reward
from .jail import JailError, Limits, Outcome, run_python


__all__ = ["JailError", "Limits", "Outcome", "code_reward", "get_code_reward", "run_python"]
