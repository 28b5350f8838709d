# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The processes of a run: their devices, collectives, and detection of processes that failed or do not respond."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers import TrainingArguments

from ..seams.libraries import get_logger
from ..seams.runs import store_of_processes, use_one_device
from .watchdog import ON_EXIT


logger = get_logger(__name__)


def device_map_kwargs(device: torch.device) -> dict[str, Any]:
    return {} if device.type in ("cpu", "mps") else {"device_map": {"": device}}


def is_model_parallel(model: nn.Module) -> bool:
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


def other_devices(model: nn.Module, device: torch.device) -> list[torch.device]:
    """Return the devices of the model's layers, except the device of this process."""
    if not is_model_parallel(model):
        return []
    names = {name for name in model.hf_device_map.values() if name != "disk"}  # type: ignore[union-attr]
    devices = {torch.device(device.type, name) if isinstance(name, int) else torch.device(name) for name in names}
    same_type = {torch.device(item.type, item.index or 0) for item in devices if item.type == device.type}
    return sorted(same_type - {torch.device(device.type, device.index or 0)}, key=lambda item: item.index)


def restrict_to_one_device(args: TrainingArguments, model: nn.Module) -> None:
    """Let a lone process use one GPU: `GRPOTrainer` (TRL 1.16) rejects the `Trainer`'s `nn.DataParallel`."""
    device = args.device
    if args.n_gpu > 1 and not is_model_parallel(model):
        logger.warning(
            f"This machine has {args.n_gpu} devices, but the run has one process, which uses only {device}. To use "
            "all devices, start the run with `accelerate launch`; to choose one, set CUDA_VISIBLE_DEVICES."
        )
        use_one_device(args)


_POLL_SECONDS = 1.0  # seconds between two reads of the store
_DIAGNOSIS_SECONDS = 5.0  # seconds to find out what happened to a process after its connection was lost
_STUCK_SECONDS = 20.0  # seconds after which a process exits if it is stuck since another process failed


class ProcessInfo(NamedTuple):
    host: str
    pid: int
    # Random id of the run: stores outlive runs, over restarts of torchrun (PyTorch 2.13) or several calls of `train()`
    run: str = ""

    @classmethod
    def current(cls) -> ProcessInfo:
        return cls(socket.gethostname(), os.getpid(), secrets.token_hex(8))


