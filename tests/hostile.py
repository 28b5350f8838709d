"""
Hostile programs for the sandbox, by class. It imports only the standard library, so that any interpreter can run it.

A program has succeeded in something that it must not do if it ends with the status `"ok"`, unless its entry says how
else it ends. `BAIT` is a folder that everybody may write to; `PARENT` is the process that runs the program.
"""

import json
import os
import platform
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor


PRELUDE = """
import ctypes, os, signal, socket, sys, time
BAIT, PARENT, PORT = {bait!r}, {parent!r}, {port!r}
libc = ctypes.CDLL(None, use_errno=True)

def done(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def call(number, *arguments):
    return done(libc.syscall(number, *arguments))
"""
ACL = 'b"\\x02\\x00\\x00\\x00" + b"".join(bytes([t, 0, p, 0]) + b"\\xff" * 4 for t, p in ((1, 6), (4, 6), (32, 6)))'
_B = "BAIT.encode()"
_NUMBERS_X86_64 = {  # for attempts that the C library has no function for, or makes in another way
    **{"fork": 57, "vfork": 58, "execve": 59, "creat": 85, "truncate": 76, "mknod": 133, "mknodat": 259},
    **{"setxattrat": 463, "removexattrat": 466, "file_setattr": 469, "open_tree_attr": 467, "open_tree": 428},
    **{"fchmodat2": 452, "openat2": 437, "name_to_handle_at": 303, "io_uring_setup": 425, "io_setup": 206},
    **{"pidfd_open": 434, "pidfd_getfd": 438, "kcmp": 312, "userfaultfd": 323, "bpf": 321, "perf_event_open": 298},
    **{"keyctl": 250, "add_key": 248, "syslog": 103, "clone3": 435, "execveat": 322, "memfd_create": 319},
    **{"memfd_secret": 447, "seccomp": 317, "fsopen": 430, "move_mount": 429, "mount_setattr": 442},
    **{"process_madvise": 440, "ioprio_set": 251, "kexec_load": 246, "finit_module": 313, "fanotify_init": 300},
    **{"inotify_init1": 294, "mq_unlink": 241, "mq_open": 240, "landlock_create_ruleset": 444, "statmount": 457},
    **{"timer_create": 222, "tkill": 200, "rt_sigqueueinfo": 129, "pidfd_send_signal": 424, "process_mrelease": 448},
    **{"modify_ldt": 154, "vhangup": 153, "set_mempolicy": 238, "mlock2": 325, "quotactl_fd": 443, "cachestat": 451},
}


def _files():
    outside = ["BAIT + '/new'", "BAIT + '/open'", "os.__file__", "'/usr/lib/x'", "'/tmp/marft-new'"]
    yield from (f"open({path}, 'w')" for path in [*outside, "'/proc/self/comm'"])
    yield from (f"open(BAIT + '/open', {mode!r})" for mode in ("a", "r+", "ab+"))
    yield from ("open(BAIT + '/new', 'x')", "os.open(BAIT + '/open', os.O_RDONLY | os.O_TRUNC)")
    yield from ("os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)", "os.open(BAIT, os.O_TMPFILE | os.O_RDWR)")
    yield from (f"os.truncate({path}, 0)" for path in ("BAIT + '/open'", "os.__file__"))
    yield from ("os.unlink(BAIT + '/open')", "os.rmdir(BAIT + '/folder')", "os.mkdir(BAIT + '/new')")
    yield from ("os.rename(BAIT + '/open', 'x')", "os.rename('main.py', BAIT + '/new')")
    yield from ("os.replace('main.py', BAIT + '/open')", "os.symlink('/etc', BAIT + '/new')")
    yield from ("os.link(BAIT + '/open', 'x')", "os.link('main.py', BAIT + '/new')")
    yield f"done(libc.renameat2(-100, {_B} + b'/open', -100, b'main.py', 2))"
    yield from ("os.symlink(BAIT + '/open', 'l'); open('l', 'w')", "os.symlink(BAIT, 'l'); open('l/new', 'w')")
    yield from ("open('/proc/self/root' + BAIT + '/new', 'w')", "open('/proc/self/cwd/../new', 'w')")
    yield "os.chdir(BAIT); open('new', 'w')"
    yield "d = os.open(BAIT, os.O_PATH); os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=d)"
    yield from ("os.chmod(BAIT + '/open', 0)", "os.chmod(BAIT, 0)", "os.chown(BAIT + '/open', 1, 1)")
    yield from ("os.lchown(BAIT + '/open', 1, 1)", "os.utime(BAIT + '/open', (1, 1))", "os.utime(BAIT)")
    yield "f = open(os.__file__); os.fchmod(f.fileno(), 0)"
    yield "f = open(os.__file__); os.fchown(f.fileno(), 1, 1)"
    yield from ("os.symlink(BAIT + '/open', 'l'); os.chmod('l', 0)", "os.setxattr(BAIT + '/open', 'user.x', b'1')")
    yield "os.removexattr(BAIT + '/open', 'user.kept')"
    yield f"os.setxattr(BAIT + '/open', 'system.posix_acl_access', {ACL})"
    yield f"os.setxattr(BAIT, 'system.posix_acl_default', {ACL})"
    yield "import fcntl, array; fcntl.ioctl(open(os.__file__), 0x40086602, array.array('l', [16]))"
    yield "import mmap; mmap.mmap(os.open(os.__file__, os.O_RDONLY), 4096, access=mmap.ACCESS_WRITE)[0] = 0"
    yield from ("os.posix_fallocate(os.open(BAIT + '/open', os.O_RDWR), 0, 10)", "os.chroot('.')")
    yield from ("done(libc.mount(b'none', BAIT.encode(), b'tmpfs', 0, None))", "done(libc.umount2(b'/proc', 2))")
    yield "done(libc.fallocate(os.open(os.__file__, os.O_RDONLY), 3, 0, 10))"


