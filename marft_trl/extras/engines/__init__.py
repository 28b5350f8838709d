# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Additional engines: vLLM servers, and a sharded base (FSDP2)."""

from .own_server import vllm_command
from .setup import Servers


__all__ = ["Servers", "vllm_command"]
