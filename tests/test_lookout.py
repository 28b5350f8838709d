"""Failures of other processes that no collective reports: a peer that is silent, a store that does not answer."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from marft_trl.system import processes as lookout
from marft_trl.system.processes import PeerMonitor, ProcessInfo

import pytest
from torch.distributed import HashStore

from .helpers import eventually


ROOT = Path(__file__).parents[1]


class Silent:
    """A store on a machine that no longer answers."""

    def __init__(self):
        self.asked = threading.Event()

    def clone(self):
        return self

    def check(self, keys):
        self.asked.set()
        time.sleep(60)

    set = get = check


def test_nobody_waits_for_a_store_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(lookout, "_DIAGNOSIS_SECONDS", 0.3)
    monkeypatch.setattr(lookout, "_POLL_SECONDS", 0.1)
    watch = PeerMonitor(Silent(), 1, [ProcessInfo("node0", 7), ProcessInfo.current()])
    start = time.monotonic()
    watch.report_failure("a failure")
    assert "the machine of process 0 (node0), which keeps the list of processes, does not respond" in watch.diagnose()
    assert watch._store.asked.is_set() and time.monotonic() - start < 30


@pytest.mark.parametrize("speaks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_process_that_is_silent_is_named_with_its_machine(monkeypatch, speaks):
    monkeypatch.setattr(lookout, "_DIAGNOSIS_SECONDS", 4.0)
    monkeypatch.setattr(lookout, "_POLL_SECONDS", 0.1)
    store, places = HashStore(), [ProcessInfo.current(), ProcessInfo("node1", 11), ProcessInfo("node2", 12)]
    PeerMonitor(store, 1, [ProcessInfo.current(), *places[1:]]).report_failure("of an earlier run")
    living, dead = PeerMonitor(store, 1, places), PeerMonitor(store, 2, places)
    with living:
        with dead:
            time.sleep(0.05)  # it is killed before it has said more than once that it is there
        if speaks:
            dead.report_failure("KeyError: 'the judge is gone'")
        found = PeerMonitor(store, 0, places).diagnose()
    said = {True: "2 of the run on node2 failed: KeyError", False: "2 (pid 12 on node2) does not respond"}
    assert f"Process {said[speaks]}" in found and "node1" not in found


class Gone(Silent):
    """A store whose process has been killed."""

    def check(self, keys):
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("store", [HashStore, Gone])
def test_a_process_of_this_machine_that_was_killed_is_named(monkeypatch, store):
    monkeypatch.setattr(lookout, "_DIAGNOSIS_SECONDS", 5.0)
    child = subprocess.Popen(["sleep", "60"])
    killed, mine = ProcessInfo(socket.gethostname(), child.pid), ProcessInfo.current()
    place = 0 if store is Gone else 1  # the first process keeps the store
    watch = PeerMonitor(store(), 1 - place, [mine, killed] if place else [killed, mine])
    child.kill()
    child.wait()
    assert f"Process {place} of the run (pid {child.pid}) exited without an error of its own" in watch.diagnose()


@pytest.mark.slow
def test_a_process_that_stands_still_after_another_has_failed_is_ended():
    """As over NCCL, where nothing is raised. The one that fails here keeps its connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, "ACCELERATE_USE_CPU": "true"} for rank in "01"]
    command = [sys.executable, "tests/scripts/stands_still.py", "1"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, "text": True}
    started = [subprocess.Popen(command, env={**os.environ, **place, **rank}, **how) for rank in ranks]
    try:
        output, said = started[0].communicate(timeout=120)
        assert "waiting" in output and started[0].returncode == 1
        assert "Process 1 of the run failed: KeyError: 'the judge is gone'" in said
        place = f"(pid {started[0].pid} on {socket.gethostname()})"
        assert f"Process 0 {place} has been stuck for 1 s since then, and exits" in said
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_what_an_earlier_run_has_said_ends_no_later_one(monkeypatch):
    """torchrun keeps the store over restarts, and `train()` may be called again after a failure."""
    for name, seconds in (("_POLL_SECONDS", 0.05), ("_STUCK_SECONDS", 0.3), ("_DIAGNOSIS_SECONDS", 0.3)):
        monkeypatch.setattr(lookout, name, seconds)
    ended = []

    def leave(status):
        """As the real one, it does not come back: the thread is not there any more when the real one is again."""
        ended.append(status)
        raise SystemExit

    monkeypatch.setattr(lookout.os, "_exit", leave)
    store, earlier = HashStore(), [ProcessInfo.current(), ProcessInfo("node1", 11)]
    PeerMonitor(store, 1, earlier).report_failure("ValueError: in the first attempt")
    with PeerMonitor(store, 0, places := [ProcessInfo.current(), ProcessInfo("node1", 12)]):
        time.sleep(1.0)
    assert not ended
    PeerMonitor(store, 1, places).report_failure("ValueError: in the second")
    with PeerMonitor(store, 0, places):
        assert eventually(lambda: ended)
