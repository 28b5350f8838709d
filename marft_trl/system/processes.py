# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The processes of a run: devices, collectives, and which one has failed or is silent."""

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
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers import TrainingArguments

from ..seams.libraries import get_logger
from ..seams.runs import store_of_processes, use_one_device
from .watchdog import ON_EXIT


logger = get_logger(__name__)


def placement(device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` that put a whole model on the device of a process, and none for the CPU."""
    return {} if device.type in ("cpu", "mps") else {"device_map": {"": device}}


def is_spread(model: nn.Module) -> bool:
    """`True` if a model was loaded onto several devices, such as by `device_map="auto"`."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


def other_devices(model: nn.Module, device: torch.device) -> list[torch.device]:
    """The devices that a spread model has layers on, besides that of the process."""
    if not is_spread(model):
        return []
    places = {item for item in model.hf_device_map.values() if item != "disk"}  # type: ignore[union-attr]
    found = {torch.device(device.type, place) if isinstance(place, int) else torch.device(place) for place in places}
    whole = {torch.device(value.type, value.index or 0) for value in found if value.type == device.type}
    return sorted(whole - {torch.device(device.type, device.index or 0)}, key=lambda entry: entry.index)


def take_one_device(args: TrainingArguments, model: nn.Module) -> None:
    """
    Let a process that was started alone on a machine with several GPUs use its own and no others. The Trainer would
    copy the model to all of them (`nn.DataParallel`), which `GRPOTrainer` (1.16) refuses. A model that the user has
    spread over several stays there.
    """
    device = args.device
    if args.n_gpu > 1 and not is_spread(model):
        logger.warning(
            f"This machine has {args.n_gpu} devices, but the run has one process, which uses only {device}. To use "
            "all devices, start the run with `accelerate launch`; to choose one, set CUDA_VISIBLE_DEVICES."
        )
        use_one_device(args)


# Seconds from one look at the store to the next
_EVERY = 1.0
# Seconds that a process waits for news of the one that has left it
_NEWS = 5.0
# Seconds that a process may stand still after another has failed, before it is ended
_PATIENCE = 20.0


class Place(NamedTuple):
    """
    Where a process runs: the name of its machine, its process id there, and a random name of its present run. Stores
    outlive runs: torchrun (PyTorch 2.13) keeps one over restarts, and `train()` may be called again after a failure.
    """

    host: str
    pid: int
    run: str = ""

    @classmethod
    def here(cls) -> Place:
        return cls(socket.gethostname(), os.getpid(), secrets.token_hex(8))


class PeerMonitor:
    """
    Looks at the key-value store of the processes in a thread of its own, and lets it know that this one is alive.

    Not every failure reaches the others: over NCCL, a collective whose peer is gone waits on the device for
    `ddp_timeout`, half an hour by default, without a Python error. So a process that is stuck for some time after
    another one has reported a failure exits with the error message of the other: whatever it waits for, its next
    collective would fail, and so would a checkpoint, which needs all processes. The store itself may be on a machine
    that no longer responds, so every wait for it has a limit.

    Args:
        store: by which the processes found one another.
    """

    def __init__(self, store: Any, index: int, places: Sequence[Place]):
        self._store, self._index, self._places = store, index, list(places)
        self._others = [other for other in range(len(places)) if other != index]
        self._prefix = f"marft/{places[0].run}"
        self._ended = threading.Event()
        self._watched = threading.get_ident()

    def __enter__(self) -> PeerMonitor:
        threading.Thread(target=self._look_out, name="marft-lookout", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()

    def say(self, text: str) -> None:
        """Report to the other processes why this process fails."""
        _within(_NEWS, lambda: self._store.set(self._failure(self._index), text))

    def news(self) -> str:
        """What became of the process whose connection is lost, after [`_NEWS`] seconds at most."""
        found = _within(_NEWS + 2 * _EVERY, self._find_out)
        if found is not None:
            return found
        keeper = self._places[0]
        return (
            f"Lost the connection to the other processes of the run, and the machine of process 0 ({keeper.host}), "
            "which keeps the list of processes, does not respond: the machine or the network is down."
        )

    def _find_out(self) -> str | None:
        end, before = time.monotonic() + _NEWS, None
        while True:
            for other in self._others:
                place = self._places[other]
                if place.host == socket.gethostname() and not _is_alive(place.pid):
                    failure = _within(_EVERY, functools.partial(self._read_failure, self._store, other))
                    return failure or (
                        f"Process {other} of the run (pid {place.pid}) exited without an error of its own: it was "
                        "killed, for example because memory ran out."
                    )
            with contextlib.suppress(Exception):  # the process that keeps the store may be gone
                store = _own(self._store)
                found = [text for other in self._others if (text := self._read_failure(store, other))]
                if found:
                    return found[0]
                beats = self._beats(store)
                before = beats if before is None else before
                if time.monotonic() >= end:
                    return self._silent([item for item in self._others if beats.get(item) == before.get(item)])
            if time.monotonic() >= end:
                return None
            time.sleep(0.2)

    def _silent(self, others: Sequence[int]) -> str:
        named = ", ".join(f"{other} (pid {self._places[other].pid} on {self._places[other].host})" for other in others)
        which = f"Process {named} does not respond" if named else "No process has reported an error"
        return (
            f"Lost the connection to the other processes of the run. {which}: a process was killed or hangs, or its "
            "machine is down."
        )

    def _read_failure(self, store: Any, other: int) -> str | None:
        if not store.check([self._failure(other)]):
            return None
        where = self._places[other].host
        on = "" if where == socket.gethostname() else f" on {where}"
        return f"Process {other} of the run{on} failed: {store.get(self._failure(other)).decode()}"

    def _beats(self, store: Any) -> dict[int, bytes]:
        return {other: store.get(self._beat(other)) for other in self._others if store.check([self._beat(other)])}

    def _failure(self, index: int) -> str:
        return f"{self._prefix}/failure/{index}"

    def _beat(self, index: int) -> str:
        return f"{self._prefix}/alive/{index}"

    # ---- In the thread ----

    def _look_out(self) -> None:
        with contextlib.suppress(Exception):  # the store is gone: then the connections are, too
            store, count = _own(self._store), 0
            while not self._ended.wait(_EVERY if count else 0.0):
                store.set(self._beat(self._index), str(count := count + 1))
                failure = next((text for other in self._others if (text := self._read_failure(store, other))), None)
                if failure is not None:
                    self._end_if_still(failure)
                    return

    def _end_if_still(self, failure: str) -> None:
        """End the process if its thread stays in one place, such as a collective that never ends."""
        place, since = self._place(), time.monotonic()
        while not self._ended.wait(_PATIENCE / 20):
            if (now := self._place()) != place:
                place, since = now, time.monotonic()
            if time.monotonic() - since >= _PATIENCE:
                mine = self._places[self._index]
                message = (
                    f"\n{failure}\nProcess {self._index} (pid {mine.pid} on {mine.host}) has been stuck for "
                    f"{_PATIENCE:g} s since then, and exits.\n"
                )
                os.write(2, message.encode())
                os._exit(1)

    def _place(self) -> tuple[int, int] | None:
        frame = sys._current_frames().get(self._watched)
        return None if frame is None else (id(frame), frame.f_lasti)


def _own(store: Any) -> Any:
    """Return a separate connection to a store: a request that waits blocks all other users of the same connection."""
    try:
        return store.clone()
    except (NotImplementedError, RuntimeError):
        return store


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """The result of a function, or `None` if it fails or needs longer than so many seconds."""
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):  # the process that keeps the store may be gone
            found.append(ask())

    thread = threading.Thread(target=run, name="marft-news", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # a zombie has ended, too
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return True


Result = TypeVar("Result", bound=BaseException)

_CONNECTION = ("connection", "peer", "socket", "broken pipe", "timed out", "nccl", "gloo", "remote process")


class OtherProcessError(RuntimeError):
    """Raised when another process of the run has failed. The message has its index and its error."""


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """
    Context manager around users' code: a child that it has forked, and that comes back from it, ends at once. It would
    train and write next to its parent, under the same lock.
    """
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
    """The processes of a run. Every method but the properties is a collective: all processes call it."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._agreed: BaseException | None = None
        self._wait: Callable[[], None] = lambda: None
        self._are_stuck: Callable[[], bool] = lambda: False

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

    @property
    def have_shards(self) -> bool:
        """`True` if the base is, or will be, in shards over the processes."""
        return self._accelerator.is_fsdp2

    def before_collectives(self, wait: Callable[[], None], are_stuck: Callable[[], bool]) -> None:
        """
        What processes do between two collectives may need the others.

        Args:
            wait: called before every collective.
            are_stuck: whether the others could not reach the next one if this process failed.
        """
        self._wait, self._are_stuck = wait, are_stuck

    def wait(self) -> None:
        """Barrier. With a sharded base, a waiting process also takes part in the other processes' passes."""
        self._wait()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over processes, in double precision on the CPU."""
        return tensor if self.count == 1 else self._everywhere(tensor).sum(dim=0)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum of a tensor over processes, in double precision on the CPU."""
        return tensor if self.count == 1 else self._everywhere(tensor).max(dim=0).values

    def gather(self, items: list[Any]) -> list[Any]:
        """The lists of all processes, joined in the order of the processes. Items are pickled."""
        self._wait()
        return gather_object(items)

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all processes, in their order. All processes have equally many."""
        if self.count == 1:
            return tensor
        self._wait()
        return self._accelerator.gather(tensor.to(self.device))

    def broadcast(self, item: Any) -> Any:
        """An item of the main process, on all processes. It is pickled."""
        return item if self.count == 1 else self.gather([item])[0]

    # ---- Failures ----

    def agreed(self, error: Result) -> Result:
        """Mark an error as raised on all processes, so that it is not announced again."""
        self._agreed = error
        return error

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """
        Context manager for code without collectives that may fail on some of the processes: at its end, all of them
        fail if one has.

        Raises:
            OtherProcessError: on the processes that have not failed themselves.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
            if self.count == 1:
                self._agreed = error
                raise
        if self.count == 1:
            return
        if error is not None and self._are_stuck():
            raise error  # the others learn of it when this process has ended
        errors = self.gather([None if error is None else _described(error)])
        failures = {index: text for index, text in enumerate(errors) if text is not None}
        if not failures:
            return
        if error is None:
            index, text = next(iter(failures.items()))
            error = OtherProcessError(f"Process {index} of the run failed: {text}")
        self._agreed = error
        raise error

    def have_agreed(self, error: BaseException) -> bool:
        """`True` if all processes have left [`~Processes.together`] with this error or that of another process."""
        return self.count == 1 or error is self._agreed

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """
        Context manager: a process that fails reports the reason to the others, and a process that loses its connection
        reports what happened to the other process.

        Raises:
            OtherProcessError: instead of a connection error.
        """
        store = self._store()
        if store is None:
            yield
            return
        lookout = PeerMonitor(store, self.index, self.gather([Place.here()]))
        ON_EXIT.append(lookout.say)
        try:
            with lookout:
                yield
        except Exception as error:
            if self._agreed is error:
                raise
            if not _is_of_connection(error):
                lookout.say(_described(error))
                raise
            raise OtherProcessError(lookout.news()) from error
        finally:
            ON_EXIT.remove(lookout.say)

    def _store(self) -> Any:
        if self.count == 1 or not torch.distributed.is_initialized():
            return None
        return store_of_processes()

    def _everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        self._wait()
        dtype = torch.float32 if self.device.type == "mps" else torch.float64  # sums of squares need the digits
        return self._accelerator.gather(tensor.to(self.device, dtype).unsqueeze(0)).cpu()


def _described(error: BaseException) -> str:
    return ". ".join([f"{type(error).__name__}: {error}".rstrip("."), *getattr(error, "__notes__", [])])


def _is_of_connection(error: BaseException) -> bool:
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(word in text for word in _CONNECTION)
