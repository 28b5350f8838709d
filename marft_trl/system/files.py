# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Files that a kill or a power cut leaves whole."""

from __future__ import annotations

import os
from pathlib import Path


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
