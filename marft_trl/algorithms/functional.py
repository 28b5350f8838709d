# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
The mathematics, as pure functions of tensors: rewards, credit, returns, advantages, ratios and losses. `B` rows of a
micro-batch, `T` tokens of the longest turn, `J` joint actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


__all__ = [
    "STD_EPS",
    "OwnSteps",
    "action_log_ratios",
    "adapted_entropy_coef",
    "approximate_kl",
    "are_equal",
    "cell_advantages",
    "clipped_factors",
    "counterfactual_credit",
    "effective_share",
    "equal_credit",
    "explained_variance",
    "gae",
    "group_advantages",
    "leave_one_out_advantages",
    "moments",
    "nan_std",
    "normalized_objectives",
    "own_steps",
    "returns_to_go",
    "sampling_weights",
    "sequential_log_factors",
    "standardized",
    "step_discount_credit",
    "team_rewards",
    "token_gae",
    "value_losses",
]

# Added to the standard deviation before dividing, as in TRL.
STD_EPS = 1e-4


def nan_std(values: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """
    Standard deviation of values of any shape over `dim`, by default over all dimensions, with Bessel's correction and
    ignoring NaN. The result is NaN if fewer than two values are left.
    """
    mean = torch.nanmean(values, dim=dim, keepdim=True)
    variance = torch.nanmean((values - mean) ** 2, dim=dim, keepdim=True)
    count = torch.sum(~torch.isnan(values), dim=dim, keepdim=True)
    correction = torch.where(count > 1, count / (count - 1), torch.full_like(variance, torch.nan))
    std = torch.sqrt(variance * correction)
    if keepdim:
        return std
    return std.squeeze() if dim is None else std.squeeze(dim)


def team_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Weighted sum `(E,)` of the rewards `(E, F)` of all reward functions, NaN where a function does not apply, with
    weights `(F,)`. The sum is NaN where no function applied.
    """
    rewards = (rewards_per_func * weights.unsqueeze(0)).nansum(dim=1)
    return rewards.masked_fill(torch.isnan(rewards_per_func).all(dim=1), torch.nan)


def normalized_objectives(
    rewards_per_func: torch.Tensor, weights: torch.Tensor, group_size: int, to_the_bit: bool = True
) -> torch.Tensor:
    """
    Normalize the rewards of each function within their group, then add them up with the functions' weights.

    Args:
        rewards_per_func (`torch.Tensor` of shape `(E, F)`): NaN where a function does not apply.
        weights (`torch.Tensor` of shape `(F,)`): weight of each function.
        group_size (`int`): `G`; groups are consecutive episodes.
        to_the_bit (`bool`, *optional*, defaults to `True`): whether to keep the rounding that is left of groups with
            equal rewards, as in TRL. Otherwise, they are exactly 0, see [`are_equal`].

    Returns: normalized rewards `(E,)`, NaN where no function applied.

    Source: GDPO (2601.05242), as in TRL's `multi_objective_aggregation="normalize_then_sum"`.
    """
    grouped = rewards_per_func.view(-1, group_size, rewards_per_func.size(1))
    mean = torch.nanmean(grouped, dim=1, keepdim=True)
    std = nan_std(grouped, dim=1, keepdim=True) if group_size > 1 else torch.zeros_like(mean)
    normalized = ((grouped - mean) / (std + STD_EPS)).view_as(rewards_per_func)
    if not to_the_bit:
        groups = torch.arange(len(normalized), device=normalized.device) // group_size
        equal = torch.stack([are_equal(item, groups) for item in rewards_per_func.T], dim=1)
        normalized = normalized.masked_fill(equal & ~normalized.isnan(), 0.0)
    return team_rewards(normalized, weights)


def group_advantages(rewards: torch.Tensor, group_size: int, scale: str) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Advantage of each episode: its reward minus the mean reward of its group. As in TRL, to the bit: where all rewards
    of a group are equal, the rounding of their mean is left, see [`are_equal`].

    Args:
        rewards (`torch.Tensor` of shape `(E,)`): reward of each episode; groups are consecutive episodes.
        group_size (`int`): `G`.
        scale (`str`): divisor of the advantages: standard deviation of the `"group"` or the `"batch"`, or `"none"`.

    Returns: advantages `(E,)`, 0 for unscored episodes, and for each episode the standard deviation of its group or of
    the batch `(E,)`.

    Source: GRPO (2402.03300), MAGRPO (2508.04652): one advantage for all turns of an episode.
    """
    grouped = rewards.view(-1, group_size)
    mean = torch.nanmean(grouped, dim=1).repeat_interleave(group_size)
    if scale == "batch":
        std = nan_std(rewards).expand_as(rewards) if rewards.numel() > 1 else torch.zeros_like(rewards)
    elif group_size > 1:
        std = nan_std(grouped, dim=1).repeat_interleave(group_size)
    else:
        std = torch.zeros_like(rewards)
    advantages = rewards - mean
    if scale != "none":
        advantages = advantages / (std + STD_EPS)
    return torch.nan_to_num(advantages, nan=0.0), std


def cell_advantages(
    returns: torch.Tensor, cells: torch.Tensor, weights: torch.Tensor, pools: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Advantage of each turn: its return minus the mean return of its cell, optionally divided by a standard deviation.

    Args:
        returns (`torch.Tensor` of shape `(N,)`): return of each turn; NaN where nothing scored it.
        cells (`torch.Tensor` of shape `(N,)`): index of the cell of each turn. Turns are compared within their cell.
        weights (`torch.Tensor` of shape `(N,)`): weight of each turn in the mean and the standard deviation, e.g.
            `1 / K`, so that every episode counts once.
        pools (`torch.Tensor` of shape `(N,)`, *optional*): index of the pool of each turn. The advantage is divided by
            the standard deviation of the pool. If `None`, advantages are not divided.

    Returns: advantages `(N,)`. They are 0 for unscored turns and for turns that cannot be compared, because the
        weights of the scored turns in their cell or pool add up to 1 or less.

    Source: with cells of one prompt GRPO (2402.03300), with cells of one prompt and agent Dr.MAS (2602.08847), with
    cells of one observation AT-GRPO (2510.11062), with one cell for all REINFORCE++ (2501.03262).
    """
    weights = weights.masked_fill(returns.isnan(), 0.0)  # also for the means and standard deviations below
    advantages = returns - _cell_means(returns, cells, weights)[cells]
    advantages = advantages.masked_fill(are_equal(returns, cells), 0.0)
    advantages = advantages.masked_fill(_sums(weights, cells)[cells] <= _ALONE, 0.0)
    if pools is not None:
        advantages = advantages / (_cell_stds(returns, pools, weights)[pools] + STD_EPS)
        advantages = advantages.masked_fill(_sums(weights, pools)[pools] <= _ALONE, 0.0)
    return torch.nan_to_num(advantages, nan=0.0)


def leave_one_out_advantages(
    returns: torch.Tensor, episodes: torch.Tensor, cells: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """
    Advantage of each turn: its return minus the mean return of the other episodes in its cell. This mean does not
    depend on the turn, so it adds no bias.

    Args:
        returns (`torch.Tensor` of shape `(N,)`): return of each turn; NaN where nothing scored it.
        episodes (`torch.Tensor` of shape `(N,)`): index of the episode of each turn.
        cells (`torch.Tensor` of shape `(N,)`): index of the prompt of each turn.
        weights (`torch.Tensor` of shape `(N,)`): weight of each turn in the mean.

    Returns: advantages `(N,)`, 0 for unscored turns and where the cell has no other scored episode.

    Source: RLOO (2402.14740).
    """
    weights = weights.masked_fill(returns.isnan(), 0.0)
    known = torch.nan_to_num(returns, nan=0.0) * weights
    cell_sums, cell_weights = _sums(known, cells), _sums(weights, cells)
    own_sums, own_weights = _sums(known, episodes), _sums(weights, episodes)
    others = cell_weights[cells] - own_weights[episodes]
    has_others = others > 1e-9
    mean = (cell_sums[cells] - own_sums[episodes]) / others.where(has_others, torch.ones_like(others))
    return torch.nan_to_num((returns - mean).masked_fill(~has_others | are_equal(returns, cells), 0.0), nan=0.0)


# A cell whose weights add up to at most this holds a single episode (with a margin for rounding).
_ALONE = 1 + 1e-4
# Returns that differ by less, relative to their size, are the same up to the rounding of sums in float32.
_ROUNDING = 4 * torch.finfo(torch.float32).eps


def are_equal(returns: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """
    Mark the turns `(N,)` of cells whose returns are all the same, up to rounding, or all unknown. `returns` `(N,)` is
    NaN where nothing scored a turn, and `cells` `(N,)` has the index of the cell of each turn. Advantages of marked
    turns must be exactly 0: the rounding of a mean would leave about 1e-8, which Adam turns into updates of full size.
    """
    if not returns.numel():
        return torch.zeros_like(returns, dtype=torch.bool)
    known, count = ~returns.isnan(), int(cells.max()) + 1
    lowest = returns.new_full((count,), torch.inf).scatter_reduce_(0, cells[known], returns[known], "amin")
    highest = returns.new_full((count,), -torch.inf).scatter_reduce_(0, cells[known], returns[known], "amax")
    size = torch.maximum(lowest.abs(), highest.abs())
    return (highest - lowest <= _ROUNDING * size)[cells]  # -inf - inf <= inf: nothing is known


def _sums(values: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(int(cells.max()) + 1 if cells.numel() else 0).index_add_(0, cells, values)


def _cell_means(values: torch.Tensor, cells: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    totals = _sums(weights, cells)
    return _sums(torch.nan_to_num(values, nan=0.0) * weights, cells) / totals.where(totals > 0, 1.0)


def _cell_stds(values: torch.Tensor, cells: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each cell with Bessel's correction; 0 where the weights add up to 1 or less."""
    deviations = torch.nan_to_num(values - _cell_means(values, cells, weights)[cells], nan=0.0)
    degrees = _sums(weights, cells) - 1
    squares = _sums(weights * deviations**2, cells)
    return torch.where(degrees > 1e-6, squares / degrees.clamp(min=1e-6), 0.0).sqrt()


# ---- Credit: from the reward of an episode to rewards (or returns) of its turns ----


def equal_credit(reward: float, steps: torch.Tensor, as_rewards: bool) -> torch.Tensor:
    """
    Give every turn of an episode the same credit `(K,)`: the team's reward. `steps` `(K,)` has the joint step of each
    turn. With `as_rewards`, credits are rewards, which are summed to returns later: the team's reward at the last turn
    of the last joint step and 0 elsewhere, so that it reaches every turn. Otherwise, they are returns: the team's
    reward at every turn.
    """
    if not as_rewards:
        return torch.full((len(steps),), float(reward))
    credit = torch.zeros(len(steps))
    credit[(steps == steps.max()).nonzero()[-1]] = float(reward)
    return credit


def step_discount_credit(reward: float, num_turns: int, discount: float) -> torch.Tensor:
    """
    Discounted credit `(K,)`: `R * d^(K-1-k)` for turn `k` of `K = num_turns`, with the reward `R` of the episode and
    the discount `d` in `[0, 1]`. Later turns get more.

    Source: the second MARFT implementation. If the credits are used as rewards, they are summed, and the first turn
    has the largest return. If they are used as returns, the last turn has the largest return.
    """
    return float(reward) * torch.tensor(float(discount)) ** torch.arange(num_turns - 1, -1, -1)


def counterfactual_credit(reward: float | torch.Tensor, counterfactuals: torch.Tensor) -> torch.Tensor:
    """
    Counterfactual credit `(K,)`: the reward of the episode, or for each turn that of its agent `(K,)`, minus the mean
    of `counterfactuals` `(K, M)`, the rewards of `M` re-runs in which the turn was resampled, NaN for unscored
    re-runs. Credit is NaN for turns none of whose re-runs was scored.

    Source: difference rewards (Wolpert and Tumer 2001), COMA (1705.08926).
    """
    return reward - torch.nanmean(counterfactuals, dim=1)


def returns_to_go(rewards: torch.Tensor, steps: torch.Tensor, gamma: float) -> torch.Tensor:
    """
    Returns `(K,)` of turns: the sum of the rewards `(K,)` after each turn from its joint step on, discounted
    by `gamma`, in `[0, 1]`, per joint step. `steps` `(K,)` has the index of the joint step of each turn, 0, 1, ...
    """
    returns = _sums(rewards, steps)
    for step in range(len(returns) - 2, -1, -1):
        returns[step] += gamma * returns[step + 1]
    return returns[steps]


class OwnSteps(NamedTuple):
    """
    An episode as one of its agents goes through it: from each of its own turns to the next, a semi-Markov step.

    Args:
        rewards (`torch.Tensor` of shape `(k,)`): discounted sum of the agent's rewards from each of its turns to its
            next one; of simultaneous turns, the last has it.
        steps (`torch.Tensor` of shape `(k,)`): index of the agent's own step of each turn, 0, 1, ...
        discounts (`list[float]`): for each own step, the discount of what comes after it.
    """

    rewards: torch.Tensor
    steps: torch.Tensor
    discounts: list[float]


def own_steps(rewards: torch.Tensor, steps: torch.Tensor, own: torch.Tensor, gamma: float) -> OwnSteps:
    """
    The steps of one agent. For its turn `k` at joint step `t_k` and its next one at `t_k'`, the reward is the sum over
    `t_k <= t < t_k'` of `gamma^(t - t_k) * r_t`, and the discount is `gamma^(t_k' - t_k)`. After its last turn, the
    rest of the episode takes the place of `t_k'`. What the agent received before its first turn is left out.

    Args:
        rewards (`torch.Tensor` of shape `(K,)`): reward that the agent received after each turn of the episode,
            whoever took it.
        steps (`torch.Tensor` of shape `(K,)`): index of the joint step of each turn, 0, 1, ...
        own (`torch.Tensor` of shape `(k,)`): positions of its own turns among all `K`, ascending.
        gamma (`float`): discount per joint step, in `[0, 1]`.

    Source: semi-Markov decision processes (Sutton, Precup and Singh 1999), with [`gae`] over the steps.
    """
    times, order = steps[own].unique(return_inverse=True)
    received, ends = _sums(rewards, steps), [*times[1:].tolist(), int(steps.max()) + 1]
    between = rewards.new_zeros(len(own))
    discounts = []
    for number, (start, end) in enumerate(zip(times.tolist(), ends, strict=True)):
        factors = torch.tensor(float(gamma)) ** torch.arange(end - start)
        between[(order == number).nonzero()[-1]] = (received[start:end] * factors).sum()
        discounts.append(float(gamma) ** (end - start))
    return OwnSteps(between, order, discounts)


# ---- Advantages with a critic ----


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    steps: torch.Tensor,
    gamma: float | Sequence[float],
    gae_lambda: float,
    last_value: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Generalised advantage estimation over the joint steps of an episode.

    For each turn `k` of joint step `t`, `A_k = R_t + gamma * Vm_{t+1} - V_k + gamma * lambda * Am_{t+1}`. Here, `R_t`
    is the sum of the rewards of joint step `t`, `V_k` the value of turn `k`, `Vm_t` the mean value of the turns of
    joint step `t`, and `Am_t` their mean advantage.

    Args:
        rewards (`torch.Tensor` of shape `(K,)`): reward received after each turn; 0 where there is none.
        values (`torch.Tensor` of shape `(K,)`): critic value before each turn, without gradient.
        steps (`torch.Tensor` of shape `(K,)`): index of the joint step of each turn, 0, 1, ...; turns of one step act
            simultaneously.
        gamma (`float` or `Sequence[float]`): discount per joint step, in `[0, 1]`; or for each of them its own, by
            which what comes after it is discounted.
        gae_lambda (`float`): GAE decay per joint step, in `[0, 1]`.
        last_value (`float`, *optional*, defaults to `0.0`): value of the observation after the last joint step, if a
            horizon cut the episode.

    Returns: advantages and value targets, each `(K,)`.

    Source: Schulman et al. 2016 (1506.02438), eq. 16; on a chain, equal to the original MARFT's recursion over agents
    (`action_level_buffer.py`).
    """
    rest = _sums(rewards, steps)  # of each joint step, `R_t + gamma * Vm_{t+1} + gamma * lambda * Am_{t+1}`
    mean_values = _sums(values, steps) / torch.bincount(steps).clamp(min=1)
    gammas = [gamma] * len(rest) if isinstance(gamma, (int, float)) else gamma
    next_value, next_advantage = last_value, 0.0
    for step in range(len(rest) - 1, -1, -1):
        rest[step] += gammas[step] * next_value + gammas[step] * gae_lambda * next_advantage
        next_value, next_advantage = mean_values[step], rest[step] - mean_values[step]
    advantages = rest[steps] - values
    return advantages, advantages + values


def token_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    steps: torch.Tensor,
    gamma: float | Sequence[float],
    gae_lambda: float,
    token_gamma: float,
    token_gae_lambda: float,
    last_value: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Generalised advantage estimation at token level.

    There are two recursions. Inside a turn, every token is a step, with `token_gamma` and `token_gae_lambda`; only the
    last token is rewarded. From joint step to joint step, the recursion of [`gae`] applies, with the value and the
    advantage of each turn's first token instead of those of the turn.

    Args:
        rewards (`torch.Tensor` of shape `(K,)`): reward received after each turn.
        values (`torch.Tensor` of shape `(K, T)`): critic value before each sampled token, without gradient.
        lengths (`torch.Tensor` of shape `(K,)`): number of tokens of each turn, at least 1.
        steps (`torch.Tensor` of shape `(K,)`): index of the joint step of each turn, 0, 1, ...
        gamma (`float` or `Sequence[float]`), gae_lambda (`float`): discount and decay per joint step, as in [`gae`].
        token_gamma, token_gae_lambda (`float`): discount and decay per token inside a turn, in `[0, 1]`.
        last_value (`float`, *optional*, defaults to `0.0`): as in [`gae`].

    Returns: advantages and value targets, each `(K, T)`, 0 after the last token of a turn.

    Source: MARFT (2504.16129), token-level Bellman backup with `token_gamma = 1`; the original's code
    (`token_level_buffer.py`) has `token_gamma = gamma` and `token_gae_lambda = gae_lambda`.
    """
    mask = torch.arange(values.size(1), device=values.device) < lengths.unsqueeze(1)
    advantages = torch.zeros_like(values)
    next_value, next_advantage = last_value, 0.0
    last = int(steps.max())
    gammas = [gamma] * (last + 1) if isinstance(gamma, (int, float)) else gamma
    for step in range(last, -1, -1):
        turns = (steps == step).nonzero().squeeze(1)
        rest = rewards[turns].sum() + gammas[step] * next_value + gammas[step] * gae_lambda * next_advantage
        advantages[turns] = _inside_turns(values[turns], lengths[turns], rest, token_gamma, token_gae_lambda)
        next_value, next_advantage = values[turns, 0].mean(), advantages[turns, 0].mean()
    advantages = advantages * mask
    return advantages, (advantages + values) * mask


def _inside_turns(values, lengths, rest, gamma, gae_lambda) -> torch.Tensor:
    """Advantages `(K, T)` of the tokens of simultaneous turns. `rest` is the estimated return from their end on."""
    rows = []  # plain numbers: with so few turns, a recursion over tokens is many times slower on tensors
    for value, length in zip(values.double().tolist(), lengths.tolist(), strict=True):
        advantages = [0.0] * len(value)
        advantage = advantages[length - 1] = float(rest) - value[length - 1]
        for i in range(length - 2, -1, -1):
            advantage = advantages[i] = gamma * value[i + 1] - value[i] + gamma * gae_lambda * advantage
        rows.append(advantages)
    return values.new_tensor(rows)


def moments(values: torch.Tensor) -> torch.Tensor:
    """Count, sum and sum of squares `(3,)` in double precision. Moments of several processes can be added."""
    values = values.double()
    return torch.stack([values.new_tensor(values.numel()), values.sum(), (values**2).sum()])


def standardized(values: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """
    Standardize values of any shape with the mean and the population standard deviation that `total` `(3,)` describes:
    the [`moments`] of all values of all processes.

    Source: the original MARFT (`appo_trainer.py`), which also adds 1e-8 to the standard deviation. It leaves out
    values that are exactly 0. Here, the caller leaves values out of `total` instead.
    """
    mean = total[1] / total[0].clamp(min=1)
    variance = (total[2] / total[0].clamp(min=1) - mean**2).clamp(min=0)
    return ((values.double() - mean) / (variance.sqrt() + 1e-8)).to(values.dtype)


def explained_variance(targets: torch.Tensor, residuals: torch.Tensor) -> float:
    """
    Share of the variance of the value targets that the critic explains, from the [`moments`] `(3,)` of the targets and
    of the targets minus the values: 1 for a perfect critic, 0 for the best constant, NaN if all targets are equal.
    """
    variances = [total[2] / total[0] - (total[1] / total[0]) ** 2 for total in (targets, residuals)]
    return (1 - variances[1] / variances[0]).item() if variances[0] > 1e-12 else float("nan")


def value_losses(
    values: torch.Tensor,
    old_values: torch.Tensor,
    targets: torch.Tensor,
    clip: float | None,
    kind: str,
    huber_delta: float = 10.0,
) -> torch.Tensor:
    """
    Clipped value loss of PPO, for every value: the larger of two losses, that of the value and that of the value after
    it is clipped to at most `clip` from its old value.

    Args:
        values (`torch.Tensor` of any shape): current values, with gradient.
        old_values (`torch.Tensor`): values when the episodes were sampled.
        targets (`torch.Tensor`): value targets.
        clip (`float`, *optional*): clip range around the old values. If `None`, there is no clipping.
        kind (`str`): `"huber"` for Huber's loss, or `"squared"` for half the squared error.
        huber_delta (`float`, *optional*, defaults to `10.0`): error above which Huber's loss is linear.

    Source: the original MARFT (`cal_value_loss`), PPO (1707.06347).
    """

    def loss(error: torch.Tensor) -> torch.Tensor:
        if kind == "squared":
            return error**2 / 2
        size = error.abs()
        return torch.where(size <= huber_delta, error**2 / 2, huber_delta * (size - huber_delta / 2))

    unclipped = loss(targets - values)
    if clip is None:
        return unclipped
    return torch.max(unclipped, loss(targets - (old_values + (values - old_values).clamp(-clip, clip))))


def action_log_ratios(log_ratios: torch.Tensor, mask: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
    """
    Log-ratios `(B,)` of turns, seen as one action each: the sum of the log-ratios `(B, T)` of the tokens whose `mask`
    `(B, T)` is 1, divided by 1, the number of tokens or the number of words of the turn (`divisors` `(B,)`).

    Source: MARFT-A's `normalization_mode` "sum", "token" and "word"; "token" is GSPO's ratio (2507.18071).
    """
    return (log_ratios * mask).sum(dim=1) / divisors


def approximate_kl(log_ratios: torch.Tensor) -> torch.Tensor:
    """
    `(r - 1) - log r` for every ratio `r` of the new to the old policy, from `log r` of any shape. Its mean over
    samples of the old policy estimates `KL(old || new)`.

    Source: Schulman, "Approximating KL divergence" (k3); the original MARFT's early stop.
    """
    log_ratios = log_ratios.clamp(-20, 20)
    return torch.exp(log_ratios) - 1 - log_ratios


def sequential_log_factors(log_ratios: torch.Tensor, actions: torch.Tensor, num_actions: int) -> torch.Tensor:
    """
    Logarithms `(J,)` of the factors by which an agent's update multiplies the advantages of `J = num_actions` joint
    actions: the sum of the log-ratios `(N,)`, new to old policy, of the agent's turns in the joint action. `actions`
    `(N,)` has the index of the joint action of each turn. The sum is 0 for joint actions without a turn of the agent.

    Source: HAPPO (2109.11251): its factor `M`, a product over the agents of one step.
    """
    return log_ratios.new_zeros(num_actions).index_add_(0, actions, log_ratios).clamp(-20, 20)


def clipped_factors(log_factors: torch.Tensor, clip: float | None) -> torch.Tensor:
    """
    Factors `(J,)` of the joint actions, clipped to `[1 - clip, 1 + clip]` unless `clip` is `None`, from the sums
    `(J,)` of [`sequential_log_factors`] over the updated agents.

    Source: the clip of the preceding agents' joint ratio in A2PO (2302.06205).
    """
    factors = log_factors.clamp(-20, 20).exp()
    return factors if clip is None else factors.clamp(1 - clip, 1 + clip)


def effective_share(weights: torch.Tensor) -> float:
    """
    Effective sample size of importance weights, divided by their number: in `(0, 1]`, and 1 if all weights are equal.
    `weights` `(3,)` has the number of weights, their sum, and the sum of their squares.

    Source: Kish, `(sum w)^2 / (n sum w^2)`.
    """
    count, total, squares = weights.double().tolist()
    return total**2 / (count * squares) if count and squares else 1.0


def adapted_entropy_coef(
    coefficient: float, entropy: float, target: float, delta: float, low: float, high: float
) -> float:
    """
    Entropy coefficient of the next step. It is raised by `delta` if the entropy is at or below its target, and lowered
    by `delta` otherwise. It stays within `[low, high]`.

    Source: Skywork-OR1 (2505.22312), as in TRL's `use_adaptive_entropy`.
    """
    return min(coefficient + delta, high) if entropy <= target else max(coefficient - delta, low)


def sampling_weights(log_ratios: torch.Tensor, mode: str, low: float | None, high: float | None) -> torch.Tensor:
    """
    Importance weights of the tokens of a turn that was sampled by another policy than the one that is trained, such as
    the same weights on a server, in another precision or of an earlier update.

    Args:
        log_ratios (`torch.Tensor` of shape `(L,)`): log-probabilities under the policy that is trained, minus those
            under the policy that sampled.
        mode (`str`): `"token_truncate"` and `"token_mask"` weigh each token by its own ratio, `"sequence_truncate"`
            and `"sequence_mask"` every token by the ratio of its turn. Ratios out of bounds are clipped (`"truncate"`)
            or replaced by 0 (`"mask"`).
        low, high (`float`, *optional*): bounds.

    Returns: weights `(L,)`.

    Source: `vllm_importance_sampling_mode` of TRL 1.16.
    """
    unit, how = mode.split("_")
    exponents = log_ratios.sum().expand_as(log_ratios) if unit == "sequence" else log_ratios
    ratios = exponents.exp()
    low, high = -torch.inf if low is None else low, torch.inf if high is None else high
    if how == "truncate":
        return ratios.clamp(low, high)
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)
