"""Child processes end with their parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from marft_trl.extras.report import runner as reports
from marft_trl.extras.report.cells import Cell
from marft_trl.system.child_processes import ChildProcesses

import pytest

from .helpers import eventually


CHILD = """
import signal, sys, time
from pathlib import Path
def on_sigterm(number, frame):
    time.sleep(0.3)  # as if it saved a checkpoint
    Path(sys.argv[1] + ".ended").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, on_sigterm)
Path(sys.argv[1]).touch()
time.sleep(60)
"""
PARENT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from marft_trl.system.child_processes import ChildProcesses
with ThreadPoolExecutor(2) as pool, ChildProcesses() as children:
    list(pool.map(lambda name: children.run([sys.executable, "-c", sys.argv[1], name]), sys.argv[2:]))
"""


def all_there(files):
    return eventually(lambda: all(file.exists() for file in files))


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_children_receive_sigterm(signum, status, tmp_path):
    names = [tmp_path / "one", tmp_path / "two"]
    process = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, *map(str, names)])
    assert all_there(names)
    process.send_signal(signum)
    assert process.wait(60) == status
    ended = [Path(f"{name}.ended") for name in names]
    assert all_there(ended) if signum == signal.SIGKILL else all(file.exists() for file in ended)  # the parent waited


@pytest.mark.parametrize("found_by", ["number", "key"])
def test_children_of_a_killed_owner_are_terminated(found_by):
    """Even before the watching process has started, and also children that it knows by their key only."""
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, "MARFT_CHILD": f"key-{os.getpid()}"})
    code = "import os, sys; from marft_trl.system.child_processes import keep; "
    code += "keep(sys.argv[1], int(sys.argv[2]), gently=True)"
    arguments = [f"key-{os.getpid()}", str(child.pid if found_by == "number" else 0)]
    owner = subprocess.run([sys.executable, "-c", f"{code}; os.kill(os.getpid(), 9)", *arguments])
    assert owner.returncode == -signal.SIGKILL and child.wait(60) == -signal.SIGTERM


def test_nothing_is_started_after_the_end():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), ChildProcesses() as children:
        assert children.run([sys.executable, "-c", "raise SystemExit(3)"]) == 3
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="the run is ending"):
        children.run([sys.executable, "-c", ""])
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupted_report_starts_no_more_runs(tmp_path, monkeypatch):
    started, ended = [], threading.Event()

    def run(children, command, environment, log):
        started.append(command)
        if len(started) == 2:
            time.sleep(0.5)  # until all runs wait for their turn
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(60)
        return 143

    monkeypatch.setattr(ChildProcesses, "run", run)
    monkeypatch.setattr(ChildProcesses, "end", lambda children: ended.set())
    cells = [Cell("team", seed, tmp_path / str(seed)) for seed in range(6)]
    with pytest.raises(SystemExit) as stopped:
        reports._side_by_side("file.py:make", None, cells, [], 2)
    assert stopped.value.code == 143 and len(started) == 2
