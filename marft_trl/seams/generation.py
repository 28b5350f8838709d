# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Seams of generation: `GRPOTrainer`, `generate`, PEFT models, and captured graphs of PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import convert_to_fp32
from peft import PeftModel
from transformers import GenerationConfig
from trl import GRPOTrainer

from .swapping import swapped


class GraphMemory(NamedTuple):
    """
    What several graphs share, of which only the latest result is read.

    Args:
        device: where they run.
        pool: their memory.
        stream: that they are captured on. Each stream has workspaces of its own.
    """

    device: torch.device
    pool: Any
    stream: Any

    @classmethod
    def create(cls, device: torch.device) -> GraphMemory | None:
        """Memory for graphs on a device; `None` where there are no graphs."""
        if device.type != "cuda":
            return None
        return cls(device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


def find_capture_obstacle(model: Any) -> str | None:
    """Reason why passes of a model cannot be captured, or `None` if it can be tried."""
    devices = {parameter.device for parameter in model.parameters()}
    kinds = sorted({device.type for device in devices})
    if kinds != ["cuda"]:
        return f"the model is on {' and '.join(kinds)}, and CUDA graphs need a CUDA device"
    return "the model is spread over several devices" if len(devices) > 1 else None


def captured(run: Callable[[], torch.Tensor], memory: GraphMemory) -> Callable[[], torch.Tensor]:
    """
    Capture the kernels of a function as a graph (PyTorch 2.13, `torch.cuda.graph`), and return a function that replays
    them. It reads and writes the same memory as the function, and its result is at the same address each time.

    Args:
        run: does the same each time, without waiting for the device.

    Raises:
        RuntimeError: it waits for the device, or the device has too little memory.
    """
    graph, stream = torch.cuda.CUDAGraph(), memory.stream
    # A thread may have another device than that of the model, where nothing would be captured
    with torch.cuda.device(memory.device):
        torch.cuda.synchronize()
        stream.wait_stream(torch.cuda.current_stream())
        # Around the graph, too: where capturing fails, PyTorch leaves its stream as that of the thread
        with torch.cuda.stream(stream):
            run()  # what is made at a first call, such as workspaces, must not be made while capturing
            # Other threads, such as those of reward functions, may use the device meanwhile
            with torch.cuda.graph(graph, pool=memory.pool, stream=stream, capture_error_mode="thread_local"):
                result = run()
        torch.cuda.current_stream().wait_stream(stream)

    def replay() -> torch.Tensor:
        with torch.cuda.device(memory.device):
            graph.replay()
        return result

    return replay


# Types of mixed precision, by the names that accelerate (1.15) has for them
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextlib.contextmanager
def generating_by(model: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """
    Context manager: `generate` acts by these settings alone. It (transformers 5.23) completes them from the model's
    own generation config, also where a setting equals the default of transformers (transformers#42762). A `min_p` of
    the base would change what is sampled, in training and not on a server, without a setting of the user.
    """
    own = vars(model.generation_config)
    before = dict(own)
    own.clear()
    own.update(vars(GenerationConfig(**settings, disable_compile=True)))
    try:
        yield
    finally:
        own.clear()
        own.update(before)


@contextlib.contextmanager
def forward_in_precision(model: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """
    Context manager: forward passes of the whole model are cast, as `Accelerator.prepare_model` (1.15) casts them in
    training. `None` for no change.
    """
    if dtype is None:
        yield
        return
    forward = model.forward
    cast = torch.autocast(model.device.type, dtype=dtype)(forward)

    @functools.wraps(forward)  # `generate` reads the signature
    def casting(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(cast(*args, **kwargs))

    with swapped(model, {"forward": casting}):
        yield


@contextlib.contextmanager
def generating_in_precision(model: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """
    Context manager: `generate` of a PEFT model (0.21) computes as training does, if the weights of the base are in the
    precision of training. It calls the base past the forward pass that accelerate (1.15) casts, so the products of
    adapters would be in float32 there and in half precision in training, and every layer would cast back and forth for
    every token. A base in float32 is left alone, as `GRPOTrainer` has it: it would be cast again for every token.

    Args:
        model: that generates.
        dtype: precision of training; `None` for that of the weights.
    """
    is_meant = dtype is not None and isinstance(model, PeftModel) and model.get_base_model().dtype == dtype
    with torch.autocast(model.device.type, dtype=dtype) if is_meant else contextlib.nullcontext():
        yield


def masks_what_comes_later(model: Any) -> bool:
    """
    `True` if attention (transformers 5.23) gets a mask of its own for every query, so that a pass over memory of fixed
    shape sees nothing that has not been written. FlashAttention is given lengths of rows instead, and flex attention
    compiles again for every mask.
    """
    return model.config.get_text_config()._attn_implementation in ("sdpa", "eager")


def get_pad_token(config: GenerationConfig) -> torch.Tensor | None:
    """The padding token as a tensor on the device, which `generate` (transformers 5.23) leaves in a private field."""
    return config._pad_token_tensor


class TrlEngine:
    """
    Generation by `GRPOTrainer._generate_single_turn` (TRL 1.16), which reads the settings of `generate` from
    attributes of the trainer and takes no further arguments of `generate`. The settings and arguments of an agent are
    put there for the time of a call. With a sharded base, `generate` (transformers 5.23) would keep its steps in step
    over processes, though they call it unequally often; [`~marft_trl.extras.engines.fsdp2.LockStep`] keeps passes in
    step.

    Args:
        general: settings of `generate` for an agent that sets none itself.
    """

    def __init__(self, trainer: GRPOTrainer, general: Mapping[str, Any]):
        self._trainer, self._general = trainer, dict(general)
        self._wrapped, self._unwrapped = None, None
        self.tokenizer = trainer._tokenizer

    @property
    def model(self) -> Any:
        """The model without wrappers of data parallelism."""
        wrapped = self._trainer.model_wrapped
        if wrapped is not self._wrapped:  # accelerate looks through all modules for compiled ones
            self._unwrapped = self._trainer.accelerator.unwrap_model(wrapped)
            self._wrapped = wrapped  # last, for other threads
        return self._unwrapped

    def settings(self, sampling: Any) -> dict[str, Any]:
        """
        Settings of `generate` for the [`Sampling`] of an agent. As in TRL, `generation_kwargs` win over the settings
        of the trainer; an agent's own settings win over both.
        """
        explicit = set(self._trainer.args.generation_kwargs or {})
        own = sampling.as_generation_kwargs()
        own = {key: value for key, value in own.items() if key not in explicit or value != self._general[key]}
        return {**self._trainer.generation_kwargs, **own}

    def generate(
        self, prompt_ids: list[list[int]], settings: Mapping[str, Any], options: Mapping[str, Any]
    ) -> list[list[int]]:
        """Sample a completion for each prompt, up to and including its end-of-sequence token."""
        trainer = self._trainer
        config, kwargs = trainer.generation_config, trainer.generation_kwargs
        trainer.generation_kwargs = dict(settings)
        trainer.generation_config = GenerationConfig(**settings, disable_compile=True)
        try:
            with (
                _generating_with(self.model, {"synced_gpus": False, **options}),
                generating_in_precision(self.model, HALF.get(trainer.accelerator.mixed_precision)),
            ):
                return trainer._generate_single_turn(prompt_ids, None, {}, 1)[0]
        finally:
            trainer.generation_config, trainer.generation_kwargs = config, kwargs


@contextlib.contextmanager
def _generating_with(model: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: `model.generate` gets further arguments."""
    own = model.__dict__.get("generate")  # the instance may already have a patched `generate`
    model.generate = functools.partial(model.generate, **options)
    try:
        yield
    finally:
        if own is None:
            del model.generate
        else:
            model.generate = own
