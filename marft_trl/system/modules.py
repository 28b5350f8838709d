# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Modules from files of users: scripts of teams, experiments."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


_LOADED: set[str] = set()


def module_of(file: Path) -> ModuleType:
    """
    The module of a Python file, executed anew.

    What it imports from beside it is found, and so is the source of its classes, which runs are compared by. It has
    the name of the file, unless a module from elsewhere has this name already.

    Args:
        file (`Path`): the file.

    Raises:
        ImportError: it is no Python file.
    """
    file = file.resolve()
    if (folder := str(file.parent)) not in sys.path:
        sys.path.insert(0, folder)
    before = sys.modules.get(file.stem)
    is_free = before is None or file.stem in _LOADED or getattr(before, "__file__", None) == str(file)
    name = file.stem if is_free else "marft_script"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{str(file)!r} is no Python script.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _LOADED.add(name)
    spec.loader.exec_module(module)
    return module
