# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments of the engine: servers of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


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

    vllm_mode: str = field(
        default="server",
        metadata={"help": "Where vLLM runs with use_vllm: on a 'server', or 'colocate' on the training device."},
    )
    vllm_python: str | None = field(
        default=None,
        metadata={"help": "Interpreter of an environment with vLLM, for vllm_mode='colocate'."},
    )
    vllm_server_base_url: list[str] | None = field(
        default=None,
        metadata={"help": "Addresses of the vLLM servers, such as http://localhost:8000."},
    )
    vllm_request_timeout: float = field(
        default=600.0,
        metadata={"help": "Maximum time in seconds of the generation of one turn by a server."},
    )
    vllm_max_inflight: int = field(
        default=256,
        metadata={"help": "Maximum number of turns that a server generates at the same time."},
    )
    vllm_adapter_dir: str | None = field(
        default=None,
        metadata={"help": "Folder that adapters are handed to the servers in. Defaults to '_adapters' in output_dir."},
    )
    max_staleness: int = field(
        default=0,
        metadata={"help": "Number of generation batches that vLLM servers sample ahead of training."},
    )
    fidelity_tolerance: float | None = field(
        default=None,
        metadata={"help": "Largest mean difference between log-probabilities of a server and of the trainer."},
    )