class PeerMonitor:
    """
    Exchanges heartbeats and error messages with the other processes, in a thread, over the store of the process group.

    Over NCCL, a collective with a dead peer waits on the device for `ddp_timeout`, half an hour by default, without a
    Python error. Therefore, a process that is stuck for some time after another one has reported a failure exits with
    the other's message. The store may be on a machine that does not respond, so requests to it have time limits.
    """

    def __init__(self, store: Any, index: int, processes: Sequence[ProcessInfo]):
        self._store, self._index, self._processes = store, index, list(processes)
        self._others = [other for other in range(len(processes)) if other != index]
        self._prefix = f"marft/{processes[0].run}"
        self._is_stopped = threading.Event()
        self._monitored_thread = threading.get_ident()

    def __enter__(self) -> PeerMonitor:
        threading.Thread(target=self._monitor, name="marft-peer-monitor", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_stopped.set()

    def report_failure(self, message: str) -> None:
        _call_with_timeout(_DIAGNOSIS_SECONDS, lambda: self._store.set(self._key("failure", self._index), message))

    def diagnose(self) -> str:
        """Return why the connection was lost, after a few seconds at most."""
        return _call_with_timeout(_DIAGNOSIS_SECONDS + 2 * _POLL_SECONDS, self._find_cause) or (
            "Lost the connection to the other processes of the run, and the machine of process 0 "
            f"({self._processes[0].host}), which keeps the list of processes, does not respond: the machine or the "
            "network is down."
        )

    def _find_cause(self) -> str | None:
        deadline, first_heartbeats = time.monotonic() + _DIAGNOSIS_SECONDS, None
        while True:
            for other in self._others:
                process = self._processes[other]
                if process.host == socket.gethostname() and not _is_alive(process.pid):
                    read_failure = functools.partial(self._read_failure, self._store, other)
                    return _call_with_timeout(_POLL_SECONDS, read_failure) or (
                        f"Process {other} of the run (pid {process.pid}) exited without an error of its own: it was "
                        "killed, for example because memory ran out."
                    )
            with contextlib.suppress(Exception):  # the process that hosts the store may be gone
                store = _clone(self._store)
                if (failure := self._read_first_failure(store)) is not None:
                    return failure
                keys = {other: self._key("alive", other) for other in self._others}
                heartbeats = {other: store.get(key) for other, key in keys.items() if store.check([key])}
                first_heartbeats = heartbeats if first_heartbeats is None else first_heartbeats
                if time.monotonic() >= deadline:
                    same = [other for other in self._others if heartbeats.get(other) == first_heartbeats.get(other)]
                    return self._describe_unresponsive(same)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.2)

    def _describe_unresponsive(self, indices: Sequence[int]) -> str:
        names = ", ".join(f"{i} (pid {self._processes[i].pid} on {self._processes[i].host})" for i in indices)
        finding = f"Process {names} does not respond" if names else "No process has reported an error"
        return (
            f"Lost the connection to the other processes of the run. {finding}: a process was killed or hangs, or its "
            "machine is down."
        )

    def _read_failure(self, store: Any, other: int) -> str | None:
        if not store.check([self._key("failure", other)]):
            return None
        host = self._processes[other].host
        on_host = "" if host == socket.gethostname() else f" on {host}"
        return f"Process {other} of the run{on_host} failed: {store.get(self._key('failure', other)).decode()}"

    def _read_first_failure(self, store: Any) -> str | None:
        return next((text for other in self._others if (text := self._read_failure(store, other))), None)

    def _key(self, kind: str, index: int) -> str:
        return f"{self._prefix}/{kind}/{index}"

    # ---- In the thread ----

    def _monitor(self) -> None:
        with contextlib.suppress(Exception):  # without the store, the processes have no connections, either
            store, count = _clone(self._store), 0
            while not self._is_stopped.wait(_POLL_SECONDS if count else 0.0):
                store.set(self._key("alive", self._index), str(count := count + 1))
                if (failure := self._read_first_failure(store)) is not None:
                    self._exit_if_stuck(failure)
                    return

    def _exit_if_stuck(self, failure: str) -> None:
        """Exit the process if the monitored thread stays at the same instruction, such as a collective that hangs."""
        position, since = self._position(), time.monotonic()
        while not self._is_stopped.wait(_STUCK_SECONDS / 20):
            if (current := self._position()) != position:
                position, since = current, time.monotonic()
            if time.monotonic() - since >= _STUCK_SECONDS:
                process = self._processes[self._index]
                message = (
                    f"\n{failure}\nProcess {self._index} (pid {process.pid} on {process.host}) has been stuck for "
                    f"{_STUCK_SECONDS:g} s since then, and exits.\n"
                )
                os.write(2, message.encode())
                os._exit(1)

    def _position(self) -> tuple[int, int] | None:
        frame = sys._current_frames().get(self._monitored_thread)
        return None if frame is None else (id(frame), frame.f_lasti)


def _clone(store: Any) -> Any:
    """Return a new connection to a store: a request that waits blocks all other users of the same connection."""
    try:
        return store.clone()
    except (NotImplementedError, RuntimeError):
        return store


