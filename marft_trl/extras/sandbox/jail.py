# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Sandbox for untrusted Python programs. Each program runs in a separate, restricted process (see `fence.py`)."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import marshal
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any


_FENCE = Path(__file__).with_name("fence.py")
# One thread for NumPy: on a machine with many cores, the buffers of a thread per core exceed the memory limit.
_ENVIRONMENT = {
    **{"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:replace", "LC_ALL": "C.UTF-8"},
    **{f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL")},
}
logger = logging.getLogger(__name__)

_REMOVAL_SECONDS = 60
_STARTUP_SECONDS = 30  # start-up time of the interpreter on a busy machine, before the program's time limit
_BEYOND_SECONDS = 0.2  # after the time limit, before a program that has disabled its own alarm is killed
_WATCH_SECONDS = 0.05  # between two checks of a running program
# Existing paths among these may be read by programs, in addition to the folders of the interpreter
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")


class JailError(RuntimeError):
    """
    Raised when the machine lacks the sandboxing features that `Limits(strict=True)` requires, or when a program could
    not be started. A wrong program never raises it.
    """


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
        disk (`int`, *optional*, defaults to `1 << 26`): total size of all written files in bytes. With bubblewrap, the
            file system of the program has this size. Otherwise, the program is killed when it is seen to have written
            more in all.
        entries (`int`, *optional*, defaults to `1000`): maximum number of files and folders in the program's folder. A
            program that is seen to exceed it is killed. It does not apply with bubblewrap, whose folder is in memory.
        threads (`int`, *optional*, defaults to `64`): maximum number of threads. A program that is seen to exceed it
            is killed.
        strict (`bool`, *optional*, defaults to `True`): raise [`JailError`] if the kernel cannot restrict file access
            and system calls.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    output: int = 1 << 20
    files: int = 32
    disk: int = 1 << 26
    entries: int = 1000
    threads: int = 64
    strict: bool = True

    def __post_init__(self):
        if not 0 < self.seconds < 1e6:
            raise ValueError(f"`seconds` of `Limits` must be a positive number below 1e6, got {self.seconds!r}.")
        least = {"memory": 1 << 27, "output": 1, "files": 16, "disk": 1 << 16, "entries": 2, "threads": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not bound <= value < 1 << 63:
                raise ValueError(f"`{name}` of `Limits` must be an integer of at least {bound}, got {value!r}.")


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
        JailError: the machine cannot sandbox programs, and `limits.strict` is set; or it cannot start a process.
    """
    limits = limits or Limits()
    missing = _missing()
    if missing and not limits.strict:
        _warn_of_missing(missing)
    elif missing:
        raise JailError(
            f"This machine cannot sandbox programs: it lacks {', '.join(missing)}. Run in a container and set "
            "`strict=False`, which only keeps the time and memory limits."
        )
    return _in_folder(code, stdin, function, arguments, limits)


@functools.cache  # once
def _warn_of_missing(missing: Sequence[str]) -> None:
    logger.warning(
        f"Programs run without a sandbox (`strict=False`): this machine lacks {', '.join(missing)}. Only their time "
        "and memory are limited."
    )


@functools.cache
def _missing() -> tuple[str, ...]:
    """Names of the sandboxing features that this machine lacks, found once by running an empty program."""
    try:
        _in_folder("", "", None, (), Limits(seconds=60.0))
    except _Lacking as error:
        return error.missing
    except JailError as error:
        return (f"a Python that runs an empty program ({error})",)
    if not _working_bubblewrap():
        logger.info("The sandbox uses kernel restrictions only: bubblewrap is not installed, or not allowed here.")
    return ()


class _Lacking(JailError):
    def __init__(self, missing: Sequence[str]):
        super().__init__(f"the machine lacks {', '.join(missing)}")
        self.missing = tuple(missing)


def _in_folder(
    code: str, stdin: str, function: str | None, arguments: Sequence[Sequence[Any]], limits: Limits
) -> Outcome:
    try:
        folder = tempfile.mkdtemp(prefix="marft-jail-")
    except OSError as error:
        raise JailError(f"Cannot create a folder for a program: {error}") from error
    try:
        return _run(Path(folder).resolve(), code, stdin, function, arguments, limits)
    except OSError as error:  # a full disk, or too many open files
        raise JailError(f"Cannot run a program: {error}") from error
    finally:
        _remove(folder)


# Files that pass settings to a process, and results back
_FILES = ("source", "wishes", "output", "errors", "results", "report")


def _run(
    folder: Path, code: str, stdin: str, function: str | None, arguments: Sequence[Sequence[Any]], limits: Limits
) -> Outcome:
    (folder / "main.py").write_text(code, encoding="utf-8", errors="replace")
    with contextlib.ExitStack() as stack:
        files = SimpleNamespace(**{name: stack.enter_context(tempfile.TemporaryFile()) for name in _FILES})
        files.source.write(stdin.encode("utf-8", errors="replace"))
        files.source.seek(0)
        command = _bubblewrap(folder, limits.disk)
        readable, packages = _readable()
        settings = {
            **{"folder": str(folder), "memory": limits.memory, "file_size": limits.output, "files": limits.files},
            **{"seconds": limits.seconds, "strict": limits.strict, "readable": readable, "packages": packages},
            **{"function": function, "arguments": json.loads(json.dumps([list(argument) for argument in arguments]))},
            **{"results": files.results.fileno(), "report": files.report.fileno()},
            "parent": 0 if command else os.getpid(),  # bubblewrap, which then is the parent, kills the process
        }
        files.wishes.write(marshal.dumps(settings))
        files.wishes.seek(0)
        start = time.monotonic()
        process = _start(command, files, folder)
        try:
            excess = _watch(process, folder, limits, files.report)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code_of_exit = process.wait()
        seconds = time.monotonic() - start
        errors = _read(files.errors, limits.output) + excess
        _check_report(files.report, limits, errors)
        status = "killed" if excess else _status(code_of_exit, bool(command))
        returned = _lines(_read(files.results, limits.output))
        return Outcome(status, _read(files.output, limits.output), errors, returned, seconds)


def _start(command: Sequence[str], files: SimpleNamespace, folder: Path) -> subprocess.Popen:
    # -S: what `site` imports takes most of the time of a short program. Not -I, which ignores the seed of hashes.
    return subprocess.Popen(  # noqa: S603  # untrusted code, which the fence restricts
        [*command, sys.executable, "-s", "-S", "-B", str(_FENCE), str(files.wishes.fileno())],
        stdin=files.source,
        stdout=files.output,
        stderr=files.errors,
        pass_fds=[files.wishes.fileno(), files.results.fileno(), files.report.fileno()],
        cwd=folder,
        env=_ENVIRONMENT,
        start_new_session=True,
    )


def _watch(process: subprocess.Popen, folder: Path, limits: Limits, report: Any) -> str:
    """Wait until a program ends or exceeds a limit. Returns a message about the exceeded limit, or `""`."""
    deadline, runs = time.monotonic() + _STARTUP_SECONDS, False
    with _ending(process) as ended:
        while not ended(min(_WATCH_SECONDS, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return ""
            if not runs and os.fstat(report.fileno()).st_size:
                deadline, runs = time.monotonic() + limits.seconds + _BEYOND_SECONDS, True
            if _threads(process.pid) > limits.threads:
                return f"\nKilled: the program has more than {limits.threads} threads."
            if _written(process.pid) > limits.disk or not _is_within(folder, limits):
                return f"\nKilled: the program wrote more than {limits.entries} files or {limits.disk} bytes."
    return ""


@contextlib.contextmanager
def _ending(process: subprocess.Popen):
    """Yield a function that waits some seconds for a process, and returns `True` as soon as it has exited."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # another system, or a container that refuses the call

        def ended(seconds: float) -> bool:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            return process.poll() is not None

        yield ended
        return
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        yield lambda seconds: bool(waiting.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def _threads(pid: int) -> int:
    """Count the threads of a process and its descendants; 0 if the system does not show them."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        children = [child for task in tasks for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except OSError:
        return 0
    return len(tasks) + sum(_threads(int(child)) for child in children)


def _written(pid: int) -> int:
    """Return the number of bytes that a process has written, including deleted and inaccessible files."""
    try:
        return int(Path(f"/proc/{pid}/io").read_text().partition("wchar:")[2].split()[0])
    except (OSError, IndexError):
        return 0


def _is_within(folder: Path, limits: Limits) -> bool:
    """Return `False` if a folder exceeds the limits, or contains a path that cannot be read."""
    entries, size, folders = 0, 0, [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    entries += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entries > limits.entries or size > limits.disk:
                        return False
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
            continue
        except OSError:  # a path that is too long, or not readable
            return False
    return True


def _check_report(report: Any, limits: Limits, errors: str) -> None:
    """Check that the program was started in the sandbox. The program cannot write this report."""
    report.seek(0)
    try:
        missing = marshal.load(report)  # noqa: S302  # written by the fence
    except (EOFError, ValueError, TypeError):
        raise JailError(f"Cannot start a program: {errors.strip()[-300:]}") from None
    if missing and limits.strict:
        raise _Lacking(missing)


@functools.cache
def _readable() -> tuple[list[str], list[str]]:
    """Return the paths that programs may read, and the package folders among them."""
    paths = sysconfig.get_paths()
    packages = list(dict.fromkeys([paths["purelib"], paths["platlib"]]))
    own = [paths["stdlib"], paths["platstdlib"], os.path.join(sys.base_prefix, "lib"), *packages]
    own += [os.path.realpath(path) for path in own]
    return list(dict.fromkeys([*_SYSTEM, *_SYSTEM_FILES, *own])), packages


def _bubblewrap(folder: Path, disk: int) -> list[str]:
    """Command line of bubblewrap, which adds separate namespaces to the fence. Empty if it does not work here."""
    command, inside, program = _working_bubblewrap(), str(folder), str(folder / "main.py")
    if not command:
        return []
    if _has_sized_folders(command):  # files are kept in memory, limited in size, and removed with the process
        return [*command, "--size", str(disk), "--tmpfs", inside, "--ro-bind", program, program, "--chdir", inside]
    return [*command, "--bind", inside, inside, "--chdir", inside]


@functools.cache
def _has_sized_folders(command: tuple[str, ...]) -> bool:
    """Return `True` if bubblewrap supports folders of limited size (0.7 and later)."""
    with tempfile.TemporaryDirectory(prefix="marft-jail-") as folder:  # not a parent, which may hold the interpreter
        trial = [*command, "--size", str(1 << 20), "--tmpfs", folder, sys.executable, "-I", "-c", ""]
        return subprocess.run(trial, capture_output=True).returncode == 0  # noqa: S603


@functools.cache
def _working_bubblewrap() -> tuple[str, ...]:
    program = shutil.which("bwrap")
    if program is None:
        return ()
    folders = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")
    command = (program, "--unshare-all", "--die-with-parent", *folders)
    done = subprocess.run([*command, sys.executable, "-I", "-c", ""], capture_output=True)  # noqa: S603
    return command if done.returncode == 0 else ()  # containers often forbid the namespaces it needs


def _status(code: int, in_bubblewrap: bool) -> str:
    if code == 0:
        return "ok"
    code = 128 - code if in_bubblewrap and code > 128 else code  # bubblewrap reports a signal this way
    if code in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    return "killed" if code < 0 else "error"


def _read(file: Any, most: int) -> str:
    file.seek(0)
    return file.read(most).decode("utf-8", errors="replace")


def _lines(text: str) -> list[dict[str, Any]]:
    lines = []
    with contextlib.suppress(ValueError, RecursionError):
        for line in text.splitlines():
            value = json.loads(line)
            if not isinstance(value, dict):
                break
            lines.append(value)
    return lines


def _remove(folder: str) -> None:
    """Remove the folder of a program. It never raises, because a program must not end training."""
    with contextlib.suppress(OSError):  # usually, the folder holds nothing but the program
        os.unlink(os.path.join(folder, "main.py"))
        os.rmdir(folder)
        return
    try:
        # System tools handle locked folders, deep nesting and odd names. `chmod -R` does not follow symbolic links
        command = ["/bin/sh", "-c", 'chmod -R u+rwx "$1"; rm -rf "$1"', "sh", folder]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_REMOVAL_SECONDS)  # noqa: S603
        problem: object = done.stderr.decode(errors="replace")[-200:]
    except (OSError, subprocess.SubprocessError) as error:
        problem = error
    if os.path.lexists(folder):
        logger.warning("Cannot remove the folder %s of a program: %s", folder, problem)
