# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""`marft env`: versions and devices, for bug reports. Nothing of it is secret."""

from __future__ import annotations

import argparse
import os
import platform

from ..seams.versions import installed_version
from .command import OptionsCommand, Parser


_PACKAGES = (
    *("marft-trl", "trl", "transformers", "peft", "accelerate", "datasets", "bitsandbytes", "evaluate", "torch"),
    *("aiohttp", "vllm", "math-verify"),
)


class Command(OptionsCommand):
    """Print versions and devices."""

    def add_arguments(self, parser: Parser) -> None:
        pass

    def run(self, args: argparse.Namespace) -> None:
        import psutil
        import torch

        rows = [("platform", platform.platform()), ("python", platform.python_version())]
        rows += [(name, installed_version(name) or "not installed") for name in _PACKAGES]
        rows.append(("processors", f"{os.cpu_count()}, {torch.get_num_threads()} threads of torch"))
        rows.append(("memory", f"{psutil.virtual_memory().total / 1e9:.0f} GB"))
        kinds = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        rows.append(("devices", ", ".join(kinds) or "none but the CPU"))
        for name, text in rows:
            print(f"{name:13} {text}")
