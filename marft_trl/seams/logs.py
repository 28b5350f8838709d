# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What other libraries say in a run: rank prefixes, warnings about how TRL and transformers call one another."""

from __future__ import annotations

import logging
import warnings
from collections.abc import MutableMapping
from typing import Any

from accelerate.logging import MultiProcessAdapter


# Messages that no user of a team can do anything about, as patterns of `warnings`, with who causes them
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
    from accelerate import PartialState

    return PartialState().num_processes == 1


def get_logger(name: str) -> MultiProcessAdapter:
    """Like `accelerate.logging.get_logger`: a message is logged once, whatever the number of processes."""
    return _Adapter(logging.getLogger(name), {})


def hush() -> None:
    """Leave out what other libraries say and nobody can act on. All else they say is heard."""
    for message, category in _NOISE.items():
        warnings.filterwarnings("ignore", message=message, category=category)
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_KERNEL)
