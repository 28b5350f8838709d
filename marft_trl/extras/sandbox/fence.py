# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Script that restricts its own process, then runs an untrusted program in it. It uses the standard library only, and
little of it, because it starts again for every program.

    python -s -S -B fence.py 5     # reads its settings from the file descriptor 5

On Linux, the kernel enforces the restrictions, and no privilege is needed to set them:

- no capabilities, and no new privileges;
- resource limits;
- Landlock: the program can write only to its folder, and otherwise read only Python and system libraries;
- seccomp: only the system calls in `_ALLOWED` and `_allowed_with` work, on every kernel. libseccomp makes the filter.

A process cannot lift its own restrictions.
"""

import builtins
import ctypes
import errno
import marshal
import os
import signal
import sys


if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the folder of this file, whose modules have names of the standard library


# The system calls that an interpreter with threads, asyncio and NumPy needs, and that stay within the process, its
# open files and the folders that Landlock allows. Those that an architecture does not have are left out.
_ALLOWED = """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range copy_file_range
    sendfile ftruncate fsync fdatasync fadvise64 dup dup2 dup3 pipe pipe2
    stat fstat lstat statx newfstatat statfs fstatfs access faccessat faccessat2 getdents getdents64 getcwd chdir
    fchdir readlink readlinkat mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 symlink symlinkat link
    linkat
    mprotect munmap mremap madvise brk membarrier get_mempolicy
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause signalfd4
    restart_syscall getitimer setitimer alarm nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time
    times select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd
    eventfd2 timerfd_create timerfd_settime timerfd_gettime
    futex futex_waitv set_robust_list set_tid_address rseq arch_prctl exit exit_group gettid sched_yield
    getpid getppid getuid geteuid getgid getegid getgroups getresuid getresgid getpgrp getpgid getsid umask
    getrlimit setrlimit getrusage uname sysinfo getrandom getcpu sched_getaffinity sched_getparam sched_getscheduler
    sched_get_priority_max sched_get_priority_min getpriority
    sendto recvfrom sendmsg recvmsg shutdown getsockname getpeername getsockopt
""".split()  # noqa: SIM905
# Of fcntl: duplicates, flags, locks, sizes of pipes; not the commands that choose a process to signal about a file.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032)
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # what a terminal is, bytes to read, blocking, inheritance
_PRCTL = (15, 16)  # names of threads
_CLONE_THREAD = 0x10000
_MAP_TYPE, _MAP_PRIVATE, _MAP_ANONYMOUS = 0xF, 0x2, 0x20
_AF_UNIX, _SOCK_STREAM, _SOCK_KIND = 1, 1, 0xF
# libseccomp: actions, operators of comparisons, attributes
_ALLOW, _ERRNO, _EQUAL, _MASKED = 0x7FFF0000, 0x00050000, 4, 7
_ATTRIBUTE_OPTIMIZE = 8

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, read folders
_WRITE = 1 << 1
_NODES = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11  # character devices, sockets, pipes with a name, block devices
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | _TRUNCATE | _IOCTL_DEV
# Rights that each version of Landlock knows. Later versions know more, which seccomp refuses.
_RIGHTS = ((1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1, (1 << 15) - 1, (1 << 16) - 1)

_PDEATHSIG, _NO_NEW_PRIVILEGES = 1, 38


class _PathAttr(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


class _Comparison(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def limit(memory: int, cpu_seconds: int, file_size: int, files: int) -> None:
    """Set resource limits, and disable core dumps."""
    import resource

    bounds = {"AS": memory, "CPU": cpu_seconds, "FSIZE": file_size, "NOFILE": files, "CORE": 0, "MEMLOCK": 0}
    for name, bound in bounds.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def drop_capabilities(libc) -> bool:
    header = _CapabilityHeader(0x20080522, 0)  # version 3: two words of each of the three sets
    return libc.capset(ctypes.byref(header), (ctypes.c_uint32 * 6)()) == 0


def fence_files(libc, folder: str, readable: list) -> bool:
    """Use Landlock to allow writing only in `folder`, and reading only there and in `readable`."""
    abi = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        return False
    handled = _RIGHTS[min(abi, len(_RIGHTS)) - 1]
    attr = ctypes.c_uint64(handled)
    ruleset = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(attr), ctypes.sizeof(attr), 0)
    rules = [(path, _READ) for path in (*readable, "/proc/self/fd/0")]  # the last is what /dev/stdin opens
    rules += [("/dev/null", _READ | _WRITE), (folder, handled & ~(_NODES | _IOCTL_DEV))]
    for path, access in rules:
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _PathAttr(access if os.path.isdir(path) else access & handled & _OF_FILES, descriptor)
        refused = libc.syscall(_LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0)
        os.close(descriptor)
        if refused:
            return False
    done = libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return done


def _allowed_with() -> list:
    """Return system calls that are allowed with some arguments: name, and comparisons `(argument, operator, a, b)`."""
    own, truncates, how = os.getpid(), os.O_TRUNC, os.O_ACCMODE
    rules = [
        ("clone", (0, _MASKED, _CLONE_THREAD, _CLONE_THREAD)),  # threads, no processes
        # Writes to a shared mapping of a file are not counted
        ("mmap", (3, _MASKED, _MAP_TYPE, _MAP_PRIVATE)),
        ("mmap", (3, _MASKED, _MAP_ANONYMOUS, _MAP_ANONYMOUS)),
        ("socketpair", (0, _EQUAL, _AF_UNIX, 0), (1, _MASKED, _SOCK_KIND, _SOCK_STREAM)),  # reaches itself alone
        ("prlimit64", (0, _EQUAL, 0, 0)),
        *((name, (0, _EQUAL, own, 0)) for name in ("kill", "tgkill")),
        *(("fcntl", (1, _EQUAL, command, 0)) for command in _FCNTL),
        *(("ioctl", (1, _EQUAL, command, 0)) for command in _IOCTL),
        *(("prctl", (0, _EQUAL, option, 0)) for option in _PRCTL),
    ]
    # Before version 3, Landlock does not stop a program from truncating a read-only file when it opens the file
    for name, flags in (("open", 1), ("openat", 2)):
        rules.append((name, (flags, _MASKED, truncates, 0)))
        rules += [(name, (flags, _MASKED, how, mode)) for mode in (os.O_WRONLY, os.O_RDWR)]
    return rules


def fence_calls() -> bool:
    """Use seccomp to refuse every system call that is not known to stay within the process and its folder."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
        library.seccomp_init.restype = ctypes.c_void_p
        library.seccomp_init.argtypes = [ctypes.c_uint32]
        library.seccomp_load.argtypes = [ctypes.c_void_p]
        library.seccomp_attr_set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
        library.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
        library.seccomp_rule_add_array.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
        library.seccomp_rule_add_array.argtypes += [ctypes.POINTER(_Comparison)]
    except (OSError, AttributeError):
        return False
    filter_ = library.seccomp_init(_ERRNO | errno.EPERM)
    if not filter_:
        return False

    def rule(action: int, name: str, *comparisons: tuple) -> int:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # this architecture, or this version of libseccomp, does not know it
            return 0
        array = (_Comparison * max(1, len(comparisons)))(*(_Comparison(*comparison) for comparison in comparisons))
        return library.seccomp_rule_add_array(filter_, action, number, len(comparisons), array)

    refused = [rule(_ALLOW, name) for name in _ALLOWED]
    refused += [rule(_ALLOW, name, *comparisons) for name, *comparisons in _allowed_with()]
    refused += [rule(_ERRNO | errno.ENOSYS, "clone3")]  # the C library then uses clone, whose arguments can be read
    library.seccomp_attr_set(filter_, _ATTRIBUTE_OPTIMIZE, 2)  # a binary search
    return not any(refused) and library.seccomp_load(filter_) == 0


