# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The seam of PyTorch for captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class GraphMemory(NamedTuple):
    """
    What several graphs share, of which only the latest result is read.

    Args:
        device (`torch.device`): where they run.
        pool: their memory.
        stream (`torch.cuda.Stream`): that they are captured on. Each stream has workspaces of its own.
    """

    device: torch.device
    pool: Any
    stream: Any

    @classmethod
    def of(cls, device: torch.device) -> GraphMemory | None:
        """Memory for graphs on a device; `None` where there are no graphs."""
        if device.type != "cuda":
            return None
        return cls(device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


def why_not_captured(model: Any) -> str | None:
    """Reason why passes of a model cannot be captured, or `None` if it can be tried."""
    devices = {parameter.device for parameter in model.parameters()}
    kinds = sorted({device.type for device in devices})
    if kinds != ["cuda"]:
        return f"the model is on {' and '.join(kinds)}, and only CUDA has graphs"
    return "the model is spread over several devices" if len(devices) > 1 else None


def captured(run: Callable[[], torch.Tensor], memory: GraphMemory) -> Callable[[], torch.Tensor]:
    """
    Capture the kernels of a function as a graph (PyTorch 2.13, `torch.cuda.graph`), and return a function that replays
    them. It reads and writes the same memory as the function, and its result is at the same address each time.

    Args:
        run (`Callable`): does the same each time, without waiting for the device.
        memory ([`GraphMemory`]): of this graph and others.

    Raises:
        RuntimeError: it waits for the device, or the device has too little memory.
    """
    graph, stream = torch.cuda.CUDAGraph(), memory.stream
    # A thread may have another device than that of the model, where nothing would be captured
    with torch.cuda.device(memory.device):
        torch.cuda.synchronize()
        stream.wait_stream(torch.cuda.current_stream())
        # Around the graph, too: where capturing fails, PyTorch leaves its stream as that of the thread
        with torch.cuda.stream(stream):
            run()  # what is made at a first call, such as workspaces, must not be made while capturing
            # Other threads, such as those of reward functions, may use the device meanwhile
            with torch.cuda.graph(graph, pool=memory.pool, stream=stream, capture_error_mode="thread_local"):
                result = run()
        torch.cuda.current_stream().wait_stream(stream)

    def replay() -> torch.Tensor:
        with torch.cuda.device(memory.device):
            graph.replay()
        return result

    return replay
