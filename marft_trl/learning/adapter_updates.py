# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Optimizer steps: which adapters train in a step, sequential factors, gradients by adapter, parameter groups, clipping.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn

from ..algorithms import functional
from ..algorithms.rows import Row, Slice
from ..config.marft_config import MARFTConfig
from ..config.team_setup import RunContext, TeamSetup
from ..seams.libraries import get_logger
from ..seams.runs import restart_schedule, schedule_of_any_length, step_without_gradients
from .log_probs import LogProbs


logger = get_logger(__name__)

# Settings that define a generation batch. The data loader and the schedule depend on them.
_BATCH_SETTINGS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations"),
    "num_generations",
)


@dataclass(frozen=True)
class Schedule:
    """
    Which adapters learn in a step, and which steps need new episodes. A micro-step is one call of `training_step`. A
    phase is the time in which one set of adapters uses a generation batch: `steps_per_generation * num_iterations`
    micro-steps.
    """

    adapters: tuple[str, ...]  # trained adapters, in team order
    phase: int  # micro-steps in a phase
    interval: int = 0  # optimizer steps for which one adapter is trained alone before the next; 0 for no rotation
    order: str = "joint"
    warmup: int = 0  # initial optimizer steps in which only the critic is trained
    seed: int = 0  # of the order of the adapters in sequential updates
    critics: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()  # values of `_BATCH_SETTINGS`, which must not change during a run

    @classmethod
    def from_args(cls, args: MARFTConfig, adapters: Sequence[str], critics: Sequence[str] = ()) -> Schedule:
        """Make the schedule. Raises `ValueError` if adapters are to train in turn but only one adapter is trained."""
        if len(adapters) < 2 and (args.agent_iteration_interval or args.update_order != "joint"):
            name = "agent_iteration_interval" if args.agent_iteration_interval else "update_order"
            raise ValueError(
                f"`{name}={getattr(args, name)!r}` trains agents in turn, but only the adapter {adapters[0]!r} is "
                "trained. Give each agent a separate adapter (`peft_config`), or remove the setting."
            )
        return cls(
            adapters=tuple(adapters),
            phase=args.steps_per_generation * args.num_iterations,
            interval=args.agent_iteration_interval,
            order=args.update_order,
            warmup=args.critic_warmup_steps,
            seed=args.seed,
            critics=tuple(critics),
            batches=tuple(getattr(args, name) for name in _BATCH_SETTINGS),
        )

    def check(self, args: MARFTConfig) -> None:
        """Raise `RuntimeError` if a callback changed a setting that defines a generation batch."""
        for name, value in zip(_BATCH_SETTINGS, self.batches, strict=True):
            if getattr(args, name) != value:
                raise RuntimeError(
                    f"`{name}` changed from {value} to {getattr(args, name)} during training, but the data loader and "
                    "the schedule keep the first value. Do not change it in callbacks. To use other batches, end the "
                    "run and continue with a new trainer (`MARFTTrainer(model=load_adapters(...))`)."
                )

    def is_due(self, micro_step: int) -> bool:
        return micro_step % self.generate_every == 0

    @property
    def phases(self) -> int:
        return len(self.adapters) if self.order == "sequential" else 1

    @property
    def generate_every(self) -> int:
        """Number of micro-steps from one generation batch to the next."""
        return self.phase * self.phases

    def learning(self, micro_step: int, optimizer_step: int) -> frozenset[str]:
        """Return the adapters, and the parts of the critic, that a step trains."""
        policies = self._policies(micro_step, optimizer_step)
        critic_learns = optimizer_step < self.warmup or self._phase_index(micro_step) == 0
        return policies | frozenset(self.critics) if critic_learns else policies

    @property
    def everyone(self) -> frozenset[str]:
        """All trained adapters and parts of the critic."""
        return frozenset([*self.adapters, *self.critics])

    def _policies(self, micro_step: int, optimizer_step: int) -> frozenset[str]:
        if optimizer_step < self.warmup:
            return frozenset()
        if self.interval:
            return frozenset([self.adapters[optimizer_step // self.interval % len(self.adapters)]])
        if self.order == "resampled":
            return frozenset([self.adapters[micro_step // self.phase % len(self.adapters)]])
        if self.order == "sequential":
            return frozenset([self.get_order(micro_step)[self._phase_index(micro_step)]])
        return frozenset(self.adapters)

    def just_updated(self, micro_step: int) -> str | None:
        """The adapter whose phase on these episodes ended with the previous micro-step, or `None`."""
        phase = self._phase_index(micro_step)
        if phase == 0 or micro_step % self.phase:
            return None
        return self.get_order(micro_step)[phase - 1]

    def get_order(self, micro_step: int) -> list[str]:
        """The adapters in the order of their phases. The order is drawn again for each generation batch."""
        generator = torch.Generator().manual_seed(self.seed + micro_step // self.generate_every)
        return [self.adapters[index] for index in torch.randperm(len(self.adapters), generator=generator)]

    def _phase_index(self, micro_step: int) -> int:
        return micro_step % self.generate_every // self.phase


# Effective sample size of the factors of sequential updates, per joint action, below which a warning is logged
_MIN_EFFECTIVE_SHARE = 0.5


class SequentialFactors:
    """Multiplies advantages by ratios of updated agents of the same joint action: `M` of HAPPO (2109.11251)."""

    def __init__(self, team: TeamSetup, run: RunContext, log_probs: LogProbs):
        self._log_probs, self._level, self._clip = log_probs, team.level, run.args.sequential_clip
        self._metrics, self._processes = run.metrics, run.processes
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        return {"warned": self._warned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._warned = state["warned"]

    def after_update(self, slices: Sequence[Slice], adapter: str | None) -> list[Slice]:
        """Include the policy ratios of the adapter that was just updated, if any, in the factors of the slices."""
        if adapter is None:
            return list(slices)
        rows = [row for slice_ in slices for row in slice_.rows]
        keys = dict.fromkeys((row.episode, row.joint_action) for row in rows)
        actions = {key: index for index, key in enumerate(keys)}
        updated = [row for row in rows if row.adapter == adapter and row.is_trained and len(row.completion_ids)]
        new_log_factors = torch.zeros(len(actions))
        if updated:
            with self._log_probs.scoring():
                new = self._log_probs.compute_log_probs(updated)
            old = [cast(torch.Tensor, row.old_per_token_logps) for row in updated]
            sums = torch.stack([(now - before).sum() for now, before in zip(new, old, strict=True)])
            places = torch.tensor([actions[row.episode, row.joint_action] for row in updated])
            divisors = self._level.divisors(updated)
            new_log_factors = functional.sequential_log_factors(sums / divisors, places, len(actions))
        log_factors = torch.zeros(len(actions), dtype=torch.float64)
        for row in rows:
            index = actions[row.episode, row.joint_action]  # all rows of an action have the same factor
            log_factors[index] = row.log_factor + new_log_factors[index].item()
        factors = functional.clipped_factors(log_factors.float(), self._clip)
        self._log(adapter, factors, functional.clipped_factors(log_factors.float(), None))
        logs, clipped = log_factors.tolist(), factors.tolist()

        def with_factor(row: Row) -> Row:
            index = actions[row.episode, row.joint_action]
            return replace(row, log_factor=logs[index], factor=clipped[index])

        return [replace(slice_, rows=[with_factor(row) for row in slice_.rows]) for slice_ in slices]

    def _log(self, adapter: str, factors: torch.Tensor, unclipped: torch.Tensor) -> None:
        """Log metrics of the factors of joint actions `(J,)`, and warn if the unclipped factors vary too much."""
        totals = self._processes.sum(torch.stack([functional.moments(kind) for kind in (factors, unclipped)]))
        count, total, squares = totals[0].tolist()
        mean, share = total / max(count, 1), functional.effective_share(totals[1])
        self._metrics.add("sequential_factor/mean", mean)
        self._metrics.add("sequential_factor/std", max(squares / max(count, 1) - mean**2, 0.0) ** 0.5)
        self._metrics.add("sequential_factor/effective_share", share)
        if share < _MIN_EFFECTIVE_SHARE and not self._warned:
            self._warned = True
            logger.warning(
                f"The factors of `update_order='sequential'` have an effective sample size of {share:.0%} after the "
                f"step of the adapter {adapter!r}, so the next agents learn from only a few episodes. Lower the "
                "learning rate or `num_iterations`, set a smaller `sequential_clip`, or set `level='action'` with "
                "`action_logprob='token'`, whose ratios do not grow with length."
            )


# Maximum number of elements to reduce in one call. It holds whole adapters, but limits copies of a full model.
_BUCKET = 2**26


def average_gradients(parameters: Iterable[nn.Parameter], world_size: int) -> None:
    """Average gradients over processes, in place, in the same order on each. A missing gradient counts as zeros."""
    buckets: list[list[torch.Tensor]] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        last = buckets[-1] if buckets else []
        if not last or last[0].dtype != parameter.grad.dtype or sum(g.numel() for g in last) > _BUCKET:
            buckets.append([])
        buckets[-1].append(parameter.grad)
    for gradients in buckets:
        flat = torch.cat([grad.reshape(-1) for grad in gradients])
        torch.distributed.all_reduce(flat)
        flat /= world_size
        for grad, averaged in zip(gradients, flat.split([grad.numel() for grad in gradients]), strict=True):
            grad.copy_(averaged.view_as(grad))


# Settings of a parameter group that come from the training arguments. Others may be the optimizer's own state.
_SETTINGS = ("weight_decay", "betas", "eps", "momentum", "initial_lr")


def _check_groups(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Raise `ValueError`, with the adapters of both, if a saved optimizer state belongs to other parameter groups."""
    old, new = (
        ", ".join(f"{group.get('adapter')!r} ({len(group['params'])} tensors)" for group in groups) or "nothing"
        for groups in (saved["param_groups"], optimizer.param_groups)
    )
    if old != new:
        raise ValueError(
            f"The optimizer state of the checkpoint belongs to {old}, but the team trains {new}. Resume with the "
            "agents, adapters and `peft_config` that the checkpoint was written with."
        )


# Number of consecutive updates of an adapter that may be skipped because of non-finite gradients before training stops
MAX_SKIPPED_UPDATES = 5


class DivergenceSums:
    """Sums of the KL divergence and of entropies over the micro-batches of an optimizer step, by adapter."""

    def __init__(self) -> None:
        # By adapter: sum and number of the KL values, and sum and number of the entropies `(4,)`
        self.sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(4, dtype=torch.float64))

    def add(self, adapter: str, log_ratios: torch.Tensor, entropies: torch.Tensor) -> None:
        """Add the log-ratios and entropies `(N,)` of the tokens of a micro-batch that the loss counts."""
        kl = functional.approximate_kl(log_ratios.detach().double())
        entropies = entropies.detach().double()
        sums = [kl.sum(), kl.new_tensor(kl.numel()), entropies.sum(), kl.new_tensor(entropies.numel())]
        self.sums[adapter] = self.sums[adapter] + torch.stack(sums).cpu()

    def snapshot(self) -> Callable[[], None]:
        """Return a function that removes everything added after this call."""
        return functools.partial(setattr, self, "sums", self.sums.copy())


class AdapterUpdates:
    """The optimizer steps of a team, adapter by adapter."""

    def __init__(self, team: TeamSetup, run: RunContext, accelerator: Accelerator):
        self._policies, self._critic, self._agents, self._args = team.policies, team.critic, team.agents, run.args
        self._metrics, self._processes, self._state = run.metrics, run.processes, run.state
        self._accelerator = accelerator
        if accelerator.scaler is not None:
            step_without_gradients(accelerator.scaler)
        self.divergence = DivergenceSums()
        self._is_within_step = False
        self.active_adapters: set[str] = set()  # adapters with a row on any process since the last update
        self._skipped_in_a_row: dict[str, int] = defaultdict(int)
        # By adapter: coefficient of the entropy bonus and last entropy, `inf` before the first: no bonus yet
        self._entropy_control = dict.fromkeys(team.policies.trained, (run.state.entropy_coef, math.inf))

    def trained_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Parameters of each trained adapter, and of each part of the critic, by name."""
        trained = {adapter: self._policies.parameters(adapter) for adapter in self._policies.trained}
        parts = {part: self._critic.parameters(part) for part in self._critic.parts} if self._critic else {}
        return trained | parts

    def state_dict(self) -> dict[str, Any]:
        return {"entropy_control": self._entropy_control, "skipped_in_a_row": dict(self._skipped_in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._entropy_control |= {name: tuple(pair) for name, pair in state.get("entropy_control", {}).items()}
        self._skipped_in_a_row.update(state.get("skipped_in_a_row", {}))

    def split_groups(self, optimizer: torch.optim.Optimizer, is_ours: bool) -> None:
        """
        Move every adapter and every part of the critic into a separate parameter group, in place. An optimizer that
        the user passed (`is_ours=False`) is not changed; if it lacks trainable parameters, this raises `ValueError`.
        """
        adapters = self.trained_parameters()
        if is_ours:
            rates = {self._policies.get_adapter(agent.name): agent.learning_rate for agent in self._agents}
            if self._critic is not None:
                rate = self._args.critic_learning_rate
                for part in self._critic.parts:
                    head = list(self._critic.heads[part].parameters())  # not part of the model
                    optimizer.add_param_group({"params": head, "lr": rate, "weight_decay": 0.0, "adapter": part})
                    rates[part] = rate
            groups = []
            # The state is saved by position: sorted by name, it finds its adapter again, even if the order of the
            # agents changes. The critic's come last, because the Trainer logs the learning rate of the first group
            for adapter in sorted(adapters, key=lambda name: (name.startswith("_"), name)):
                ids = {id(parameter) for parameter in adapters[adapter].values()}
                changed = {} if rates.get(adapter) is None else {"lr": rates[adapter]}
                for group in optimizer.param_groups:
                    parameters = [parameter for parameter in group["params"] if id(parameter) in ids]
                    if parameters:
                        groups.append({**group, **changed, "params": parameters, "adapter": adapter})
            optimizer.param_groups[:] = groups
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        missing = [name for name, parameters in adapters.items() if {id(p) for p in parameters.values()} - optimized]
        if missing:
            raise ValueError(
                f"The optimizer passed in `optimizers=` does not have the parameters of {missing}, so these adapters "
                "would not train. The trainer creates the adapters: leave `optimizers` out and set `optim`, "
                "`learning_rate` and `AgentSpec(learning_rate=...)`, or pass a `PeftModel` that has the adapters."
            )

    @contextlib.contextmanager
    def loading(self, optimizer: Any, scheduler: Any) -> Iterator[None]:
        """Load the states of both within the context, but keep the settings and the schedule of this run."""
        inner = getattr(optimizer, "optimizer", optimizer)
        rates = [group.get("initial_lr", group["lr"]) for group in inner.param_groups]
        settings = [{key: group[key] for key in _SETTINGS if key in group} for group in inner.param_groups]
        hook = inner.register_load_state_dict_pre_hook(_check_groups)
        try:
            with schedule_of_any_length(scheduler):
                yield
        finally:
            hook.remove()
        for group, own in zip(inner.param_groups, settings, strict=True):
            group.update(own)
        if not restart_schedule(scheduler, rates):
            logger.warning(
                f"The resumed run takes the learning rate from the saved state of {type(scheduler).__name__}, so a "
                "changed `learning_rate` has no effect."
            )

    def forget(self) -> None:
        """Forget an optimizer step, which has ended or which training did not finish."""
        self.active_adapters.clear()
        self.divergence.sums.clear()
        self._is_within_step = False

    def clear_gradients(self) -> None:
        """Clear the gradients of modules that the Trainer does not know."""
        for module in (*self._policies.further, *([self._critic] if self._critic is not None else [])):
            module.zero_grad()

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module) -> Iterator[None]:
        """Do not reduce gradients within the context, as `finish` does: processes have different micro-batches."""
        if not self._is_within_step:
            self.clear_gradients()
        self._is_within_step = True
        with self._accelerator.no_sync(model) if self._processes.count > 1 else contextlib.nullcontext():
            yield

    def finish(self, is_update: bool) -> None:
        """
        End a micro-step. At the end of an optimizer step, reduce the gradients of the adapters that have had a row on
        any process (the optimizer skips the others, which have no gradient). Then apply `target_kl` and the adaptive
        entropy bonus.
        """
        if not is_update:
            return
        adapters = self.trained_parameters()
        used = [list(adapters[adapter].values()) for adapter in adapters if adapter in self.active_adapters]
        if self._processes.count > 1:
            average_gradients([parameter for parameters in used for parameter in parameters], self._processes.count)
        for parameters in used:  # rows without a gradient skip the backward pass: set the missing gradients to 0
            if all(parameter.grad is None for parameter in parameters):
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
        if self._args.target_kl is not None or self._args.use_adaptive_entropy:
            self._apply_kl_and_entropy_targets(adapters)
        self.forget()

    def _apply_kl_and_entropy_targets(self, adapters: dict[str, dict[str, nn.Parameter]]) -> None:
        """Skip the updates of adapters above `target_kl`, and adapt the entropy bonuses for the next step."""
        names, args = self._policies.trained, self._args
        totals = self._processes.sum(torch.stack([self.divergence.sums[name] for name in names]))
        for name, (kl_sum, kl_count, entropy_sum, tokens) in zip(names, totals.tolist(), strict=True):
            agents = self._policies.get_agents(name)
            if args.target_kl is not None and kl_count:
                kl = kl_sum / kl_count
                stopped = kl > args.target_kl
                for parameter in adapters[name].values() if stopped else ():
                    parameter.grad = None  # the optimizer skips the adapter
                for agent in agents:
                    self._metrics.add(f"agents/{agent}/approx_kl", kl)
                    self._metrics.add(f"agents/{agent}/stopped_updates", float(stopped))
            if args.use_adaptive_entropy and tokens:
                bounds = args.entropy_coef_delta, args.entropy_coef_min, args.entropy_coef_max
                coefficient, entropy = self._entropy_control[name][0], entropy_sum / tokens
                coefficient = functional.adapted_entropy_coef(coefficient, entropy, args.entropy_target, *bounds)
                self._entropy_control[name] = coefficient, entropy
                for agent in agents:
                    self._metrics.add(f"agents/{agent}/entropy_coef", coefficient)
        if args.use_adaptive_entropy:  # means over the team, under the names of TRL
            coefficients, entropies = zip(*self._entropy_control.values(), strict=True)
            coefficient = sum(coefficients) / len(coefficients)
            self._state.set_entropy(coefficient, sum(entropies) / len(entropies))
            self._metrics.add("entropy_coef", coefficient)

    def get_entropy_coef(self, adapter: str) -> float:
        if not self._args.use_adaptive_entropy:
            return self._state.entropy_coef
        coefficient, entropy = self._entropy_control[adapter]
        return coefficient if entropy <= self._args.entropy_target else 0.0

    def clip(self, max_norm: float) -> torch.Tensor:
        """
        Clip the gradient of each adapter by its norm, and skip those that are not finite. Returns the norm before
        clipping, over adapters of agents. Raises `FloatingPointError` after several skipped updates of one in a row.
        """
        trained = self.trained_parameters()
        if any(parameter.grad is not None for value in trained.values() for parameter in value.values()):
            self._accelerator.unscale_gradients()
        norms: dict[str, torch.Tensor] = {}
        for adapter, parameters in trained.items():
            present = {name: parameter for name, parameter in parameters.items() if parameter.grad is not None}
            if not present:
                continue
            is_policy = adapter in self._policies.trained
            limit = max_norm if is_policy else (self._args.max_grad_norm or math.inf)  # 0: no clipping
            norm = nn.utils.clip_grad_norm_(list(present.values()), limit)
            names = [f"agents/{agent}" for agent in self._policies.get_agents(adapter)] or ["critic"]
            if self._accelerator.scaler is None:  # with fp16, the gradient scaler handles overflow
                self._skip_if_not_finite(adapter, norm, present, names)
            if is_policy and norm.isfinite():
                norms[adapter] = norm.to(self._processes.device)
            for name in names:
                self._metrics.add(f"{name}/grad_norm", norm.item())
        if len(norms) == 1:
            return next(iter(norms.values()))
        return torch.stack(list(norms.values())).norm() if norms else torch.zeros(())

    def _skip_if_not_finite(
        self, adapter: str, norm: torch.Tensor, parameters: Mapping[str, nn.Parameter], names: Sequence[str]
    ) -> None:
        for name in names:
            self._metrics.add(f"{name}/skipped_updates", float(not norm.isfinite()))
        if norm.isfinite():
            self._skipped_in_a_row[adapter] = 0
            return
        for parameter in parameters.values():
            parameter.grad = None
        self._skipped_in_a_row[adapter] += 1
        agents = ", ".join(map(repr, self._policies.get_agents(adapter)))
        whose = f"of the adapter {adapter!r} (agents {agents})" if agents else f"of the critic ({adapter!r})"
        step = self._state.optimizer_step + 1
        message = f"The gradient {whose} is not finite in step {step}; its update was skipped."
        if self._skipped_in_a_row[adapter] >= MAX_SKIPPED_UPDATES:
            raise FloatingPointError(
                f"{message} This was the {MAX_SKIPPED_UPDATES}th skipped update in a row, so training stops. Lower "
                "the learning rate, or look for exploding rewards and log-probabilities."
            )
        logger.warning(message)
