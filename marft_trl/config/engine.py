# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments of the engine, servers of vLLM, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..rules.credit_rules import CREDITS
from .checks import has_turn_ratio, uses_candidates
from .options import ABOVE_0, AT_LEAST_0, documented, option


@documented
@dataclass
class EngineSettings:
    """
    Settings of vLLM, in addition to those of [`~trl.GRPOConfig`]. They have an effect with `use_vllm=True`.

    Args:
        vllm_mode (`str`, *optional*, defaults to `"server"`):
            Where vLLM runs with `use_vllm=True`. `"server"`: on servers that you start with the command that
            `marft_trl.rollout.vllm_command` gives. `"colocate"`: every training process starts a server of its own, on
            the device that it trains on, with TRL's `vllm_gpu_memory_utilization`, `vllm_max_model_length`,
            `vllm_model_impl` and `vllm_enable_sleep_mode`. The server ends when the process does.
        vllm_python (`str`, *optional*, defaults to `None`):
            Interpreter of an environment with vLLM, such as `"/opt/vllm/bin/python"`, for `vllm_mode="colocate"`. If
            `None`, it is the environment variable `MARFT_VLLM_PYTHON`, or else the interpreter that trains.
        vllm_server_base_url (`str` or `list[str]`, *optional*, defaults to `None`):
            Addresses of the vLLM servers, such as `["http://node1:8000", "http://node2:8000"]`. Each has a whole copy
            of the base. If `None`, there is one server, at `vllm_server_host` and `vllm_server_port`.
        vllm_server_timeout (`float`, *optional*, defaults to `240.0`):
            Time in seconds that training waits while no server works. After it, training stops with an error.
        vllm_request_timeout (`float`, *optional*, defaults to `600.0`):
            Maximum time in seconds of the generation of one turn. After it, the server counts as one that does not
            work, and the turn is requested again.
        vllm_max_inflight (`int`, *optional*, defaults to `256`):
            Maximum number of turns that a server generates at the same time. Set it to the server's `--max-num-seqs`.
        vllm_adapter_dir (`str`, *optional*, defaults to `None`):
            Folder that the adapters are handed to the servers in. All servers must see it under the same path. If
            `None`, it is `_adapters` in `output_dir`.
        max_staleness (`int`, *optional*, defaults to `0`):
            Number of generation batches that vLLM servers sample ahead of training. With `0`, rollouts and training
            take turns, and every turn is sampled by the present weights. With `n`, training on a batch runs while the
            next `n` are sampled, each from the weights of `n` publications ago; how long rollouts and training take
            does not change which. The loss is corrected by `vllm_importance_sampling_mode`.
        fidelity_tolerance (`float`, *optional*, defaults to `None`):
            Largest mean difference between the log-probabilities of a server and those of the trainer, for the same
            tokens under the same weights. Above it, training stops with an error. If `None`, it is `1e-3` if both
            compute in float32, as far as the trainer knows, and `0.2` otherwise.
    """

    vllm_mode: str = option("server", choices=("server", "colocate"), about="machines")
    vllm_python: str | None = option(None, about="machines")
    vllm_server_base_url: list[str] | None = option(None, about="machines")
    vllm_request_timeout: float = option(600.0, ABOVE_0, about="machines")
    vllm_max_inflight: int = option(256, ABOVE_0, integer=True, about="machines")
    vllm_adapter_dir: str | None = option(None, about="machines")
    max_staleness: int = option(0, AT_LEAST_0, integer=True)
    fidelity_tolerance: float | None = option(None, ABOVE_0, about="evaluations")


def check_vllm(args: Any) -> None:
    """
    Check the settings of vLLM.

    Raises:
        ValueError: A setting is not supported, or does not go with another one.
    """
    if not args.use_vllm:
        if args.max_staleness:
            raise ValueError(
                f"`max_staleness={args.max_staleness}` needs servers that generate while training runs. Set "
                "`use_vllm=True`, or leave it out."
            )
        return
    sequence = args.vllm_importance_sampling_mode.startswith("sequence")
    corrects = args.vllm_importance_sampling_correction
    refused = [
        *(_colocate_conflicts(args) if args.vllm_mode == "colocate" else []),
        (
            args.vllm_structured_outputs_regex is not None,
            "`vllm_structured_outputs_regex` is not supported: turns would be sampled from another distribution than "
            "the one that is scored. Leave it out.",
        ),
        (
            corrects and not sequence and has_turn_ratio(args),
            f"`vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r}` weighs each token, but at "
            "`level='action'` a turn is one action. Set 'sequence_mask' or 'sequence_truncate'.",
        ),
        (
            corrects and sequence and args.loss_type == "vespo",
            "`loss_type='vespo'` needs `vllm_importance_sampling_mode='token_truncate'` or 'token_mask', got "
            f"{args.vllm_importance_sampling_mode!r}.",
        ),
        *(_staleness_conflicts(args) if args.max_staleness else []),
    ]
    for holds, message in refused:
        if holds:
            raise ValueError(message)


def _colocate_conflicts(args: Any) -> list[tuple[bool, str]]:
    """What does not go with a server for each process."""
    return [
        (
            args.vllm_server_base_url is not None,
            "`vllm_server_base_url` names servers that run, and `vllm_mode='colocate'` starts its own. Leave it out, "
            "or set `vllm_mode='server'`.",
        ),
        (
            args.vllm_tensor_parallel_size > 1,
            f"`vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}` needs several devices for one server, and "
            "with `vllm_mode='colocate'` each process has one. Start a server for them with "
            "`vllm_command(..., extra=[\"--tensor-parallel-size\", ...])`, and set `vllm_mode='server'`.",
        ),
        (
            args.vllm_enable_sleep_mode and args.max_staleness > 0,
            f"`max_staleness={args.max_staleness}` generates while training runs, so the server cannot sleep. Set "
            "`vllm_enable_sleep_mode=False`, or `max_staleness=0`.",
        ),
    ]


def _staleness_conflicts(args: Any) -> list[tuple[bool, str]]:
    """What does not go with turns that were sampled by earlier weights."""
    stale = f"`max_staleness={args.max_staleness}`"
    is_bounded = args.vllm_importance_sampling_correction and args.vllm_importance_sampling_clip_max is not None
    return [
        (
            not is_bounded,
            f"{stale} trains on turns of earlier weights, and without a bounded correction training collapses. Set "
            "`vllm_importance_sampling_correction=True` and `vllm_importance_sampling_clip_max`.",
        ),
        (
            not args.use_policy_ratio,
            f"{stale} needs the clipped policy ratio, which `use_policy_ratio=False` leaves out.",
        ),
        (
            args.top_p not in (None, 1.0) or bool(args.top_k and args.top_k > 0) or bool(args.min_p),
            f"{stale} weighs turns by the ratio of the present to the earlier weights, which is not known where "
            "`top_p`, `top_k` or `min_p` cut the distribution. Leave them out, or set `max_staleness=0`.",
        ),
        (
            uses_candidates(args) or CREDITS[args.credit].reruns,
            f"{stale} does not go with candidates for turns (`advantage='turn'`, `'c3'`) or re-runs "
            "(`credit='counterfactual'`, `'removed'`), which are scored while episodes run. Set `max_staleness=0`.",
        ),
        (
            args.on_collapse == "restore",
            f"{stale} samples ahead from weights that `on_collapse='restore'` takes back. Set `on_collapse='warn'`, "
            "or `max_staleness=0`.",
        ),
        (
            args.update_order == "resampled",
            f"{stale} does not go with `update_order='resampled'`, which asks for new episodes after every agent's "
            "update. Set `max_staleness=0`.",
        ),
    ]
