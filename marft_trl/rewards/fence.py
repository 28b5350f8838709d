# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Script that restricts its own process, then runs an untrusted program in it. It uses the standard library only.

    python -I fence.py 5        # reads settings as JSON from the file descriptor 5

On Linux, the kernel enforces the restrictions, and no privilege is needed to set them:

- resource limits;
- Landlock: the program can write only to its folder, and otherwise read only Python and system libraries;
- a seccomp filter: the program cannot start or reach other processes, open sockets or change the mode of files.

A process cannot lift its own restrictions.
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


# Refused system calls, with their numbers on x86_64 and aarch64 (from the kernel's `asm/unistd.h`; `None` if missing)
_REFUSED = {
    # programs and processes
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    # sockets
    "socket": (41, 198),
    "socketpair": (53, 199),
    "io_uring_setup": (425, 425),
    # signals to others
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    # others' memory and priorities
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    # modes, owners and times of files, which Landlock does not restrict
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "truncate": (76, 45),
    "open_by_handle_at": (304, 265),
    # objects that outlive a process
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # the machine
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
}
# Audit number of the architecture, and numbers of the calls clone, prlimit64 and fcntl
_MACHINES = {"x86_64": (0xC000003E, 56, 302, 72), "aarch64": (0xC00000B7, 220, 261, 25)}
_SET_OWNER = (8, 10, 15)  # fcntl's F_SETOWN, F_SETSIG, F_SETOWN_EX, which choose the process to signal about a file
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
    """Limit memory, CPU time, the size of each file and the number of open files. Disable core dumps."""
    bounds = {"AS": memory, "CPU": cpu_seconds, "FSIZE": file_size, "NOFILE": files, "CORE": 0}
    for name, bound in bounds.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def fence_files(libc, folder: str) -> bool:
    """Use Landlock to allow writing only in `folder`, and reading only there and in Python and system libraries."""
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
    """Use seccomp to refuse calls that start processes, open sockets or reach anything outside of the folder."""
    machine = platform.machine()
    if machine not in _MACHINES:
        return False
    architecture, clone, prlimit, fcntl = _MACHINES[machine]
    refused = [numbers[list(_MACHINES).index(machine)] for numbers in _REFUSED.values()]

    def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    load, equals, has_bits, answer = 0x20, 0x15, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050000 | _EPERM, 0x00050000 | _ENOSYS, 0x80000000
    number, first, second = 0, 16, 24  # offsets of a call's number and of its arguments
    program = [op(load, 4), op(equals, architecture, 1), op(answer, kill), op(load, number)]
    # On x86_64, numbers from 2**30 on are the x32 variants of the same calls
    program += [op(0x35, 0x40000000, 0, 1), op(answer, refuse)]
    program += [op(equals, _CLONE3, 0, 1), op(answer, unknown)]  # the C library then uses clone
    for call in filter(None, refused):
        program += [op(equals, call, 0, 1), op(answer, refuse)]
    # Allow threads but not processes, and the process's own limits but not those of others
    program += [op(equals, clone, 0, 3), op(load, first), op(has_bits, _CLONE_THREAD, 1), op(answer, refuse)]
    program += [op(load, number), op(equals, prlimit, 0, 3), op(load, first), op(equals, 0, 1), op(answer, refuse)]
    program += [op(load, number), op(equals, fcntl, 0, 2 * len(_SET_OWNER) + 1), op(load, second)]
    for command in _SET_OWNER:
        program += [op(equals, command, 0, 1), op(answer, refuse)]
    program += [op(answer, allow)]
    code = ctypes.create_string_buffer(b"".join(program))
    filter_ = _Program(len(program), ctypes.cast(code, ctypes.c_void_p).value)
    return libc.prctl(22, 2, ctypes.byref(filter_), 0, 0) == 0


def fence(settings: dict) -> list[str]:
    """Restrict this process. Returns the names of the restrictions that could not be set."""
    missing = []
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS: required without privileges
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
    signal.setitimer(signal.ITIMER_REAL, settings["seconds"])  # its signal ends the process
    if settings["function"] is None:
        runpy.run_path("main.py", run_name="__main__")
    else:
        call("main.py", settings["function"], settings["arguments"], settings["results"])


if __name__ == "__main__":
    main()
