# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Schedule of the adapters that learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..config.marft_config import MARFTConfig


# What a generation batch is. The data loader and the schedule are made for it.
_OF_BATCHES = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations"),
    "num_generations",
)


@dataclass(frozen=True)
class Schedule:
    """
    Schedule of the adapters that learn in a step, and of the steps that need new episodes.

    A micro-step is one call of `training_step`. An optimizer step has `gradient_accumulation_steps` micro-steps. A
    phase is the time in which one set of adapters uses a generation batch: `steps_per_generation * num_iterations`
    micro-steps.

    Args:
        adapters (`tuple[str, ...]`): trained adapters, in team order.
        phase (`int`): number of micro-steps in a phase.
        interval (`int`, *optional*, defaults to `0`): number of optimizer steps for which one adapter learns alone,
            before the next one does. 0 disables taking turns by intervals.
        order (`str`, *optional*, defaults to `"joint"`): `"joint"`, `"sequential"` or `"resampled"`.
        warmup (`int`, *optional*, defaults to `0`): number of first optimizer steps in which no adapter learns.
        seed (`int`, *optional*, defaults to `0`): seed of the order of the adapters in sequential updates.
        critics (`tuple[str, ...]`): parts of the critic.
        batches (`tuple[int, ...]`): settings of a generation batch, which do not change during a run.
    """

    adapters: tuple[str, ...]
    phase: int
    interval: int = 0
    order: str = "joint"
    warmup: int = 0
    seed: int = 0
    critics: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()

    @classmethod
    def of(cls, args: MARFTConfig, adapters: Sequence[str]) -> Schedule:
        """
        Make the schedule from the training arguments.

        Raises:
            ValueError: the arguments let adapters learn in turn, but there is only one trained adapter.
        """
        if len(adapters) < 2 and (args.agent_iteration_interval or args.update_order != "joint"):
            name = "agent_iteration_interval" if args.agent_iteration_interval else "update_order"
            raise ValueError(
                f"`{name}={getattr(args, name)!r}` lets agents learn in turn, but only the adapter {adapters[0]!r} is "
                "trained. Give each agent an adapter of its own (`peft_config`), or leave the setting out."
            )
        return cls(
            adapters=tuple(adapters),
            phase=args.steps_per_generation * args.num_iterations,
            interval=args.agent_iteration_interval,
            order=args.update_order,
            warmup=args.critic_warmup_steps,
            seed=args.seed,
            batches=tuple(getattr(args, name) for name in _OF_BATCHES),
        )

    def check(self, args: MARFTConfig) -> None:
        """
        Raises:
            RuntimeError: a callback has changed what a generation batch is.
        """
        for name, value in zip(_OF_BATCHES, self.batches, strict=True):
            if getattr(args, name) != value:
                raise RuntimeError(
                    f"`{name}` was changed from {value} to {getattr(args, name)} during training, where the data "
                    "loader and the schedule keep the first value. Leave it as it is; for other batches, end the run "
                    "and train on with another trainer (`MARFTTrainer(model=load_adapters(...))`)."
                )

    def with_critic(self, parts: Sequence[str]) -> Schedule:
        """The schedule with a critic of these parts."""
        return replace(self, critics=tuple(parts))

    def is_due(self, micro_step: int) -> bool:
        """`True` if new episodes are due."""
        return micro_step % self.generate_every == 0

    @property
    def phases(self) -> int:
        """Number of phases of a generation batch."""
        return len(self.adapters) if self.order == "sequential" else 1

    @property
    def generate_every(self) -> int:
        """Number of micro-steps from one generation batch to the next."""
        return self.phase * self.phases

    def learning(self, micro_step: int, optimizer_step: int) -> frozenset[str]:
        """The adapters, and the parts of the critic, that learn in a step."""
        policies = self._policies(micro_step, optimizer_step)
        return policies | frozenset(self.critics) if self.critic_learns(micro_step, optimizer_step) else policies

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
            return frozenset([self.order_of(micro_step)[self._phase_of(micro_step)]])
        return frozenset(self.adapters)

    def critic_learns(self, micro_step: int, optimizer_step: int) -> bool:
        """`True` if the critic learns: in the warm-up, and in the first phase of every generation batch."""
        return optimizer_step < self.warmup or self._phase_of(micro_step) == 0

    def just_updated(self, micro_step: int) -> str | None:
        """The adapter whose phase on these episodes ended with the previous micro-step, or `None`."""
        phase = self._phase_of(micro_step)
        if phase == 0 or micro_step % self.phase:
            return None
        return self.order_of(micro_step)[phase - 1]

    def order_of(self, micro_step: int) -> list[str]:
        """The adapters in the order of their phases. The order is drawn again for each generation batch."""
        generator = torch.Generator().manual_seed(self.seed + micro_step // self.generate_every)
        return [self.adapters[index] for index in torch.randperm(len(self.adapters), generator=generator)]

    def _phase_of(self, micro_step: int) -> int:
        return micro_step % self.generate_every // self.phase
