# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Teams of different models: prompts, turns and generators of each agent's base behind the interface of one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..episodes.records import EndOfEpisode, Request, Turn
from ..prompts.builder import Observation, PromptBuilder
from ..prompts.views import View
from .generator import Generator, SampledTurn, check_sampled
from .speaker import Speaker
from .turn_reader import TurnReader


Part = TypeVar("Part")


def _places(parts: Mapping[str, Part], agents: Iterable[str]) -> dict[Part, list[int]]:
    """The places of agents, grouped by the part of their base."""
    places: dict[Part, list[int]] = {}
    for place, agent in enumerate(agents):
        places.setdefault(parts[agent], []).append(place)
    return places


class TeamPrompts:
    """A [`PromptBuilder`] for agents with different tokenizers: `builders` has the builder of each agent."""

    def __init__(self, builders: Mapping[str, PromptBuilder]):
        self._builders = builders
        first = next(iter(builders.values()))
        # The same for all agents
        self.aliases, self.template = first.aliases, first.template

    def for_agent(self, agent: str) -> PromptBuilder:
        return self._builders[agent]

    @property
    def view(self) -> View:
        return next(iter(self._builders.values())).view

    @view.setter
    def view(self, view: View) -> None:
        for builder in self._builders.values():
            builder.view = view

    def build(self, requests: Iterable[Request]) -> list[Observation]:
        requests = list(requests)
        built: dict[int, Observation] = {}
        for builder, places in _places(self._builders, [request.agent for request in requests]).items():
            built |= zip(places, builder.build([requests[place] for place in places]), strict=True)
        return [built[place] for place in range(len(requests))]


class TeamReader(TurnReader):
    """A [`TurnReader`] for agents with different tokenizers."""

    def __init__(self, readers: Mapping[str, TurnReader]):
        self._readers = readers
        self.uses_tools = any(reader.uses_tools for reader in readers.values())

    def read_sample(self, request: Request, *arguments: Any) -> Turn | EndOfEpisode:
        return self._readers[request.agent].read_sample(request, *arguments)

    def read_reply(self, request: Request, *arguments: Any) -> Turn:
        return self._readers[request.agent].read_reply(request, *arguments)


class TeamGenerator(Generator):
    """Lets the generator of each agent's base sample its turns. Requests of one base share batches."""

    def __init__(self, speakers: Mapping[str, Speaker]):
        self._generators = {agent: speaker.generator for agent, speaker in speakers.items()}
        self._vocabularies = {agent: speaker.vocabulary for agent, speaker in speakers.items()}
        self._all = list(dict.fromkeys(self._generators.values()))
        self.batches = all(generator.batches for generator in self._all)

    @property
    def keeps_cache(self) -> bool:
        return any(generator.keeps_cache for generator in self._all)

    async def generate(
        self, observed: Sequence[Observation], greedy: bool = False, sampling: Mapping[str, float] | None = None
    ) -> list[SampledTurn]:
        groups = _places(self._generators, [item.agent for item in observed])
        calls = [
            generator.generate([observed[place] for place in places], greedy=greedy, sampling=sampling)
            for generator, places in groups.items()
        ]
        # Servers sample at the same time
        results = [await call for call in calls] if self.batches else await asyncio.gather(*calls)
        turns: dict[int, SampledTurn] = {}
        for places, sampled in zip(groups.values(), results, strict=True):
            agents = [observed[place].agent for place in places]
            check_sampled(sampled, agents, self._vocabularies[agents[0]])
            turns |= zip(places, sampled, strict=True)
        return [turns[place] for place in range(len(observed))]

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        return self._generators[agent].holds_stop(agent, ids)

    def settings(self, agent: str) -> dict[str, Any]:
        return self._generators[agent].settings(agent)

    def drop_cache(self) -> None:
        for generator in self._all:
            generator.drop_cache()

    def publish(self, alone: bool = False) -> None:
        for generator in self._all:
            generator.publish(alone)

    def close(self) -> None:
        for generator in self._all:
            generator.close()

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for generator in self._all:
                await stack.enter_async_context(generator.connected())
            yield

    # ---- Of servers, by base ----

    def pin(self) -> list[Any]:
        return [generator.pin() for generator in self._all]  # type: ignore[attr-defined]

    def staleness(self, adapter: str, version: int) -> int:
        generator = next(item for item in self._all if adapter in item.adapters)  # type: ignore[attr-defined]
        return generator.staleness(adapter, version)  # type: ignore[attr-defined]

    def release(self, pins: list[Any]) -> None:
        for generator, pin in zip(self._all, pins, strict=True):
            generator.release(pin)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def using(self, pins: list[Any]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for generator, pin in zip(self._all, pins, strict=True):
                stack.enter_context(generator.using(pin))  # type: ignore[attr-defined]
            yield


def join_speakers(speakers: Mapping[str, Speaker]) -> Speaker:
    """The speaker of a team from the speakers of its agents. Agents on the same base have the same speaker."""
    first, *others = dict.fromkeys(speakers.values())
    if not others:
        return first
    return Speaker(
        prompts=TeamPrompts({agent: speaker.prompts for agent, speaker in speakers.items()}),  # type: ignore[arg-type]
        generator=TeamGenerator(speakers),
        reader=TeamReader({agent: speaker.reader for agent, speaker in speakers.items()}),
        vocabulary=max(speaker.vocabulary for speaker in speakers.values()),
    )
