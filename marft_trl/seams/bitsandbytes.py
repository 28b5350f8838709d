# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""bitsandbytes is loaded when it is used: it takes a second, and on a CPU it prints what it cannot load."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

from .swapping import swapped_in_module


_NAME = "bitsandbytes"


class _Later(types.ModuleType):
    """A module that is loaded when it is asked for anything but what is known of it before."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


def load_bitsandbytes_when_used() -> None:
    """
    Put off the import of bitsandbytes. PEFT (0.21) imports it whenever it is imported itself (`peft.helpers`), whether
    or not a model is quantized. Where one of the two is loaded already, nothing changes.
    """
    spec = None if {_NAME, "peft"} & sys.modules.keys() else importlib.util.find_spec(_NAME)
    if spec is not None:
        module = _Later(_NAME)
        module.__spec__, module.__file__, module.__loader__ = spec, spec.origin, spec.loader
        sys.modules[_NAME] = module


@contextlib.contextmanager
def without_bitsandbytes(model: Any) -> Iterator[None]:
    """
    Context manager: PEFT (0.21) makes LoRA layers without a look at bitsandbytes, unless the model is quantized. It
    imports bitsandbytes for every layer, to ask whether the layer is one of its own.
    """
    if getattr(model, "is_quantized", False):
        yield
        return
    from peft.tuners.lora import model as lora

    absent = dict.fromkeys(("is_bnb_available", "is_bnb_4bit_available"), bool)  # `bool()` is `False`
    with swapped_in_module(lora, absent):
        yield
