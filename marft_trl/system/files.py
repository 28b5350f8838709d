# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Files that survive a kill or a power cut, the limit of open files, and modules and sources of users' files."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


_MOST_OPEN = (65_536, 10_240)  # limits of open files that are tried, in this order; the second one is macOS's largest


def spare_files() -> int:
    """Raise the limit of open files of this process as far as possible. Returns how many more may be open."""
    if os.name != "posix":
        return _MOST_OPEN[0]
    import resource

    for most in _MOST_OPEN:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        if soft != resource.RLIM_INFINITY and soft < allowed:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (_MOST_OPEN[0] if soft == resource.RLIM_INFINITY else soft) - len(os.listdir("/dev/fd"))


def write_atomically(path: str | Path, text: str) -> None:
    """Write a file so that a kill at any instant leaves either the old or the new contents, also on the disk."""
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable. Systems that cannot open folders (Windows) need no such call."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_LOADED: set[str] = set()


def import_file(file: Path) -> ModuleType:
    """
    Import the module of a Python file, and execute it again if it was imported before. It can import modules next to
    it, and `inspect` finds its source, by which runs are compared. Its name is that of the file, unless a module from
    elsewhere has this name. Raises an `ImportError` if it is no Python file.
    """
    file = file.resolve()
    if (folder := str(file.parent)) not in sys.path:
        sys.path.insert(0, folder)
    before = sys.modules.get(file.stem)
    is_free = before is None or file.stem in _LOADED or getattr(before, "__file__", None) == str(file)
    name = file.stem if is_free else "marft_script"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{str(file)!r} is not a Python script.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _LOADED.add(name)
    spec.loader.exec_module(module)
    return module


def read_source(function: Any) -> str:
    """
    Source of a function or class; an `OSError` or `TypeError` if there is none. Garbage collection is off meanwhile:
    CPython 3.11 fails if a finalizer parses at the same time (https://github.com/python/cpython/issues/106905).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return inspect.getsource(function)
    finally:
        if collects:
            gc.enable()