def _reads():
    secret = ["BAIT + '/secret'", "'/etc/passwd'", "'/etc/shadow'", "'/etc/hostname'", "'/proc/1/environ'"]
    secret += ["f'/proc/{PARENT}/environ'", "f'/proc/{PARENT}/maps'", "'/proc/net/tcp'", "'/proc/kcore'"]
    secret += ["'/dev/mem'", "'/dev/kmsg'"]
    secret += ["'/proc/self/root/etc/passwd'", "'/sys/kernel/notes'", "'/etc/machine-id'", "'/dev/ptmx'", "'/dev/tty'"]
    yield from (f"open({path}, 'rb').read(1)" for path in secret)
    yield "os.symlink(BAIT + '/secret', 'l'); open('l').read()"
    yield from (
        f"os.listdir({path})" for path in ("BAIT", "'/'", "'/home'", "'/tmp'", "'/proc'", "os.path.dirname(BAIT)")
    )
    yield "os.listdir(os.path.dirname(os.path.dirname(os.getcwd())) or '/')"
    yield "b = ctypes.create_string_buffer(8); done(libc.process_vm_readv(PARENT, b, 1, b, 1, 0))"
    yield "done(libc.ptrace(16, PARENT, 0, 0))"


def _devices():
    yield from ("os.mknod('x', 0o20600, os.makedev(1, 1))", "os.mknod('x', 0o60600, os.makedev(8, 0))")
    yield from ("os.mkfifo('x')", "os.mknod('x', 0o140600)", "os.open('/dev/fuse', os.O_RDWR)")
    yield from ("os.open('/dev/loop-control', os.O_RDWR)", "os.openpty()", "open('/dev/shm/marft', 'w')")
    yield from ("import fcntl; fcntl.ioctl(0, 0x5412, b'x')", "done(libc.iopl(3))", "done(libc.ioperm(0, 1, 1))")


def _sockets():
    families = ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"]
    yield from (f"socket.socket(socket.{family}, socket.SOCK_STREAM)" for family in families)
    yield from (f"socket.socket(socket.{family}, socket.SOCK_DGRAM)" for family in families[:3])
    yield from ("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", "socket.create_connection(('127.0.0.1', PORT))")
    yield "import urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{PORT}')"
    yield from ("socket.getaddrinfo('example.com', 80)", "socket.socketpair(type=socket.SOCK_DGRAM)")
    yield "socket.socketpair(type=socket.SOCK_SEQPACKET)"
    yield "a, b = socket.socketpair(); a.connect(BAIT + '/socket')"
    yield "a, b = socket.socketpair(); a.sendto(b'x', BAIT + '/socket')"
    yield from ("a, b = socket.socketpair(); a.bind(BAIT + '/new')", "a, b = socket.socketpair(); a.listen()")
    yield "a, b = socket.socketpair(); a.setsockopt(socket.SOL_SOCKET, 26, b'\\0' * 16)"  # attach a filter
    yield "import fcntl; fcntl.flock(open(os.__file__), fcntl.LOCK_EX)"


