# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The seam of PyTorch for captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def why_not_captured(device: torch.device) -> str | None:
    """Reason why passes on a device cannot be captured, or `None` if it can be tried."""
    if device.type != "cuda":
        return f"the device is {device.type}, and only CUDA has graphs"
    return None


def new_pool(device: torch.device) -> Any:
    """Memory for several graphs of which only the latest result is read; `None` where there are no graphs."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def captured(run: Callable[[], torch.Tensor], pool: Any = None) -> Callable[[], torch.Tensor]:
    """
    Capture the kernels of a function as a graph (PyTorch 2.13, `torch.cuda.graph`), and return a function that replays
    them. It reads and writes the same memory as the function, and its result is at the same address each time.

    Args:
        run (`Callable`): does the same each time, without waiting for the device.
        pool (*optional*): memory that the graph shares with others, see [`new_pool`].

    Raises:
        RuntimeError: it waits for the device, or the device has too little memory.
    """
    torch.cuda.synchronize()
    # What is made at a first call, such as workspaces, must not be made while capturing
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as those of reward functions, may use the device meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay
