# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What stands on the core: inference servers, applications, reports, the sandbox, tasks and the command."""
