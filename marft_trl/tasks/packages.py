# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Packages that tasks come from, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any


def load(module: str, package: str, what: str) -> Any:
    """
    Import a module of a package of tasks.

    Args:
        module (`str`): name of the module.
        package (`str`): name of the package on PyPI.
        what (`str`): what needs it, for the message.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise ImportError(
            f"{what} needs the package {package!r}, which is not installed: `pip install {package}`, or all packages "
            'of tasks with `pip install "marft-trl[tasks]"`.'
        ) from error
