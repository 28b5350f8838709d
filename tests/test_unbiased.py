"""The expected gradient of an estimator, over all episodes of a tiny team, against the exact gradient."""

import itertools

import pytest
import torch

from .enumeration import Parallel, World, of_candidates, with_branches
from .helpers import in_turn, pairs


def assert_same(got, want, factor=1.0):
    assert want.norm() > 1e-2
    torch.testing.assert_close(got, factor * want, rtol=1e-3, atol=1e-4 * want.norm().item())


@pytest.mark.parametrize(
    ("settings", "factor", "workflow"),
    in_turn(
        [
            ({"advantage": "leave_one_out"}, 1.0),
            ({"advantage": "leave_one_out", "level": "action"}, 1.0),
            ({"advantage": "none"}, 1.0),
            # the mean of a group of 2 holds half of the episode's own reward
            ({"advantage": "group", "scale_rewards": "none"}, 0.5),
            ({"advantage": "agent", "scale_rewards": "none"}, 0.5),
        ],
        *(None, Parallel()),
    ),
    ids=str,
)
def test_equal_credit_is_unbiased(tmp_path, workflow, settings, factor):
    world = World(tmp_path, workflow=workflow, **{"level": "token", **settings})
    assert_same(world.of_groups(2), world.exact(), factor)


@pytest.mark.parametrize(
    ("critic", "kind"),
    in_turn(
        [(name,) for name in ("shared", "frozen", "per_agent", "multi_head")],
        *itertools.product(["token", "action"], [None, Parallel()]),
    ),
)
def test_gae_without_decay_is_unbiased_whatever_the_critic_says(tmp_path, critic, kind):
    level, workflow = kind
    settings = {"advantage": "gae", "critic": critic, "level": level, "num_generations": 1}
    world = World(tmp_path, 2, workflow, **settings, gae_lambda=1.0, normalize_advantages="none")
    assert_same(world.of_groups(1), world.exact())


@pytest.mark.parametrize(
    ("credit", "advantage", "workflow"),
    pairs(["counterfactual", "removed"], ["none", "leave_one_out"], [None, Parallel()]),
)
def test_counterfactual_credit_is_unbiased(tmp_path, workflow, advantage, credit):
    world = World(tmp_path, workflow=workflow, advantage=advantage, credit=credit)
    assert_same(with_branches(world), world.exact())


@pytest.mark.slow
def test_candidates_are_unbiased_with_sampled_continuations(tmp_path):
    settings = {"advantage": "turn", "turn_candidates": 2, "num_generations": 1, "scale_rewards": "none"}
    world = World(tmp_path, **settings, continue_from="sampled")
    exact = world.exact()
    assert_same(of_candidates(world), exact)  # two candidates, each against a mean that holds half of its own
    world.trainer.args.continue_from = "best"
    got, half = of_candidates(world), len(exact) // 2
    assert_same(got[:half], exact[:half])
    assert (got[half:] - exact[half:]).norm() > 0.05 * exact[half:].norm()  # other observations than the policy's


@pytest.mark.slow
def test_alternatives_of_every_turn_are_unbiased(tmp_path):
    """Both of two alternatives are rows, each compared with the other one alone."""
    world = World(tmp_path, advantage="c3", turn_candidates=2, num_generations=1)
    assert world.trainer.args.continue_from == "sampled"
    assert_same(of_candidates(world), world.exact(), factor=2.0)


@pytest.mark.slow
def test_scaled_and_decayed_estimators_are_biased(tmp_path):
    for settings in (
        {"advantage": "group"},
        {"advantage": "gae", "critic": "shared", "gae_lambda": 0.5, "normalize_advantages": "none"},
    ):
        world = World(tmp_path, level="token", **settings)
        exact, got = world.exact(), world.of_groups(2)
        aligned = got * (got @ exact) / (got @ got)
        assert (aligned - exact).norm() > 0.02 * exact.norm(), settings
