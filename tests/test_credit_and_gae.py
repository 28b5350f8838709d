"""Credit, GAE, ratios and value losses: reference vectors, and brute force over random ragged episodes."""

import math

from marft_trl.algorithms import functional as F
from marft_trl.episodes import Turn, joint_steps

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


def test_counterfactual_credit_by_hand():
    others = torch.tensor([[0.0, 1.0], [1.0, math.nan], [math.nan, math.nan]])
    credit = F.counterfactual_credit(1.0, others)
    assert credit[:2].tolist() == [0.5, 0.0] and credit[2].isnan()


def test_joint_steps_follow_the_turns_that_were_seen():
    def steps(*seen):
        return joint_steps([Turn("a", "", index, sees=indices) for index, indices in enumerate(seen)])

    assert steps((), (0,), (0, 1)) == [0, 1, 2]
    assert steps((), (0,), (0,), (1, 2)) == [0, 1, 1, 2]
    assert steps((), (), (1,), (0,), (2, 3)) == [0, 0, 1, 1, 2]


@st.composite
def episodes(draw):
    """A random dependency graph with rewards, ragged token values and factors."""
    count = draw(st.integers(1, 6))
    sees = [draw(st.sets(st.integers(0, k - 1))) if k else set() for k in range(count)]
    turns = [Turn("a", "", k, sees=tuple(sorted(indices))) for k, indices in enumerate(sees)]
    numbers = st.floats(-3, 3, width=32)
    lengths = [draw(st.integers(1, 4)) for _ in turns]
    values = [[draw(numbers) for _ in range(length)] for length in lengths]
    rewards = [draw(numbers) for _ in turns]
    factors = [draw(st.floats(0, 1)) for _ in range(4)]
    return joint_steps(turns), rewards, values, factors, draw(numbers)


def brute_action(steps, rewards, values, gamma, lam, last_value):
    """A_k = R_t + gamma Vm_{t+1} - V_k + gamma lambda Am_{t+1}, straight from the formula, by recursion."""

    def mean_value(t):
        step_values = [v for v, s in zip(values, steps, strict=True) if s == t]
        return sum(step_values) / len(step_values) if step_values else last_value

    def mean_advantage(t):
        if t not in steps:
            return 0.0
        reward = sum(r for r, s in zip(rewards, steps, strict=True) if s == t)
        return reward + gamma * mean_value(t + 1) - mean_value(t) + gamma * lam * mean_advantage(t + 1)

    return [mean_advantage(t) + mean_value(t) - v for v, t in zip(values, steps, strict=True)]


def brute_token(steps, rewards, values, factors, last_value):
    gamma, lam, token_gamma, token_lam = factors

    def first(t, value_of):
        step_values = [value_of(k) for k, s in enumerate(steps) if s == t]
        return sum(step_values) / len(step_values) if step_values else None

    def advantage(k, i):
        t = steps[k]
        if i + 1 < len(values[k]):
            return token_gamma * values[k][i + 1] - values[k][i] + token_gamma * token_lam * advantage(k, i + 1)
        next_value = first(t + 1, lambda j: values[j][0])
        next_advantage = first(t + 1, lambda j: advantage(j, 0))
        reward = sum(r for r, s in zip(rewards, steps, strict=True) if s == t)
        value = last_value if next_value is None else next_value
        return reward + gamma * value - values[k][i] + gamma * lam * (next_advantage or 0.0)

    return [[advantage(k, i) for i in range(len(values[k]))] for k in range(len(values))]


def padded(values):
    rows = [torch.tensor(row, dtype=torch.float64) for row in values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@given(episodes())
def test_action_gae_equals_the_formula(episode):
    steps, rewards, values, (gamma, lam, _, _), last = episode
    first = [row[0] for row in values]
    rewards_, first_ = torch.tensor(rewards, dtype=torch.float64), torch.tensor(first, dtype=torch.float64)
    advantages, targets = F.gae(rewards_, first_, torch.tensor(steps), gamma, lam, last)
    want = brute_action(steps, rewards, first, gamma, lam, last)
    assert advantages.tolist() == pytest.approx(want, abs=1e-6)
    assert targets.tolist() == pytest.approx([a + v for a, v in zip(want, first, strict=True)], abs=1e-6)


@given(episodes())
def test_token_gae_equals_the_formula(episode):
    steps, rewards, values, factors, last = episode
    lengths = torch.tensor([len(row) for row in values])
    arguments = torch.tensor(rewards, dtype=torch.float64), padded(values), lengths, torch.tensor(steps)
    advantages, targets = F.token_gae(*arguments, *factors, last)
    want = brute_token(steps, rewards, values, factors, last)
    for k, row in enumerate(want):
        assert advantages[k, : len(row)].tolist() == pytest.approx(row, abs=1e-6)
        assert targets[k, : len(row)].tolist() == pytest.approx([a + v for a, v in zip(row, values[k], strict=True)])
        assert not advantages[k, len(row) :].any() and not targets[k, len(row) :].any()


@given(episodes())
def test_returns_to_go_equal_a_loop(episode):
    steps, rewards, _, (gamma, *_), _ = episode
    want = [sum(gamma ** (s - t) * r for r, s in zip(rewards, steps, strict=True) if s >= t) for t in steps]
    rewards_ = torch.tensor(rewards, dtype=torch.float64)
    assert F.returns_to_go(rewards_, torch.tensor(steps), gamma).tolist() == pytest.approx(want, abs=1e-6)


@given(reward=st.floats(-5, 5), count=st.integers(1, 8), discount=st.floats(0, 1))
def test_step_discount_equals_a_loop(reward, count, discount):
    want = [reward * discount ** (count - 1 - k) for k in range(count)]
    assert F.step_discount_credit(reward, count, discount).tolist() == pytest.approx(want, abs=1e-5)
    assert F.equal_credit(reward, torch.arange(count), True).tolist() == pytest.approx([0.0] * (count - 1) + [reward])
    assert F.equal_credit(reward, torch.arange(count), False).tolist() == pytest.approx([reward] * count)


@given(episodes(), st.floats(-5, 5))
def test_the_teams_reward_reaches_every_turn_of_every_graph(episode, reward):
    # also where the turn that was spoken last is not in the last joint step
    steps = torch.tensor(episode[0])
    credit = F.equal_credit(reward, steps, as_rewards=True)
    assert F.gae(credit, torch.zeros(len(steps)), steps, 1.0, 1.0)[0].tolist() == pytest.approx([reward] * len(steps))


ragged = st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=5), min_size=1, max_size=4)