def _ipc():
    yield from ("done(libc.shmget(0, 4096, 0o1666))", "done(libc.semget(0, 1, 0o1666))")
    yield from ("done(libc.msgget(0, 0o1666))", "done(libc.shmctl(0, 0, None))", "done(libc.semctl(0, 0, 0))")
    yield "done(libc.msgctl(0, 0, None))"
    yield "from multiprocessing.shared_memory import SharedMemory; SharedMemory('marft', True, 10)"
    yield from ("import multiprocessing; multiprocessing.Lock()", "from multiprocessing import Manager; Manager()")


def _processes():
    yield from ("os.fork()", "done(libc.vfork())", "os.execv('/bin/true', ['true'])")
    yield from ("os.posix_spawn('/bin/true', ['x'], {})", "sys.exit(os.system('true') and 9)")
    yield from ("os.popen('true').close()", "import subprocess; subprocess.run(['true'])", "import pty; pty.fork()")
    yield from ("os.forkpty()", "import multiprocessing as m; m.Process(target=print).start()")
    yield "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()"
    yield from ("done(libc.unshare(0x10000000))", "done(libc.unshare(0x20000))", "done(libc.setns(0, 0))")
    yield from ("os.setsid()", "os.setpgid(0, 0)", "done(libc.personality(0x40000))")
    yield from ("done(libc.prctl(1, 0, 0, 0, 0))", "done(libc.prctl(4, 1, 0, 0, 0))")
    yield from ("done(libc.prctl(22, 1, 0, 0, 0))", "os.setuid(0)", "os.setgroups([])", "os.setgid(0)")
    yield from ("os.setresuid(0, 0, 0)", "done(libc.prctl(47, 2, 0, 0, 0))", "done(libc.ptrace(0, 0, 0, 0))")
    yield "import resource; resource.prlimit(PARENT, resource.RLIMIT_NOFILE, (9, 9))"
    yield "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    yield from ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))", "os.nice(-5)")
    yield from ("os.setpriority(os.PRIO_PROCESS, PARENT, 19)", "os.sched_setaffinity(PARENT, {0})")
    yield from ("os.sched_setscheduler(PARENT, os.SCHED_IDLE, os.sched_param(0))", "done(libc.sethostname(b'x', 1))")
    yield from ("time.clock_settime(time.CLOCK_REALTIME, 0)", "done(libc.settimeofday(bytes(16), None))")
    yield from ("done(libc.adjtimex(bytes(400)))", "done(libc.acct(None))", "done(libc.reboot(0))")
    yield from ("done(libc.swapoff(b'x'))", "done(libc.mlockall(1))", "done(libc.capset(bytes(8), bytes(24)))")
    yield "done(libc.pivot_root(b'.', b'.'))"


def _numbers():
    yield from (f"call({number}, 0, 0, 0, 0, 0, 0)  # {name}" for name, number in _NUMBERS_X86_64.items())
    yield from (f"call({number}, 0, 0, 0, 0, 0, 0)  # not assigned yet" for number in (470, 480, 500, 600, 999, 2**29))


def _signals():
    yield from ("os.kill(PARENT, 9)", "os.kill(PARENT, 0)", "os.kill(-1, 9)", "os.kill(0, 9)", "os.kill(1, 9)")
    yield from ("os.killpg(os.getpgid(PARENT), 9)", "os.killpg(0, 9)", "call(234, PARENT, PARENT, 9)")
    yield from ("done(libc.sigqueue(PARENT, 9, 0))", "import fcntl; fcntl.fcntl(0, 8, PARENT)")
    yield from ("import fcntl; fcntl.fcntl(0, 10, 9)", "import fcntl; fcntl.fcntl(os.open('.', 0), 1026, 1)")
    yield "import fcntl; fcntl.fcntl(open(os.__file__), 1024, 0)"
    yield "signal.pidfd_send_signal(os.pidfd_open(PARENT), 9)"


