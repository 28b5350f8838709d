# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A base that is sharded over the processes (FSDP2), under adapters that every process has as a whole."""

from __future__ import annotations

import os

from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from trl import GRPOTrainer

from ..config.checks import check_engine, is_on
from ..config.marft_config import MARFTConfig
from ..seams.logs import get_logger
from ..seams.runs import timeout_of_processes
from ..seams.sharding import WholeAdapters, in_the_precision_of_the_head, names_of_layers, storage_of_4bit
from ..system.processes import Processes
from ..weights.policies import Policies
from .lock_step import LockStep


logger = get_logger(__name__)


def wants_sharding(args: MARFTConfig) -> bool:
    """`True` if the launcher or the training arguments ask for FSDP."""
    return bool(args.fsdp) or is_on("ACCELERATE_USE_FSDP")


_OTHER_DIMENSIONS = [f"PARALLELISM_CONFIG_{name}_SIZE" for name in ("TP", "CP", "SP")]


def _is_on_above_one(variable: str) -> bool:
    return os.environ.get(variable, "1").isdecimal() and int(os.environ.get(variable, "1")) > 1


def check_launcher(args: MARFTConfig) -> None:
    """
    Check how the base would be spread over processes, before it is loaded.

    Raises:
        ValueError: in a way that does not go with several adapters. The message names what does.
    """
    check_engine(args)
    _warn_of_lone_process(args.world_size)
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


# Variables by which launchers say how many processes they have started
_COUNTS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def _warn_of_lone_process(world_size: int) -> None:
    """
    Warn of a process that trains alone although a launcher has started several: each trains a run of its own, without
    an error. `accelerate launch` (1.15) does so for `distributed_type: MULTI_CPU` and `--cpu` without MPI.
    """
    counts = {name: os.environ[name] for name in _COUNTS if os.environ.get(name, "").isdigit()}
    more = {name: count for name, count in counts.items() if int(count) > world_size}
    if more:
        why = f"the launcher says {', '.join(f'{name}={count}' for name, count in more.items())}"
    elif world_size == 1 and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        why = "the launcher has set a port for several (MASTER_PORT) and no WORLD_SIZE"
    else:
        return
    logger.warning(
        f"This run has {world_size} process{'es' if world_size > 1 else ''}, but {why}: are the others runs of their "
        "own? Start it with `torchrun --nnodes ... --nproc_per_node ...`, or with `accelerate launch` and "
        "`distributed_type: MULTI_GPU` (on a CPU with ACCELERATE_USE_CPU=true). See docs/guide/several_machines.md."
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
            isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "`fsdp_offload_params` is not supported: adapters stay on the GPU, and passes would mix both devices. Set "
            "it to false. A base that is stored in 4 bits takes a quarter of the memory.",
        ),
        (
            bool(plugin.ignored_modules),
            "`fsdp_ignored_modules` is what MARFTTrainer sets itself, to the adapters. Leave it out.",
        ),
        (
            bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant")),
            "Reentrant gradient checkpointing does not go with FSDP2 here: processes lend passes of which only parts "
            "have gradients. Leave `use_reentrant` out of `gradient_checkpointing_kwargs`.",
        ),
        (
            any(_is_on_above_one(name) for name in ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", *_OTHER_DIMENSIONS)),
            "MARFTTrainer shards the base over all processes. Replicas of shards (hybrid sharding), tensor and "
            "context parallelism are not supported: leave `parallelism_config` out.",
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
        _check_layers(trainer)
        _check_4bit(trainer)
        WholeAdapters(trainer.accelerator, trainer.model, policies.all_parameters())
        if not trainer.model.get_base_model().config.get_text_config().tie_word_embeddings:
            in_the_precision_of_the_head(trainer.model)
        # All layers then take part in every backward pass, whichever of them the adapter of an agent has
        trainer.model.enable_input_require_grads()
        logger.info("The base is sharded over the processes (FSDP2). Adapters and critics are whole on each of them.")


def _check_layers(trainer: GRPOTrainer) -> None:
    given = trainer.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap
    layers = names_of_layers(trainer.model)
    if given is not None and sorted(given) != layers:
        raise ValueError(
            f"`fsdp_transformer_layer_cls_to_wrap` names {', '.join(given)}, but the layers of this base are "
            f"{', '.join(layers)}. Leave it out."
        )


def _check_4bit(trainer: GRPOTrainer) -> None:
    """FSDP2 casts what it gathers to the type of mixed precision. That would change the bytes of 4-bit weights."""
    stored, policy = storage_of_4bit(trainer.model), trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
    computes = getattr(policy, "param_dtype", None)
    if stored is None or not stored.is_floating_point or computes in (None, stored):
        return
    raise ValueError(
        f"The 4-bit base is stored as {stored}, and mixed precision would cast its shards to {computes}, which "
        f"changes the bytes. Set `BitsAndBytesConfig(bnb_4bit_quant_storage={computes})`."
    )


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
        processes.before_collectives(steps.wait, lambda: steps.is_in_pass)
        trainer.accelerator.backward = steps.backward(trainer.accelerator.backward)
