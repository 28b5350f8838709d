# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Communication between the processes of a run."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object


class Processes:
    """
    The processes of a run. Every method but the properties is a collective: all processes call it.

    Args:
        accelerator ([`~accelerate.Accelerator`]): does the communication.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator

    @property
    def count(self) -> int:
        """Number of processes."""
        return self._accelerator.num_processes

    @property
    def index(self) -> int:
        """Index of this process."""
        return self._accelerator.process_index

    @property
    def is_main(self) -> bool:
        """`True` on the process that writes files and logs."""
        return self._accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._accelerator.device

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over processes, in double precision on the CPU."""
        return tensor if self.count == 1 else self._everywhere(tensor).sum(dim=0)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum of a tensor over processes, in double precision on the CPU."""
        return tensor if self.count == 1 else self._everywhere(tensor).max(dim=0).values

    def gather(self, items: list[Any]) -> list[Any]:
        """The lists of all processes, joined in the order of the processes. Items are pickled."""
        return gather_object(items)

    def _everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if self.device.type == "mps" else torch.float64  # sums of squares need the digits
        return self._accelerator.gather(tensor.to(self.device, dtype).unsqueeze(0)).cpu()
