# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Serving a team over HTTP, in the form of OpenAI's API. It needs aiohttp: `pip install "marft-trl[serve]"`."""

from .app import application, serve
from .settings import GatewaySettings


__all__ = ["GatewaySettings", "application", "serve"]
