# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Generation of turns: how an agent samples, what comes of it, and what an engine has to offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..agents import AgentSpec


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


class Generator(Protocol):
    """An engine of generation for a team. To add one, implement these methods and choose it in `trainer/parts.py`."""

    def generate(
        self, agents: Sequence[str], prompt_ids: Sequence[list[int]], by_reference: bool = False, greedy: bool = False
    ) -> list[Sampled]:
        """
        Sample a turn for each observation.

        Args:
            agents (`Sequence[str]`): name of the agent of each observation.
            prompt_ids (`Sequence[list[int]]`): token ids of the observations.
            by_reference (`bool`, *optional*, defaults to `False`): sample from the agents' references.
            greedy (`bool`, *optional*, defaults to `False`): take the most likely token each time.

        Returns: the sampled tokens of each turn, in order, up to and including the token that ends it.
        """

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        """Whether the tokens of a turn of an agent hold one of its stop texts."""

    def settings(self, agent: str) -> dict[str, Any]:
        """Settings of `generate` for an agent, which are saved with the team."""
