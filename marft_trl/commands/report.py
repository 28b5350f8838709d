# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft report`: is the team worth it? The arguments are those of `python -m marft_trl.report`."""

from __future__ import annotations

from collections.abc import Sequence

from ..report.__main__ import main
from .command import BaseCommand


class Command(BaseCommand):
    """Compare a team with what it should be better than."""

    def main(self, argv: Sequence[str]) -> int | None:
        main(argv)
        return 0
