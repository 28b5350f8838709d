# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
A pretended device for a machine that has only a CPU: `pretend:0` and `pretend:1`.

Its tensors hold CPU data, report a device, and cannot be mixed with tensors of the CPU or of the other index, as on a
GPU. Forward and backward passes, optimizers and `generate` work on it. It detects values that are made on the wrong
device or read back too late, and counts operations that would wait for a device. It does not model speed, memory,
kernels or precision, and its tensors have no storage addresses. A process that imports this module calls [`install`]
once, before accelerate or transformers look for devices, and runs on the device within [`Pretend`].
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths


COUNT = 2  # devices
# Operations that may take tensors of the CPU and of a device
_MAY_MIX = {
    *("aten._to_copy.default", "aten.copy_.default", "aten._local_scalar_dense.default"),
    *("aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default"),
}
# Called with the kind of each wait, and with the type of each product with a weight
LISTENERS: list[Callable[[str], None]] = []
PRODUCTS: list[Callable[[torch.dtype], None]] = []


class OnDevice(torch.Tensor):
    """A tensor of a pretended device. Its data are on the CPU."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, device: torch.device):
        properties = {name: getattr(data, name) for name in ("dtype", "layout", "requires_grad")}
        properties |= {"strides": data.stride(), "storage_offset": data.storage_offset(), "device": device}
        wrapper = torch.Tensor._make_wrapper_subclass(cls, data.size(), **properties)
        wrapper.data_on_cpu = data
        return wrapper

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.data_on_cpu}, {self.device})"

    def tolist(self) -> Any:
        _note("to the CPU")
        return self.data_on_cpu.detach().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _note(kind: str) -> None:
    for listener in LISTENERS:
        listener(kind)


def _count(name: str, args: tuple, devices: set, target: Any) -> None:
    """Count operations that make the host wait for a device, and products with weights."""
    if name in ("aten.mm.default", "aten.addmm.default") and devices:
        for listener in PRODUCTS:
            listener(args[-1].dtype)
    elif name.startswith("aten._local_scalar_dense") and devices:
        _note("a scalar")
    elif name.startswith(("aten.nonzero", "aten.masked_select")) and devices:
        _note("a shape")
    elif name.startswith("aten.index.Tensor") and devices:
        if any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]):
            _note("a shape")
    elif name.startswith("aten._to_copy") and target is not None:
        if devices and torch.device(target).type == "cpu":
            _note("to the CPU")
        elif not devices and torch.device(target).type == "pretend":
            _note("to the device")
    elif name.startswith("aten.copy_") and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
        _note("to the device" if isinstance(args[0], OnDevice) else "to the CPU")


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU and place the results on the device."""
    name = str(func)
    tensors = [tensor for tensor in tree_flatten((args, kwargs))[0] if isinstance(tensor, torch.Tensor)]
    placed = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    devices = {tensor.device for tensor in placed}
    others = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim() > 0]
    target = kwargs.get("device")
    _count(name, args, devices, target)
    if name not in _MAY_MIX and (len(devices) > 1 or (devices and others)):
        where = [(tuple(tensor.shape), str(tensor.device)) for tensor in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {where}")
    if target is not None:
        target_device = torch.device(target)
        device = torch.device("pretend", target_device.index or 0) if target_device.type == "pretend" else None
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif name == "aten.copy_.default":
        device = args[0].device if isinstance(args[0], OnDevice) else None
    else:
        device = next(iter(placed)).device if placed else None

    def data(argument: Any) -> Any:
        return argument.data_on_cpu if isinstance(argument, OnDevice) else argument

    result = func(*tree_map(data, args), **tree_map(data, kwargs))
    if device is None or name == "aten._local_scalar_dense.default":
        return result

    def on_device(output: Any) -> Any:
        return (
            OnDevice(output, device)
            if isinstance(output, torch.Tensor) and not isinstance(output, OnDevice)
            else output
        )

    result = tree_map(on_device, result)
    is_in_place = func._schema.is_mutable and name.split(".")[1].endswith("_")
    if placed or torch.Tag.inplace_view in func.tags or is_in_place:
        return return_and_correct_aliasing(func, args, kwargs, result)
    return result


class Pretend(TorchDispatchMode):
    """Make `device="pretend"` create tensors of the pretended device within the context."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Turn the pretended device off within the context."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def _always(result: Any) -> Callable:
    return staticmethod(lambda *_, **__: result)


class _Backend:
    """The module `torch.pretend`, like `torch.cuda` for a GPU."""

    is_available = is_initialized = is_bf16_supported = _always(True)
    _is_in_bad_fork, device_count, mem_get_info = _always(False), _always(COUNT), _always((8 << 30, 16 << 30))
    current_device = memory_allocated = max_memory_allocated = memory_reserved = _always(0)
    get_amp_supported_dtype = _always([torch.bfloat16, torch.float16])
    _lazy_init = manual_seed = manual_seed_all = set_device = _always(None)
    synchronize = empty_cache = reset_peak_memory_stats = _always(None)

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


def find_obstacle() -> str | None:
    """Reason why this machine cannot pretend to have a device, or `None` if it can."""
    return None if shutil.which("g++") else "there is no C++ compiler (g++) to compile `pretend_device.cpp`"


def _load_guard() -> None:
    """Compile `pretend_device.cpp`, once for a version of PyTorch, and load it."""
    source = Path(__file__).with_suffix(".cpp")
    name = f"marft-pretend-{torch.__version__}-{os.getuid()}-{source.stat().st_mtime_ns:x}.so"
    library = Path(tempfile.gettempdir(), name)
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        flags = ["-shared", "-fPIC", "-std=c++20", "-O0", *(f"-I{folder}" for folder in include_paths())]
        libraries = [f"-L{TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu"]
        subprocess.run(["g++", *flags, str(source), "-o", str(unfinished), *libraries], check=True)
        unfinished.replace(library)
    torch.ops.load_library(str(library))


def install() -> torch.device:
    """
    Register the device. accelerate and transformers take `pretend:0` for the device of the process from then on, and
    modules are moved by swapping tensors, since there are no storages to move.
    """
    import accelerate.state
    import transformers.training_args

    for module in (transformers.utils, transformers.training_args):
        module.is_torch_bf16_gpu_available = lambda: True
    _load_guard()
    torch.utils.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", _Backend())
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    device = torch.device("pretend", 0)
    begin = accelerate.state.PartialState.__init__

    def on_device(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.device = device

    accelerate.state.PartialState.__init__ = on_device
    accelerate.state.PartialState.set_device = lambda self: setattr(self, "device", device)
    transformers.TrainingArguments.device = property(lambda self: (self._setup_devices, device)[1])
    run_thread = threading.Thread.run

    def in_mode(self):  # a mode applies to one thread
        with Pretend():
            run_thread(self)

    threading.Thread.run = in_mode
    return device
