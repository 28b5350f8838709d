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


# ---- The order of the rows ----


class EpochSampler(RepeatSampler):
    """
    TRL's `RepeatSampler` (1.16) with an order that depends on the epoch alone, so that a resumed run finds the order
    of its epoch (transformers#40691). Upstream draws on from the generator of the run before. An uninterrupted run
    gets the same order.
    """

    @classmethod
    def from_sampler(cls, sampler: RepeatSampler, phases: int) -> EpochSampler:
        """The sampler that replaces TRL's; every generation batch is repeated for so many phases."""
        return cls(
            sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count * phases,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the random state for `epoch`, counted from 0."""
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            # One draw for each pass, as an uninterrupted run would have made
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


def begin_pass(order: EpochSampler | None, epoch: int) -> None:
    """
    Set the epoch of an order of rows, if there is one. `Trainer._run_epoch` (transformers 5.24) does so through the
    data loader, which does not reach the sampler where several processes resume within an epoch (`SkipBatchSampler`
    around `BatchSamplerShard`, see accelerate#4071 and accelerate#4233).
    """
    if order is not None:
        order.set_epoch(epoch)


class EndlessStream(torch.utils.data.IterableDataset):
    """
    A stream that restarts when it ends. `Trainer` (transformers 5.23) counts one pass over a stream as an epoch of
    `max_steps` steps, so a resumed run finds its place in the first pass only. In an endless pass, skipping the rows
    of the steps so far always finds it. Each pass has its own order, as upstream.

    Args:
        stream: the rows of one pass.
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


# ---- Saving and resuming ----


def checkpoint_folder(trainer: GRPOTrainer, trial: Any) -> Path:
    """
    The folder that `Trainer._save_checkpoint` (transformers 5.23) is about to write. It has no public name; with a
    hyperparameter search it lies in the folder of the trial.
    """
    return Path(trainer._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"


@contextlib.contextmanager
def saving_only(trainer: GRPOTrainer) -> Iterator[None]:
    """
    Context manager: `Trainer._save_checkpoint` (transformers 5.23) neither pushes nor removes checkpoints. Upstream
    does both at the end of the method, before a checkpoint can be seen to be complete on all processes.
    """
    args = trainer.args
    # With a best metric, upstream waits for all processes in the middle, where one may have failed already
    alone = swapped_in_module(torch.distributed, {"barrier": lambda *arguments, **named: None})
    with swapped(args, {"push_to_hub": False, "save_total_limit": None}), alone:
        yield


def saving_adapters_alone(trainer: GRPOTrainer, names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """
    Context manager: adapters are saved without layers of the base. PEFT (0.21) adds the embeddings of the base to an
    adapter that has a LoRA on them (peft#1147), and a saved team does not take layers of the base from a file.
    Adapters of the model that are none of the team's (`names`) are left out.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not isinstance(model, PeftModel):
        return contextlib.nullcontext()
    options = {"save_embedding_layers": False, "selected_adapters": list(names)}
    return swapped(model, {"save_pretrained": functools.partial(model.save_pretrained, **options)})


@contextlib.contextmanager
def keeping_checkpoints(trainer: GRPOTrainer) -> Iterator[None]:
    """
    Context manager: `Trainer._finalize_training` (transformers 5.23) removes no checkpoint. With a limit of 1 it would
    leave the best one alone (transformers#35070), and a finished run that is started again would train the steps after
    it again.
    """
    with swapped(trainer.args, {"save_total_limit": None}):
        yield


def save_checkpoint_now(trainer: GRPOTrainer) -> None:
    """Save a checkpoint of the present step, as `Trainer` (transformers 5.23) does when one is due."""
    trainer._save_checkpoint(trainer.model_wrapped, None)


@contextlib.contextmanager
def schedule_of_any_length(scheduler: Any) -> Iterator[None]:
    """
    Context manager: a `LambdaLR` (torch 2.13) loads the state of one with another number of parameter groups. Upstream
    keeps the factors of each group by position, though those that `get_scheduler` makes have nothing to keep.
    """
    load = scheduler.load_state_dict

    def load_any(state: Mapping[str, Any]) -> None:
        factors = getattr(scheduler, "lr_lambdas", None)
        if factors is not None and len(state.get("lr_lambdas", factors)) != len(factors):
            state = {**state, "lr_lambdas": [None] * len(factors)}
        load(state)

    with swapped(scheduler, {"load_state_dict": load_any}):
        yield


def restart_schedule(scheduler: Any, rates: Sequence[float]) -> bool:
    """
    Give a `LambdaLR` (torch 2.13) other base learning rates at its present step, which has no public way.

    Args:
        scheduler: the scheduler; its state has been loaded.
        rates: base learning rate of each parameter group.

    Returns: `False` for a scheduler of another kind, which is left alone.
    """
    factors = getattr(scheduler, "lr_lambdas", None)
    if factors is None:
        return False
    scheduler.base_lrs = list(rates)
    present = [rate * factor(scheduler.last_epoch) for rate, factor in zip(rates, factors, strict=True)]
    for group, rate, now in zip(scheduler.optimizer.param_groups, rates, present, strict=True):
        group["initial_lr"], group["lr"] = rate, now
    scheduler._last_lr = present
    return True


# ---- Processes ----


class _PartialStateWithTimeout(PartialState):
    def __init__(self, cpu: bool = False, **kwargs: Any):
        super().__init__(cpu, **{**_TIMEOUT, **kwargs})


_TIMEOUT: dict[str, Any] = {}


@contextlib.contextmanager
def timeout_also_on_cpu(seconds: float | None) -> Iterator[None]:
    """
    Context manager: `TrainingArguments` (transformers 5.23) starts the processes with `ddp_timeout` on the CPU, too.
    Upstream leaves it out there, so a process that hangs is waited for for half an hour.

    Args:
        seconds: the timeout; `None` for upstream's.
    """
    # A module-level dictionary, because accelerate makes the state from a class, without arguments
    _TIMEOUT.clear()
    if seconds is not None:
        _TIMEOUT["timeout"] = timedelta(seconds=seconds)
    with swapped_in_module(training_args, {"PartialState": _PartialStateWithTimeout}):
        yield


def use_one_device(args: TrainingArguments) -> None:
    """Let the Trainer (transformers 5.23) use the device of the process alone, as it does for a model in parts."""
    args._n_gpu = 1


def step_without_gradients(scaler: Any) -> None:
    """
    Let a gradient scaler (PyTorch 2.13) pass a step in which no parameter has a gradient on to the optimizer, which
    then changes nothing. It would end the run, because it has nothing to look for infinities in. A team has such
    steps: `target_kl` may stop all adapters, and on a process no agent may have spoken.
    """
    step, update = scaler.step, scaler.update
    had_gradients = True

    def step_if(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal had_gradients
        had_gradients = any(item.grad is not None for group in optimizer.param_groups for item in group["params"])
        return step(optimizer, *args, **kwargs) if had_gradients else optimizer.step(*args, **kwargs)

    def update_if(*args: Any, **kwargs: Any) -> None:
        if had_gradients:
            update(*args, **kwargs)

    scaler.step, scaler.update = step_if, update_if


def timeout_of_processes() -> float | None:
    """Seconds that a process of the default group (torch 2.13) waits for the others; `None` without a group."""
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    if group is None:
        return None
    device = torch.device("cuda" if "nccl" in torch.distributed.get_backend() else "cpu")
    return group._get_backend(device).options._timeout.total_seconds()


def store_of_processes() -> Any:
    """The key-value store by which the processes of the default group (torch 2.13) found one another."""
    return torch.distributed.distributed_c10d._get_default_store()
