# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Trained teams in use: answers, streams, and episodes as datasets."""

from .events import Answer, Event, TextDelta, TurnEnded, TurnStarted
from .team import Team


__all__ = ["Answer", "Event", "Team", "TextDelta", "TurnEnded", "TurnStarted"]