# Programs that exceed a limit, and how they may end
LIMITS = {
    "memory": {
        "blocks": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "error"),
        "a list": ("x = [0]\nwhile True: x = x + x", "error timeout"),
        "a text": ("x = 'x' * (1 << 40)", "error"),
        "a mapping": ("import mmap; mmap.mmap(-1, 1 << 34)", "error"),
        "a number": ("x = 1 << (1 << 36)", "error"),
        "deep recursion": ("def f(): f()\nf()", "error"),
        "recursion without a limit": ("sys.setrecursionlimit(10**8)\ndef f(): f()\nf()", "error killed timeout"),
        "nested lists": ("import json; json.loads('[' * 10**6)", "error"),
    },
    "disk": {
        "a large file": ("open('f', 'w').write('x' * 10_000_000)", "error"),
        "a sparse file": ("os.ftruncate(os.open('f', 65), 1 << 40)", "error killed"),
        "many open files": ("x = [open('f', 'w') for _ in range(100)]", "error"),
        "many files": ("for i in range(10**7): open(str(i), 'w').close()", "error killed timeout"),
        "many large files": (
            "for i in range(10**4): open(str(i), 'w').write('x' * 1_000_000)\ntime.sleep(9)",
            "error killed",
        ),
        "nested folders": ("for _ in range(10**7): os.mkdir('x'); os.chdir('x')", "error killed timeout"),
        "links": ("for i in range(10**7): os.symlink('/', str(i))", "error killed timeout"),
        "hard links": ("for i in range(10**7): os.link('main.py', str(i))", "error killed timeout"),
    },
    "threads": {
        "five thousand": (
            "import threading; threading.stack_size(32768)\n"
            "for _ in range(5000): threading.Thread(target=time.sleep, args=(9,)).start()\ntime.sleep(9)",
            "error killed",
        ),
        "threads of threads": (
            "import threading\ndef f():\n    threading.Thread(target=f).start(); time.sleep(9)\nf()",
            "error killed timeout",
        ),
        "that never end": ("import threading; threading.Thread(target=time.sleep, args=(60,)).start()", "timeout"),
    },
    "time": {
        "a loop": ("while True: pass", "timeout"),
        "a sleeper": ("time.sleep(60)", "timeout"),
        "no alarm": ("signal.setitimer(signal.ITIMER_REAL, 0); time.sleep(60)", "timeout"),
        "an ignored alarm": ("signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass", "timeout"),
        "blocked signals": ("signal.pthread_sigmask(0, range(1, 65))\nwhile True: pass", "timeout"),
        "a caught alarm": (
            "def f(*_): raise ValueError\nsignal.signal(signal.SIGALRM, f)\n"
            "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
            "timeout error",
        ),
        "a pattern": ("import re; re.match('(a+)+$', 'a' * 50 + 'b')", "timeout"),
        "a power": ("9 ** 9 ** 9", "timeout error"),
        "a sleeper in C": ("libc.sleep(60)", "timeout"),
        "a lock": ("import threading; l = threading.Lock(); l.acquire(); l.acquire()", "timeout"),
        "standard input": ("r, w = os.pipe(); os.read(r, 1)", "timeout"),
    },
    "floods": {
        "output": ("while True: print('x' * 1_000_000)", "error"),
        "errors": ("while True: print('x' * 1_000_000, file=sys.stderr)", "error timeout killed"),
        "raw output": ("while True: os.write(1, b'x' * 1_000_000)", "error killed timeout"),
        "every file": (
            "while True:\n  for n in range(32):\n    try: os.write(n, b'x' * 4096)\n    except OSError: pass",
            "timeout killed error",
        ),
        "no output": ("os.close(1); os.close(2); raise SystemExit(3)", "error"),
    },
    "ends": {
        "a crash": ("ctypes.string_at(0)", "killed"),
        "an abort": ("os.abort()", "killed"),
        "a kill": ("os.kill(os.getpid(), 9)", "timeout killed"),
        "an exit": ("os._exit(7)", "error"),
        "an endless end": ("import atexit; atexit.register(time.sleep, 60)", "timeout"),
        "no such program": ("print(", "error"),
        # Stopped if it is looked at before it ends, by a user who may not list such a folder
        "a folder that is locked": (
            "os.mkdir('d', 0); os.mkdir('e'); open('e/f', 'w'); os.mkdir('e/d', 0)",
            "ok killed",
        ),
        "odd names": ("[open(n, 'w') for n in ('-rf', '\\n', ' ', '*', b'\\xff', '$(touch x)', 'a' * 255)]", "ok"),
        "no folder": ("os.unlink('main.py'); os.rmdir(os.getcwd())", "ok error"),
    },
}
# What legitimate programs do
HARMLESS = {
    "files": "open('a', 'w').write('1'); os.mkdir('b'); os.rename('a', 'b/a'); print(open('b/a').read())",
    "threads": "import threading; t = threading.Thread(target=print, args=(1,)); t.start(); t.join()",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0.01); return 1\nassert asyncio.run(f()) == 1",
    "a thread of asyncio": "import asyncio; print(asyncio.run(asyncio.to_thread(int, '1')))",
    "futures": "from concurrent.futures import ThreadPoolExecutor as P; print(list(P(4).map(abs, [-1, 2])))",
    "a socket pair": "a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'",
    "pipes": "r, w = os.pipe(); os.write(w, b'x'); assert os.read(r, 1) == b'x'",
    "signals to itself": "signal.signal(signal.SIGUSR1, print); os.kill(os.getpid(), signal.SIGUSR1)",
    "temporary files": "import tempfile; tempfile.tempdir = '.'; print(tempfile.NamedTemporaryFile().write(b'x'))",
    "dates": "import datetime, zoneinfo; print(datetime.datetime.now(zoneinfo.ZoneInfo('Europe/Berlin')))",
    "modules": "import decimal, json, sqlite3, re, random, statistics, heapq; sqlite3.connect(':memory:')",
    "deep but finite": "sys.setrecursionlimit(5000)\ndef f(n): return n and f(n - 1)\nf(4000)",
    "exit": "print(1); exit()",
    "quit": "quit(0)",
    "its own limits": "import resource; print(resource.getrlimit(resource.RLIMIT_AS)[0])",
    "mapped memory": "import mmap; m = mmap.mmap(-1, 4096); m[0] = 1",
}

