# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The base in shards (FSDP2): adapters that stay whole, and passes in step."""
