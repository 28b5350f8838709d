"""Failures of other processes that no collective reports: a silent peer, an unresponsive store."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from marft_trl.system import processes
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


def test_failure_reports_do_not_wait_for_an_unresponsive_store(monkeypatch):
    monkeypatch.setattr(processes, "_DIAGNOSIS_SECONDS", 0.3)
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.1)
    watch = PeerMonitor(Silent(), 1, [ProcessInfo("node0", 7), ProcessInfo.current()])
    start = time.monotonic()
    watch.report_failure("a failure")
    assert "the machine of process 0 (node0), which keeps the list of processes, does not respond" in watch.diagnose()
    assert watch._store.asked.is_set() and time.monotonic() - start < 30


@pytest.mark.parametrize("speaks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_process_that_is_silent_is_named_with_its_machine(monkeypatch, speaks):
    monkeypatch.setattr(processes, "_DIAGNOSIS_SECONDS", 4.0)
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.1)
    store, places = HashStore(), [ProcessInfo.current(), ProcessInfo("node1", 11), ProcessInfo("node2", 12)]
    PeerMonitor(store, 1, [ProcessInfo.current(), *places[1:]]).report_failure("of an earlier run")
    living, dead = PeerMonitor(store, 1, places), PeerMonitor(store, 2, places)
    with living:
        with dead:
            time.sleep(0.05)  # killed before its second heartbeat
        if speaks:
            dead.report_failure("KeyError: 'the judge is gone'")
        diagnosis = PeerMonitor(store, 0, places).diagnose()
    expected = {True: "2 of the run on node2 failed: KeyError", False: "2 (pid 12 on node2) does not respond"}
    assert f"Process {expected[speaks]}" in diagnosis and "node1" not in diagnosis


class Gone(Silent):
    """A store whose process has been killed."""

    def check(self, keys):
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("store", [HashStore, Gone])
def test_a_process_of_this_machine_that_was_killed_is_named(monkeypatch, store):
    monkeypatch.setattr(processes, "_DIAGNOSIS_SECONDS", 5.0)
    child = subprocess.Popen(["sleep", "60"])
    killed, current = ProcessInfo(socket.gethostname(), child.pid), ProcessInfo.current()
    place = 0 if store is Gone else 1  # the first process keeps the store
    watch = PeerMonitor(store(), 1 - place, [current, killed] if place else [killed, current])
    child.kill()
    child.wait()
    assert f"Process {place} of the run (pid {child.pid}) exited without an error of its own" in watch.diagnose()


@pytest.mark.slow
def test_stuck_processes_exit_after_a_peer_failed():
    """As over NCCL, where nothing is raised: the failed process keeps its connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, "ACCELERATE_USE_CPU": "true"} for rank in "01"]
    command = [sys.executable, "tests/scripts/stands_still.py", "1"]
    popen_options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, "text": True}
    started = [subprocess.Popen(command, env={**os.environ, **place, **rank}, **popen_options) for rank in ranks]
    try:
        output, errors = started[0].communicate(timeout=120)
        assert "waiting" in output and started[0].returncode == 1
        assert "Process 1 of the run failed: KeyError: 'the judge is gone'" in errors
        place = f"(pid {started[0].pid} on {socket.gethostname()})"
        assert f"Process 0 {place} has been stuck for 1 s since then, and exits" in errors
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_failures_of_earlier_runs_do_not_end_later_runs(monkeypatch):
    """torchrun keeps the store over restarts, and `train()` may be called again after a failure."""
    for name, seconds in (("_POLL_SECONDS", 0.05), ("_STUCK_SECONDS", 0.3), ("_DIAGNOSIS_SECONDS", 0.3)):
        monkeypatch.setattr(processes, name, seconds)
    ended = []

    def leave(status):
        """Like the real `_exit`, do not return, so that the thread is gone when the patch is undone."""
        ended.append(status)
        raise SystemExit

    monkeypatch.setattr(processes.os, "_exit", leave)
    store, earlier = HashStore(), [ProcessInfo.current(), ProcessInfo("node1", 11)]
    PeerMonitor(store, 1, earlier).report_failure("ValueError: in the first attempt")
    with PeerMonitor(store, 0, places := [ProcessInfo.current(), ProcessInfo("node1", 12)]):
        time.sleep(1.0)
    assert not ended
    PeerMonitor(store, 1, places).report_failure("ValueError: in the second")
    with PeerMonitor(store, 0, places):
        assert eventually(lambda: ended)