@given(rows=ragged, words=st.lists(st.integers(1, 6), min_size=4, max_size=4))
def test_log_ratios_of_actions_equal_a_loop(rows, words):
    mask = padded([[1.0] * len(row) for row in rows])
    noise = padded(rows) + 7 * (1 - mask)  # what lies beyond a turn's end does not count
    # Sums, and means by tokens and words
    for its in ([1] * len(rows), [len(row) for row in rows], words[: len(rows)]):
        want = [sum(row) / by for row, by in zip(rows, its, strict=True)]
        got = F.action_log_ratios(noise, mask, torch.tensor(its, dtype=torch.float64))
        assert got.tolist() == pytest.approx(want, abs=1e-6)


@given(
    rows=st.lists(st.tuples(*[st.floats(-20, 20)] * 3), min_size=1, max_size=6),
    clip=st.one_of(st.none(), st.floats(0.01, 2)),
    kind=st.sampled_from(["huber", "squared"]),
)
def test_value_loss_equals_the_originals(rows, clip, kind):
    def loss(error):
        size = abs(error)
        return error**2 / 2 if kind == "squared" or size <= 10 else 10 * (size - 5)

    want = []
    for value, old, target in rows:
        near = value if clip is None else old + max(-clip, min(clip, value - old))
        want.append(max(loss(target - value), loss(target - near)))
    tensors = [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]
    assert F.value_losses(*tensors, clip, kind).tolist() == pytest.approx(want, abs=1e-6)


def test_a_clipped_value_has_no_gradient():
    value = torch.tensor([0.5, 0.1], requires_grad=True)
    F.value_losses(value, torch.zeros(2), torch.ones(2), 0.2, "squared").sum().backward()
    assert value.grad.tolist() == pytest.approx([0.0, -0.9])  # 0.5 has moved beyond 0.2 towards its target


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=3))
def test_standardized_over_processes_equals_one(parts):
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    everything = torch.cat(tensors)
    total = sum(F.moments(part) for part in tensors)
    got = torch.cat([F.standardized(part, total) for part in tensors])
    std = everything.std(correction=0)
    if std > 1e-3:
        torch.testing.assert_close(got, (everything - everything.mean()) / (std + 1e-8), rtol=1e-5, atol=1e-5)


def test_explained_variance_by_hand():
    targets = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert F.explained_variance(F.moments(targets), F.moments(targets - targets)) == 1.0
    assert F.explained_variance(F.moments(targets), F.moments(targets - targets.mean())) == pytest.approx(0.0)
    assert F.explained_variance(F.moments(targets), F.moments(2 * targets)) == pytest.approx(-3.0)
    assert math.isnan(F.explained_variance(F.moments(torch.ones(3)), F.moments(torch.ones(3))))


def test_divergence_factors_and_entropy_control_by_hand():
    assert F.approximate_kl(torch.tensor([0.0, math.log(2)])).tolist() == pytest.approx([0.0, 1 - math.log(2)])
    assert F.approximate_kl(torch.tensor([500.0])).isfinite().all()
    log_ratios = torch.tensor([math.log(2), math.log(3), math.log(0.5)])
    factors = F.sequential_log_factors(log_ratios, torch.tensor([0, 0, 2]), 3)
    assert factors.exp().tolist() == pytest.approx([6.0, 1.0, 0.5])
    assert F.clipped_factors(factors, None).tolist() == pytest.approx([6.0, 1.0, 0.5])
    assert F.clipped_factors(factors, 0.2).tolist() == pytest.approx([1.2, 1.0, 0.8])
    weights = torch.tensor([3.0, 7.5, 6.0**2 + 1 + 0.25])  # number, sum, sum of squares
    assert F.effective_share(weights) == pytest.approx(7.5**2 / (3 * 37.25))
    assert F.effective_share(torch.tensor([4.0, 8.0, 16.0])) == 1.0
    assert F.adapted_entropy_coef(0.1, entropy=0.3, target=0.3, delta=0.05, low=0, high=0.12) == 0.12
    assert F.adapted_entropy_coef(0.1, entropy=0.4, target=0.3, delta=0.05, low=0.08, high=1) == 0.08


def test_gae_reference_vector_of_a_chain():
    advantages, targets = F.gae(torch.tensor([0.0, 1.0]), torch.tensor([0.2, 0.6]), torch.tensor([0, 1]), 0.99, 0.95)
    assert advantages.tolist() == pytest.approx([0.7702, 0.4], abs=1e-6)
    assert targets.tolist() == pytest.approx([0.9702, 1.0], abs=1e-6)
