# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Extras on top of the core: inference servers, applications, reports, the sandbox, tasks and the command."""
