# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Communication between the processes of a run, also about failures."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..seams.runs import store_of_processes
from .lookout import Lookout, Place
from .watchdog import LAST_WORDS


Result = TypeVar("Result", bound=BaseException)

_CONNECTION = ("connection", "peer", "socket", "broken pipe", "timed out", "nccl", "gloo", "remote process")


class OtherProcessError(RuntimeError):
    """Raised when another process of the run has failed. The message has its index and its error."""


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """
    Context manager around users' code: a child that it has forked, and that comes back from it, ends at once. It would
    train and write beside its parent, under the same lock.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            message = (
                f"Process {os.getpid()} was forked from the training process {pid} by a reward, a workflow or a tool, "
                "and returned from it, so it ends here. End a forked child with `os._exit(0)`.\n"
            )
            os.write(2, message.encode())
            os._exit(70)


class Processes:
    """
    The processes of a run. Every method but the properties is a collective: all processes call it.

    Args:
        accelerator ([`~accelerate.Accelerator`]): does the communication.
    """

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
            wait (`Callable[[], None]`): called before every collective.
            are_stuck (`Callable[[], bool]`): whether the others could not reach the next one if this process failed.
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
        said = self.gather([None if error is None else _described(error)])
        failures = {index: text for index, text in enumerate(said) if text is not None}
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
        Context manager: a process that fails tells the others why, and one that loses its connection says what became
        of the other.

        Raises:
            OtherProcessError: in place of an error of the connection.
        """
        store = self._store()
        if store is None:
            yield
            return
        lookout = Lookout(store, self.index, self.gather([Place.here()]))
        LAST_WORDS.append(lookout.say)
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
            LAST_WORDS.remove(lookout.say)

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
