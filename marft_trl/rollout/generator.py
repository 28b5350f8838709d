# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Generation of turns: its result, and the interface of generators."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..episodes.records import SampledBy


class Sampled(NamedTuple):
    """
    Sampled completion of one observation.

    Args:
        ids (`list[int]`): token ids of the completion.
        logps (`list[float]`, *optional*): log-probabilities of the tokens. Without a server, only if they equal those
            that scoring computes.
        sampled_by ([`SampledBy`], *optional*): the server that sampled it.
    """

    ids: list[int]
    logps: list[float] | None = None
    sampled_by: SampledBy | None = None


def check_sampled(sampled: Sequence[Sampled], agents: Sequence[str], vocabulary: int | None = None) -> None:
    """
    Check what a generator returned.

    Args:
        sampled (`Sequence[Sampled]`): the completions.
        agents (`Sequence[str]`): the agents that were to speak.
        vocabulary (`int`, *optional*): number of token ids of the model.

    Raises:
        ValueError: there are more or fewer completions than observations, or one has a token that the model does not
            have, or not one log-probability per token.
    """
    if len(sampled) != len(agents):
        raise ValueError(f"The generator returned {len(sampled)} completions for {len(agents)} observations.")
    for agent, (ids, logps, _) in zip(agents, sampled, strict=True):
        wrong = [index for index in ids if not 0 <= index < vocabulary] if vocabulary is not None else []
        if wrong:
            raise ValueError(
                f"The generator returned the token id {wrong[0]} for a turn of {agent!r}; the model has {vocabulary} "
                "tokens. Generate with the tokenizer of the model."
            )
        if logps is not None and len(logps) != len(ids):
            raise ValueError(
                f"The generator returned {len(logps)} log-probabilities for the {len(ids)} tokens of a turn of "
                f"{agent!r}."
            )


class Generator(Protocol):
    """Samples the turns of a team. To add a generator, write these methods and choose it in `trainer/parts.py`."""

    def generate(
        self,
        agents: Sequence[str],
        prompt_ids: Sequence[list[int]],
        by_reference: bool = False,
        greedy: bool = False,
        copies: Sequence[int | None] | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> list[Sampled]:
        """
        Sample a turn for each observation.

        Args:
            agents (`Sequence[str]`): name of the agent of each observation.
            prompt_ids (`Sequence[list[int]]`): token ids of the observations.
            by_reference (`bool`, *optional*, defaults to `False`): sample from the agents' references.
            greedy (`bool`, *optional*, defaults to `False`): take the most likely token each time.
            copies (`Sequence[int]`, *optional*): for each observation the past copy that the agent acts with, or
                `None`, see [`PastCopies`].
            sampling (`dict`, *optional*): `temperature`, `top_p`, `top_k` and `min_p` in place of the agents' own.

        Returns: the sampled tokens of each turn, in order, up to and including the token that ends it.
        """

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        """`True` if the tokens of a turn of an agent hold one of its stop texts."""

    def settings(self, agent: str) -> dict[str, Any]:
        """Settings of `generate` for an agent, which are saved with the team."""


class StreamGenerator(Protocol):
    """
    Samples each turn by itself, as soon as it is asked for: the interface of generators that servers stand behind. A
    generator with the attribute `streams = True` has it.
    """

    streams: bool

    def publish(self, alone: bool = False) -> None:
        """
        Let the present weights generate from now on. Called on every process, between rollouts.

        Args:
            alone (`bool`, *optional*, defaults to `False`): whether the other processes do not call this.
        """

    def pin(self) -> Any:
        """The present weights. They are kept until [`~StreamGenerator.release`]."""

    def release(self, pin: Any) -> None:
        """Weights of [`~StreamGenerator.pin`] are no longer used."""

    def using(self, pin: Any) -> contextlib.AbstractContextManager[None]:
        """Context manager: turns are sampled from weights of [`~StreamGenerator.pin`]."""

    def close(self) -> None:
        """Take from servers what they were given. Later calls of [`~StreamGenerator.publish`] give it to them anew."""

    def connected(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Asynchronous context manager around all calls of [`~StreamGenerator.sample`] in an event loop."""

    async def sample(
        self,
        agent: str,
        prompt_ids: list[int],
        key: tuple,
        by_reference: bool = False,
        greedy: bool = False,
        copy: int | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> Sampled:
        """
        Sample a turn.

        Args:
            agent (`str`): name of the agent.
            prompt_ids (`list[int]`): token ids of the observation.
            key (`tuple`): place of the turn in the run, which the seed is made from.
            by_reference (`bool`, *optional*, defaults to `False`): sample from the agent's reference.
            greedy (`bool`, *optional*, defaults to `False`): take the most likely token each time.
            copy (`int`, *optional*): the past copy that the agent acts with, see [`PastCopies`].
            sampling (`dict`, *optional*): `temperature`, `top_p`, `top_k` and `min_p` in place of the agent's own.
        """

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        """`True` if the tokens of a turn of an agent hold one of its stop texts."""

    def settings(self, agent: str) -> dict[str, Any]:
        """Settings of `generate` for an agent, which are saved with the team."""
