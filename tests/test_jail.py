"""The sandbox: what programs cannot do, what they may do, and what they leave behind."""

import contextlib
import errno
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

from marft_trl.extras.sandbox import JailError, Limits, run_python
from marft_trl.extras.sandbox import code as code_module
from marft_trl.extras.sandbox import jail as jail_module
from marft_trl.extras.sandbox.code import pass_rate

import pytest

from .helpers import eventually
from .hostile import LIMITS, PRELUDE, programs


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fence is kept by the Linux kernel")
QUICK = Limits(seconds=1, memory=1 << 28)
HOSTILE = str(Path(__file__).with_name("hostile.py"))
PACKAGE = str(Path(jail_module.__file__).parents[2])
ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 8], "function": "add"}


@pytest.fixture(params=["the fence alone", "bubblewrap"])
def walls(request, monkeypatch):
    """The kind of sandbox. Bubblewrap is added to the fence only where it works."""
    if request.param == "the fence alone":
        monkeypatch.setattr(jail_module, "_working_bubblewrap", lambda: ())
    elif not jail_module._working_bubblewrap():
        pytest.skip("bubblewrap is not installed here, or the machine forbids its namespaces")
    return request.param


@pytest.fixture
def fence(tmp_path, monkeypatch):
    """A function that replaces the script of the fence."""

    def put(source: str) -> None:
        (tmp_path / "fence.py").write_text(source)
        jail_module._missing.cache_clear()
        jail_module._warn_of_missing.cache_clear()
        monkeypatch.setattr(jail_module, "_FENCE", tmp_path / "fence.py")

    missing = jail_module._missing
    yield put
    missing.cache_clear()


def _without(source: str, part: str, instead: str) -> str:
    assert source.count(part) == 1
    return source.replace(part, instead)


