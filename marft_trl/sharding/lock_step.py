# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Passes through a sharded base, in lock-step over processes.

Every pass gathers the weights of the base from all processes, layer by layer. Processes of a team run different
numbers of passes: their episodes differ in turns, and their rows in agents. A process that ran one pass less would
take part in the gathering of another layer than the others, which hangs or, worse, mixes weights.

So before each forward and each backward pass, the processes tell one another what they are about to do. All of them
then do the same: who wanted something else, or has nothing to do, lends itself with a pass of one token. A process
without passes reaches the next collective, where it lends itself until all others have reached it too.

Rows that share a prefix take two forward passes and one backward pass through both. A process whose backward pass
goes through fewer forward passes than that of another one lends the rest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ..seams.sharding import gather_in_one_order, is_sharded, keep_what_is_gathered


# What a process is about to do, in the order of precedence. Passes without gradients leave nothing behind, so they
# come first. A backward pass comes last: when no process wants a forward pass, whoever has none of its own to go back
# through has lent those that are open, so it can go back through one of them.
_FORWARD, _FORWARD_WITH_GRADIENTS, _BACKWARD, _NOTHING = range(4)


class LockStep:
    """
    Keeps the passes of the processes in step.

    Args:
        model (`nn.Module`): the model as it is trained; it may be sharded later.
        backbone (`nn.Module`): its transformer without the head, through which every pass goes once.
        timeout (`float`, *optional*): seconds that a process waits for the others; `None` for the default of torch.

    Attributes:
        num_lent (`int`): number of passes, forward or backward, that this process has lent.
        is_in_pass (`bool`): whether the other processes wait in the middle of a pass of this one.
    """

    def __init__(self, model: nn.Module, backbone: nn.Module, timeout: float | None):
        self._model, self._backbone = model, backbone
        limit = None if timeout is None else timedelta(seconds=timeout)
        # A group of its own: its messages are small and meant for the CPU, whatever the device
        self._group = torch.distributed.new_group(backend="gloo", timeout=limit)
        self._is_ready = self._is_lending = False
        # Whether a pass of its own runs, or has ended with an error: the others are in the middle of theirs, too
        self.is_in_pass = False
        self._num_open = 0  # forward passes of its own that wait for their backward pass
        self._lent: list[tuple[torch.Tensor, torch.Tensor]] = []  # forward passes that wait for theirs
        self.num_lent = 0
        backbone.register_forward_pre_hook(self._before_forward)
        backbone.register_forward_hook(self._after_forward)

    def wait(self) -> None:
        """Lend passes until no process wants one. All processes call this, before every collective."""
        if is_sharded(self._model):
            self._get_ready()
            self._until(_NOTHING)
            self._lent.clear()
            self._num_open = 0

    def backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """A function that runs backward passes, in step with those of the other processes."""

        @functools.wraps(backward)
        def in_step(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            # Not in a hook: within a backward pass, FSDP2 would keep the weights of a lent forward pass
            own, self._num_open = self._num_open, 0
            most = self._until(_BACKWARD, own) if own else 0
            self.is_in_pass = own > 0
            backward(loss, *args, **kwargs)
            self._lend_backward(most - own)
            self.is_in_pass = False

        return in_step

    # ---- Agreement ----

    def _until(self, wanted: int, passes: int = 0) -> int:
        """
        Return when all processes are about to do what this one wants.

        Args:
            wanted (`int`): what that is.
            passes (`int`, *optional*, defaults to 0): forward passes that its backward pass goes through.

        Returns: the largest number of forward passes that the backward pass of a process goes through.
        """
        while True:
            first = torch.tensor([wanted, -passes])
            torch.distributed.all_reduce(first, torch.distributed.ReduceOp.MIN, self._group)
            chosen, most = int(first[0]), -int(first[1])
            if chosen == wanted:
                return most
            if chosen == _BACKWARD:
                self._lend_backward(most)
            else:
                self._lend_forward(with_gradients=chosen == _FORWARD_WITH_GRADIENTS)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._is_lending or not is_sharded(self._model):
            return
        self._get_ready()
        self._until(_FORWARD_WITH_GRADIENTS if torch.is_grad_enabled() else _FORWARD)
        self._num_open += torch.is_grad_enabled()
        self.is_in_pass = True

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_lending:
            self.is_in_pass = False

    def _get_ready(self) -> None:
        """
        FSDP2 takes the first module that runs for the root. It has to be the model, and passes may begin within. All
        processes do this when they first have a pass or wait for those of others, whichever comes first.
        """
        if self._is_ready:
            return
        self._is_ready = True
        gather_in_one_order(self._model)
        with self._lending(), torch.no_grad():
            self._model(input_ids=self._token(), use_cache=False)
        keep_what_is_gathered(self._model)

    # ---- Lending ----

    @contextlib.contextmanager
    def _lending(self) -> Iterator[None]:
        self._is_lending = True
        device = next(self._model.parameters()).device
        devices = [] if device.type == "cpu" else [device]
        try:
            with torch.random.fork_rng(devices, device_type=device.type):  # what is lent draws for dropout, too
                yield
        finally:
            self._is_lending = False

    def _token(self) -> torch.Tensor:
        return torch.zeros(1, 1, dtype=torch.long, device=next(self._model.parameters()).device)

    def _lend_backward(self, passes: int) -> None:
        """Go back through forward passes that were lent."""
        self.num_lent += passes
        with self._lending():
            for _ in range(passes):
                hidden, start = self._lent.pop()
                torch.autograd.grad(hidden.sum(), start)  # gradients of no parameter

    def _lend_forward(self, with_gradients: bool) -> None:
        self.num_lent += 1
        starts: list[torch.Tensor] = []
        embeddings = self._backbone.get_input_embeddings()
        handle = embeddings.register_forward_hook(lambda module, args, output: starts.append(output))
        with self._lending(), torch.set_grad_enabled(with_gradients):
            hidden = self._backbone(input_ids=self._token(), use_cache=False).last_hidden_state
        handle.remove()
        if with_gradients:
            self._lent.append((hidden, starts[0]))
