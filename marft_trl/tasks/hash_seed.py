# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Calls in a process whose hash seed is 0, for what depends on the order of sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


# The first entry of the path is the current folder, whose files must not stand in for modules
_CODE = """
import sys
sys.path.pop(0)
import importlib, json
place, function, file = sys.argv[1:4]
try:
    found = {"result": getattr(importlib.import_module(place), function)(**json.load(sys.stdin))}
except ValueError as error:
    found = {"error": str(error)}
with open(file, "w", encoding="utf-8") as written:
    json.dump(found, written)
"""


def is_fixed() -> bool:
    """Whether this process has the hash seed 0. A variable that was set later changes nothing."""
    return not sys.flags.hash_randomization


def call_with_fixed_hashes(place: str, function: str, arguments: dict[str, Any]) -> Any:
    """
    The result of `place.function(**arguments)` in a new process with the hash seed 0. Arguments and result are those
    that JSON can hold.

    Raises:
        ValueError: the function has raised it.
        RuntimeError: the process has failed; the message has the end of what it wrote.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path if isinstance(entry, str))
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-c", _CODE, place, function, str(file)]
        done = subprocess.run(  # noqa: S603
            command, check=False, capture_output=True, text=True, env=environment, input=json.dumps(arguments)
        )
        if done.returncode:
            raise RuntimeError(f"`{place}.{function}` has failed in a process of its own:\n{done.stderr[-2000:]}")
        found = json.loads(file.read_text(encoding="utf-8"))
    if "error" in found:
        raise ValueError(found["error"])
    return found["result"]