@pytest.fixture
def bait():
    """A world-writable folder in /tmp with a socket and a file with extended attributes."""
    with tempfile.TemporaryDirectory(prefix="marft-bait-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "folder").mkdir()
        (folder / "open").write_text("open")
        (folder / "secret").write_text("secret")
        with contextlib.suppress(OSError):  # not on every file system
            os.setxattr(folder / "open", "user.kept", b"1")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen()
            for path in (folder, folder / "folder", folder / "open", folder / "socket"):
                path.chmod(0o777)
            yield folder


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def _state(path: Path):
    status = path.lstat()
    names = os.listxattr(path, follow_symlinks=False)
    attributes = {name: os.getxattr(path, name, follow_symlinks=False) for name in names}
    content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
    metadata = status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_mtime_ns, status.st_ctime_ns
    return {str(path): (metadata, attributes, content)}


def _world(bait: Path, temporary: Path):
    files = {}
    for path in (bait, *bait.rglob("*"), Path(os.__file__), Path("/usr/lib")):
        files |= _state(path)
    objects = {name: Path(f"/proc/sysvipc/{name}").read_text() for name in ("msg", "sem", "shm")}
    limits = Path(f"/proc/{os.getpid()}/limits").read_text()
    mounts, hostname = Path("/proc/self/mounts").read_text(), socket.gethostname()
    shared = sorted(name for name in os.listdir("/dev/shm") if "marft" in name)
    return files, objects, limits, mounts, hostname, shared, sorted(os.listdir(temporary)), _jailed(temporary)


def _jailed(folder):
    """Processes whose working directory is below this folder."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            processes += [path] if str(path.readlink()).startswith(str(folder)) else []
    return processes


WITHOUT_CAPABILITIES = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # out of the bounding set, so the next program has none
os.execv(sys.executable, [sys.executable, "-W", "ignore", *sys.argv[1:]])
"""
NOBODY = 65534


def _another_users_python():
    """An interpreter that another user can run."""
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            version = "import sys; assert sys.version_info >= (3, 9)"
            subprocess.run([python, "-c", version], user=NOBODY, group=NOBODY, extra_groups=[], check=True)
            return python
    pytest.skip("another user can run no Python here, or processes of other users cannot be started")


@pytest.mark.parametrize(
    ("user", "wall_kind", "every"),
    [
        ("this user", "", 11),
        *(
            pytest.param(user, wall_kind, 1, marks=pytest.mark.slow)
            for user in ("this user", "no capabilities", "another user")
            for wall_kind in ("", "bubblewrap")
        ),
    ],
)
def test_hostile_programs_change_nothing_and_leave_nothing(user, wall_kind, every, bait, port, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir(mode=0o777)
    temporary.chmod(0o777)
    for folder in (*reversed(tmp_path.parents), tmp_path):
        if user == "another user" and folder.stat().st_uid == os.getuid() and folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    script, options = [sys.executable, "-W", "ignore"], {}
    if user == "no capabilities":
        script = [sys.executable, "-c", WITHOUT_CAPABILITIES]
    elif user == "another user":
        script, options = [_another_users_python()], {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    before = _world(bait, temporary)
    command = [*script, HOSTILE, PACKAGE, wall_kind, str(bait), str(port), str(every)]
    options |= {"capture_output": True, "text": True, "timeout": 300, "env": {**os.environ, "TMPDIR": str(temporary)}}
    done = subprocess.run(command, **options)
    if done.stdout.startswith('{"bubblewrap"'):
        pytest.skip("bubblewrap is not installed here, or the machine forbids its namespaces")
    assert done.returncode == 0, done.stderr
    *wrong, last = map(json.loads, done.stdout.splitlines())
    assert not wrong, json.dumps(wrong, indent=1)
    assert len(programs()) > 150 and last["programs"] == len(programs()[::every])
    assert _world(bait, temporary) == before


WALLS = {
    "seccomp": ('"libseccomp.so.2"', '"libnothing.so.2"'),
    "Landlock": ("abi = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)", "abi = -1"),
}


@pytest.mark.parametrize(
    ("lacking", "attempt"),
    [
        ("seccomp", "open(BAIT + '/open', 'w')"),
        ("seccomp", "open('/etc/passwd').read()"),
        ("seccomp", "os.chroot('.')"),  # only the superuser has capabilities to lose
        ("seccomp", "os.mknod('x', 0o20600, os.makedev(1, 1))"),
        *((wall, "os.mkfifo('x')") for wall in WALLS),
        *((wall, "os.open(BAIT + '/open', os.O_RDONLY | os.O_TRUNC)") for wall in WALLS),
        ("Landlock", "os.chmod(BAIT + '/open', 0)"),
        ("Landlock", "os.kill(PARENT, 0)"),
        ("Landlock", "os.fork()"),
    ],
)
def test_each_wall_stands_without_the_other(fence, bait, monkeypatch, lacking, attempt):
    monkeypatch.setattr(jail_module, "_working_bubblewrap", lambda: ())
    fence(_without(jail_module._FENCE.read_text(), *WALLS[lacking]))
    prelude = PRELUDE.format(bait=str(bait), parent=os.getpid(), port=0)
    assert run_python(prelude, limits=Limits(strict=False)).status == "ok"
    outcome = run_python(prelude + attempt, limits=Limits(strict=False))
    assert outcome.status == "error" and "PermissionError" in outcome.stderr
    assert (bait / "open").read_text() == "open"


def test_only_files_of_the_interpreter_are_readable(tmp_path, walls):
    environment = tmp_path / "project"
    (environment / "lib").mkdir(parents=True)
    for name in (".env", "lib/secret"):
        (environment / name).write_text("KEY=1")
    readable, _ = jail_module._readable()
    assert str(Path(sys.prefix)) not in readable
    hidden = [environment / ".env", environment / "lib" / "secret", Path(__file__), Path(PACKAGE, "agents.py")]
    hidden += [Path(sys.prefix, "pyvenv.cfg")] if Path(sys.prefix, "pyvenv.cfg").exists() else []
    for path in hidden:
        assert "PermissionError" in run_python(f"open({str(path)!r}).read()").stderr, path


IN_A_PROCESS = """
import sys, tempfile
tempfile.tempdir, tests, package, walls, *programs = sys.argv[1:]
sys.path.insert(0, tests)
from hostile import load_jail
jail = load_jail(package, walls)
"""
SLEEPER = "import signal, time; signal.setitimer(signal.ITIMER_REAL, 0); time.sleep(60)"


def test_a_program_ends_with_the_process_that_runs_it(tmp_path, walls):
    code = f"{IN_A_PROCESS}\njail.run_python({SLEEPER!r}, limits=jail.Limits(seconds=50))"
    arguments = [str(tmp_path), str(Path(HOSTILE).parent), PACKAGE, walls]
    parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, *arguments])
    try:
        assert eventually(lambda: _stay_jailed(tmp_path))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert eventually(lambda: not _jailed(tmp_path))


def _stay_jailed(folder):
    """Whether the program itself runs, not only the interpreter's start or an earlier probe."""
    before = _jailed(folder)
    time.sleep(0.5)
    return bool(before) and before == _jailed(folder)


@pytest.mark.parametrize(
    "where",
    [
        "pass",
        "for _ in range(22): os.mkdir('d' * 250); os.chdir('d' * 250)",  # a path too long to list
        "os.mkdir('d', 0o300); os.chdir('d')",  # only the superuser may list it
        "keep = []\ndef after(f): keep.append(mmap.mmap(f.fileno(), 4096, mmap.MAP_PRIVATE)); os.unlink(f.name)",
    ],
)
def test_programs_cannot_fill_the_disk(walls, where):
    program = (
        f"import mmap, os, time\nafter = lambda f: None\n{where}\nfor i in range(50):\n"
        "    with open(f'f{i}', 'w+') as f:\n        f.write('x' * 1_000_000); f.flush(); after(f)\ntime.sleep(3)"
    )
    outcome = run_python(program, limits=Limits(seconds=5, disk=1 << 23, files=100))  # with fewer, it may finish first
    if walls == "bubblewrap":
        assert outcome.status == "error" and "No space left" in outcome.stderr
    else:
        assert outcome.status == "killed" and outcome.stderr.endswith("wrote more than 1000 files or 8388608 bytes.")


@pytest.mark.parametrize("deleted", [False, True])
def test_space_that_no_write_counts_cannot_be_taken(walls, deleted):
    program = (
        "import mmap, os\nfile = open('f', 'w+b')\nfile.truncate(1 << 20)\n"
        f"if {deleted}: os.unlink('f')\nshared = mmap.mmap(file.fileno(), 1 << 20)\nshared[:] = bytes(1 << 20)"
    )
    outcome = run_python(program, limits=Limits(seconds=5))
    assert outcome.status == "error" and "Operation not permitted" in outcome.stderr
    assert run_python("import mmap; m = mmap.mmap(-1, 99); m[0] = 1; print(m[0])").stdout == "1\n"


@pytest.mark.parametrize("error", [OSError(errno.ENAMETOOLONG, "too long"), PermissionError()])
def test_unreadable_folders_are_over_the_limit(tmp_path, monkeypatch, error):
    assert jail_module._is_within(tmp_path, Limits())
    monkeypatch.setattr(jail_module.os, "scandir", Mock(side_effect=error))
    assert not jail_module._is_within(tmp_path, Limits())


def test_exceeded_limits_are_named(monkeypatch):
    monkeypatch.setattr(jail_module, "_working_bubblewrap", lambda: ())  # whose folder is in memory
    threads = PRELUDE.format(bait="", parent=0, port=0) + LIMITS["threads"]["five thousand"][0]
    files = "import os, time\nfor i in range(50): os.mkdir(str(i))\ntime.sleep(2)"
    for program, limits, message in (
        (threads, Limits(threads=20), "Killed: the program has more than 20 threads."),
        (files, Limits(entries=20), "more than 20 files"),
    ):
        outcome = run_python(program, limits=limits)
        assert outcome.status == "killed" and message in outcome.stderr


def test_the_time_of_a_program_begins_when_it_does():
    """The time an interpreter takes to start does not count against the limit."""
    start = time.monotonic()
    outcome = run_python(SLEEPER, limits=QUICK)
    assert outcome.status == "timeout" and time.monotonic() - start < jail_module._STARTUP_SECONDS / 3


def test_a_program_has_a_time_budget_for_all_tests(monkeypatch):
    slow, tests = "import time; time.sleep(0.4); print(input())", {"inputs": ["1"] * 60, "outputs": ["1"] * 60}
    runs, start = [], time.monotonic()
    noting = lambda *a, **k: (runs.append(k["limits"].seconds), run_python(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(code_module, "run_python", noting)
    rate = pass_rate(slow, tests, Limits(seconds=5), total_seconds=2.0)
    assert time.monotonic() - start < 20 and 0.0 < rate <= 5 / 60
    assert len(runs) <= 6 and all(0 < seconds <= 2 for seconds in runs)


def test_programs_may_use_files_threads_and_stdin(walls):
    program = (
        "import threading, os\nopen('a', 'w').write('4')\n"
        "t = threading.Thread(target=lambda: print(open('a').read() + input())); t.start(); t.join()\n"
        "print(sorted(os.environ))"
    )
    outcome = run_python(program, stdin="2\n")
    assert outcome.status == "ok" and outcome.stdout.splitlines()[0] == "42", outcome
    assert "HOME" not in outcome.stdout and "PATH" not in outcome.stdout


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("import numpy; print(numpy.arange(3).sum())", "3\n"),  # an installed package
        ("import code, math; print(math.gcd(4, 6), code.__name__)", "2 code\n"),  # not the modules beside the fence
        *((f"print(open({name}).read())", "3 4\n") for name in ("0", "'/dev/stdin'", "'/proc/self/fd/0'")),
    ],
)
def test_output_of_correct_programs(walls, program, printed):
    assert run_python(program, stdin="3 4", limits=Limits(seconds=20)).stdout == printed


LEAVING = f"""{IN_A_PROCESS}
for program in programs:
    assert jail.run_python(program, limits=jail.Limits(entries=5000)).status in ("ok", "killed"), program
"""


def test_leftover_files_are_removed_by_a_user_without_privileges(walls, tmp_path):
    """Root may remove anything, so the capabilities that make it root are dropped."""
    victim = tmp_path / "victim"
    victim.write_text("x")
    victim.chmod(0o400)
    leaving = [
        "import os; os.mkdir('x', 0)",
        "import os; os.mkdir('x'); os.mkdir('x/y'); os.mkdir('x/y/z'); os.open('x/y/f', 64, 0); os.mkdir('x/0', 0)",
        "import os\nfor _ in range(3000): os.mkdir('x'); os.chdir('x')",
        f"import os; os.mkdir('x', 0); os.symlink({str(victim)!r}, 'y'); os.symlink('/etc', 'z')",
    ]
    arguments = [str(tmp_path), str(Path(HOSTILE).parent), PACKAGE, walls, *leaving]
    command = [sys.executable, "-c", WITHOUT_CAPABILITIES, "-c", LEAVING, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["victim"] and victim.stat().st_mode & 0o777 == 0o400


def test_a_folder_that_cannot_be_removed_is_no_error(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(jail_module.subprocess, "run", Mock(side_effect=OSError("no shell")))
    (tmp_path / "left").touch()
    jail_module._remove(str(tmp_path))
    assert "of a program: no shell" in caplog.text and tmp_path.exists()


def test_no_file_is_left_open(tmp_path, monkeypatch, walls):
    monkeypatch.setattr(jail_module.tempfile, "tempdir", str(tmp_path))
    run_python("print(1)")
    before = set(os.listdir("/proc/self/fd"))
    for program in ("print(1)", "import time; time.sleep(60)", "import os; os.kill(os.getpid(), 9)"):
        run_python(program, limits=QUICK)
    assert set(os.listdir("/proc/self/fd")) == before and not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("part", "instead", "lacks"),
    [
        (*WALLS["Landlock"], "Landlock"),
        (*WALLS["seccomp"], r"seccomp \(libseccomp.so.2, in the package libseccomp2 of Debian\)"),
        ("def main() -> None:", "def main() -> None:\n    raise OSError('no such call')", "a Python .*no such call"),
    ],
)
def test_a_machine_that_cannot_fence_in_is_refused(fence, part, instead, lacks, caplog):
    fence(_without(jail_module._FENCE.read_text(), part, instead))
    with pytest.raises(JailError, match=rf"(?s)it lacks {lacks}.*Run in a container .* `strict=False`"):
        run_python("print(1)")
    if "no such call" not in instead:
        for _ in range(2):
            assert run_python("print(1)", limits=Limits(strict=False)).stdout == "1\n"
        assert re.search(rf"this machine lacks {lacks}. Only their time and memory are limited", caplog.text)
        assert caplog.text.count("Programs run without a sandbox") == 1


def test_a_refused_descriptor_of_a_process_or_timer_fails_no_right_program(fence, monkeypatch):
    def refused(pid):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    assert run_python("print(1)").status == "ok"
    timer = 'signal.setitimer(signal.ITIMER_REAL, settings["seconds"])'
    fence(_without(jail_module._FENCE.read_text(), timer, "raise OSError(1, 'refused')"))
    with pytest.raises(JailError, match="it lacks setitimer"):
        run_python("print(1)")


def test_a_program_that_cannot_start_is_not_scored_as_wrong(fence, monkeypatch):
    fence(jail_module._FENCE.read_text())
    assert pass_rate("print(3)", ADD) == 0.5
    fence("raise MemoryError('none left')")
    monkeypatch.setattr(jail_module, "_missing", lambda: ())  # it was well when the run began
    with pytest.raises(JailError, match="(?s)Cannot start a program: .*none left"):
        pass_rate("print(3)", ADD)


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("subprocess", "Popen", "Cannot run a program: .*Too many open files"),
        ("tempfile", "TemporaryFile", "Too many open files"),
        ("tempfile", "mkdtemp", "Cannot create a folder for a program"),
    ],
)
def test_a_machine_without_resources_is_not_a_wrong_program(monkeypatch, module, name, message):
    run_python("")
    monkeypatch.setattr(getattr(jail_module, module), name, Mock(side_effect=OSError(24, "Too many open files")))
    with pytest.raises(JailError, match=message):
        pass_rate("print(3)", ADD)


