# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Inference servers (vLLM) that generate turns: requests, the adapters on them, and checks of what they answer."""