NUMBER = r"Operation not permitted|Function not implemented"
# How the kernel refuses. An attempt that fails for another reason, such as a bug of the attempt, proves nothing.
SAYS = (
    r"PermissionError|Operation not permitted|Read-only|Invalid cross-device link|No such file|No such process"
    r"|name resolution|already connected|not allowed to raise|out of pty devices|cannot be accessed|SystemExit|^$"
)
_REFUSED = {
    **{"files": _files, "reads": _reads, "devices": _devices, "sockets": _sockets, "ipc": _ipc, "signals": _signals},
    **{"processes": _processes, "numbers": _numbers},
}


def programs() -> list[dict]:
    """All programs: `kind`, `name`, `code` without the prelude, and the statuses with which each may `end`."""
    listed = []
    for kind, attempts in _REFUSED.items():
        if kind == "numbers" and platform.machine() != "x86_64":
            continue
        listed += [{"kind": kind, "name": code, "code": code, "ends": ["error"]} for code in attempts()]
    for kind, cases in LIMITS.items():  # on a busy machine, a program may reach the limit of time before its own
        for name, (code, ends) in cases.items():
            listed.append({"kind": kind, "name": name, "code": code, "ends": [*ends.split(), "timeout"]})
    return listed + [{"kind": "harmless", "name": n, "code": code, "ends": ["ok"]} for n, code in HARMLESS.items()]


def load_jail(package: str, walls: str):
    """Import the jail from this folder of the package, without the trainer, which is slow to import."""
    for name, path in (("marft_trl", package), ("marft_trl.rewards", f"{package}/rewards")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [path]
    from marft_trl.extras.sandbox import jail

    if walls != "bubblewrap":
        jail._working_bubblewrap = lambda: ()
    return jail


def main() -> None:
    """Print a JSON line for each program (or each `every`-th) that did not end as required, then their number."""
    package, walls, bait, port, every = sys.argv[1:6]
    jail = load_jail(package, walls)
    if walls and not jail._working_bubblewrap():
        print(json.dumps({"bubblewrap": "does not work"}))
        return
    prelude = PRELUDE.format(bait=bait, parent=os.getpid(), port=int(port))

    def run(program: dict):
        # Only programs that exceed a limit run on until they are stopped
        limits = jail.Limits(seconds=1 if program["kind"] in LIMITS else 20, memory=1 << 28)
        return jail.run_python(prelude + program["code"], limits=limits)

    listed = programs()[:: int(every)]
    with ThreadPoolExecutor(4) as pool:
        for program, outcome in zip(listed, pool.map(run, listed), strict=True):
            says = (outcome.stderr.strip().splitlines() or [""])[-1]
            kind, result = program["kind"], {"status": outcome.status, "stderr": says, "stdout": outcome.stdout[:200]}
            refused = kind not in _REFUSED or re.search(NUMBER if kind == "numbers" else SAYS, says)
            if outcome.status not in program["ends"] or not refused:
                print(json.dumps(program | result))
    print(json.dumps({"programs": len(listed)}))


if __name__ == "__main__":
    main()
