# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer's part that steps: optimizer groups, one reduction, clipping, and what stops or steers an update."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from trl import GRPOTrainer

from ..agents import AgentSpec
from ..configs import MARFTConfig
from . import functional, gradients
from .adapters import Policies
from .schedules import Schedule


logger = get_logger(__name__)

# Updates in a row that may be skipped for gradients that are not finite before training stops.
MAX_SKIPPED_UPDATES = 5


class TeamUpdates(GRPOTrainer):
    """Overrides of `Trainer` and `GRPOTrainer` (checked against TRL 1.16) around gradients and the optimizer."""

    args: MARFTConfig
    agents: list[AgentSpec]
    policies: Policies
    critic: Any  # `Critic`, or `None`
    schedule: Schedule

    entropy_coef: float

    def _prepare_updates(self) -> None:
        self._is_window_open = False
        self._window_adapters: set[str] = set()
        self._skipped_in_a_row: dict[str, int] = defaultdict(int)
        # Sums of an optimizer step, by adapter: divergence and its count, entropy and its tokens
        self._window_sums: dict[str, torch.Tensor] = {}
        # By adapter: coefficient of the entropy bonus, and the entropy it was set by
        self._entropy_control = dict.fromkeys(self.policies.trained, (self.entropy_coef, math.inf))

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        given = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        adapters = self._trained_parameters()
        if not given:
            rates = {self.policies.adapter_of(agent.name): agent.learning_rate for agent in self.agents}
            if self.critic is not None:
                rate = self.args.critic_learning_rate
                for part in self.critic.parts:
                    gradients.add_group(optimizer, part, self.critic.heads[part].parameters(), rate)
                    rates[part] = rate
            gradients.split_groups(optimizer, adapters, rates)
        missing = gradients.untrained(optimizer, adapters)
        if missing:
            raise ValueError(
                f"The optimizer passed in `optimizers=` does not have the parameters of {missing}, so these adapters "
                "would not train. Adapters are created by the trainer: leave `optimizers` out and set `optim`, "
                "`learning_rate` and `AgentSpec(learning_rate=...)`, or pass a `PeftModel` that has the adapters."
            )
        return optimizer

    def _trained_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        trained = {adapter: self.policies.parameters(adapter) for adapter in self.policies.trained}
        parts = self.critic.parts if self.critic is not None else []
        return trained | {part: self.critic.parameters(part) for part in parts}

    # ---- The beginning and the end of an optimizer step ----

    def _open_window(self) -> None:
        """Forget the value heads' gradients of the last step: the Trainer clears those of the model alone."""
        if not self._is_window_open and self.critic is not None:
            self.critic.heads.zero_grad(set_to_none=True)
        self._is_window_open = True

    def _finish_gradients(self) -> None:
        """
        One reduction over processes, of the adapters that have had a row on any of them since the last update. The
        others have no gradient, so the optimizer leaves them out.
        """
        adapters = self._trained_parameters()
        if self.accelerator.num_processes > 1:
            spoke = [adapter for adapter in adapters if adapter in self._window_adapters]
            gradients.average_gradients(
                [parameter for adapter in spoke for parameter in adapters[adapter].values()],
                self.accelerator.num_processes,
            )
        self._window_adapters.clear()
        self._is_window_open = False
        if self.args.target_kl is not None or self.use_adaptive_entropy:
            self._steer(adapters)
        self._window_sums.clear()

    def _add_to_window(self, adapter: str, log_ratios: torch.Tensor, entropies: torch.Tensor) -> None:
        """Take note of the log-ratios and token entropies `(N,)` that a micro-batch of an adapter counts."""
        kl = functional.approximate_kl(log_ratios.detach().double())
        entropies = entropies.detach().double()
        sums = [kl.sum(), kl.new_tensor(kl.numel()), entropies.sum(), kl.new_tensor(entropies.numel())]
        zeros = torch.zeros(4, dtype=torch.float64)
        self._window_sums[adapter] = self._window_sums.get(adapter, zeros) + torch.stack(sums).cpu()

    def _steer(self, adapters: dict[str, dict[str, nn.Parameter]]) -> None:
        """Skip the updates of adapters that have moved too far, and adapt the entropy bonuses of the next step."""
        names, zeros = self.policies.trained, torch.zeros(4, dtype=torch.float64)
        totals = self._reduce(torch.stack([self._window_sums.get(name, zeros) for name in names]), "sum")
        for name, (kl_sum, kl_count, entropy_sum, tokens) in zip(names, totals.tolist(), strict=True):
            if self.args.target_kl is not None and kl_count:
                kl = kl_sum / kl_count
                stopped = kl > self.args.target_kl
                if stopped:
                    gradients.drop_gradients(adapters[name])
                for agent in self.policies.agents_of(name):
                    self._metrics["train"][f"agents/{agent}/approx_kl"].append(kl)
                    self._metrics["train"][f"agents/{agent}/stopped_updates"].append(float(stopped))
            if self.use_adaptive_entropy and tokens:
                self._adapt_entropy(name, entropy_sum / tokens)
        if self.use_adaptive_entropy:  # the team's, under the names of TRL; with one agent they are its own
            coefficients, entropies = zip(*self._entropy_control.values(), strict=True)
            self.entropy_coef = sum(coefficients) / len(coefficients)
            self._last_world_entropy = sum(entropies) / len(entropies)
            self._metrics["train"]["entropy_coef"].append(self.entropy_coef)

    def _adapt_entropy(self, adapter: str, entropy: float) -> None:
        args = self.args
        bounds = args.entropy_coef_delta, args.entropy_coef_min, args.entropy_coef_max
        coefficient, _ = self._entropy_control[adapter]
        coefficient = functional.adapted_entropy_coef(coefficient, entropy, args.entropy_target, *bounds)
        self._entropy_control[adapter] = coefficient, entropy
        for agent in self.policies.agents_of(adapter):
            self._metrics["train"][f"agents/{agent}/entropy_coef"].append(coefficient)

    def _entropy_coef_of(self, adapter: str) -> float:
        """Coefficient of the entropy bonus of an adapter in the present step."""
        if not self.use_adaptive_entropy:
            return self.entropy_coef
        coefficient, entropy = self._entropy_control[adapter]
        return coefficient if entropy <= self.args.entropy_target else 0.0

    # ---- Clipping ----

    def _clip_grad_norm(self, model) -> torch.Tensor:
        return self._clip_adapters(self.args.max_grad_norm, self._critic_max_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        if grad_norm is not None:
            return grad_norm
        return self._clip_adapters(math.inf, self._critic_max_norm)

    @property
    def _critic_max_norm(self) -> float:
        own = self.args.critic_max_grad_norm
        return (self.args.max_grad_norm if own is None else own) or math.inf  # 0: no clipping, as for `max_grad_norm`

    def _clip_adapters(self, max_norm: float, critic_max_norm: float) -> torch.Tensor:
        """Clip each adapter by its own norm, and leave out of the update those whose gradient is not finite."""
        self.accelerator.unscale_gradients()
        norms = []
        for adapter, parameters in self._trained_parameters().items():
            present = {name: parameter for name, parameter in parameters.items() if parameter.grad is not None}
            if not present:
                continue
            is_policy = adapter in self.policies.trained
            norm = gradients.clip_gradients(present, max_norm if is_policy else critic_max_norm)
            if self.accelerator.scaler is None:  # with fp16, overflow is the gradient scaler's business
                self._guard(adapter, norm, present)
            if is_policy and norm.isfinite():
                norms.append(norm)
            for name in self._metric_names(adapter):
                self._metrics["train"][f"{name}/grad_norm"].append(norm.item())
        if len(norms) == 1:
            return norms[0]
        return torch.stack(norms).norm() if norms else torch.zeros(())

    def _metric_names(self, adapter: str) -> list[str]:
        return [f"agents/{agent}" for agent in self.policies.agents_of(adapter)] or ["critic"]

    def _guard(self, adapter: str, norm: torch.Tensor, parameters: dict[str, nn.Parameter]) -> None:
        for name in self._metric_names(adapter):
            self._metrics["train"][f"{name}/skipped_updates"].append(float(not norm.isfinite()))
        if norm.isfinite():
            self._skipped_in_a_row[adapter] = 0
            return
        gradients.drop_gradients(parameters)
        self._skipped_in_a_row[adapter] += 1
        agents = ", ".join(map(repr, self.policies.agents_of(adapter)))
        whose = f"of the adapter {adapter!r} (agents {agents})" if agents else f"of the critic ({adapter!r})"
        message = f"The gradient {whose} is not finite in step {self.state.global_step + 1}; its update was skipped."
        if self._skipped_in_a_row[adapter] >= MAX_SKIPPED_UPDATES:
            raise FloatingPointError(
                f"{message} This was the {MAX_SKIPPED_UPDATES}th time in a row, so training stops with the weights as "
                "they are. Lower the learning rate, or look for rewards and log-probabilities that explode."
            )
        logger.warning(message)

    def _reduce(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
        raise NotImplementedError  # the trainer's part that reports has it
