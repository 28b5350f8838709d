# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Engines beside the trainer's own: vLLM servers, and a base in shards (FSDP2)."""

from .own_server import vllm_command
from .setup import Servers


__all__ = ["Servers", "vllm_command"]
