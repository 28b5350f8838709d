# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Losses, ratios and what controls them as pure functions of tensors. `B` rows of a micro-batch, `T` tokens of the
longest turn, `J` joint actions.
"""

from __future__ import annotations

import torch


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
    Log-ratio of each turn, seen as one action.

    Args:
        log_ratios (`torch.Tensor` of shape `(B, T)`): log-ratio of each token.
        mask (`torch.Tensor` of shape `(B, T)`): 1 for tokens that count.
        divisors (`torch.Tensor` of shape `(B,)`): divisor of each turn's sum over tokens: 1, its number of tokens or
            its number of words.

    Returns: log-ratios `(B,)`.

    Source: MARFT-A's `normalization_mode` "sum", "token" and "word"; "token" is GSPO's ratio (2507.18071).
    """
    return (log_ratios * mask).sum(dim=1) / divisors


def approximate_kl(log_ratios: torch.Tensor) -> torch.Tensor:
    """
    `(r - 1) - log r` for every ratio `r` of the new to the old policy. Its mean over samples of the old policy
    estimates `KL(old || new)`.

    Args:
        log_ratios (`torch.Tensor` of any shape): `log r`.

    Source: Schulman, "Approximating KL divergence" (k3); the original MARFT's early stop.
    """
    log_ratios = log_ratios.clamp(-20, 20)
    return torch.exp(log_ratios) - 1 - log_ratios


def sequential_log_factors(log_ratios: torch.Tensor, actions: torch.Tensor, num_actions: int) -> torch.Tensor:
    """
    Logarithm of the factor by which an agent's update multiplies the advantages of each joint action: the sum of the
    log-ratios of the agent's turns in the joint action.

    Args:
        log_ratios (`torch.Tensor` of shape `(N,)`): log-ratio, new to old policy, of each turn of the updated agent.
        actions (`torch.Tensor` of shape `(N,)`): index of the joint action that each turn is part of.
        num_actions (`int`): `J`.

    Returns: logarithms `(J,)`, 0 for joint actions without a turn of the agent.

    Source: HAPPO (2109.11251): its factor `M`, a product over the agents of one step.
    """
    return log_ratios.new_zeros(num_actions).index_add_(0, actions, log_ratios).clamp(-20, 20)


def clipped_factors(log_factors: torch.Tensor, clip: float | None) -> torch.Tensor:
    """
    Factors of the joint actions, clipped to `[1 - clip, 1 + clip]`.

    Args:
        log_factors (`torch.Tensor` of shape `(J,)`): sums of [`sequential_log_factors`] over the updated agents.
        clip (`float`, *optional*): clip range. If `None`, factors are not clipped.

    Source: the clip of the preceding agents' joint ratio in A2PO (2302.06205).
    """
    factors = log_factors.clamp(-20, 20).exp()
    return factors if clip is None else factors.clamp(1 - clip, 1 + clip)


def effective_share(weights: torch.Tensor) -> float:
    """
    Effective sample size of importance weights, divided by their number: in `(0, 1]`, and 1 if all weights are equal.

    Args:
        weights (`torch.Tensor` of shape `(3,)`): number of weights, their sum, and the sum of their squares.

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
        log_ratios (`torch.Tensor` of shape `(L,)`):
            Log-probabilities under the policy that is trained, minus those under the policy that sampled.
        mode (`str`):
            `"token_truncate"` and `"token_mask"` weigh each token by its own ratio, `"sequence_truncate"` and
            `"sequence_mask"` every token by the ratio of its turn. Ratios out of bounds are clipped (`"truncate"`) or
            replaced by 0 (`"mask"`).
        low, high (`float`, *optional*):
            Bounds.

    Returns: weights `(L,)`.

    Source: `vllm_importance_sampling_mode` of TRL 1.16.
    """
    unit, how = mode.split("_")
    exponents = log_ratios.sum().expand_as(log_ratios) if unit == "sequence" else log_ratios
    ratios = exponents.exp()
    if how == "truncate":
        return ratios if low is None and high is None else ratios.clamp(min=low, max=high)
    outside = torch.zeros_like(ratios, dtype=torch.bool)
    outside |= ratios < low if low is not None else False
    outside |= ratios > high if high is not None else False
    return ratios.masked_fill(outside, 0.0)
