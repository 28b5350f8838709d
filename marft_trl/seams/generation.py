# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Seams of generation: `GRPOTrainer`, `generate`, PEFT models, and captured graphs of PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import convert_to_fp32
from peft import PeftModel
from transformers import GenerationConfig
from trl import GRPOTrainer
from trl.trainer.utils import pad

from .swapping import swapped


class GraphMemory(NamedTuple):
    """Memory that several graphs share. Only the latest result of a graph is valid."""

    device: torch.device
    pool: Any
    stream: Any  # for capturing; each stream has its own workspaces

    @classmethod
    def create(cls, device: torch.device) -> GraphMemory | None:
        """Memory for graphs on a device; `None` without CUDA."""
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
    Capture the kernels of a function as a graph (PyTorch 2.13), and return a function that replays them, with a result
    at the same address. Raises a `RuntimeError` if the function waits for the device, or memory runs out.
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
    Let `generate` use these settings alone. transformers (5.23) fills in settings from the model's own generation
    config, even where a setting equals the default (transformers#42762), such as a `min_p` of the base.
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
    """Cast forward passes as `Accelerator.prepare_model` (1.15) does in training."""
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
    Let `generate` of a PEFT model (0.21) compute in the precision of training (`dtype`), if the base has it. It
    bypasses the forward pass that accelerate (1.15) casts, so adapters would compute in float32. A base in float32 is
    left alone, as in `GRPOTrainer`: it would be cast again for every token.
    """
    is_meant = dtype is not None and isinstance(model, PeftModel) and model.get_base_model().dtype == dtype
    with torch.autocast(model.device.type, dtype=dtype) if is_meant else contextlib.nullcontext():
        yield


def masks_what_comes_later(model: Any) -> bool:
    """
    `True` if attention (transformers 5.23) gets a mask per query, so that a pass ignores memory that is not written
    yet. FlashAttention gets lengths of rows instead, and flex attention compiles again for every mask.
    """
    return model.config.get_text_config()._attn_implementation in ("sdpa", "eager")


def get_pad_token(config: GenerationConfig) -> torch.Tensor | None:
    """The padding token on the device, which `generate` (transformers 5.23) leaves in a private field."""
    return config._pad_token_tensor


class TrlEngine:
    """
    Generation by `GRPOTrainer._generate_single_turn` (TRL 1.16), which reads settings from attributes of the trainer,
    so those of an agent are set for each call. `general` are settings for an agent that sets none itself. With a
    sharded base, `synced_gpus` of `generate` (transformers 5.23) is off, because processes call it unequally often;
    [`~marft_trl.extras.engines.fsdp2.LockStep`] keeps their passes in step.
    """

    def __init__(self, trainer: GRPOTrainer, general: Mapping[str, Any]):
        self._trainer, self._general = trainer, dict(general)
        self._wrapped = self._unwrapped = None
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
        """Settings of `generate`. As in TRL, `generation_kwargs` override the trainer's; the agent's override both."""
        explicit = set(self._trainer.args.generation_kwargs or {})
        own = sampling.as_generation_kwargs()
        own = {key: value for key, value in own.items() if key not in explicit or value != self._general[key]}
        return {**self._trainer.generation_kwargs, **own}

    def generate(
        self,
        prompt_ids: list[list[int]],
        settings: Mapping[str, Any],
        options: Mapping[str, Any],
        images: Callable[[torch.Tensor, Sequence[int]], dict[str, Any]] | None = None,
    ) -> list[list[int]]:
        """Sample completions up to and including their EOS token. `images` gives inputs for token ids `(B, P)`."""
        trainer, model = self._trainer, self.model
        config = GenerationConfig(**settings, disable_compile=True)
        generate = functools.partial(model.generate, **{"synced_gpus": False, **options})
        with (
            swapped(trainer, {"generation_config": config, "generation_kwargs": dict(settings)}),
            swapped(model, {"generate": generate}),
            generating_in_precision(model, HALF.get(trainer.accelerator.mixed_precision)),
        ):
            inputs = {} if images is None else images(ids := self._padded(prompt_ids), [ids.size(1)] * len(ids))
            return trainer._generate_single_turn(prompt_ids, None, inputs, 1)[0]

    def _padded(self, prompt_ids: list[list[int]]) -> torch.Tensor:
        """Token ids as TRL pads them."""
        tensors, multiple = list(map(torch.tensor, prompt_ids)), self._trainer.pad_to_multiple_of
        return pad(tensors, self.tokenizer.pad_token_id, padding_side="left", pad_to_multiple_of=multiple)