FILES = "import os\nfor n in range(3, 40):\n    try: "


@pytest.mark.parametrize(
    "forged",
    [
        FILES + """os.write(n, b'{"missing": ["x"]}\\n')\n    except OSError: pass""",
        FILES + """os.write(n, b'{"value": 9}\\n' * 9)\n    except OSError: pass""",
        FILES + "os.ftruncate(n, 0)\n    except OSError: pass",
        "import json; json.dumps = lambda *a, **k: '{\"value\": true}'",
        "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
        "def add(a, b): return float('nan')",
        "import sys\nf = sys._getframe()\nwhile f: print(f.f_locals.get('outputs')); f = f.f_back",
        "import gc\nprint([o for o in gc.get_objects() if isinstance(o, dict) and 'outputs' in o])",
    ],
)
def test_verdicts_cannot_be_forged(forged):
    exits = f"{forged}\nimport os; os._exit(3)"
    assert pass_rate(forged, ADD) == 0.0 and pass_rate(exits, ADD) == 0.0
    assert pass_rate(forged, CALLS) == 0.0


@contextlib.contextmanager
def cleared_caches(*functions):
    for function in functions:
        function.cache_clear()
    try:
        yield
    finally:
        for function in functions:
            function.cache_clear()


def test_an_interpreter_below_the_temporary_folder_keeps_the_limit_on_the_disk(monkeypatch):
    if not (command := jail_module._working_bubblewrap()):
        pytest.skip("bubblewrap is not installed here, or the machine forbids its namespaces")
    sized = jail_module._has_sized_folders(command)
    monkeypatch.setattr(tempfile, "tempdir", os.path.dirname(sys.prefix))
    with cleared_caches(jail_module._has_sized_folders):
        assert jail_module._has_sized_folders(command) == sized


