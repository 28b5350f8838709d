# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What the processes of a run know of one another beside their collectives: who has failed, and who is silent."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


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


class Lookout:
    """
    Looks at the key-value store of the processes in a thread of its own, and lets it know that this one is alive.

    Not every failure reaches the others: over NCCL, a collective whose peer is gone waits on the device for
    `ddp_timeout`, half an hour by default, without a Python error. So a process that is still in the same place some
    time after another one has said that it failed is ended, with the words of that one: whatever it waits for, its
    next collective could not succeed, nor a checkpoint, which takes all processes. And the store itself may be on a
    machine that no longer answers, so nobody waits for it without a bound.

    Args:
        store (`torch.distributed.Store`): by which the processes found one another.
        index (`int`): of this process.
        places (`Sequence[Place]`): of all processes.
    """

    def __init__(self, store: Any, index: int, places: Sequence[Place]):
        self._store, self._index, self._places = store, index, list(places)
        self._others = [other for other in range(len(places)) if other != index]
        self._prefix = f"marft/{places[0].run}"
        self._ended = threading.Event()
        self._watched = threading.get_ident()

    def __enter__(self) -> Lookout:
        threading.Thread(target=self._look_out, name="marft-lookout", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()

    def say(self, text: str) -> None:
        """Tell the other processes why this one fails."""
        _within(_NEWS, lambda: self._store.set(self._failure(self._index), text))

    def news(self) -> str:
        """What became of the process whose connection is lost, after [`_NEWS`] seconds at most."""
        found = _within(_NEWS + 2 * _EVERY, self._find_out)
        if found is not None:
            return found
        keeper = self._places[0]
        return (
            f"The connection to the other processes of the run is lost, and the machine of process 0 ({keeper.host}), "
            "which keeps their list, does not answer: it is gone, or the network between them is."
        )

    def _find_out(self) -> str | None:
        end, before = time.monotonic() + _NEWS, None
        while True:
            for other in self._others:
                place = self._places[other]
                if place.host == socket.gethostname() and not _is_alive(place.pid):
                    said = _within(_EVERY, functools.partial(self._failure_of, self._store, other))
                    return said or (
                        f"Process {other} of the run (pid {place.pid}) has ended without an error of its own: it was "
                        "killed, for instance for lack of memory."
                    )
            with contextlib.suppress(Exception):  # the process that keeps the store may be gone
                store = _own(self._store)
                found = [text for other in self._others if (text := self._failure_of(store, other))]
                if found:
                    return found[0]
                beats = self._beats(store)
                before = beats if before is None else before
                if time.monotonic() >= end:
                    return self._silent([one for one in self._others if beats.get(one) == before.get(one)])
            if time.monotonic() >= end:
                return None
            time.sleep(0.2)

    def _silent(self, others: Sequence[int]) -> str:
        named = ", ".join(f"{one} (pid {self._places[one].pid} on {self._places[one].host})" for one in others)
        which = f"Process {named} is silent" if named else "None of them has said why"
        return (
            f"The connection to the other processes of the run is lost. {which}: it was killed, hangs, or its machine "
            "is gone."
        )

    def _failure_of(self, store: Any, other: int) -> str | None:
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
                said = next((text for other in self._others if (text := self._failure_of(store, other))), None)
                if said is not None:
                    self._end_if_still(said)
                    return

    def _end_if_still(self, said: str) -> None:
        """End the process if its thread stays in one place, such as a collective that never ends."""
        place, since = self._place(), time.monotonic()
        while not self._ended.wait(_PATIENCE / 20):
            if (now := self._place()) != place:
                place, since = now, time.monotonic()
            if time.monotonic() - since >= _PATIENCE:
                mine = self._places[self._index]
                message = (
                    f"\n{said}\nProcess {self._index} (pid {mine.pid} on {mine.host}) has waited for it for "
                    f"{_PATIENCE:g} s and ends.\n"
                )
                os.write(2, message.encode())
                os._exit(1)

    def _place(self) -> tuple[int, int] | None:
        frame = sys._current_frames().get(self._watched)
        return None if frame is None else (id(frame), frame.f_lasti)


def _own(store: Any) -> Any:
    """A connection of its own to a store: one that waits for an answer holds up all others that use it."""
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
