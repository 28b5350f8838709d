# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Episodes: the record of what happened, the handle that a workflow holds, and what runs many of them at once."""

from .live import LiveEpisode
from .records import TOOL, EndOfEpisode, Episode, Feedback, RequestedTurn, Seen, Turn, joint_actions, joint_steps


__all__ = [
    "TOOL",
    "EndOfEpisode",
    "Episode",
    "Feedback",
    "LiveEpisode",
    "RequestedTurn",
    "Seen",
    "Turn",
    "joint_actions",
    "joint_steps",
]
