# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The mathematics: pure functions of tensors."""

from .advantages import (
    STD_EPS,
    cell_advantages,
    counterfactual_credit,
    equal_credit,
    explained_variance,
    gae,
    group_advantages,
    leave_one_out_advantages,
    moments,
    nan_std,
    normalized_objectives,
    returns_to_go,
    standardized,
    step_discount_credit,
    team_rewards,
    token_gae,
)
from .losses import (
    action_log_ratios,
    adapted_entropy_coef,
    approximate_kl,
    clipped_factors,
    effective_share,
    sampling_weights,
    sequential_log_factors,
    value_losses,
)


__all__ = [
    "STD_EPS",
    "action_log_ratios",
    "adapted_entropy_coef",
    "approximate_kl",
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
    "returns_to_go",
    "sampling_weights",
    "sequential_log_factors",
    "standardized",
    "step_discount_credit",
    "team_rewards",
    "token_gae",
    "value_losses",
]
