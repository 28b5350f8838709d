# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Start vLLM servers: the command for a server, and a server that a training process starts for itself."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from peft import LoraConfig, PeftConfig

from ...adapters.lora import max_lora_rank
from ...agents import AgentSpec
from ...config.marft_config import MARFTConfig
from ...system.child_processes import keep, kill_group, let_go
from ...system.event_loop import run_coroutine
from .server import EngineDownError, RefusedError, ServerDownError, ServerSettings


MODULE = "vllm.entrypoints.openai.api_server"
# Environment variable under which a server takes adapters while it runs
UPDATES = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
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
    ranks: dict[str, int] = {}
    for agent in (agent for agent in agents if agent.has_policy):
        config = agent.peft_config or peft_config
        rank = config.r if isinstance(config, LoraConfig) else LoraConfig().r
        ranks[agent.adapter] = max(rank, ranks.get(agent.adapter, 0))
    flags = server_flags(model, ranks, args or MARFTConfig(), port, host, max_model_len, device)
    return f"{UPDATES}=True python -m {MODULE} {shlex.join([*flags, *extra])}"


def server_flags(
    model: str,
    adapters: Mapping[str, int],
    args: MARFTConfig,
    port: int,
    host: str = "127.0.0.1",
    max_model_len: int | None = None,
    device: str = "cuda",
) -> list[str]:
    """Flags of a server. `adapters` has their ranks, and `max_model_len` counts prompt and turn together."""
    most = len(adapters) * (args.max_staleness + 1) + 1  # all versions that turns are sampled from, and the base
    return [
        *("--model", model, "--host", host, "--port", str(port), "--enable-lora"),
        *("--max-loras", str(most), "--max-cpu-loras", str(2 * most)),
        *("--max-lora-rank", str(max_lora_rank(adapters.values()))),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--max-num-seqs", str(args.vllm_max_inflight)),
        *(("--max-model-len", str(max_model_len)) if max_model_len is not None else ()),
        *(("--revision", revision) if (revision := (args.model_init_kwargs or {}).get("revision")) else ()),
        *(("--trust-remote-code",) if args.trust_remote_code else ()),
        *(_ON_CPU if device == "cpu" else ()),
    ]


# Variables of launchers, since the server is not a process of the run, and of the interpreter that trains
_NOT_INHERITED = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "PYTHONHOME"),
}
_PREFIXES = ("TORCHELASTIC_", "ROLE_", "ACCELERATE_", "FSDP_")
# Timeout of a health check in seconds
_HEALTH_SECONDS = 5.0
# Characters of the log that are shown if the server does not start
_MOST_SHOWN = 2000


class OwnServer:
    """A vLLM server of this process. It ends when this process does, in whatever way."""

    def __init__(
        self,
        flags: Callable[[int], Sequence[str]],  # arguments of the interpreter for a port
        python: str,  # interpreter of an environment with vLLM
        log: Path,  # to which the output is appended
        variables: Mapping[str, str] | None = None,
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # Every request needs the key
        self.url, self.key, self._log = f"http://127.0.0.1:{port}", secrets.token_hex(16), log
        log.parent.mkdir(parents=True, exist_ok=True)
        names = [name for name in os.environ if name not in _NOT_INHERITED and not name.startswith(_PREFIXES)]
        with open(log, "ab") as output:
            self._process = subprocess.Popen(  # noqa: S603
                [python, *flags(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**{name: os.environ[name] for name in names}, **(variables or {}), "VLLM_API_KEY": self.key},
                start_new_session=True,
            )
        keep(f"server-{self._process.pid}", self._process.pid)
        self.close = weakref.finalize(self, _end, self._process)

    def wait(self, seconds: float) -> None:
        """Wait until the server answers. Raises an [`EngineDownError`] if it has ended, or needs longer."""
        end = time.monotonic() + seconds
        while not run_coroutine(self._is_well):
            status = self._process.poll()
            if status is None and time.monotonic() < end:
                time.sleep(0.5)
                continue
            failure = f"did not start within {seconds:g} seconds" if status is None else f"exited with status {status}"
            self.close()
            raise EngineDownError(
                f"The vLLM server of this process (`vllm_mode='colocate'`) {failure}. The end of its log, "
                f"{self._log}:\n" + self._log.read_text(encoding="utf-8", errors="replace")[-_MOST_SHOWN:]
            )

    async def _is_well(self) -> bool:
        async with ServerSettings((self.url,), own=self).connected() as (server,):
            try:
                await server.check_health(_HEALTH_SECONDS)
            except (ServerDownError, RefusedError):  # another program may answer at the port
                return False
            return True


def _end(server: subprocess.Popen) -> None:
    """End a server, and its engines, which may outlive it."""
    kill_group(server.pid)
    server.wait()
    let_go(f"server-{server.pid}")
