# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Applications that ask the agents of a team over HTTP: an endpoint for each episode, and programs."""

from .program import AppResult
from .session import AppEndpoint


__all__ = ["AppEndpoint", "AppResult"]
