# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""From observations to token ids: views, chat templates, tool calls, reasoning."""

from .views import View, team_view


__all__ = ["View", "team_view"]
