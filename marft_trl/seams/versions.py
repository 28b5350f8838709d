# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
The versions of the packages that this one builds on, and what differs between them.

`pyproject.toml` has the same lowest versions, and the next major version as a ceiling. `make test-versions` runs the
tests with the lowest and with the newest ones.
"""

from __future__ import annotations

import functools
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from .logs import get_logger


logger = get_logger(__name__)

# The lowest version that works, and the newest that the tests have run with.
TESTED = {
    "trl": ("1.16", "1.16"),
    "transformers": ("5.16", "5.24"),
    "peft": ("0.20", "0.21"),
    "accelerate": ("1.12", "1.15"),
    "datasets": ("4.8", "5.2"),
    "bitsandbytes": ("0.49", "0.50"),
    "evaluate": ("0.4.5", "0.4.6"),
    "torch": ("2.11", "2.14"),
}


def installed_version(package: str) -> str | None:
    """
    Version of a package, by the name of its distribution; `None` if there is none. A checkout on `PYTHONPATH` has no
    metadata, or those of another version, so the code that is loaded comes first.
    """
    module = sys.modules.get(package.replace("-", "_"))
    loaded = vars(module).get("__version__") if module is not None else None  # `getattr` may load a lazy module
    try:
        return str(loaded) if loaded else version(package)
    except PackageNotFoundError:
        return None


def release(text: str) -> tuple[int, int]:
    """Major and minor version. Patches are neither warned of nor asked for."""
    major, minor, *_ = (*Version(text).release, 0)
    return major, minor


def newer_than_tested() -> dict[str, str]:
    """Installed versions by package, of those that are newer than what the tests have run with."""
    found = {name: installed_version(name) for name in TESTED}
    return {name: text for name, text in found.items() if text and release(text) > release(TESTED[name][1])}


@functools.cache
def warn_of_newer_versions() -> None:
    """Log one line, once in a process, if packages are newer than what the tests have run with."""
    newer = [f"{name} {its} (tested up to {TESTED[name][1]})" for name, its in newer_than_tested().items()]
    if newer:
        logger.warning(
            f"marft_trl has not been tested with {', '.join(newer)}. It is likely to work. If something fails, "
            "install the tested version and report it."
        )


def is_checkpointing(model: Any) -> bool:
    """Whether a model checkpoints gradients. transformers renamed the property in 5.23, like the field."""
    name = "is_activation_checkpointing"
    return bool(getattr(model, name) if hasattr(model, name) else model.is_gradient_checkpointing)


def checkpointing_fields(args: Any) -> list[str]:
    """
    Names of the field of training arguments that turns gradient checkpointing on. transformers renamed it in 5.23 and
    keeps the former name until version 6; before, there is only that one.
    """
    return [name for name in ("gradient_checkpointing", "activation_checkpointing") if hasattr(args, name)]
