# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments."""

from __future__ import annotations

import copy
import difflib
import math
from dataclasses import dataclass, field

from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig


ADVANTAGES = ("group", "agent")
CONTEXT_OVERFLOWS = ("raise", "drop_oldest_turn")
LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
SCALES = ("group", "batch", "none")


@dataclass
class MARFTConfig(GRPOConfig):
    r"""
    Configuration class for the [`MARFTTrainer`].

    Everything of [`~trl.GRPOConfig`] is here, with its meaning counted in episodes; only what differs or is new is
    listed. Agents are not training arguments: see [`AgentSpec`].

    Args:
        learning_rate (`float`, *optional*, defaults to `5e-6`):
            Peak learning rate of every adapter whose agent names none. The default is that of MARFT's published LoRA
            runs.
        bf16 (`bool`, *optional*):
            Whether to use bfloat16 mixed precision. Unless set: on where a GPU supports it and `fp16` is off.
        advantage (`str`, *optional*, defaults to `"group"`):
            What the return of a turn is compared with: `"group"`, the episodes of the same prompt, one advantage for
            all turns of an episode; or `"agent"`, the turns of the same agent in these episodes.
        max_tokens_per_micro_batch (`int`, *optional*, defaults to `16384`):
            Largest number of tokens, padding included, in one forward and backward pass. A micro-batch holds rows of
            one agent, at most `per_device_train_batch_size` of them; a single longer row still forms one. It bounds
            memory and changes no result beyond rounding. `None` for no bound.
        context_overflow (`str`, *optional*, defaults to `"raise"`):
            What happens when what an agent sees, plus its `max_completion_length`, is longer than the model's window:
            `"raise"` an error, or `"drop_oldest_turn"`, leaving out whole turns from the oldest on (counted in
            `context/dropped_turns`) and raising only where the prompt alone does not fit.
        eval_reference_column (`str`, *optional*, defaults to `"solution"`):
            Dataset column that metrics of the `evaluate` package get as `references`.
    """

    learning_rate: float = field(
        default=5e-6,
        metadata={"help": "Peak learning rate of every adapter whose agent names none."},
    )
    advantage: str = field(
        default="group",
        metadata={
            "help": "What the return of a turn is compared with: 'group', the episodes of the same prompt, or "
            "'agent', the turns of the same agent in these episodes.",
            "choices": list(ADVANTAGES),
        },
    )
    max_tokens_per_micro_batch: int | None = field(
        default=16384,
        metadata={
            "help": "Largest number of tokens, padding included, in one forward and backward pass. Bounds memory and "
            "changes no result beyond rounding."
        },
    )
    context_overflow: str = field(
        default="raise",
        metadata={
            "help": "What happens when what an agent sees does not fit the model's window: 'raise' or "
            "'drop_oldest_turn'.",
            "choices": list(CONTEXT_OVERFLOWS),
        },
    )
    eval_reference_column: str = field(
        default="solution",
        metadata={"help": "Dataset column that metrics of the `evaluate` package get as `references`."},
    )

    def __post_init__(self):
        if self.bf16 is None:
            # GRPOConfig turns bfloat16 on everywhere, and TrainingArguments then refuses to start without a GPU.
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        self._check_numbers()
        super().__post_init__()
        self._check_choices()
        check_supported(self)

    def _check_numbers(self) -> None:
        if self.num_generations is not None and self.num_generations < 2:
            raise ValueError(
                f"`num_generations` ({self.num_generations}) must be at least 2: group baselines compare the episodes "
                "of a prompt with one another. Set `num_generations=2` or more."
            )
        at_least_zero = ("learning_rate", "beta", "epsilon", "epsilon_high", "max_grad_norm", "delta")
        above_zero = ("temperature", "max_completion_length", "max_tokens_per_micro_batch")
        for name in (*at_least_zero, *above_zero):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                continue
            needs_more = name in above_zero
            if math.isfinite(value) and (value > 0 if needs_more else value >= 0):
                continue
            bound = "above 0" if needs_more else "of at least 0"
            raise ValueError(f"`{name}` must be a finite number {bound}, got {value!r}.")

    def _check_choices(self) -> None:
        choices = {
            "advantage": ADVANTAGES,
            "context_overflow": CONTEXT_OVERFLOWS,
            "loss_type": LOSS_TYPES,
            "scale_rewards": SCALES,
            "importance_sampling_level": ("token", "sequence"),
            "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                near = difflib.get_close_matches(str(value), known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"`{name}` must be one of {', '.join(map(repr, known))}; got {value!r}.{hint}")

    def __getstate__(self):
        # The Trainer pickles its arguments into `training_args.bin`, which is saved and uploaded: no secrets in it.
        return {**self.__dict__, "hub_token": None}

    def __deepcopy__(self, memo):
        # A copy goes through `__getstate__` unless told otherwise, and has to keep the token.
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __copy__(self):
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone


def check_supported(args: GRPOConfig) -> None:
    """
    Raise for settings of [`~trl.GRPOConfig`] that a team cannot honour.

    Raises:
        ValueError: names the setting, why, and what to set instead.
    """
    refused = {
        "use_vllm": (args.use_vllm, "TRL's vLLM modes serve one policy, merged into the base. Set it to False."),
        "use_transformers_continuous_batching": (
            args.use_transformers_continuous_batching,
            "it keeps one policy for all requests. Set it to False.",
        ),
        "sync_ref_model": (args.sync_ref_model, "the reference of an agent is its own start. Set it to False."),
        "use_adaptive_entropy": (
            args.use_adaptive_entropy,
            "its controller follows one policy. Set it to False and use a fixed `entropy_coef`.",
        ),
        "top_entropy_quantile": (
            args.top_entropy_quantile < 1.0,
            "its threshold would depend on how rows fall into micro-batches. Set it to 1.0.",
        ),
        "load_best_model_at_end": (
            args.load_best_model_at_end and args.metric_for_best_model in (None, "loss", "eval_loss"),
            "evaluation measures the team's reward and has no loss. Set `metric_for_best_model='reward'` and "
            "`greater_is_better=True`.",
        ),
    }
    for name, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"`{name}={getattr(args, name)!r}` is not supported by MARFTTrainer: {why}")


def as_marft_config(args: GRPOConfig) -> MARFTConfig:
    """
    The arguments as a [`MARFTConfig`]. A [`~trl.GRPOConfig`] keeps all its values and gets the defaults of the rest.

    Raises:
        TypeError: `args` is neither.
    """
    if isinstance(args, MARFTConfig):
        return args
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"`args` must be a `MARFTConfig` (or a `GRPOConfig`), got {type(args).__name__}.")
    config = object.__new__(MARFTConfig)
    config.__dict__.update(args.__dict__)  # already set up: running `__post_init__` again would change the batch sizes
    config._check_numbers()
    config._check_choices()
    check_supported(config)
    return config