def test_a_broken_bubblewrap_is_skipped_and_logged(tmp_path, monkeypatch, caplog):
    script = tmp_path / "bwrap"
    script.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    caplog.set_level("INFO", logger="marft_trl")
    with cleared_caches(jail_module._working_bubblewrap, jail_module._missing):
        assert [run_python("print(1)").stdout for _ in range(2)] == ["1\n"] * 2
    assert (tmp_path / "runs").read_text() == "run\n"
    assert caplog.text.count("bubblewrap is not installed, or not allowed here") == 1


def test_two_runs_of_a_program_are_alike(walls):
    program = "print(list({'a', 'b', 'c', 'd', 'e', 'f', 'g'}), hash('x'))"
    first, second = (run_python(program).stdout for _ in range(2))
    assert first == second != ""


def test_failed_writes_and_exit_codes_are_errors(walls):
    """Writing to stdin, and exit codes that look like a time limit."""
    assert run_python("import sys; open('/dev/stdin', 'w').write('x')", stdin="3 4").status == "error"
    for code in (3, 137) if walls != "bubblewrap" else (3,):  # bubblewrap reports signals by such codes
        assert run_python(f"import os; os._exit({code})").status == "error"


def test_an_exit_ends_one_call_and_arguments_may_be_long(walls):
    program = "def f(x):\n    exit() if x == [1] else 0\n    return len(x)"
    first, second, third = run_python(program, function="f", arguments=[[[]], [[1]], [[0] * 100_000]]).returned
    assert (first["value"], third["value"]) == (0, 100_000) and "SystemExit" in second["error"]


def test_limits_that_no_program_could_keep_are_refused():
    seconds = [("seconds", value) for value in (0, float("inf"), float("nan"))]
    others = [("output", 0), ("files", 3), ("memory", 1e9), ("threads", 0), ("disk", 1 << 70)]
    for name, value in [*seconds, *others]:
        with pytest.raises(ValueError, match=f"`{name}` of `Limits` must be"):
            Limits(**{name: value})
    assert Limits(memory=1 << 27, output=1, files=16, disk=1 << 16, entries=2, threads=1)