def fence(settings: dict) -> list:
    """Restrict this process. Returns the names of the restrictions that could not be set."""
    missing = []
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if not drop_capabilities(libc):
            missing.append("capset")
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):  # required without privileges
            missing.append("prctl")
        libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if settings["parent"] and os.getppid() != settings["parent"]:
            sys.exit("The parent process has ended.")
        if not fence_files(libc, settings["folder"], settings["readable"]):
            missing.append("Landlock")
        limit(settings["memory"], int(settings["seconds"]) + 2, settings["file_size"], settings["files"])
        if not fence_calls():
            missing.append("seccomp (libseccomp.so.2, in the package libseccomp2 of Debian)")
    else:
        missing.append("a Linux kernel that restricts file access and system calls")
        limit(settings["memory"], int(settings["seconds"]) + 2, settings["file_size"], settings["files"])
    return missing


def load(name: str) -> dict:
    """Run the program as the module of this name, and return what it defines."""
    module = type(sys)(name)
    module.__file__ = "main.py"
    sys.modules[name] = module
    with open("main.py", "rb") as file:
        program = compile(file.read(), "main.py", "exec", dont_inherit=True)
    exec(program, module.__dict__)  # noqa: S102  # this process exists to run it
    return module.__dict__


def call(name: str, arguments: list, results: int) -> None:
    """Load the program, call a function of it on each list of arguments, and write what it returns as JSON lines."""
    import json

    scope = load("solution")
    owner = scope["Solution"]() if name not in scope and "Solution" in scope else None
    function = getattr(owner, name) if owner is not None else scope[name]
    for args in arguments:
        try:
            line = json.dumps({"value": function(*args)}, default=_plain)
        except (Exception, SystemExit) as error:
            line = json.dumps({"error": f"{type(error).__name__}: {error}"[:500]})
        os.write(results, line.encode() + b"\n")


def _plain(value):
    """Convert a NumPy value or an iterable to JSON data."""
    return value.tolist() if hasattr(value, "tolist") else list(value)


def main() -> None:
    with open(int(sys.argv[1]), "rb") as file:
        settings = marshal.load(file)  # noqa: S302  # written by the parent process
    os.chdir(settings["folder"])
    missing = fence(settings)
    try:
        signal.setitimer(signal.ITIMER_REAL, settings["seconds"])  # its signal ends the process
    except OSError:
        missing.append("setitimer")
    # The program runs after this file is closed, so it cannot write there
    os.write(settings["report"], marshal.dumps(missing))
    os.close(settings["report"])
    if missing and settings["strict"]:
        sys.exit(3)
    sys.argv = ["main.py"]
    sys.path += settings["packages"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which `site` defines
    if settings["function"] is None:
        load("__main__")
    else:
        call(settings["function"], settings["arguments"], settings["results"])


if __name__ == "__main__":
    main()
