# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training with vLLM servers: checks before anything is loaded, and the generator of a team."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from ..advantages.credit_rules import CREDITS
from ..agents import AgentSpec
from ..configs import MARFTConfig
from ..engine.library import AdapterLibrary, Entry
from ..engine.replicas import ServerSettings, addresses, longest_turn
from ..processes import Processes
from ..rollout.generator import Sampling
from ..rollout.vllm_generator import BASE, VLLMGenerator
from ..weights.policies import Policies
from ..weights.served import adapter_tensors, check_servable, served_config, zero_tensors


logger = get_logger(__name__)

# Mean difference of log-probabilities: both sides in float32, or at least one of them less precise
_EXACT, _ROUGH = 1e-3, 0.2

# `next_token(agent, ids, by_reference=False)`: the trainer's log-probabilities of all tokens after some tokens
NextToken = Callable[..., torch.Tensor]


def server_settings(args: MARFTConfig) -> ServerSettings:
    """The servers that training arguments name."""
    return ServerSettings(
        urls=addresses(args.vllm_server_base_url, args.vllm_server_host, args.vllm_server_port),
        request_timeout=args.vllm_request_timeout,
        server_timeout=args.vllm_server_timeout,
        max_inflight=args.vllm_max_inflight,
    )


def tolerance_of(args: MARFTConfig, is_exact: bool) -> float:
    """Largest mean difference between log-probabilities of servers and the trainer's."""
    if args.fidelity_tolerance is not None:
        return args.fidelity_tolerance
    return _EXACT if is_exact else _ROUGH


def check_engine(args: MARFTConfig, policies: Policies, model: Any, agents: Sequence[AgentSpec]) -> int | None:
    """
    Check that servers can generate for a team, and wait until they run.

    Returns: largest number of tokens of an observation and a turn together on the servers, if they tell.

    Raises:
        ImportError: the HTTP client is not installed.
        ValueError: the team cannot be served.
        EngineDownError: a server does not run.
    """
    if not args.use_vllm:
        return None
    if importlib.util.find_spec("aiohttp") is None:
        raise ImportError("`use_vllm=True` needs aiohttp. Install it with `pip install 'marft-trl[vllm]'`.")
    if not policies.has_adapters:
        raise ValueError(
            "`use_vllm=True` needs adapters: servers are given the weights of adapters after each update, never those "
            "of the base. Pass `peft_config=LoraConfig(...)`, or set `use_vllm=False`."
        )
    for agent in agents:
        check_servable(agent, model.peft_config[agent.adapter])
    if getattr(model.get_base_model(), "is_quantized", False):
        logger.warning(
            "The base is quantized. If the servers have it in another precision, they sample from another "
            "distribution than is trained; `sampling/sampling_logp_difference/mean` tells how far it is off."
        )
    return longest_turn(server_settings(args))


def make_vllm_generator(
    args: MARFTConfig,
    agents: Sequence[AgentSpec],
    policies: Policies,
    model: PeftModel,
    samplings: Mapping[str, Sampling],
    settings: Callable[[Sampling], dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    vocabulary: int,
    is_exact: bool,
    next_token: NextToken,
    processes: Processes,
) -> VLLMGenerator:
    """
    The generator of a team on vLLM servers.

    Args:
        args ([`MARFTConfig`]): addresses and limits.
        agents (`Sequence[AgentSpec]`): the team.
        policies ([`Policies`]): its adapters.
        model ([`~peft.PeftModel`]): has them.
        samplings (`Mapping[str, Sampling]`): how each agent samples.
        settings (`Callable`): all settings of `generate` of a [`Sampling`].
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): decodes stop texts.
        ends (`Sequence[int]`): ids of the tokens that end a turn.
        vocabulary (`int`): number of token ids.
        is_exact (`bool`): whether the trainer computes in float32.
        next_token (`Callable`): the trainer's log-probabilities.
        processes ([`Processes`]): the processes of the run.
    """
    servers = server_settings(args)
    entries = _entries(args, agents, policies, model, next_token)
    library = AdapterLibrary(
        folder=args.vllm_adapter_dir or Path(args.output_dir or ".") / "_adapters",
        entries=entries,
        servers=servers,
        vocabulary=vocabulary,
        tolerance=tolerance_of(args, is_exact),
    )
    generator = VLLMGenerator(library, servers, policies, samplings, settings, tokenizer, ends, processes)
    others = [agent.name for agent in agents if not generator.samples_what_is_scored(agent.name)]
    if others:
        logger.warning(
            f"{', '.join(map(repr, others))} sample from a part of their distribution (`top_p`, `top_k`, `min_p` or "
            "`repetition_penalty`), so log-probabilities of servers cannot be compared with the trainer's: their "
            "tokens have the weight 1 in the loss, and only the adapters themselves are checked."
        )
    return generator


def _entries(
    args: MARFTConfig, agents: Sequence[AgentSpec], policies: Policies, model: PeftModel, next_token: NextToken
) -> dict[str, Entry]:
    """What servers are given: the adapters, and the references where turns are sampled from them."""
    entries: dict[str, Entry] = {}
    for agent in agents:
        adapter = agent.adapter
        entries[adapter] = Entry(
            functools.partial(adapter_tensors, model, adapter),
            served_config(model, adapter),
            functools.partial(next_token, agent.name, by_reference=False),
            is_fixed=adapter not in policies.trained,
        )
    if not CREDITS[args.credit].reruns:
        return entries
    for agent in agents:
        adapter, reference = agent.adapter, functools.partial(next_token, agent.name, by_reference=True)
        if policies.starts_as_base(agent.name):
            tensors = functools.partial(zero_tensors, model, adapter)
            entries[BASE] = Entry(tensors, served_config(model, adapter), reference, is_fixed=True)
        else:
            tensors = functools.partial(_reference_tensors, policies, model, agent)
            entries[f"{adapter}-reference"] = Entry(tensors, served_config(model, adapter), reference)
    return entries


def _reference_tensors(policies: Policies, model: PeftModel, agent: AgentSpec) -> dict[str, Any]:
    with policies.reference(agent.name):
        return {name: tensor.clone() for name, tensor in adapter_tensors(model, agent.adapter).items()}
