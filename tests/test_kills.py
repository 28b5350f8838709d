"""Runs that are killed and started again with the same command, and faults on one of two processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


SCRIPT = Path(__file__).parent / "scripts" / "lives.py"
pytestmark = pytest.mark.timeout(3600)


def lives(*arguments) -> dict:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=3500)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("seed", "processes", "kills"),
    [
        pytest.param(0, 1, 3, marks=pytest.mark.slow),
        *(pytest.param(seed, 1, 10, marks=pytest.mark.exhaustive) for seed in range(1, 16)),
        *(pytest.param(seed, 2, 10, marks=pytest.mark.exhaustive) for seed in range(16, 21)),
    ],
)
def test_a_run_killed_at_random_instants_ends_with_the_same_bits(small_model, tmp_path, seed, processes, kills):
    outcome = lives("random", tmp_path, small_model, "--kills", kills, "--seed", seed, "--processes", processes)
    assert outcome["kills"] == kills and outcome["wrong"] == []


@pytest.mark.parametrize(
    ("processes", "rank", "every", "restarts"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0, 20, 3), (2, 1, 4, 2))),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((1, 0, 1, 4), (2, 0, 1, 8), (2, 1, 1, 1))),
    ],
)
def test_a_kill_within_a_save_leaves_a_checkpoint_that_stands(small_model, tmp_path, processes, rank, every, restarts):
    """With `save_total_limit=1`: the one before until the new one is complete on all processes."""
    options = ["--processes", processes, "--rank", rank, "--every", every, "--restarts", restarts]
    outcome = lives("operations", tmp_path, small_model, *options)
    least = 150 if rank == 0 else 6  # the second process writes only its own files
    assert outcome["operations"] >= least and outcome["kills"] >= outcome["operations"] // every
    assert outcome["wrong"] == [] and outcome["stood"].keys() <= {"2", "3"}
    assert outcome["restarts"] >= 1 and (rank == 1 or every > 1 or outcome["stood"].keys() == {"2", "3"})


@pytest.fixture(scope="module")
def faults(small_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    return lives("faults", folder, small_model, "--rank", 1, "--kinds", "raise", "hang", "die", "signal", "nothing")


@pytest.mark.slow
def test_a_process_that_raises_ends_all_with_the_same_error(faults):
    """Within 30 seconds, and after a checkpoint of the last complete step."""
    outcome = faults["raise"]
    assert outcome["seconds"] < 30 and outcome["statuses"] == [1, 1] and outcome["stands"] == 2
    (first,), (second,) = outcome["errors"]
    assert "Process 1 of the run failed: ZeroDivisionError: boom" in first and "ZeroDivisionError: boom" in second


@pytest.mark.slow
def test_a_process_that_hangs_ends_all_and_names_the_reward(faults):
    outcome = faults["hang"]
    assert outcome["seconds"] < 30 and outcome["statuses"] == [1, 1] and outcome["stands"] == 2
    for (error,) in outcome["errors"]:
        assert "The reward function `faulty` has not returned for 2 seconds" in error


@pytest.mark.slow
def test_a_process_that_dies_is_named(faults):
    outcome = faults["die"]
    assert outcome["seconds"] < 30 and outcome["statuses"] == [1, -9]
    assert "Process 1 of the run (pid " in outcome["errors"][0][0] and "it was killed" in outcome["errors"][0][0]


@pytest.mark.slow
def test_the_process_that_keeps_the_store_is_named_as_well(small_model, tmp_path):
    """The first process keeps the store through which the processes report errors."""
    runs = lives("faults", tmp_path, small_model, "--rank", 0, "--kinds", "raise", "die")
    assert runs["die"]["seconds"] < 30 and runs["die"]["statuses"] == [-9, 1]
    assert "Process 0 of the run (pid " in runs["die"]["errors"][1][0]
    assert runs["raise"]["statuses"] == [1, 1] and "Process 0 of the run failed" in runs["raise"]["errors"][1][0]


@pytest.mark.slow
def test_a_signal_to_a_process_ends_all_with_the_signals_code_after_a_checkpoint(faults):
    outcome = faults["signal"]
    assert outcome["seconds"] < 30 and outcome["statuses"] == [143, 143] and outcome["stands"] == 3


@pytest.mark.slow
def test_a_process_with_nothing_to_learn_from_stops_nobody(faults):
    assert faults["nothing"]["statuses"] == [0, 0] and faults["nothing"]["stands"] == 12


@pytest.mark.slow
def test_a_process_that_cannot_be_interrupted_ends_all(small_model, tmp_path):
    """Its last words reach the others, and it exits with code 124."""
    outcome = lives("faults", tmp_path, small_model, "--rank", 1, "--kinds", "stuck")["stuck"]
    assert outcome["seconds"] < 30 and outcome["statuses"] == [1, 124]
    assert "could not be interrupted, so the process exits" in outcome["errors"][0][0]
