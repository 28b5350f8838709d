# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Sandbox for untrusted Python programs. Each program runs in a separate, restricted process (see `fence.py`)."""

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
_STARTUP_SECONDS = 5  # start-up time of the interpreter on a busy machine, added to the program's time limit


class JailError(RuntimeError):
    """Raised when the machine lacks the sandboxing features that `Limits(strict=True)` requires."""


@dataclass(frozen=True)
class Limits:
    """
    Limits of a program.

    Args:
        seconds (`float`, *optional*, defaults to `10.0`): wall-clock time limit in seconds. CPU time has about the
            same limit.
        memory (`int`, *optional*, defaults to `1 << 30`): size of the address space in bytes.
        output (`int`, *optional*, defaults to `1 << 20`): maximum size of each file that the program writes, in bytes,
            including the standard output. Of a longer output, only the beginning is kept.
        files (`int`, *optional*, defaults to `32`): maximum number of open files.
        disk (`int`, *optional*, defaults to `1 << 26`): total size of all written files in bytes. It only applies if
            bubblewrap gives the program its own file system.
        strict (`bool`, *optional*, defaults to `True`): raise [`JailError`] if the kernel cannot restrict file access
            and system calls.
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
    Result of running a program.

    Args:
        status (`str`): `"ok"`, `"error"` (an exception or an exit code), `"killed"` (by a signal) or `"timeout"`.
        stdout (`str`): text on the standard output.
        stderr (`str`): text on the standard error stream, including the traceback of an exception.
        returned (`list`): one `{"value": ...}` or `{"error": ...}` per finished call, if a function was called.
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
    Run a Python program in a sandboxed process. The program has no network, cannot start or reach other processes, and
    writes only to a temporary folder, which is removed afterwards. Its environment is empty, and its time, memory and
    output are limited. This function is thread-safe.

    Args:
        code (`str`): source code of the program.
        stdin (`str`, *optional*): standard input of the program.
        function (`str`, *optional*): name of a function of the program, or of a method of its class `Solution`. It is
            called instead of running the program as a script.
        arguments (`Sequence[Sequence]`, *optional*): arguments of each call, as JSON values.
        limits ([`Limits`], *optional*): limits of the program. Defaults to `Limits()`.

    Raises:
        JailError: the machine cannot sandbox programs, and `limits.strict` is set.
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
    """Names of the sandboxing features that this machine lacks. They are found once, by running an empty program."""
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
        process = subprocess.Popen(  # noqa: S603  # untrusted code, which the fence restricts
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
            pass  # the program disabled its own alarm
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
    """Command line of bubblewrap, which adds separate namespaces to the fence. Empty if it does not work here."""
    command, inside, program = _working_bubblewrap(), str(folder), str(folder / "main.py")
    if not command:
        return []
    if _has_sized_folders(command):  # files are kept in memory, limited in size, and removed with the process
        return [*command, *_sized(disk, inside), "--ro-bind", program, program, "--chdir", inside]
    return [*command, "--bind", inside, inside, "--chdir", inside]


def _sized(size: int, folder: str) -> list[str]:
    return ["--size", str(size), "--tmpfs", folder]


@functools.cache
def _has_sized_folders(command: tuple[str, ...]) -> bool:
    """Return `True` if bubblewrap supports folders of limited size (0.7 and later)."""
    with tempfile.TemporaryDirectory(prefix="marft-jail-") as folder:  # not a parent, which may hold the interpreter
        trial = [*command, *_sized(1 << 20, folder), sys.executable, "-I", "-c", ""]
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
    code = 128 - code if code > 128 else code  # bubblewrap reports a signal this way
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
    Remove the folder of a program. It never raises, because a program must not end training.

    System tools do it in a child process. They can handle locked folders, thousands of nested folders and odd names.
    `chmod -R` does not follow symbolic links.
    """
    with contextlib.suppress(OSError):  # usually, the folder holds nothing but the program
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
