# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Chat APIs over HTTP: train applications that call the agents of a team, and serve teams."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .external_app import ExternalApp
    from .program import AppResult, Program
    from .routing import AppRequest, BySystemPrompt, ByTools
    from .served_team import ServeSettings, application, serve
    from .session import AppEndpoint

_MODULES = {
    "AppEndpoint": "session",
    "ExternalApp": "external_app",
    **dict.fromkeys(("AppRequest", "BySystemPrompt", "ByTools"), "routing"),
    **dict.fromkeys(("AppResult", "Program"), "program"),
    **dict.fromkeys(("ServeSettings", "application", "serve"), "served_team"),
}
__all__ = [
    "AppEndpoint",
    "AppRequest",
    "AppResult",
    "BySystemPrompt",
    "ByTools",
    "ExternalApp",
    "Program",
    "ServeSettings",
    "application",
    "serve",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: training an application needs no aiohttp."""
    if name not in _MODULES:
        hint = ". It is named `ServeSettings` now" if name == "GatewaySettings" else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
