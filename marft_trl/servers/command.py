# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The command that starts a vLLM server for a team."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from peft import LoraConfig, PeftConfig

from ..agents import AgentSpec
from ..config.marft_config import MARFTConfig
from ..weights.adapters import config_of
from ..weights.copies import served_entries


_MODULE = "vllm.entrypoints.openai.api_server"
# Environment variable under which a server takes adapters while it runs
_UPDATES = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
# Ranks that vLLM has kernels for
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Flags of the CPU build, whose engine stops at a request with a seed if it may read a prompt in parts
_ON_CPU = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192", "--enforce-eager", "--dtype", "float32")


def vllm_command(
    model: str,
    agents: Sequence[AgentSpec],
    args: MARFTConfig | None = None,
    peft_config: PeftConfig | None = None,
    port: int = 8000,
    host: str = "127.0.0.1",
    max_model_len: int | None = None,
    device: str = "cuda",
    extra: Sequence[str] = (),
) -> str:
    """
    The shell command that starts a vLLM server for a team, with all flags that the team needs. Run it in an
    environment that vLLM is installed in, once for each address in `vllm_server_base_url`.

    Args:
        model (`str`):
            Name or folder of the base.
        agents (`Sequence[AgentSpec]`):
            The team.
        args ([`MARFTConfig`], *optional*):
            Training arguments.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapter config of agents without one of their own, as passed to [`MARFTTrainer`].
        port (`int`, *optional*, defaults to `8000`):
            Port of the server.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address that the server listens at. The server takes adapters from whoever reaches it, so let only the
            trainer reach it.
        max_model_len (`int`, *optional*):
            Longest prompt and turn together, in tokens. If `None`, the server takes the model's window.
        device (`str`, *optional*, defaults to `"cuda"`):
            `"cpu"` adds the flags that vLLM's CPU build needs.
        extra (`Sequence[str]`, *optional*):
            Further flags, such as `["--tensor-parallel-size", "2"]`.

    Returns: one line.
    """
    ranks = adapter_ranks(agents, peft_config)
    flags = server_flags(model, ranks, args or MARFTConfig(), port, host, max_model_len, device)
    return f"{_UPDATES}=True python -m {_MODULE} {shlex.join([*flags, *extra])}"


def server_arguments(*arguments: Any, **limits: Any) -> tuple[dict[str, str], list[str]]:
    """Environment variables, and the arguments of an interpreter that start a server, see [`server_flags`]."""
    return {_UPDATES: "True"}, ["-m", _MODULE, *server_flags(*arguments, **limits)]


def server_flags(
    model: str,
    adapters: Mapping[str, int],
    args: MARFTConfig,
    port: int,
    host: str = "127.0.0.1",
    max_model_len: int | None = None,
    device: str = "cuda",
) -> list[str]:
    """
    Flags of a server.

    Args:
        model (`str`): name or folder of the base.
        adapters (`Mapping[str, int]`): rank of each adapter.
        args ([`MARFTConfig`]): training arguments.
        port (`int`): port.
        host (`str`): address to listen at.
        max_model_len (`int`, *optional*): longest prompt and turn together.
        device (`str`): `"cuda"` or `"cpu"`.
    """
    most = max_loras(len(adapters), args.max_staleness)
    return [
        *("--model", model, "--host", host, "--port", str(port), "--enable-lora"),
        *("--max-loras", str(most), "--max-cpu-loras", str(2 * most)),
        *("--max-lora-rank", str(next((rank for rank in _RANKS if rank >= max(adapters.values())), _RANKS[-1]))),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--max-num-seqs", str(args.vllm_max_inflight)),
        *(("--max-model-len", str(max_model_len)) if max_model_len is not None else ()),
        *(("--revision", revision) if (revision := (args.model_init_kwargs or {}).get("revision")) else ()),
        *(("--trust-remote-code",) if args.trust_remote_code else ()),
        *(_ON_CPU if device == "cpu" else ()),
    ]


def max_loras(num_adapters: int, max_staleness: int = 0) -> int:
    """
    Number of adapters that a server needs room for: those of the team in all versions that are sampled from at a time,
    and the base as an adapter.
    """
    return num_adapters * (max_staleness + 1) + 1


def adapter_ranks(agents: Sequence[AgentSpec], peft_config: PeftConfig | None = None) -> Mapping[str, int]:
    """Rank of each adapter that servers have of a team."""
    ranks: dict[str, int] = {}
    for agent in agents:
        config = config_of(agent, agents, peft_config)
        rank = config.r if isinstance(config, LoraConfig) else LoraConfig().r
        ranks |= {name: max(rank, ranks.get(name, 0)) for name in served_entries(agent)}
    return ranks
