# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Generation with transformers: one batched `generate` per adapter and sampling setting, under the right adapter."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import GenerationConfig

from ..agents import AgentSpec
from .decoding import Recorder, can_decode, decode
from .stopping import EndAtStopText, StopTexts


@dataclass(frozen=True)
class Sampling:
    """How an agent samples: its own settings, the trainer's where it has none."""

    max_completion_length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    stop: tuple[str, ...]

    @classmethod
    def of(cls, agent: AgentSpec, args) -> Sampling:
        """The settings of `agent` under the training arguments `args`."""

        def setting(name: str):
            own = getattr(agent, name)
            return getattr(args, name) if own is None else own

        return cls(
            max_completion_length=setting("max_completion_length"),
            temperature=setting("temperature"),
            top_p=setting("top_p"),
            top_k=setting("top_k"),
            min_p=setting("min_p"),
            stop=tuple(agent.stop or ()),
        )


class Sampled(NamedTuple):
    """
    What was sampled for one observation.

    Args:
        ids (`list[int]`): token ids.
        logps (`list[float]`, *optional*): their log-probabilities, where these are as scoring would have them.
    """

    ids: list[int]
    logps: list[float] | None = None


class TransformersGenerator:
    """
    Generates turns with the generation of TRL's `GRPOTrainer`.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Does the generating.
        policies ([`Policies`]):
            Switches adapters.
        samplings (`dict[str, Sampling]`):
            How each agent samples.
        share (`bool`):
            Compute what observations have in common once.
        records (`bool`):
            Keep log-probabilities of what is sampled.
    """

    def __init__(self, trainer, policies, samplings: dict[str, Sampling], share: bool, records: bool):
        self._share, self.records = share, share and records
        self._trainer = trainer
        self._policies = policies
        self._samplings = samplings
        self._stops = {sampling: StopTexts(trainer._tokenizer, sampling.stop) for sampling in samplings.values()}

    def generate(
        self, agents: Sequence[str], prompt_ids: Sequence[list[int]], by_reference: bool = False
    ) -> list[Sampled]:
        """
        Args:
            agents (`Sequence[str]`):
                Who speaks, for each observation.
            prompt_ids (`Sequence[list[int]]`):
                The observations.
            by_reference (`bool`, *optional*, defaults to `False`):
                Let the agents' references speak instead of the agents.

        Returns: what was sampled for each, in order.
        """
        groups: dict[tuple[str, Sampling], list[int]] = {}
        for index, agent in enumerate(agents):
            groups.setdefault((self._policies.adapter_of(agent), self._samplings[agent]), []).append(index)
        completions: list[Sampled] = [Sampled([]) for _ in agents]
        for (_, sampling), indices in groups.items():
            agent = agents[indices[0]]
            self._policies.activate(agent)
            speaker = self._policies.reference(agent) if by_reference else contextlib.nullcontext()
            recorder = Recorder() if self.records and not by_reference else None
            with self._sampling(sampling, recorder), speaker:
                sampled, _ = self._trainer._generate_single_turn([prompt_ids[i] for i in indices], None, {}, 1)
            logps = recorder.logps.tolist() if recorder is not None and recorder.logps is not None else None
            for position, (index, ids) in enumerate(zip(indices, sampled, strict=True)):
                ids = self._stops[sampling].cut(ids)
                completions[index] = Sampled(ids, logps[position][: len(ids)] if logps is not None else None)
        return completions

    @contextlib.contextmanager
    def _sampling(self, sampling: Sampling, recorder: Recorder | None) -> Iterator[None]:
        trainer = self._trainer
        config, kwargs = trainer.generation_config, trainer.generation_kwargs
        own: dict[str, Any] = {
            "max_new_tokens": sampling.max_completion_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        }
        # As in TRL, `generation_kwargs` win over the trainer's settings; an agent's own settings win over both
        general = {**own, **vars(Sampling.of(AgentSpec("solo"), trainer.args))}
        general["max_new_tokens"] = general["max_completion_length"]
        explicit = set(trainer.args.generation_kwargs or {})
        own = {key: value for key, value in own.items() if key not in explicit or value != general[key]}
        trainer.generation_kwargs = {**kwargs, **own}
        trainer.generation_config = GenerationConfig(**trainer.generation_kwargs, disable_compile=True)
        options: dict[str, Any] = {}
        if sampling.stop:
            options["stopping_criteria"] = [EndAtStopText(self._stops[sampling])]
        if self._share and can_decode(self._merged(trainer.generation_config)):
            # `generation_kwargs` may sample otherwise than it is scored
            sampled_at = trainer.generation_config.temperature if trainer.generation_config.do_sample else None
            recorder = recorder if sampled_at == sampling.temperature else None
            options["custom_generate"] = functools.partial(decode, recorder=recorder)
        try:
            with self._generating(**options):
                yield
        finally:
            trainer.generation_config, trainer.generation_kwargs = config, kwargs

    def _merged(self, config: GenerationConfig) -> GenerationConfig:
        """A config as `generate` completes it: what it leaves open is the model's."""
        merged, model = copy.deepcopy(config), self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)
        merged.update(**model.generation_config.to_dict(), defaults_only=True)
        return merged

    @contextlib.contextmanager
    def _generating(self, **options: Any) -> Iterator[None]:
        """Within, `generate` has these options too, for which TRL's call has no room."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)
        model.generate = functools.partial(model.generate, **options)
        try:
            yield
        finally:
            del model.generate

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        """Whether a turn of an agent holds one of its stop texts."""
        return self._stops[self._samplings[agent]].are_in(ids)
