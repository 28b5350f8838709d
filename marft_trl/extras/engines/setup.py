# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""vLLM servers: checks before anything is loaded, the generator of a trainer, and that of a trained team."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from ...adapters.policies import Policies
from ...agents import AgentSpec
from ...algorithms.baselines import CREDITS
from ...config.marft_config import MARFTConfig
from ...config.team_setup import RunContext, Sampling, TeamSetup
from ...rollout.transformers_generator import ModelEngine
from ...seams.libraries import get_logger
from ...system.event_loop import run_coroutine
from ...system.hints import did_you_mean
from .library import AdapterLibrary, ServedAdapter, adapter_tensors, check_servable, served_config, zero_tensors
from .own_server import MODULE, UPDATES, OwnServer, server_flags
from .server import ServerSettings, find_max_model_len, parse_addresses, put_to_sleep
from .vllm_generator import BASE, SamplingCorrection, VLLMGenerator, make_reference_name


logger = get_logger(__name__)

# Seconds that the server of a process may need to start; large bases are read slowly
_STARTS = 1800.0
# Mean difference of log-probabilities: both sides in float32, or at least one of them less precise
_EXACT, _ROUGH = 1e-3, 0.2

# `next_token(agent, ids, by_reference=False)`: the trainer's log-probabilities of all tokens after some tokens
NextToken = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Engine:
    """The servers that generate for a trainer."""

    servers: ServerSettings
    max_model_len: int | None  # limit of an observation and a turn together in tokens, if they report one


def choose_tolerance(tolerance: float | None, is_exact: bool) -> float:
    """Largest mean difference between log-probabilities of servers and ours. `is_exact`: both are float32."""
    default = _EXACT if is_exact else _ROUGH
    return default if tolerance is None else tolerance


def sampling_correction(run: RunContext, generator: Any, is_exact: bool) -> SamplingCorrection:
    """Compares and weighs turns of servers, which have to agree closely if they are in float32 (`is_exact`)."""
    return SamplingCorrection(run, choose_tolerance(run.args.fidelity_tolerance, is_exact), generator.staleness)


