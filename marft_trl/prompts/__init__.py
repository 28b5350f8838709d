# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""From observations to token ids: views, chat templates, tool calls, reasoning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .views import View, team_view

__all__ = ["View", "team_view"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import views

    return getattr(views, name)
