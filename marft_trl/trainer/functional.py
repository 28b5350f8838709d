# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
The mathematics, as pure functions of tensors.

Notation: `E` episodes of all processes, `G` episodes of one prompt (a group), `F` reward functions, `A` agents. NaN in
a reward means that nothing scored the episode; such episodes are left out of every statistic and get advantage 0.
"""

from __future__ import annotations

import torch


# Added to the standard deviation before dividing, as in TRL.
STD_EPS = 1e-4


def nan_std(values: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """
    Standard deviation with Bessel's correction, ignoring NaN; NaN where fewer than two values are left.

    Args:
        values (`torch.Tensor`): any shape.
        dim (`int`, *optional*): dimension to reduce; all of them unless given.
        keepdim (`bool`, *optional*, defaults to `False`): keep the reduced dimension.
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
    The weighted sum over reward functions.

    Args:
        rewards_per_func (`torch.Tensor` of shape `(E, F)`): NaN where a function does not apply.
        weights (`torch.Tensor` of shape `(F,)`): weight of each function.

    Returns: rewards `(E,)`, NaN where no function applied.
    """
    rewards = (rewards_per_func * weights.unsqueeze(0)).nansum(dim=1)
    return rewards.masked_fill(torch.isnan(rewards_per_func).all(dim=1), torch.nan)


def normalized_objectives(rewards_per_func: torch.Tensor, weights: torch.Tensor, group_size: int) -> torch.Tensor:
    """
    Each reward function normalised within its group, then summed by weight: `normalize_then_sum`.

    Args:
        rewards_per_func (`torch.Tensor` of shape `(E, F)`): NaN where a function does not apply.
        weights (`torch.Tensor` of shape `(F,)`): weight of each function.
        group_size (`int`): `G`; groups are consecutive episodes.

    Returns: `(E,)`, NaN where no function applied.

    Source: GDPO (2601.05242), as in TRL's `multi_objective_aggregation="normalize_then_sum"`.
    """
    grouped = rewards_per_func.view(-1, group_size, rewards_per_func.size(1))
    mean = torch.nanmean(grouped, dim=1, keepdim=True)
    std = nan_std(grouped, dim=1, keepdim=True) if group_size > 1 else torch.zeros_like(mean)
    normalized = ((grouped - mean) / (std + STD_EPS)).view_as(rewards_per_func)
    return team_rewards(normalized, weights)


def group_advantages(rewards: torch.Tensor, group_size: int, scale: str) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Advantage of an episode over the other episodes of its prompt.

    Args:
        rewards (`torch.Tensor` of shape `(E,)`): reward of each episode; groups are consecutive episodes.
        group_size (`int`): `G`.
        scale (`str`): divide by the standard deviation of the `"group"`, of the `"batch"`, or by nothing (`"none"`).

    Returns: advantages `(E,)`, 0 for unscored episodes, and the standard deviation that belongs to each `(E,)`.

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


def agent_advantages(
    rewards: torch.Tensor, turn_counts: torch.Tensor, group_size: int, scale: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Advantage of an episode for each agent, against the turns of that agent in the group.

    Every turn of an episode has the episode's reward as its return, so the mean of an agent's returns weighs each
    episode by the number of turns the agent had in it.

    Args:
        rewards (`torch.Tensor` of shape `(E,)`): reward of each episode; groups are consecutive episodes.
        turn_counts (`torch.Tensor` of shape `(E, A)`): turns that each agent had in each episode.
        group_size (`int`): `G`.
        scale (`str`): `"group"` divides by the standard deviation of the agent's returns in the group, `"batch"` by
            that of the agent's returns in the batch, `"none"` by nothing.

    Returns: advantages `(E, A)`, 0 where the agent had no turn or nothing scored, and standard deviations `(E, A)`.

    Source: Dr.MAS (2602.08847).
    """
    counts = turn_counts.to(rewards.dtype) * (~torch.isnan(rewards)).unsqueeze(1)  # (E, A)
    returns = torch.nan_to_num(rewards, nan=0.0).unsqueeze(1).expand_as(counts)
    mean, std = _weighted_moments(returns, counts, group_size)
    if scale == "batch":
        _, std = _weighted_moments(returns, counts, len(rewards))
    advantages = returns - mean
    if scale != "none":
        advantages = advantages / (std + STD_EPS)
    return advantages.masked_fill(counts == 0, 0.0), std


def _weighted_moments(values: torch.Tensor, counts: torch.Tensor, group_size: int):
    """Mean and sample deviation over consecutive groups, `(E, A)` each, of values that occur `counts` times."""
    grouped = values.reshape(-1, group_size, values.size(1))
    weights = counts.reshape(-1, group_size, values.size(1))
    total = weights.sum(dim=1, keepdim=True)
    mean = (grouped * weights).sum(dim=1, keepdim=True) / total.clamp(min=1)
    variance = ((grouped - mean) ** 2 * weights).sum(dim=1, keepdim=True) / (total - 1).clamp(min=1)
    return mean.expand_as(grouped).reshape_as(values), variance.sqrt().expand_as(grouped).reshape_as(values)
