# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Run as a script: fences itself in, then runs a program that is not trusted. Standard library only.

    python -I fence.py 5        # settings as JSON behind the file descriptor 5

On Linux the kernel keeps the fence, without any privilege: resource limits; Landlock, so that nothing can be written
outside of the folder and nothing read but Python and system libraries; a seccomp filter, so that no process can be
started, no socket opened and no other process be signalled. What was given up cannot be got back.
"""

import ctypes
import json
import os
import platform
import resource
import runpy
import signal
import struct
import sys


# What is refused, by machine; the numbers are those of the kernel's `asm/unistd.h`. In each row: to start programs and
# processes, to open sockets; to signal others; to look into others and to change what one may do.
_X86_64 = (
    *(57, 58, 59, 322, 41, 53),  # fork, vfork, execve, execveat, socket, socketpair
    *(62, 200, 234, 129, 297, 424, 434),  # kill, tkill, tgkill, rt_(tg)sigqueueinfo, pidfd_send_signal, pidfd_open
    *(101, 310, 311, 272, 308),  # ptrace, process_vm_readv, process_vm_writev, unshare, setns
    *(425, 321, 250, 165),  # io_uring_setup, bpf, keyctl, mount
)
_AARCH64 = (
    *(221, 281, 198, 199),  # execve, execveat, socket, socketpair
    *(129, 130, 131, 138, 240, 424, 434),
    *(117, 270, 271, 97, 268),
    *(425, 280, 219, 40),
)
# Number of the architecture, of clone, and of what is refused
_MACHINES = {"x86_64": (0xC000003E, 56, _X86_64), "aarch64": (0xC00000B7, 220, _AARCH64)}
_CLONE3 = 435
_CLONE_THREAD = 0x10000
_EPERM, _ENOSYS = 1, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, read folders
_EVERYTHING_ABI_1 = (1 << 13) - 1


class _RulesetAttr(ctypes.Structure):
    _fields_ = [("handled_access_fs", ctypes.c_uint64)]


class _PathAttr(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def limit(memory: int, cpu_seconds: int, file_size: int, files: int) -> None:
    """Bound memory, CPU time, the size of a file and the number of open ones; leave no core dump."""
    bounds = {"AS": memory, "CPU": cpu_seconds, "FSIZE": file_size, "NOFILE": files, "CORE": 0}
    for name, bound in bounds.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def fence_files(libc, folder: str) -> bool:
    """Let Landlock forbid writing outside of `folder`, and reading but of Python and the system's libraries."""
    abi = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        return False
    handled = _EVERYTHING_ABI_1 | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0)
    attr = _RulesetAttr(handled)
    ruleset = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(attr), ctypes.sizeof(attr), 0)
    readable = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", sys.prefix]
    readable += [sys.base_prefix, os.path.realpath(sys.base_prefix), os.path.dirname(os.path.realpath(sys.executable))]
    rules = [(path, _READ) for path in readable] + [("/dev/null", 1 << 1 | 1 << 2), (folder, handled)]
    for path, access in rules:
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        of_file = 1 << 0 | 1 << 1 | 1 << 2 | (handled & 1 << 14)
        rule = _PathAttr(access if os.path.isdir(path) else access & of_file, descriptor)
        refused = libc.syscall(_LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0)
        os.close(descriptor)
        if refused:
            return False
    done = libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return done


def fence_calls(libc) -> bool:
    """Let seccomp refuse calls that start processes, open sockets or reach into other processes."""
    if platform.machine() not in _MACHINES:
        return False
    architecture, clone, refused = _MACHINES[platform.machine()]

    def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    load, equals, has_bits, answer = 0x20, 0x15, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050000 | _EPERM, 0x00050000 | _ENOSYS, 0x80000000
    program = [op(load, 4), op(equals, architecture, 1), op(answer, kill), op(load, 0)]
    # On x86_64, numbers from 2**30 on are the x32 variants of the same calls
    program += [op(0x35, 0x40000000, 0, 1), op(answer, refuse)]
    program += [op(equals, _CLONE3, 0, 1), op(answer, unknown)]  # the C library then uses clone
    for number in refused:
        program += [op(equals, number, 0, 1), op(answer, refuse)]
    program += [op(equals, clone, 0, 3), op(load, 16), op(has_bits, _CLONE_THREAD, 1), op(answer, refuse)]
    program += [op(answer, allow)]
    code = ctypes.create_string_buffer(b"".join(program))
    filter_ = _Program(len(program), ctypes.cast(code, ctypes.c_void_p).value)
    return libc.prctl(22, 2, ctypes.byref(filter_), 0, 0) == 0


def fence(settings: dict) -> list[str]:
    """Put up the fence. Returns what could not be put up."""
    missing = []
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(38, 1, 0, 0, 0):  # no new privileges: without it nobody may fence himself in
            missing.append("prctl")
        if not fence_files(libc, settings["folder"]):
            missing.append("Landlock")
        if not fence_calls(libc):
            missing.append("seccomp")
    else:
        missing.append("a kernel that fences files and calls (Linux)")
    limit(settings["memory"], int(settings["seconds"]) + 2, settings["file_size"], settings["files"])
    return missing


def call(path: str, name: str, arguments: list, results: int) -> None:
    """Load the program, call a function of it on each list of arguments, and write what it returns as JSON lines."""
    scope = runpy.run_path(path, run_name="solution")
    owner = scope["Solution"]() if name not in scope and "Solution" in scope else None
    function = getattr(owner, name) if owner is not None else scope[name]
    for one in arguments:
        try:
            line = json.dumps({"value": function(*one)}, default=list)
        except Exception as error:
            line = json.dumps({"error": f"{type(error).__name__}: {error}"[:500]})
        os.write(results, line.encode() + b"\n")


def main() -> None:
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        settings = json.load(file)
    os.chdir(settings["folder"])
    missing = fence(settings)
    if missing and settings["strict"]:
        os.write(settings["results"], json.dumps({"missing": missing}).encode() + b"\n")
        sys.exit(3)
    sys.argv = ["main.py"]
    signal.setitimer(signal.ITIMER_REAL, settings["seconds"])  # whose signal ends the process
    if settings["function"] is None:
        runpy.run_path("main.py", run_name="__main__")
    else:
        call("main.py", settings["function"], settings["arguments"], settings["results"])


if __name__ == "__main__":
    main()
