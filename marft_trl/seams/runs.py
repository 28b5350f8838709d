# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The seams of the course of a run: order of the rows, saving, resuming, processes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import TrainingArguments, training_args
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from .swapping import swapped, swapped_in_module


class EpochSampler(RepeatSampler):
    """TRL's `RepeatSampler` (1.16), whose order depends on the epoch alone: for resumed runs (transformers#40691)."""

    @classmethod
    def from_sampler(cls, sampler: RepeatSampler, phases: int) -> EpochSampler:
        """Replace TRL's sampler; every generation batch is repeated for `phases` phases."""
        return cls(
            sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count * phases,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the random state of `epoch`, counted from 0."""
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            # One draw for each pass, as an uninterrupted run would have made
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


def begin_pass(order: EpochSampler | None, epoch: int) -> None:
    # `Trainer._run_epoch` (transformers 5.24) does not reach the sampler where several processes resume within an
    # epoch (accelerate#4071, accelerate#4233)
    if order is not None:
        order.set_epoch(epoch)


class EndlessStream(torch.utils.data.IterableDataset):
    """
    A stream that restarts when it ends, in a new order as upstream. `Trainer` (transformers 5.23) takes a pass over a
    stream for an epoch of `max_steps` steps, so a resumed run would find its place in the first pass only.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        for epoch in itertools.count():
            self._stream.set_epoch(epoch)
            count = 0
            for row in self._stream:
                count += 1
                yield row
            if count == 0:
                raise ValueError(
                    f"`train_dataset` yielded no full batch of prompts in epoch {epoch + 1}. A streaming dataset must "
                    "have rows for one generation batch in every epoch: check that it can be iterated more than once."
                )


def checkpoint_folder(trainer: GRPOTrainer, trial: Any) -> Path:
    """Folder that `Trainer._save_checkpoint` (transformers 5.23) is about to write. It has no public name."""
    return Path(trainer._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"


@contextlib.contextmanager
def saving_only(trainer: GRPOTrainer) -> Iterator[None]:
    """`Trainer._save_checkpoint` (transformers 5.23) only saves: other processes may not be ready yet."""
    args = trainer.args
    # With a best metric, upstream waits for all processes in the middle, where one may have failed already
    alone = swapped_in_module(torch.distributed, {"barrier": lambda *arguments, **named: None})
    with swapped(args, {"push_to_hub": False, "save_total_limit": None}), alone:
        yield


def saving_adapters_alone(trainer: GRPOTrainer, names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """
    Save only the adapters `names`, without layers of the base. PEFT (0.21) adds the embeddings of the base to an
    adapter with a LoRA on them (peft#1147), and a saved team does not take layers of the base from a file.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not isinstance(model, PeftModel):
        return contextlib.nullcontext()
    options = {"save_embedding_layers": False, "selected_adapters": list(names)}
    return swapped(model, {"save_pretrained": functools.partial(model.save_pretrained, **options)})


def keeping_checkpoints(trainer: GRPOTrainer) -> contextlib.AbstractContextManager[None]:
    """`Trainer._finalize_training` (transformers 5.23) keeps all checkpoints, also the newest (transformers#35070)."""
    # Without the newest, a restarted run would repeat the steps after the best one
    return swapped(trainer.args, {"save_total_limit": None})


def save_checkpoint_now(trainer: GRPOTrainer) -> None:
    """Save a checkpoint of the current step, as `Trainer` (transformers 5.23) does when one is due."""
    trainer._save_checkpoint(trainer.model_wrapped, None)


@contextlib.contextmanager
def schedule_of_any_length(scheduler: Any) -> Iterator[None]:
    """Let a `LambdaLR` (torch 2.13) load the state of another number of parameter groups."""
    load = scheduler.load_state_dict

    def load_any(state: Mapping[str, Any]) -> None:
        factors = getattr(scheduler, "lr_lambdas", None)
        if factors is not None and len(state.get("lr_lambdas", factors)) != len(factors):
            state = {**state, "lr_lambdas": [None] * len(factors)}
        load(state)

    with swapped(scheduler, {"load_state_dict": load_any}):
        yield


def restart_schedule(scheduler: Any, rates: Sequence[float]) -> bool:
    """Set the base learning rates of a loaded `LambdaLR` (torch 2.13); return `False` for other schedulers."""
    factors = getattr(scheduler, "lr_lambdas", None)
    if factors is None:
        return False
    scheduler.base_lrs = list(rates)
    present = [rate * factor(scheduler.last_epoch) for rate, factor in zip(rates, factors, strict=True)]
    for group, rate, now in zip(scheduler.optimizer.param_groups, rates, present, strict=True):
        group["initial_lr"], group["lr"] = rate, now
    scheduler._last_lr = present
    return True


class _PartialStateWithTimeout(PartialState):
    def __init__(self, cpu: bool = False, **kwargs: Any):
        super().__init__(cpu, **{**_TIMEOUT, **kwargs})


_TIMEOUT: dict[str, Any] = {}


@contextlib.contextmanager
def timeout_also_on_cpu(seconds: float | None) -> Iterator[None]:
    """`TrainingArguments` (transformers 5.23) passes `ddp_timeout` on the CPU, too. `None`: upstream's 30 minutes."""
    # A module-level dictionary, because accelerate makes the state from a class, without arguments
    _TIMEOUT.clear()
    if seconds is not None:
        _TIMEOUT["timeout"] = timedelta(seconds=seconds)
    with swapped_in_module(training_args, {"PartialState": _PartialStateWithTimeout}):
        yield


def use_one_device(args: TrainingArguments) -> None:
    """Let the `Trainer` (transformers 5.23) use only the device of the process."""
    args._n_gpu = 1


def step_without_gradients(scaler: Any) -> None:
    """Let a gradient scaler (PyTorch 2.13) accept a step without gradients, as if `target_kl` stops all adapters."""
    step, update = scaler.step, scaler.update
    had_gradients = True

    def step_if(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal had_gradients
        had_gradients = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        return step(optimizer, *args, **kwargs) if had_gradients else optimizer.step(*args, **kwargs)

    def update_if(*args: Any, **kwargs: Any) -> None:
        if had_gradients:
            update(*args, **kwargs)

    scaler.step, scaler.update = step_if, update_if


def timeout_of_processes() -> float | None:
    """Timeout of the default process group (torch 2.13) in seconds; `None` without a group."""
    if not torch.distributed.is_initialized():
        return None
    device = torch.device("cuda" if "nccl" in torch.distributed.get_backend() else "cpu")
    return torch.distributed.group.WORLD._get_backend(device).options._timeout.total_seconds()


def store_of_processes() -> Any:
    """Key-value store of the default process group (torch 2.13)."""
    return torch.distributed.distributed_c10d._get_default_store()
