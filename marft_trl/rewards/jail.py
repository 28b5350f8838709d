# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Runs Python programs that nobody trusts, each in a process of its own behind a fence (see `fence.py`)."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


_FENCE = Path(__file__).with_name("fence.py")
logger = logging.getLogger(__name__)

_REMOVAL_SECONDS = 60
_STARTUP_SECONDS = 5  # of the interpreter on a busy machine, on top of the program's own time


class JailError(RuntimeError):
    """The machine cannot fence programs in."""


@dataclass(frozen=True)
class Limits:
    """
    What a program may use.

    Args:
        seconds (`float`): wall-clock time; CPU time is bounded by the same, rounded up.
        memory (`int`): bytes of address space.
        output (`int`): bytes of a file it writes, its standard output included; of an output that is longer the
            beginning is kept.
        files (`int`): open files.
        disk (`int`): bytes of all files it writes together, where bubblewrap gives it a file system of its own.
        strict (`bool`): whether to refuse running at all where the kernel cannot fence files and calls.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    output: int = 1 << 20
    files: int = 32
    disk: int = 1 << 26
    strict: bool = True


@dataclass(frozen=True)
class Outcome:
    """
    How a program ended.

    Args:
        status (`str`): `"ok"`, `"error"` (an exception or an exit code), `"killed"` (by a signal) or `"timeout"`.
        stdout (`str`): what it printed.
        stderr (`str`): what it printed on the error stream; the traceback of an exception.
        returned (`list`): for calls, `{"value": ...}` or `{"error": ...}` for each, as far as it came.
        seconds (`float`): wall-clock time.
    """

    status: str
    stdout: str
    stderr: str
    returned: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def run_python(
    code: str,
    stdin: str = "",
    function: str | None = None,
    arguments: Sequence[Sequence[Any]] = (),
    limits: Limits | None = None,
) -> Outcome:
    """
    Run a Python program in a process of its own: no network, no other process, no file but in a temporary folder that
    is removed afterwards, an empty environment, bounded time, memory and output. May be called from several threads.

    Args:
        code (`str`): the program.
        stdin (`str`, *optional*): its standard input.
        function (`str`, *optional*): a function of it (or of its class `Solution`) to call, in place of running it as
            a script.
        arguments (`Sequence[Sequence]`, *optional*): the arguments of each call, as JSON values.
        limits ([`Limits`], *optional*): what it may use.

    Raises:
        JailError: the machine cannot fence programs in, and `limits.strict` is set.
    """
    limits = limits or Limits()
    missing = _missing() if limits.strict else ()
    if missing:
        raise JailError(
            f"Programs cannot be fenced in on this machine: it lacks {', '.join(missing)}. Run in a container of your "
            "own and set `strict=False`, which keeps the limits on time and memory only."
        )
    return _in_folder(code, stdin, function, arguments, limits)


@functools.cache
def _missing() -> tuple[str, ...]:
    """What this machine lacks for the fence. Found out once, by a program that can be trusted."""
    outcome = _in_folder("", "", None, (), Limits(seconds=60.0))
    if outcome.returned:
        return tuple(outcome.returned[0]["missing"])
    return (
        () if outcome.status == "ok" else (f"a Python that runs an empty program ({outcome.stderr.strip()[-300:]})",)
    )


def _in_folder(
    code: str, stdin: str, function: str | None, arguments: Sequence[Sequence[Any]], limits: Limits
) -> Outcome:
    folder = tempfile.mkdtemp(prefix="marft-jail-")
    try:
        return _run(Path(folder).resolve(), code, stdin, function, arguments, limits)
    finally:
        _remove(folder)


def _run(
    folder: Path, code: str, stdin: str, function: str | None, arguments: Sequence[Sequence[Any]], limits: Limits
) -> Outcome:
    (folder / "main.py").write_text(code, encoding="utf-8", errors="replace")
    with contextlib.ExitStack() as files:
        source = files.enter_context(tempfile.TemporaryFile())
        wishes, output, errors, results = (files.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        source.write(stdin.encode("utf-8", errors="replace"))
        source.seek(0)
        settings = {
            **{"folder": str(folder), "memory": limits.memory, "file_size": limits.output, "files": limits.files},
            **{"seconds": limits.seconds, "strict": limits.strict},
            **{"function": function, "arguments": [list(one) for one in arguments], "results": results.fileno()},
        }
        wishes.write(json.dumps(settings).encode())
        wishes.seek(0)
        start = time.monotonic()
        process = subprocess.Popen(  # noqa: S603  # the fence is there for just that
            [*_bubblewrap(folder, limits.disk), sys.executable, "-I", "-B", str(_FENCE), str(wishes.fileno())],
            stdin=source,
            stdout=output,
            stderr=errors,
            pass_fds=[wishes.fileno(), results.fileno()],
            cwd=folder,
            env={"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:replace", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            process.wait(limits.seconds + _STARTUP_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # it has put off its own alarm
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code_of_exit = process.wait()
        seconds = time.monotonic() - start
        returned = _lines(_read(results, limits.output))
        return Outcome(
            _status(code_of_exit), _read(output, limits.output), _read(errors, limits.output), returned, seconds
        )


def _bubblewrap(folder: Path, disk: int) -> list[str]:
    """The command line of bubblewrap, where it works: namespaces of its own on top of the fence."""
    command, inside, program = _working_bubblewrap(), str(folder), str(folder / "main.py")
    if not command:
        return []
    if _has_sized_folders(command):  # what is written is in memory, bounded, and gone with the process
        return [*command, *_sized(disk, inside), "--ro-bind", program, program, "--chdir", inside]
    return [*command, "--bind", inside, inside, "--chdir", inside]


def _sized(size: int, folder: str) -> list[str]:
    return ["--size", str(size), "--tmpfs", folder]


@functools.cache
def _has_sized_folders(command: tuple[str, ...]) -> bool:
    """Whether bubblewrap knows folders of a size, which it does from 0.7 on."""
    trial = [*command, *_sized(1 << 20, tempfile.gettempdir()), sys.executable, "-I", "-c", ""]
    return subprocess.run(trial, capture_output=True).returncode == 0  # noqa: S603


@functools.cache
def _working_bubblewrap() -> tuple[str, ...]:
    program = shutil.which("bwrap")
    if program is None:
        return ()
    command = (
        program,
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
    )
    done = subprocess.run([*command, sys.executable, "-I", "-c", ""], capture_output=True)  # noqa: S603
    return command if done.returncode == 0 else ()  # containers often forbid the namespaces it needs


def _status(code: int) -> str:
    if code == 0:
        return "ok"
    code = 128 - code if code > 128 else code  # bubblewrap's way to tell a signal
    if code in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    return "killed" if code < 0 else "error"


def _read(file: Any, most: int) -> str:
    file.seek(0)
    return file.read(most).decode("utf-8", errors="replace")


def _lines(text: str) -> list[dict[str, Any]]:
    lines = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(value, dict):
            break
        lines.append(value)
    return lines


def _remove(folder: str) -> None:
    """
    Remove the folder of a program, whatever the program has made of it. Never raises: a program must not end training.

    A child process does it, as system tools can that know locked folders, thousands of nested ones and odd names.
    `chmod -R` leaves what symbolic links point to alone.
    """
    with contextlib.suppress(OSError):  # nothing but the program itself, as after most
        os.unlink(os.path.join(folder, "main.py"))
        os.rmdir(folder)
        return
    problem: object = ""
    try:
        command = ["/bin/sh", "-c", 'chmod -R u+rwx "$1"; rm -rf "$1"', "sh", folder]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_REMOVAL_SECONDS)  # noqa: S603
        problem = done.stderr.decode(errors="replace")[-200:]
    except (OSError, subprocess.SubprocessError) as error:
        problem = error
    if os.path.lexists(folder):
        logger.warning("The folder %s of a program that was run could not be removed: %s", folder, problem)
