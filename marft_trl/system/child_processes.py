# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
End the programs of a process when the process ends in any way, also by SIGKILL. A separate process does this: it runs
this file as a script, without the package. It needs only pipes, unlike `PR_SET_PDEATHSIG`, which macOS does not have,
and which ends a program with the thread that started it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import IO, Any


class ChildProcesses:
    """
    Starts processes, and ends them with SIGTERM, at which a trainer saves a checkpoint, if the block is left by an
    exception, Ctrl+C or SIGTERM, or if this process is killed. They would otherwise go on and keep their folders.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._has_ended = False
        self._before: Any = None

    def __enter__(self) -> ChildProcesses:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._terminated)
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        if kind is not None:
            self.end()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, log: IO[str] | None = None
    ) -> int:
        """Run a command, from any thread. Returns its exit status, negative for a signal. `log` gets the output."""
        stderr = None if log is None else subprocess.STDOUT
        with self._lock:
            if self._has_ended:
                raise RuntimeError("Cannot start another process, because the run is ending.")
            # By its key until its number is known: this process may be killed in between
            key = f"child-{uuid.uuid4().hex}"
            keep(key, gently=True)
            variables = {**(os.environ if environment is None else environment), "MARFT_CHILD": key}
            process = subprocess.Popen(list(command), stdout=log, stderr=stderr, env=variables)  # noqa: S603
            self._running.add(process)
            keep(key, process.pid, gently=True)
        try:
            return process.wait()
        finally:
            with self._lock:
                if process.returncode is not None:
                    self._running.discard(process)
                    let_go(key)

    def end(self) -> None:
        """Start no more processes, and end those that run and wait for them."""
        with self._lock:
            self._has_ended = True
            running = list(self._running)
        for process in running:
            process.terminate()
        for process in running:
            process.wait()

    @staticmethod
    def _terminated(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)


_LOOK = 1.0  # seconds between two checks whether the owner has ended: a forked child may hold its end of the pipe
_ROUNDS = 20  # most rounds in which processes that start others all the time are ended
_LOCK = threading.Lock()
_KEEPERS: dict[int, subprocess.Popen] = {}  # by process: a fork has a separate one


def keep(key: str, pid: int = 0, gently: bool = False) -> None:
    """
    End programs when this process has ended: the process `pid` with its group, or if it is 0, all that have `key`
    (without spaces) in their environment. `gently` sends SIGTERM, and to `pid` alone, so that it can save.
    """
    _tell(f"{key} {pid} {int(gently)}")


def let_go(key: str) -> None:
    _tell(f"{key} -1 0")


def _tell(line: str) -> None:
    with _LOCK, contextlib.suppress(BrokenPipeError):  # somebody has ended the keeper
        if os.getpid() not in _KEEPERS:
            command = [sys.executable, "-P", __file__, str(os.getpid())]
            keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603
            keeper.returncode = 0  # it outlives this process, which Python would warn of
            _KEEPERS[os.getpid()] = keeper
        pipe: Any = _KEEPERS[os.getpid()].stdin
        pipe.write(f"{line}\n".encode())
        pipe.flush()


def started_by(pid: int, key: str) -> list[Any]:
    """Processes (`psutil.Process`) in the group of a program or with its key in their environment, except itself."""
    import psutil  # when it is needed, so that a keeper is small

    found, me = [], os.getuid()
    for process in psutil.process_iter(["uids"]):
        with contextlib.suppress(psutil.Error, OSError):
            is_mine = process.info["uids"] is not None and process.info["uids"].real == me
            if not is_mine or process.pid in (os.getpid(), pid) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getpgid(process.pid) == pid or key.encode() in _read_environment(process):
                found.append(process)
    return found


def _read_environment(process: Any) -> bytes:
    if os.path.exists(f"/proc/{process.pid}/environ"):
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            return file.read()
    return " ".join(process.environ().values()).encode()


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Read what is kept until the owner has ended, and end it."""
    kept: dict[str, tuple[int, bool]] = {}
    owner, rest = int(sys.argv[1]), b""
    while True:
        if not select.select([0], [], [], _LOOK)[0]:
            if os.getppid() == owner:
                continue
            break
        # Also of an owner that has ended: all it wrote is read first
        if not (data := os.read(0, 65536)):
            break
        *lines, rest = (rest + data).split(b"\n")
        for key, pid, gently in (line.decode().split() for line in lines):
            kept[key] = int(pid), gently == "1"
            if int(pid) < 0:
                del kept[key]
    for key, (process, is_gentle) in kept.items():
        _end(key, process, is_gentle)


def _end(key: str, pid: int, gently: bool) -> None:
    if gently:
        for process in [pid] if pid else [found.pid for found in started_by(0, key)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGTERM)
    elif pid:
        kill_group(pid)
    else:
        for _ in range(_ROUNDS):
            for process in (left := started_by(0, key)):
                with contextlib.suppress(Exception):  # it has ended
                    process.kill()
            if not left:
                return


if __name__ == "__main__":
    main()
