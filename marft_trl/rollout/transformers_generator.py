# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Generation with transformers: one batched `generate` per adapter and sampling setting, under the right adapter."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..shared_prefix.decoding import Recorder, can_decode, decode
from ..weights.copies import PastCopies
from ..weights.policies import Policies
from .generator import GREEDY, Sampled, Sampling
from .stopping import EndAtStopText, StopTexts


class Engine(Protocol):
    """Interface that [`TransformersGenerator`] calls `generate` through: [`TrlEngine`] or [`ModelEngine`]."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def model(self) -> Any:
        """Model whose `generate` is called, without data-parallel wrappers."""

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        """All settings of `generate` for an agent's sampling."""

    def generate(
        self, prompt_ids: list[list[int]], settings: Mapping[str, Any], options: Mapping[str, Any]
    ) -> list[list[int]]:
        """
        Sample a completion for each prompt, up to and including its end-of-sequence token.

        Args:
            prompt_ids (`list[list[int]]`): token ids of the prompts.
            settings (`Mapping[str, Any]`): settings of the `GenerationConfig`.
            options (`Mapping[str, Any]`): further arguments of `generate`, such as stopping criteria.
        """


class TransformersGenerator:
    """
    Generates turns with `generate` of transformers.

    Args:
        engine ([`Engine`]):
            Engine that calls `generate`.
        policies ([`Policies`]):
            Policies of the team, used to activate the agents' adapters.
        samplings (`dict[str, Sampling]`):
            Sampling settings of each agent.
        share (`bool`):
            Whether to compute the common prefix of several observations only once.
        records (`bool`):
            Whether to record the log-probabilities of sampled tokens.
        past ([`PastCopies`], *optional*):
            Past copies that opponents act with.
    """

    def __init__(
        self,
        engine: Engine,
        policies: Policies,
        samplings: dict[str, Sampling],
        share: bool,
        records: bool,
        past: PastCopies | None = None,
    ):
        self._share, self.records, self._past = share, share and records, past
        self._engine = engine
        self._policies = policies
        self._samplings = samplings
        self._stops = {sampling: StopTexts(engine.tokenizer, sampling.stop) for sampling in samplings.values()}

    def generate(
        self,
        agents: Sequence[str],
        prompt_ids: Sequence[list[int]],
        by_reference: bool = False,
        greedy: bool = False,
        copies: Sequence[int | None] | None = None,
    ) -> list[Sampled]:
        """
        Args:
            agents (`Sequence[str]`):
                Name of the agent of each observation.
            prompt_ids (`Sequence[list[int]]`):
                Token ids of the observations.
            by_reference (`bool`, *optional*, defaults to `False`):
                Whether to sample from the agents' references instead of the agents.
            greedy (`bool`, *optional*, defaults to `False`):
                Whether to use greedy decoding instead of sampling.
            copies (`Sequence[int]`, *optional*):
                For each observation the past copy that the agent acts with, or `None`.

        Returns: the sampled completions, in order.
        """
        groups: dict[tuple[str, Sampling, int | None], list[int]] = {}
        for index, agent in enumerate(agents):
            copied = copies[index] if copies is not None else None
            groups.setdefault((self._policies.adapter_of(agent), self._samplings[agent], copied), []).append(index)
        completions: list[Sampled] = [Sampled([]) for _ in agents]
        for (_, sampling, copied), indices in groups.items():
            agent = agents[indices[0]]
            self._policies.activate(agent)
            speaker = self._policies.reference(agent) if by_reference else contextlib.nullcontext()
            if copied is not None and self._past is not None:
                speaker = self._past.acting(agent, copied)
            recorder = Recorder() if self.records and not by_reference else None
            settings = self._engine.settings(sampling) | (GREEDY if greedy else {})
            options = self._options(sampling, settings, recorder)
            with speaker:
                sampled = self._engine.generate([prompt_ids[i] for i in indices], settings, options)
            logps = recorder.logps.tolist() if recorder is not None and recorder.logps is not None else None
            for position, (index, ids) in enumerate(zip(indices, sampled, strict=True)):
                ids = self._stops[sampling].cut(ids)
                completions[index] = Sampled(ids, logps[position][: len(ids)] if logps is not None else None)
        return completions

    def settings(self, agent: str) -> dict[str, Any]:
        """All settings of `generate` for an agent."""
        return self._engine.settings(self._samplings[agent])

    def _options(self, sampling: Sampling, settings: Mapping[str, Any], recorder: Recorder | None) -> dict[str, Any]:
        """Arguments of `generate` that make it stop at stop texts and decode the fast way."""
        options: dict[str, Any] = {}
        if sampling.stop:
            options["stopping_criteria"] = [EndAtStopText(self._stops[sampling])]
        if self._share and can_decode(self._merged(GenerationConfig(**settings))):
            # `generation_kwargs` may set a sampling temperature that differs from the temperature of scoring
            sampled_at = settings["temperature"] if settings["do_sample"] else None
            recorder = recorder if sampled_at == sampling.temperature else None
            options["custom_generate"] = functools.partial(decode, recorder=recorder)
        return options

    def _merged(self, config: GenerationConfig) -> GenerationConfig:
        """Complete a config as `generate` does: missing settings are taken from the model's generation config."""
        merged = copy.deepcopy(config)
        merged.update(**self._engine.model.generation_config.to_dict(), defaults_only=True)
        return merged

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        """Return `True` if a turn of an agent contains one of the agent's stop texts."""
        return self._stops[self._samplings[agent]].are_in(ids)
