"""A resumed run equals one that was not interrupted, at every step, bit for bit."""

import functools

import pytest

from .exactness import SETTINGS, STEPS, inexact_points, trainer_of


POINTS = range(1, STEPS)
# Each value of each part of a setting is in one of these
PER_COMMIT = [
    ("grpo", "sequential", 1, 1, 3),
    ("grpo", "graph", 2, 4, 1),
    ("grpo", "orchestrated", 2, 1, 3),
    ("ppo", "sequential", 2, 4, 3),
    ("ppo", "graph", 1, 4, 3),
    ("ppo", "orchestrated", 2, 1, 1),
]


def test_there_are_528_points_and_66_of_them_per_commit():
    assert len(SETTINGS) * len(POINTS) == 528 and len(PER_COMMIT) * len(POINTS) == 66
    assert set(PER_COMMIT) <= set(SETTINGS)
    assert all({one[part] for one in PER_COMMIT} == {one[part] for one in SETTINGS} for part in range(5))


@pytest.mark.parametrize("setting", PER_COMMIT, ids=str)
def test_a_run_resumed_at_any_step_goes_on_with_the_same_bits(small_model, tmp_path, setting, record_property):
    """Two steps on, all that a checkpoint holds is the same, so all that follows is."""
    make = functools.partial(trainer_of, setting, small_model)
    assert inexact_points(make, tmp_path, POINTS, ahead=2) == []
    record_property("exact_points", len(POINTS))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_run_resumed_at_any_step_ends_with_the_same_bits(small_model, tmp_path, setting, record_property):
    make = functools.partial(trainer_of, setting, small_model)
    assert inexact_points(make, tmp_path, POINTS) == []
    record_property("exact_points", len(POINTS))
