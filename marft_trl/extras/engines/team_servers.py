# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Trained teams whose turns vLLM servers sample."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel

from ...adapters.policies import Policies
from ...agents import AgentSpec
from ...config.team_setup import Sampling
from ...rollout.transformers_generator import ModelEngine
from .library import AdapterLibrary, check_servable
from .replicas import ServerSettings, addresses, longest_turn
from .setup import adapter_entries, tolerance_of
from .vllm_generator import VLLMGenerator


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
            addresses(self.urls, "", 0, name="engine"),
            request_timeout=self.request_timeout,
            server_timeout=self.server_timeout,
            max_inflight=self.max_inflight,
        )

    def longest_turn(self) -> int | None:
        """
        Wait until the servers run.

        Returns: the largest number of tokens of an observation and a turn together, if they tell.

        Raises:
            ImportError: the HTTP client is not installed.
            EngineDownError: a server does not answer.
        """
        if importlib.util.find_spec("aiohttp") is None:
            raise ImportError("`engine=` needs aiohttp. Install it with `pip install 'marft-trl[serve]'`.")
        return longest_turn(self.settings)

    def generator(
        self, agents: Sequence[AgentSpec], policies: Policies, samplings: Mapping[str, Sampling], engine: ModelEngine
    ) -> VLLMGenerator:
        """
        The generator of a loaded team.

        Args:
            agents (`Sequence[AgentSpec]`): the team.
            policies ([`Policies`]): of the team.
            samplings (`Mapping[str, Sampling]`): sampling settings of each agent.
            engine ([`ModelEngine`]): has the model with the adapters, whose log-probabilities the servers' are
                compared with.
        """
        model = engine.model
        if not isinstance(model, PeftModel):
            raise ValueError(
                "`engine=` needs a team with adapters: this one shares one fully trained policy. Leave `engine` out, "
                "or serve its folder with vLLM itself."
            )
        served = [agent for agent in agents if agent.has_policy]
        for agent in served:
            check_servable(agent, model.peft_config[agent.adapter])

        def next_token(agent: str, ids: Sequence[int], by_reference: bool = False) -> torch.Tensor:
            policies.activate(agent)
            return torch.log_softmax(engine.next_logits(ids), dim=-1)

        is_exact = model.get_base_model().dtype == torch.float32 and engine.autocast is None
        library = AdapterLibrary(
            folder=self.adapter_dir or tempfile.mkdtemp(prefix="marft-adapters-"),
            entries=adapter_entries(served, model, next_token),
            servers=self.settings,
            vocabulary=model.get_input_embeddings().weight.size(0),
            tolerance=tolerance_of(self.fidelity_tolerance, is_exact),
        )
        return VLLMGenerator(
            policies, samplings, library, self.settings, engine.settings, engine.tokenizer, engine.ends
        )
