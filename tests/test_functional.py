"""Advantages: hand-computed numbers, brute force, and TRL's own arithmetic."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marft_trl.trainer.functional import (
    STD_EPS,
    agent_advantages,
    group_advantages,
    nan_std,
    normalized_objectives,
    team_rewards,
)


NAN = math.nan


def test_group_by_hand():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    advantages, std = group_advantages(rewards, 2, "group")
    half = math.sqrt(0.5)
    assert std.tolist() == pytest.approx([half, half, 0, 0, 0, 0])
    assert advantages.tolist() == pytest.approx([0.5 / (half + STD_EPS), -0.5 / (half + STD_EPS), 0, 0, 0, 0])
    assert group_advantages(rewards, 2, "none")[0].tolist() == [0.5, -0.5, 0, 0, 0, 0]
    batch_std = statistics.stdev(rewards.tolist())
    assert group_advantages(rewards, 2, "batch")[0].tolist() == pytest.approx(
        [0.5 / (batch_std + STD_EPS), -0.5 / (batch_std + STD_EPS), 0, 0, 0, 0]
    )


def test_episodes_that_nothing_scored_have_advantage_zero_and_no_part_in_the_mean():
    advantages, _ = group_advantages(torch.tensor([1.0, NAN, 3.0, NAN]), 4, "none")
    assert advantages.tolist() == [-1.0, 0.0, 1.0, 0.0]


def test_reference_vector_of_dr_mas():
    # G = 2: agent one has returns [1, 0], agent two [1, 1] (it spoke only in the first episode, twice)
    rewards = torch.tensor([1.0, 0.0])
    counts = torch.tensor([[1, 2], [1, 0]])
    advantages, _ = agent_advantages(rewards, counts, 2, "none")
    assert advantages.tolist() == [[0.5, 0.0], [-0.5, 0.0]]


def test_with_one_turn_each_the_agent_baseline_is_the_groups():
    rewards = torch.rand(12)
    by_agent, _ = agent_advantages(rewards, torch.ones(12, 3, dtype=torch.long), 4, "group")
    by_group, _ = group_advantages(rewards, 4, "group")
    torch.testing.assert_close(by_agent, by_group.unsqueeze(1).expand(-1, 3))


rewards_lists = st.lists(st.one_of(st.none(), st.floats(-5, 5, width=32)), min_size=6, max_size=6)


@given(
    rewards=rewards_lists,
    counts=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=6, max_size=6),
    scale=st.sampled_from(["group", "batch", "none"]),
)
def test_agent_advantages_equal_a_loop(rewards, counts, scale):
    tensor = torch.tensor([NAN if r is None else r for r in rewards], dtype=torch.float64)
    advantages, _ = agent_advantages(tensor, torch.tensor(counts), 3, scale)
    for agent in range(2):
        for group in range(2):
            members = range(3 * group, 3 * group + 3)
            returns = [rewards[e] for e in members for _ in range(counts[e][agent]) if rewards[e] is not None]
            everyone = [rewards[e] for e in range(6) for _ in range(counts[e][agent]) if rewards[e] is not None]
            pool = everyone if scale == "batch" else returns
            std = statistics.stdev(pool) if len(pool) > 1 else 0.0
            for e in members:
                if rewards[e] is None or counts[e][agent] == 0:
                    assert advantages[e, agent] == 0
                    continue
                want = rewards[e] - statistics.fmean(returns)
                want = want if scale == "none" else want / (std + STD_EPS)
                assert advantages[e, agent].item() == pytest.approx(want, abs=1e-6)


@given(rewards=rewards_lists, scale=st.sampled_from(["group", "batch", "none"]))
def test_group_advantages_equal_a_loop(rewards, scale):
    tensor = torch.tensor([NAN if r is None else r for r in rewards], dtype=torch.float64)
    advantages, _ = group_advantages(tensor, 3, scale)
    assert advantages.isfinite().all()
    known = [r for r in rewards if r is not None]
    for e, reward in enumerate(rewards):
        group = [r for r in rewards[e // 3 * 3 : e // 3 * 3 + 3] if r is not None]
        pool = known if scale == "batch" else group
        if reward is None or (scale != "none" and len(pool) < 2):
            assert advantages[e] == 0
            continue
        want = reward - statistics.fmean(group)
        want = want if scale == "none" else want / (statistics.stdev(pool) + STD_EPS)
        assert advantages[e].item() == pytest.approx(want, abs=1e-6)


def test_team_rewards_and_normalized_objectives_by_hand():
    per_func = torch.tensor([[1.0, 10.0], [3.0, NAN], [NAN, NAN], [1.0, 30.0]])
    weights = torch.tensor([1.0, 0.1])
    rewards = team_rewards(per_func, weights)
    assert rewards[[0, 1, 3]].tolist() == [2.0, 3.0, 4.0] and rewards[2].isnan()
    two = normalized_objectives(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([2.0, 1.0]), 2)
    z = 1 / (math.sqrt(2) + STD_EPS)
    assert two.tolist() == pytest.approx([-2 * z, 2 * z])


def test_nan_std_equals_torch_without_nan():
    values = torch.rand(4, 5)
    torch.testing.assert_close(nan_std(values), values.std())
    torch.testing.assert_close(nan_std(values, dim=1), values.std(dim=1))
    assert nan_std(torch.tensor([1.0, NAN])).isnan()
