# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A base that is sharded over the processes (FSDP2), under adapters that every process has as a whole."""

from __future__ import annotations

import os

from accelerate.logging import get_logger
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from trl import GRPOTrainer

from ..configs import MARFTConfig
from ..lock_step import LockStep
from ..processes import Processes
from ..seams.runs import timeout_of_processes
from ..seams.sharding import WholeAdapters
from ..weights.policies import Policies


logger = get_logger(__name__)


def wants_sharding(args: MARFTConfig) -> bool:
    """`True` if the launcher or the training arguments ask for FSDP."""
    return bool(args.fsdp) or _is_on("ACCELERATE_USE_FSDP")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("true", "1")


def check_launcher(args: MARFTConfig) -> None:
    """
    Check how the base would be spread over processes, before it is loaded.

    Raises:
        ValueError: in a way that does not go with several adapters. The message names what does.
    """
    if args.deepspeed or _is_on("ACCELERATE_USE_DEEPSPEED") or _is_on("ACCELERATE_USE_MEGATRON_LM"):
        raise ValueError(
            "MARFTTrainer does not run under DeepSpeed or Megatron: gradients of agents are reduced by the trainer "
            "itself. To shard the base, launch with FSDP2 (`accelerate launch --use_fsdp --fsdp_version 2 "
            "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP`); otherwise use plain data parallelism "
            "(`accelerate launch --multi_gpu`)."
        )
    if not wants_sharding(args):
        return
    plugin = FullyShardedDataParallelPlugin(**(args.fsdp_plugin_args or {}))
    for holds, message in _refused(plugin, args):
        if holds:
            raise ValueError(message)
    if args.distributed_state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        raise ValueError(
            "FSDP was asked for, but there is no device that accelerate shards a model on: on the CPU it runs plain "
            "data parallelism. Leave FSDP out, or run on GPUs under `accelerate launch`."
        )


def _refused(plugin: FullyShardedDataParallelPlugin, args: MARFTConfig) -> list[tuple[bool, str]]:
    return [
        (
            plugin.fsdp_version != 2,
            f"FSDP{plugin.fsdp_version} is not supported by MARFTTrainer: it joins the parameters of several adapters "
            "into one. Set `fsdp_version: 2` in the config of accelerate, or pass `--fsdp_version 2`.",
        ),
        (
            plugin.auto_wrap_policy is not transformer_auto_wrap_policy,
            "MARFTTrainer shards the base by its layers, so FSDP2 needs `fsdp_auto_wrap_policy: "
            "TRANSFORMER_BASED_WRAP`.",
        ),
        (
            plugin.activation_checkpointing,
            "`fsdp_activation_checkpointing` renames the layers that the adapters belong to. Set it to false, and "
            "`MARFTConfig(gradient_checkpointing=True)` for the same memory.",
        ),
        (
            bool(args.torch_compile),
            "`torch_compile=True` does not go with FSDP2 here: passes are kept in step by hooks. Leave it out.",
        ),
    ]


def check_team(args: MARFTConfig, has_adapters: bool) -> None:
    """
    Check that a team can be trained on a sharded base.

    Raises:
        ValueError: it has no adapters.
    """
    if wants_sharding(args) and not has_adapters:
        raise ValueError(
            "Under FSDP2 the base is sharded and frozen, and adapters are trained. This team has none: pass "
            "`peft_config=LoraConfig(...)`, or launch without FSDP."
        )


def keep_adapters_whole(trainer: GRPOTrainer, policies: Policies) -> None:
    """
    Let accelerate shard the base alone when it prepares the model.

    Args:
        trainer ([`~trl.GRPOTrainer`]): its constructor has run.
        policies ([`Policies`]): the adapters.
    """
    if trainer.accelerator.is_fsdp2:
        WholeAdapters(trainer.accelerator, trainer.model, policies.all_parameters())
        # All layers then take part in every backward pass, whichever of them the adapter of an agent has
        trainer.model.enable_input_require_grads()
        logger.info("The base is sharded over the processes (FSDP2). Adapters and critics are whole on each of them.")


def keep_in_step(trainer: GRPOTrainer, processes: Processes) -> None:
    """
    Keep the passes of the processes in step, if the base is sharded.

    Args:
        trainer ([`~trl.GRPOTrainer`]): has the model.
        processes ([`Processes`]): their collectives wait for passes.
    """
    if trainer.accelerator.is_fsdp2 and processes.count > 1:
        backbone = trainer.model.get_base_model().base_model
        steps = LockStep(trainer.model, backbone, timeout_of_processes())
        processes.before_collectives(steps.wait)
        trainer.accelerator.backward = steps.backward(trainer.accelerator.backward)
