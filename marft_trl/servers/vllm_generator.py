# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Generation by vLLM servers: every turn is a request of its own, under the present version of its agent's adapter."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from accelerate.utils.memory import clear_device_cache
from transformers import PreTrainedTokenizerBase

from ..config.sampling import Sampling
from ..episodes.records import SampledBy
from ..rollout.generator import Generator, Observed, Sampled
from ..rollout.stopping import StopTexts
from ..seams.logs import get_logger
from ..system.event_loop import run_coroutine
from ..system.processes import Processes
from ..system.randomness import seed_of
from ..weights.copies import PastCopies
from ..weights.policies import Policies
from .library import AdapterLibrary, Version
from .replicas import Replicas, ServerSettings
from .server import Order


logger = get_logger(__name__)

# Settings of `generate` that vLLM has under the same name, with the values that leave the distribution as it is
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
}
# Settings of `generate` that say nothing about what is sampled, or that requests have by other means
_ELSEWHERE = (
    *("max_new_tokens", "temperature", "do_sample", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("cache_implementation", "disable_compile"),
)
# Number of pins that staleness is counted over
_REMEMBERED = 1000
# Versions that turns are sampled from, where they are not the present ones
_PINNED: contextvars.ContextVar[dict[str, Version] | None] = contextvars.ContextVar("marft_pinned", default=None)
# Entry of the library that is the base without an adapter. No agent can have such a name.
BASE = "=base"


class VLLMGenerator(Generator):
    """
    Generates turns on vLLM servers.

    Args:
        policies ([`Policies`]): of the team.
        samplings (`Mapping[str, Sampling]`): sampling settings of each agent.
        library ([`AdapterLibrary`]): the adapters on the servers.
        servers ([`ServerSettings`]): addresses and limits.
        settings (`Callable`): `settings(sampling)` returns all settings of `generate`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): decodes stop texts.
        ends (`Sequence[int]`): ids of the tokens that end a turn.
        processes ([`Processes`], *optional*): the first one publishes for all. Without them, this one is alone.
        past ([`PastCopies`], *optional*): past copies that opponents act with.

    Attributes:
        library ([`AdapterLibrary`]): the adapters on the servers.
        servers ([`ServerSettings`]): addresses and limits.
    """

    batches = False

    def __init__(
        self,
        policies: Policies,
        samplings: Mapping[str, Sampling],
        library: AdapterLibrary,
        servers: ServerSettings,
        settings: Callable[[Sampling], dict[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        processes: Processes | None = None,
        past: PastCopies | None = None,
    ):
        self._past = past
        self.library, self.servers, self._policies = library, servers, policies
        self._samplings, self._settings, self._ends = samplings, settings, list(ends)
        self._processes = processes
        self._stops = {sampling: StopTexts(tokenizer, sampling.stop) for sampling in samplings.values()}
        self._requests = {agent: self._request(agent) for agent in samplings}
        self._open: dict[asyncio.AbstractEventLoop, Replicas] = {}
        self._pins: list[dict[str, Version]] = []
        self._pinned: deque[dict[str, int]] = deque(maxlen=_REMEMBERED)  # numbers of the latest pins
        self._asleep = servers.sleep  # as they were started

    def settings(self, agent: str) -> dict[str, Any]:
        """All settings of `generate` for an agent."""
        return self._settings(self._samplings[agent])

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        """Return `True` if a turn of an agent contains one of the agent's stop texts."""
        return self._stops[self._samplings[agent]].are_in(ids)

    def samples_what_is_scored(self, agent: str) -> bool:
        """`True` if an agent samples from the distribution that it is scored by."""
        settings, sampling = self.settings(agent), self._samplings[agent]
        is_whole = all(settings.get(name) in neutral for name, neutral in _NEUTRAL.items())
        return is_whole and settings["temperature"] == sampling.temperature

    def publish(self, alone: bool = False) -> None:
        """
        Let the servers have the present weights. The first process does it, and tells the others the names.

        Args:
            alone (`bool`, *optional*, defaults to `False`): whether the other processes do not call this. Then it has
                to be the first process, or nothing may have changed since the last time.
        """
        processes = self._processes
        with contextlib.nullcontext() if alone or processes is None else processes.together():
            run_coroutine(self._wake)
            current = self.library.publish(self._kept()) if self._is_main else None
        if alone or processes is None:
            return
        current = processes.broadcast(current)
        if self.servers.own is None:
            self.library.adopt(current, self._kept())
            return
        with processes.together():
            if not processes.is_main:
                self.library.follow(current, self._kept())

    def pin(self) -> dict[str, Version]:
        """The present versions of all adapters, which servers keep until [`~VLLMGenerator.release`]."""
        pin = self.library.current
        self._pins.append(pin)
        self._pinned.append({entry: version.number for entry, version in pin.items()})
        return pin

    def release(self, pin: dict[str, Version]) -> None:
        """Versions of [`~VLLMGenerator.pin`] are no longer used."""
        self._pins = [one for one in self._pins if one is not pin]

    @contextlib.contextmanager
    def using(self, pin: dict[str, Version]) -> Iterator[None]:
        """Context manager: turns are sampled from versions of [`~VLLMGenerator.pin`]."""
        before = _PINNED.set(pin)
        try:
            yield
        finally:
            _PINNED.reset(before)

    def staleness(self, adapter: str, version: int) -> int:
        """How many of the states that [`~VLLMGenerator.pin`] has given are later ones of an adapter than a version."""
        return sum(number > version for number in {pin[adapter] for pin in self._pinned})

    def _kept(self) -> list[Version]:
        return [version for pin in self._pins for version in pin.values()]

    def close(self) -> None:
        """Take the adapters from the servers."""
        if self._is_main or self.servers.own is not None:
            run_coroutine(self._wake)
            self.library.close(its_files=self._is_main)
            run_coroutine(self._sleep)

    @property
    def _is_main(self) -> bool:
        return self._processes is None or self._processes.is_main

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Asynchronous context manager: connections to the servers, for the present event loop."""
        await self._wake()
        loop = asyncio.get_running_loop()
        async with Replicas(self.servers, self.library.make_ready) as replicas:
            self._open[loop] = replicas
            try:
                yield
            finally:
                if self._open.get(loop) is replicas:
                    del self._open[loop]
        await self._sleep()

    async def _wake(self) -> None:
        if self._asleep:
            # The server is another process: what the allocator of this one keeps for later is gone for it
            clear_device_cache(garbage_collection=True)
            await self.library.wake()
            self._asleep = False

    async def _sleep(self) -> None:
        if self.servers.sleep:
            await self.library.sleep()
            self._asleep = True

    async def generate(
        self, observed: Sequence[Observed], greedy: bool = False, sampling: Mapping[str, float] | None = None
    ) -> list[Sampled]:
        return await asyncio.gather(*[self._sample(one, greedy, sampling) for one in observed])

    async def _sample(self, observed: Observed, greedy: bool, sampling: Mapping[str, float] | None) -> Sampled:
        agent, ids, key, by_reference, copy, live = observed
        own = self._samplings[agent]
        entry = self.reference_entry(agent) if by_reference else self._policies.adapter_of(agent)
        if copy is not None and self._past is not None:
            entry = self._past.entry(agent, copy)
        version, seed = (_PINNED.get() or self.library.current)[entry], seed_of(key)
        given = {"temperature": 0.0} if greedy else sampling or {}
        settings = {**self._requests[agent], "seed": seed, **given}
        limit = own.max_completion_length
        if live is not None and live.limit is not None:
            limit = min(limit, live.limit)
        order = Order(version.name, ids, limit, settings)
        hear = None if live is None else live.hear
        generated, server = await self._open[asyncio.get_running_loop()].generate(order, hear)
        ids = self._stops[own].cut(generated.ids)
        is_scored = not (greedy or sampling or by_reference) and self.samples_what_is_scored(agent)
        logps = generated.logps[: len(ids)] if is_scored else None
        return Sampled(ids, logps, SampledBy(server, version.number, seed))

    def reference_entry(self, agent: str) -> str:
        """Entry of the library that has the reference of an agent."""
        adapter = self._policies.adapter_of(agent)
        return BASE if self._policies.starts_as_base(agent) else reference_of(adapter)

    def _request(self, agent: str) -> dict[str, Any]:
        """What all requests for an agent have in common, under vLLM's names."""
        settings, sampling = self.settings(agent), self._samplings[agent]
        unknown = sorted(
            name
            for name, value in settings.items()
            if name not in _NEUTRAL and name not in _ELSEWHERE and value is not None
        )
        if unknown or settings.get("do_sample") is False:
            raise ValueError(
                f"`generation_kwargs` has {(unknown or ['do_sample'])[0]!r}, which marft_trl does not translate for "
                f"vLLM. Leave it out, or set `use_vllm=False`. It translates temperature, {', '.join(_NEUTRAL)}."
            )
        given = {name: settings[name] for name in _NEUTRAL if settings.get(name) is not None}
        stops = {"stop": list(sampling.stop)} if sampling.stop else {}
        ends = {"ignore_eos": True, "stop_token_ids": self._ends}
        return {"temperature": settings["temperature"], "top_p": 1.0, "top_k": 0, **given, **ends, **stops}


def reference_of(adapter: str) -> str:
    """Entry of the library that has the reference of an adapter."""
    return f"={adapter}-reference"