def _call_with_timeout(seconds: float, function: Callable[[], Any]) -> Any:
    """Return the result of a function, or `None` if it fails or takes longer than `seconds`."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):  # the process that hosts the store may be gone
            results.append(function())

    thread = threading.Thread(target=run, name="marft-store-request", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # the process is another user's
        return True


_CONNECTION_WORDS = ("connection", "peer", "socket", "broken pipe", "timed out", "nccl", "gloo", "remote process")


class OtherProcessError(RuntimeError):
    """Raised when another process of the run has failed. The message has the index and the error of that process."""


@contextlib.contextmanager
def exiting_forked_children() -> Iterator[None]:
    """Exit a child that user code forked when it returns here: it would train and write files like its parent."""
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            message = (
                f"A reward, a workflow or a tool forked process {os.getpid()} from the training process {pid}, and "
                "the child returned to the trainer, so it exits here. End a forked child with `os._exit(0)`.\n"
            )
            os.write(2, message.encode())
            os._exit(70)


class Processes:
    """The processes of a run. Methods that communicate are collectives, which all processes must call."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._shared_error: BaseException | None = None
        # With a sharded base, waits for the other processes and takes part in their passes
        self.wait: Callable[[], None] = lambda: None
        self._are_others_blocked: Callable[[], bool] = lambda: False

    @property
    def count(self) -> int:
        return self._accelerator.num_processes

    @property
    def index(self) -> int:
        return self._accelerator.process_index

    @property
    def is_main(self) -> bool:
        return self._accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        return self._accelerator.device

    @property
    def is_base_sharded(self) -> bool:
        """`True` if the base is, or will be, sharded over the processes."""
        return self._accelerator.is_fsdp2

    def set_hooks(self, wait: Callable[[], None], are_others_blocked: Callable[[], bool]) -> None:
        """Hooks of a sharded base: called before each collective; whether a failure here would block the others."""
        self.wait, self._are_others_blocked = wait, are_others_blocked

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over processes, in double precision on the CPU."""
        return tensor if self.count == 1 else self._gather_stacked(tensor).sum(dim=0)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the maximum of a tensor over processes, in double precision on the CPU."""
        return tensor if self.count == 1 else self._gather_stacked(tensor).max(dim=0).values

    def gather(self, items: list[Any]) -> list[Any]:
        """Concatenate the lists of all processes, in the order of the processes. Items are pickled."""
        self.wait()
        return gather_object(items)

    def gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the rows of all processes, in the order of the processes. All must have the same number."""
        if self.count == 1:
            return tensor
        self.wait()
        return self._accelerator.gather(tensor.to(self.device))

    def broadcast(self, item: Any) -> Any:
        """Return the item of the main process on all processes. It is pickled."""
        return item if self.count == 1 else self.gather([item])[0]

    def mark_shared(self, error: Exception) -> Exception:
        """Mark an error as raised on all processes, so that it is not reported again. Return the error."""
        self._shared_error = error
        return error

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise on all processes if the block, without collectives, fails on one; others [`OtherProcessError`]."""
        if self.count == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if error is not None and self._are_others_blocked():
            raise error  # the others detect it when this process exits
        messages = self.gather([None if error is None else describe_error(error)])
        failures = {index: message for index, message in enumerate(messages) if message is not None}
        if not failures:
            return
        if error is None:
            index, message = next(iter(failures.items()))
            error = OtherProcessError(f"Process {index} of the run failed: {message}")
        raise self.mark_shared(error)

    def is_shared(self, error: BaseException) -> bool:
        """`True` if all processes have raised this error, or an [`OtherProcessError`] about it."""
        return self.count == 1 or error is self._shared_error

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Report errors to the others; lost connections raise an [`OtherProcessError`] with the cause."""
        if self.count == 1 or not torch.distributed.is_initialized():
            yield
            return
        monitor = PeerMonitor(store_of_processes(), self.index, self.gather([ProcessInfo.current()]))
        ON_EXIT.append(monitor.report_failure)
        try:
            with monitor:
                yield
        except Exception as error:
            if self._shared_error is error:
                raise
            is_of_torch = isinstance(error, torch.distributed.DistError)
            says_so = any(word in str(error).lower() for word in _CONNECTION_WORDS)
            if not is_of_torch and not (type(error) is RuntimeError and says_so):
                monitor.report_failure(describe_error(error))
                raise
            raise OtherProcessError(monitor.diagnose()) from error
        finally:
            ON_EXIT.remove(monitor.report_failure)

    def _gather_stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        self.wait()
        dtype = torch.float32 if self.device.type == "mps" else torch.float64  # sums of squares need double precision
        return self._accelerator.gather(tensor.to(self.device, dtype).unsqueeze(0)).cpu()


def describe_error(error: BaseException) -> str:
    return ". ".join([f"{type(error).__name__}: {error}".rstrip("."), *getattr(error, "__notes__", [])])
