# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Published ways to fine-tune a team, as settings of `MARFTConfig`."""

from __future__ import annotations

from typing import Any, NamedTuple


class Preset(NamedTuple):
    """Settings of one publication, without sizes, which depend on the task and the machine."""

    source: str  # name and reference, shown by `print(config)`
    settings: dict[str, Any]


_PPO = {
    "advantage": "gae",
    "adam_epsilon": 1e-5,
    "num_generations": 1,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "normalize_advantages": "batch",
    "num_iterations": 5,
    "epsilon": 0.2,
    "value_clip": 0.2,
    "value_loss": "huber",
    "entropy_coef": 0.01,
}
# For papers that fine-tune without a KL, with clipped ratios
_CLIPPED = {"epsilon": 0.2, "beta": 0.0, "learning_rate": 1e-6}
_MARFT_V1 = {
    "critic": "frozen",
    **_PPO,
    "beta": 0.0,
    "max_grad_norm": 0.5,
    "learning_rate": 5e-7,
    "critic_learning_rate": 5e-4,
    "lr_scheduler_type": "constant",
}

PRESETS: dict[str, Preset] = {
    "marft-a": Preset(
        "MARFT (arXiv 2504.16129), action level, with the values of the original repository",
        {**_MARFT_V1, "level": "action", "action_logprob": "sum"},
    ),
    "marft-t": Preset(
        "MARFT (arXiv 2504.16129), token level, with the values of the original repository",
        {**_MARFT_V1, "level": "token", "token_gamma": 0.99, "token_gae_lambda": 0.95},
    ),
    "grpo": Preset(
        "GRPO (arXiv 2402.03300): one group of episodes per prompt, KL in the loss",
        {
            "advantage": "group",
            "scale_rewards": "group",
            "loss_type": "grpo",
            "beta": 0.04,
            "use_bias_correction_kl": False,
            "learning_rate": 1e-6,
        },
    ),
    "magrpo": Preset(
        "MAGRPO (arXiv 2508.04652), as in CoMLRL 1.4: log-probability of a turn times its group's standardized return",
        {
            "advantage": "group",
            "scale_rewards": "group",
            "level": "action",
            "action_logprob": "sum",
            "use_policy_ratio": False,
            "credit_kind": "rewards",
            "loss_type": "grpo",
            "beta": 0.0,
        },
    ),
    "dr-mas": Preset(
        "Dr.MAS (arXiv 2602.08847): mean and deviation per agent", {"advantage": "agent", "scale_rewards": "group"}
    ),
    "at-grpo": Preset(
        "AT-GRPO (arXiv 2510.11062): candidates for every turn from one observation, continuing from the best",
        {
            "advantage": "turn",
            "scale_rewards": "group",
            "turn_candidates": 4,
            "continue_from": "best",
            "num_generations": 1,
        },
    ),
    "reinforce++": Preset(
        "REINFORCE++ (arXiv 2501.03262): mean and deviation of the whole batch, clipped token ratios",
        {"advantage": "batch", "level": "token", "epsilon": 0.2, "num_generations": 1},
    ),
    "rloo": Preset(
        "RLOO (arXiv 2402.14740): the mean of the other episodes as baseline, a completion as one action",
        {"advantage": "leave_one_out", "level": "action", "action_logprob": "sum"},
    ),
    "c3": Preset(
        "C3 (arXiv 2603.06859): alternatives for every turn, each against the mean of the others",
        {"advantage": "c3", "turn_candidates": 8, "num_generations": 1, "level": "token", **_CLIPPED},
    ),
    "ccpo": Preset(
        "CCPO (arXiv 2603.21563): the reward lost without a turn, standardized over the turns of an agent",
        {
            "advantage": "agent",
            "scale_rewards": "group",
            "credit": "removed",
            "level": "action",
            "action_logprob": "token",
            **_CLIPPED,
        },
    ),
    "mappo": Preset(
        "MAPPO (arXiv 2103.01955): a central critic with normalized values",
        {
            "critic": "shared",
            "critic_sees": "history",
            "normalize_values": True,
            "level": "action",
            "action_logprob": "sum",
            **_PPO,
            "max_grad_norm": 10.0,
        },
    ),
}