def start_engine(args: MARFTConfig, model: Any, agents: Sequence[AgentSpec]) -> Engine:
    """
    Check that servers can generate for the agents on a base, start the server of this process if it has one, and wait
    until they run. Raises an `ImportError` without the HTTP client or vLLM, a `ValueError` if the team cannot be
    served, and an [`EngineDownError`] if a server does not run.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise ImportError("`use_vllm=True` needs aiohttp. Install it with `pip install aiohttp`.")
    if not isinstance(model, PeftModel):
        raise ValueError(
            "`use_vllm=True` needs adapters: servers receive the weights of adapters after each update, never those "
            "of the base. Pass `peft_config=LoraConfig(...)`, or set `use_vllm=False`."
        )
    served = [agent for agent in agents if agent.has_policy]
    for agent in served:
        check_servable(agent, model.peft_config[agent.adapter])
    own = None
    if args.vllm_mode == "colocate":
        ranks = {agent.adapter: model.peft_config[agent.adapter].r for agent in served}
        own = start_own_server(args, model, ranks)
        urls: tuple[str, ...] = (own.url,)
    else:
        if getattr(model.get_base_model(), "is_quantized", False):
            logger.warning(
                "The base is quantized. Servers that load it in another precision sample from a different "
                "distribution than the trained one; `sampling/sampling_logp_difference/mean` logs the difference."
            )
        addresses: Any = args.vllm_server_base_url
        if isinstance(addresses, Mapping):
            base = str(model.get_base_model().name_or_path)
            if base not in addresses:
                raise ValueError(
                    f"`vllm_server_base_url` has no servers for the model {base!r}, only for "
                    f"{', '.join(map(repr, addresses))}.{did_you_mean(base, addresses)}"
                )
            addresses = addresses[base]
        urls = parse_addresses(addresses, args.vllm_server_host, args.vllm_server_port)
    servers = ServerSettings(
        urls=urls,
        request_timeout=args.vllm_request_timeout,
        server_timeout=args.vllm_server_timeout,
        max_inflight=args.vllm_max_inflight,
        own=own,
        sleep=own is not None and args.vllm_enable_sleep_mode,
    )
    engine = Engine(servers, find_max_model_len(servers))
    if servers.sleep:
        run_coroutine(put_to_sleep, servers)
    return engine


def make_vllm_generator(
    team: TeamSetup,
    run: RunContext,
    servers: ServerSettings,
    model: PeftModel,
    settings: Callable[[Sampling], dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    end_token_ids: Sequence[int],
    vocabulary: int,
    is_exact: bool,
    next_token: NextToken,
) -> VLLMGenerator:
    """The generator of a team on vLLM servers. `is_exact`: whether the trainer computes in float32."""
    args, policies = run.args, team.policies
    served = [agent for agent in team.agents if agent.has_policy and policies.get_model(agent.name) is model]
    entries = _entries(args, served, policies, model, next_token)
    folder = Path(args.vllm_adapter_dir or Path(args.output_dir or ".") / "_adapters")
    if model in policies.further:
        folder = folder / served[0].name
    samplings = {name: team.samplings[name] for name in team.names if policies.get_model(name) is model}
    tolerance = choose_tolerance(args.fidelity_tolerance, is_exact)
    library = AdapterLibrary(folder, entries, servers, vocabulary, tolerance)
    generator = VLLMGenerator(policies, samplings, library, settings, tokenizer, end_token_ids, run.processes)
    others = [agent.name for agent in served if not generator.samples_scored_distribution(agent.name)]
    trained = [agent.name for agent in served if agent.name in others and agent.trainable]
    if trained and args.max_staleness:
        raise ValueError(
            f"`max_staleness={args.max_staleness}` weights turns by the probability ratio of the current to the "
            f"earlier adapters, which is unknown for {', '.join(map(repr, trained))}: `top_p`, `top_k`, `min_p`, "
            "`repetition_penalty` or `generation_kwargs` change the sampling distribution. Remove these settings, or "
            "set `max_staleness=0`."
        )
    if others:
        logger.warning(
            f"The sampling settings of {', '.join(map(repr, others))} change the distribution (`top_p`, `top_k`, "
            "`min_p` or `repetition_penalty`), so log-probabilities of servers cannot be compared with the trainer's: "
            "the tokens of these agents get the weight 1 in the loss, and only the adapters are checked."
        )
    return generator


def _entries(
    args: MARFTConfig, agents: Sequence[AgentSpec], policies: Policies, model: PeftModel, next_token: NextToken
) -> dict[str, ServedAdapter]:
    """The adapters that servers load, and the references if turns are sampled from them."""
    # Callbacks may change a frozen adapter, such as that of an opponent
    entries = adapter_entries(agents, model, next_token, changing=policies.names)
    if not CREDITS[args.credit].uses_references:
        return entries
    for agent in agents:
        adapter, reference = agent.adapter, functools.partial(next_token, agent.name, by_reference=True)
        if policies.base_is_reference(agent.name):
            tensors = functools.partial(zero_tensors, model, adapter)
            entries[BASE] = ServedAdapter(tensors, served_config(model, adapter), reference, is_fixed=True)
        else:
            tensors = functools.partial(_reference_tensors, policies, model, agent)
            entries[make_reference_name(adapter)] = ServedAdapter(tensors, served_config(model, adapter), reference)
    return entries


def adapter_entries(
    agents: Sequence[AgentSpec], model: PeftModel, next_token: NextToken, changing: Sequence[str] = ()
) -> dict[str, ServedAdapter]:
    """The adapters of agents, by their names. The weights of those in `changing` may change."""
    return {
        agent.adapter: ServedAdapter(
            functools.partial(adapter_tensors, model, agent.adapter),
            served_config(model, agent.adapter),
            functools.partial(next_token, agent.name),
            is_fixed=agent.adapter not in changing,
        )
        for agent in agents
    }


def _reference_tensors(policies: Policies, model: PeftModel, agent: AgentSpec) -> dict[str, Any]:
    with policies.reference(agent.name):
        return {name: tensor.clone() for name, tensor in adapter_tensors(model, agent.adapter).items()}


def start_own_server(args: MARFTConfig, model: Any, adapters: Mapping[str, int]) -> OwnServer:
    """Start a server on the device of this process, and wait until it runs."""
    base, device = model.get_base_model(), args.device
    if device.type not in ("cuda", "cpu"):
        raise ValueError(
            f"`vllm_mode='colocate'` is not supported on {device.type!r}. Start a server with the command that "
            "`marft_trl.extras.engines.vllm_command` gives, and set `vllm_mode='server'`."
        )
    if getattr(base, "is_quantized", False):
        raise ValueError(
            "`vllm_mode='colocate'` cannot serve a quantized base: vLLM reads 4-bit weights only with a plugin. Start "
            "a server that has the same base, with the command that `marft_trl.extras.engines.vllm_command` gives, "
            "and set `vllm_mode='server'`."
        )
    name, dtype = str(base.name_or_path), str(base.dtype).removeprefix("torch.")
    if not name:
        raise ValueError(
            "`vllm_mode='colocate'` starts a server with the same base, and this model has no name: it was not loaded "
            "from the Hub or a folder. Save it with `save_pretrained`, and pass the folder as `model`."
        )
    variables = {UPDATES: "True"}
    if device.type == "cuda":  # that of this process
        index, visible = device.index or 0, os.environ.get("CUDA_VISIBLE_DEVICES")
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    if args.vllm_enable_sleep_mode:
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # has the routes by which it sleeps and wakes
    share = [] if device.type == "cpu" else ["--gpu-memory-utilization", str(args.vllm_gpu_memory_utilization)]
    further = ["--dtype", dtype, *share, "--model-impl", args.vllm_model_impl]
    further += ["--enable-sleep-mode"] if args.vllm_enable_sleep_mode else []

    def flags(port: int) -> list[str]:
        own = server_flags(name, adapters, args, port, max_model_len=args.vllm_max_model_length, device=device.type)
        return ["-m", MODULE, *own, *further]

    log = Path(args.output_dir or ".") / "_vllm" / f"server-{args.process_index}.log"
    server = OwnServer(flags, _interpreter(args), log, variables)
    server.wait(max(args.vllm_server_timeout, _STARTS))
    return server


def _interpreter(args: MARFTConfig) -> str:
    path = args.vllm_python or os.environ.get("MARFT_VLLM_PYTHON")
    if path is None and importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "`vllm_mode='colocate'` needs vLLM, which is not installed here and is not compatible with this version "
            "of transformers. Install vLLM in a separate environment, and set `vllm_python` to the interpreter of "
            "that environment, such as '/opt/vllm/bin/python'."
        )
    python = shutil.which(path or sys.executable)
    if python is None:
        raise ValueError(f"`vllm_python` must be a Python interpreter, got {path!r}, which is not an executable.")
    return python


@dataclass(frozen=True)
class Servers:
    """
    vLLM servers that have the base of a team. They get its adapters when the team is first asked.

    Args:
        urls (`str` or `Sequence[str]`):
            Their addresses, such as `"http://127.0.0.1:8000"`.
        adapter_dir (`str` or `os.PathLike`, *optional*):
            Folder for the adapters that the servers see under the same path. Defaults to a temporary one, for servers
            on this machine.
        request_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds after which a request for a turn is given up.
        server_timeout (`float`, *optional*, defaults to `240.0`):
            Seconds to wait while no server answers.
        max_inflight (`int`, *optional*, defaults to `256`):
            Largest number of turns at a server at the same time.
        fidelity_tolerance (`float`, *optional*):
            Largest mean difference between log-probabilities of a server and those of the loaded adapters. Defaults to
            0.001 for a base in float32, and to 0.2 otherwise.
    """

    urls: str | Sequence[str]
    adapter_dir: str | os.PathLike | None = None
    request_timeout: float = 600.0
    server_timeout: float = 240.0
    max_inflight: int = 256
    fidelity_tolerance: float | None = None

    @property
    def settings(self) -> ServerSettings:
        """The servers as generators have them."""
        return ServerSettings(
            parse_addresses(self.urls, "", 0, name="engine"),
            request_timeout=self.request_timeout,
            server_timeout=self.server_timeout,
            max_inflight=self.max_inflight,
        )

    def find_max_model_len(self) -> int | None:
        """
        Wait until the servers run.

        Returns: the largest number of tokens of an observation and a turn together, if they tell.

        Raises:
            ImportError: the HTTP client is not installed.
            EngineDownError: a server does not answer.
        """
        if importlib.util.find_spec("aiohttp") is None:
            raise ImportError("`engine=` needs aiohttp. Install it with `pip install aiohttp`.")
        return find_max_model_len(self.settings)

    def generator(
        self, agents: Sequence[AgentSpec], policies: Policies, samplings: Mapping[str, Sampling], engine: ModelEngine
    ) -> VLLMGenerator:
        """
        The generator of a loaded team.

        Args:
            agents (`Sequence[AgentSpec]`): the team.
            policies ([`Policies`]): of the team.
            samplings (`Mapping[str, Sampling]`): sampling settings of each agent on the base.
            engine ([`ModelEngine`]): has the model with the adapters, whose log-probabilities the servers' are
                compared with.
        """
        model = engine.model
        if not isinstance(model, PeftModel):
            raise ValueError(
                "`engine=` needs a team with adapters, but the agents of this team share one fully trained policy. "
                "Remove `engine`, or serve the folder of the team with vLLM itself."
            )
        served = [agent for agent in agents if agent.has_policy and agent.name in samplings]
        for agent in served:
            check_servable(agent, model.peft_config[agent.adapter])

        def next_token(agent: str, ids: Sequence[int]) -> torch.Tensor:
            policies.activate(agent)
            return torch.log_softmax(engine.next_logits(ids), dim=-1)

        is_exact = model.get_base_model().dtype == torch.float32 and engine.autocast is None
        folder = self.adapter_dir or tempfile.mkdtemp(prefix="marft-adapters-")
        tolerance = choose_tolerance(self.fidelity_tolerance, is_exact)
        entries, vocabulary = adapter_entries(served, model, next_token), model.get_input_embeddings().weight.size(0)
        library = AdapterLibrary(folder, entries, self.settings, vocabulary, tolerance)
        return VLLMGenerator(policies, samplings, library, engine.settings, engine.tokenizer, engine.end_token_ids)
