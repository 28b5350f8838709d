# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Generation with transformers: one batched `generate` per adapter and sampling setting, under the right adapter."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from transformers import GenerationConfig, PreTrainedTokenizerBase

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
    def of(cls, agent: AgentSpec, args: Any) -> Sampling:
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

    def as_generation_kwargs(self) -> dict[str, Any]:
        """The settings under the names of `generate`."""
        return {
            "max_new_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
        }


# The names under which `generate` knows what an agent sets itself
_OF_AGENTS = {
    "max_new_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
}


def general_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of settings of `generate` those that all agents have in common and that can be written as JSON."""
    plain = (str, int, float, bool, list, type(None))
    return {key: value for key, value in settings.items() if key not in _OF_AGENTS and isinstance(value, plain)}


def own_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of settings of `generate` those that an agent may set itself, under the names of `AgentSpec`."""
    return {ours: settings[theirs] for theirs, ours in _OF_AGENTS.items()}


# Settings of `generate` that are without effect where nothing is sampled
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}


class Sampled(NamedTuple):
    """
    What was sampled for one observation.

    Args:
        ids (`list[int]`): token ids.
        logps (`list[float]`, *optional*): their log-probabilities, where these are as scoring would have them.
    """

    ids: list[int]
    logps: list[float] | None = None


class Engine(Protocol):
    """What [`TransformersGenerator`] runs `generate` with: a trainer ([`TrlEngine`]) or a model ([`ModelEngine`])."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def model(self) -> Any:
        """The model whose `generate` runs, without wrappers of data parallelism."""

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        """All settings of `generate` for an agent's sampling."""

    def generate(self, prompt_ids: list[list[int]], settings: Mapping[str, Any]) -> list[list[int]]:
        """Sample a completion for each prompt, up to and including its end-of-sequence token."""


class TransformersGenerator:
    """
    Generates turns with `generate` of transformers.

    Args:
        engine ([`Engine`]):
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

    def __init__(self, engine: Engine, policies, samplings: dict[str, Sampling], share: bool, records: bool):
        self._share, self.records = share, share and records
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
    ) -> list[Sampled]:
        """
        Args:
            agents (`Sequence[str]`):
                Who speaks, for each observation.
            prompt_ids (`Sequence[list[int]]`):
                The observations.
            by_reference (`bool`, *optional*, defaults to `False`):
                Let the agents' references speak instead of the agents.
            greedy (`bool`, *optional*, defaults to `False`):
                Take the most likely token each time instead of sampling.

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
            settings = self._engine.settings(sampling) | (GREEDY if greedy else {})
            with self._generating(sampling, settings, recorder), speaker:
                sampled = self._engine.generate([prompt_ids[i] for i in indices], settings)
            logps = recorder.logps.tolist() if recorder is not None and recorder.logps is not None else None
            for position, (index, ids) in enumerate(zip(indices, sampled, strict=True)):
                ids = self._stops[sampling].cut(ids)
                completions[index] = Sampled(ids, logps[position][: len(ids)] if logps is not None else None)
        return completions

    def settings(self, agent: str) -> dict[str, Any]:
        """All settings of `generate` for an agent."""
        return self._engine.settings(self._samplings[agent])

    @contextlib.contextmanager
    def _generating(
        self, sampling: Sampling, settings: Mapping[str, Any], recorder: Recorder | None
    ) -> Iterator[None]:
        """Context manager: `generate` stops at stop texts and decodes the fast way, for which calls have no room."""
        model = self._engine.model
        options: dict[str, Any] = {}
        if sampling.stop:
            options["stopping_criteria"] = [EndAtStopText(self._stops[sampling])]
        config = self._merged(GenerationConfig(**settings))
        if self._share and can_decode(config):
            # `generation_kwargs` may sample otherwise than it is scored
            sampled_at = settings["temperature"] if settings["do_sample"] else None
            recorder = recorder if sampled_at == sampling.temperature else None
            options["custom_generate"] = functools.partial(decode, recorder=recorder)
        own = model.__dict__.get("generate")  # somebody else may have put one there
        model.generate = functools.partial(model.generate, **options)
        try:
            yield
        finally:
            if own is None:
                del model.generate
            else:
                model.generate = own

    def _merged(self, config: GenerationConfig) -> GenerationConfig:
        """A config as `generate` completes it: what it leaves open is the model's."""
        merged = copy.deepcopy(config)
        merged.update(**self._engine.model.generation_config.to_dict(), defaults_only=True)
        return merged

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        """Whether a turn of an agent holds one of its stop texts."""
        return self._stops[self._samplings[agent]].are_in(ids)
