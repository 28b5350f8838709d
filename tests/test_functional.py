"""Advantages: hand-computed numbers, brute force, and TRL's own arithmetic."""

import math
import statistics

from marft_trl.algorithms import functional
from marft_trl.algorithms.functional import STD_EPS

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


NAN = math.nan


def test_group_by_hand():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    half, whole = math.sqrt(0.5), statistics.stdev(rewards.tolist())
    assert functional.group_advantages(rewards, 2, "group")[1].tolist() == pytest.approx([half, half, 0, 0, 0, 0])
    for scale, std in (("group", half + STD_EPS), ("none", 1), ("batch", whole + STD_EPS)):
        advantages, _ = functional.group_advantages(rewards, 2, scale)
        assert advantages.tolist() == pytest.approx([0.5 / std, -0.5 / std, 0, 0, 0, 0])


@given(counts=st.lists(st.integers(1, 4), min_size=8, max_size=8), scale=st.sampled_from(["group", "batch", "none"]))
def test_where_all_turns_have_the_episodes_reward_the_group_baseline_is_grpos(counts, scale):
    rewards = torch.linspace(-1, 2, 8, dtype=torch.float64) ** 3
    episodes = torch.arange(8).repeat_interleave(torch.tensor(counts))
    weights = 1 / torch.tensor(counts, dtype=torch.float64)[episodes]
    pools = {"group": episodes // 4, "batch": episodes * 0, "none": None}[scale]
    by_turn = functional.cell_advantages(rewards[episodes], episodes // 4, weights, pools)
    torch.testing.assert_close(by_turn, functional.group_advantages(rewards, 4, scale)[0][episodes])


worths = st.one_of(st.none(), st.floats(-5, 5, width=32))
cell_samples = st.tuples(worths, st.integers(0, 3), st.integers(0, 2), st.integers(1, 3))


def numbers(worths):
    return torch.tensor([NAN if worth is None else worth for worth in worths], dtype=torch.float64)


@given(samples=st.lists(cell_samples, min_size=1, max_size=12), is_scaled=st.booleans())
def test_cell_advantages_equal_a_loop(samples, is_scaled):
    returns = numbers(sample[0] for sample in samples)
    cells, pools, weights = (torch.tensor([s[i] for s in samples]) for i in (1, 2, 3))
    advantages = functional.cell_advantages(returns, cells, weights.double(), pools if is_scaled else None)
    for index, (worth, cell, pool, _) in enumerate(samples):
        if worth is None:
            assert advantages[index] == 0
            continue
        # a weight of 2 is the same as the turn being there twice; deviations are from the pool's own mean
        peers = [s[0] for s in samples for _ in range(s[3]) if s[0] is not None and s[1] == cell]
        want = worth - statistics.fmean(peers)
        if is_scaled:
            others = [s[0] for s in samples for _ in range(s[3]) if s[0] is not None and s[2] == pool]
            want = want / (statistics.stdev(others) + STD_EPS) if len(others) > 1 else 0.0
        want = want if len(peers) > 1 else 0.0
        assert advantages[index].item() == pytest.approx(want, abs=1e-6, rel=1e-6)


def test_turns_of_a_single_episode_have_no_advantage():
    # One scored episode in the first cell, whose turns have different returns; in the second none
    returns = torch.tensor([0.0, 0.5, 1.0, NAN, NAN])
    cells, weights = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0, 1.0])
    for pools in (None, cells, cells * 0):
        assert functional.cell_advantages(returns, cells, weights, pools).tolist() == [0.0] * 5


@given(samples=st.lists(st.tuples(worths, st.integers(0, 5)), min_size=1, max_size=12))
def test_leave_one_out_equals_a_loop(samples):
    returns = numbers(sample[0] for sample in samples)
    episodes = torch.tensor([s[1] for s in samples])
    counts = torch.bincount(episodes)
    advantages = functional.leave_one_out_advantages(returns, episodes, episodes // 3, 1 / counts[episodes].double())
    for index, (worth, episode) in enumerate(samples):
        others = {e for r, e in samples if e != episode and e // 3 == episode // 3}
        weighted = [(r / counts[e].item(), 1 / counts[e].item()) for r, e in samples if e in others and r is not None]
        if worth is None or not weighted:
            assert advantages[index] == 0
            continue
        mean = sum(value for value, _ in weighted) / sum(weight for _, weight in weighted)
        assert advantages[index].item() == pytest.approx(worth - mean, abs=1e-6)


@given(rewards=st.lists(worths, min_size=6, max_size=6), scale=st.sampled_from(["group", "batch", "none"]))
def test_group_advantages_equal_a_loop(rewards, scale):
    advantages, _ = functional.group_advantages(numbers(rewards), 3, scale)
    assert advantages.isfinite().all()
    scored = [r for r in rewards if r is not None]
    for e, reward in enumerate(rewards):
        group = [r for r in rewards[e // 3 * 3 : e // 3 * 3 + 3] if r is not None]
        pool = scored if scale == "batch" else group
        if reward is None or (scale != "none" and len(pool) < 2):
            assert advantages[e] == 0
            continue
        want = reward - statistics.fmean(group)
        want = want if scale == "none" else want / (statistics.stdev(pool) + STD_EPS)
        assert advantages[e].item() == pytest.approx(want, abs=1e-6)


def test_team_rewards_and_normalized_objectives_by_hand():
    per_func = torch.tensor([[1.0, 10.0], [3.0, NAN], [NAN, NAN], [1.0, 30.0]])
    weights = torch.tensor([1.0, 0.1])
    rewards = functional.team_rewards(per_func, weights)
    assert rewards[[0, 1, 3]].tolist() == [2.0, 3.0, 4.0] and rewards[2].isnan()
    two = functional.normalized_objectives(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([2.0, 1.0]), 2)
    z = 1 / (math.sqrt(2) + STD_EPS)
    assert two.tolist() == pytest.approx([-2 * z, 2 * z])
