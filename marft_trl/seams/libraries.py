# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Small seams: what other libraries log, their versions, and parsers of argparse."""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import warnings
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from accelerate import PartialState
from accelerate.logging import MultiProcessAdapter
from packaging.version import Version


# Warnings that users of a team cannot act on, as patterns of messages, with their causes
_NOISE = {
    # TRL (1.16) asks models for the name that transformers (5.23) has replaced, at each switch of checkpointing
    r"`is_gradient_checkpointing` is deprecated": FutureWarning,
    # `dataloader_pin_memory` of transformers is on by default, also without a device that it would help
    r"'pin_memory' argument is set as true but no accelerator is found": UserWarning,
}
# bitsandbytes (0.50) looks for a kernel on the Hub when it is imported on a CPU, and says that it found none
_KERNEL = "Failed to load CPU gemm_4bit_forward"


class _Adapter(MultiProcessAdapter):
    """Logger of accelerate (1.15) that names the process only where there are several."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        msg, kwargs = super().process(msg, kwargs)
        return str(msg).removeprefix("[RANK 0] ") if _is_alone() else msg, kwargs


def _is_alone() -> bool:
    return PartialState().num_processes == 1


def get_logger(name: str) -> MultiProcessAdapter:
    """Like `accelerate.logging.get_logger`: log a message once, whatever the number of processes."""
    return _Adapter(logging.getLogger(name), {})


def hush() -> None:
    """Filter out warnings of other libraries that a user cannot act on. All other warnings are shown."""
    for message, category in _NOISE.items():
        warnings.filterwarnings("ignore", message=message, category=category)
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_KERNEL)


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
    """Version of a distribution, if installed. Metadata comes last: a checkout on `PYTHONPATH` may lack it."""
    module = sys.modules.get(package.replace("-", "_"))
    loaded = vars(module).get("__version__") if module is not None else None  # `getattr` may load a lazy module
    try:
        return str(loaded) if loaded else _metadata_version(package)
    except PackageNotFoundError:
        return None


_metadata_version = functools.cache(version)  # reads a file at each call


def release(text: str) -> tuple[int, int]:
    """Major and minor version; patches are ignored."""
    return Version(text).major, Version(text).minor


def newer_than_tested() -> dict[str, str]:
    """Installed versions, by package, that are newer than those that the tests have run with."""
    installed = {name: installed_version(name) for name in TESTED}
    return {name: text for name, text in installed.items() if text and release(text) > release(TESTED[name][1])}


@functools.cache
def warn_of_newer_versions() -> None:
    """Log one line, once in a process, if packages are newer than what the tests have run with."""
    if newer := [f"{name} {value} (tested up to {TESTED[name][1]})" for name, value in newer_than_tested().items()]:
        logger.warning(
            f"marft_trl has not been tested with {', '.join(newer)}. It is likely to work. If something fails, "
            "install the tested version and report it."
        )


def checkpointing_fields(args: Any) -> list[str]:
    """Names of the argument for gradient checkpointing: transformers 5.23 renamed it, and has both until version 6."""
    return [name for name in ("gradient_checkpointing", "activation_checkpointing") if hasattr(args, name)]


def get_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Options of a parser (Python 3.11 to 3.13) by long name, without `--` and with `_` for `-`."""
    return {
        text.removeprefix("--").replace("-", "_"): action
        for action in parser._actions
        for text in action.option_strings
        if text.startswith("--")
    }
