# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The command `marft`, as `python -m marft_trl`."""

import sys

from .extras.commands import main


if __name__ == "__main__":
    sys.exit(main())
