# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Generation with vLLM servers, and the correction of their log-probabilities in the loss."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import PreTrainedTokenizerBase

from ...adapters.policies import Policies
from ...algorithms import functional
from ...algorithms.rows import Row
from ...config.team_setup import RunContext, Sampling
from ...episodes.records import SampledBy
from ...prompts.builder import Observation
from ...rollout.generator import Generator, SampledTurn
from ...rollout.turn_reader import StopStrings
from ...seams.libraries import get_logger
from ...system.event_loop import run_coroutine
from ...system.processes import Processes
from ...system.randomness import make_seed
from .library import AdapterLibrary, Version
from .server import GenerateRequest, ServerPool


logger = get_logger(__name__)


# Share of `fidelity_tolerance` above which a difference logs a warning
_WARN_SHARE = 0.25


class FidelityError(RuntimeError):
    """Raised if a server sampled with other weights than the trainer has. Its turns were not trained on."""


class SamplingCorrection:
    """Weights tokens by importance sampling. A mean difference of log-probabilities above `tolerance` ends the run."""

    def __init__(self, run: RunContext, tolerance: float, staleness: Callable[[str, int], int]):
        # `staleness(adapter, version)`: number of newer versions that were published
        self._args, self._tolerance = run.args, tolerance
        self._metrics, self._processes, self._staleness = run.metrics, run.processes, staleness
        self._warned: set[tuple[str, str]] = set()

    def corrected(self, rows: Sequence[Row]) -> list[Row]:
        """
        Return the rows with `sampling_weights`. The rows must have `old_per_token_logps`, the log-probabilities under
        the trained weights. Raises a [`FidelityError`] if those of a server differ.
        """
        compared = [row for row in rows if row.sampling_logps is not None and row.old_per_token_logps is not None]
        with self._processes.failing_together():
            stale = self._check_staleness(rows)
            self._check([row for row in compared if not stale[row.number]])
        counts = torch.tensor([sum(stale.values()), len(rows)], dtype=torch.float64)
        total, count = self._processes.sum(counts).tolist()
        if count:
            self._metrics.add("sampling/staleness", total / count)
        weights = {}
        if self._args.vllm_importance_sampling_correction:
            weights = {row.number: self._weights(row) for row in compared}
        self._report(compared, list(weights.values()))
        ones = {row.number: torch.ones(len(row.completion_ids)) for row in rows} if weights else {}
        filled = ones | weights
        return [replace(row, sampling_weights=filled.get(row.number)) for row in rows]

    def _check_staleness(self, rows: Sequence[Row]) -> dict[int, int]:
        """Return the staleness of each row, by row number; raise if it is above `max_staleness`."""
        stale = {
            row.number: self._staleness(row.adapter, row.sampled_by.version) if row.sampled_by is not None else 0
            for row in rows
        }
        worst = max(rows, key=lambda row: stale[row.number], default=None)
        if worst is not None and stale[worst.number] > self._args.max_staleness:
            raise RuntimeError(
                f"A turn of {worst.agent!r} was sampled from an adapter that is {stale[worst.number]} versions old, "
                f"but `max_staleness` is {self._args.max_staleness}. This is a bug; please report it."
            )
        return stale

    def _weights(self, row: Row) -> torch.Tensor:
        args = self._args
        bounds = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        return functional.sampling_weights(-_differences(row), args.vllm_importance_sampling_mode, *bounds)

    def _check(self, rows: Sequence[Row]) -> None:
        by_origin: dict[tuple[str, str, int], list[torch.Tensor]] = defaultdict(list)
        for row in rows:
            if row.sampled_by is not None:
                by_origin[row.agent, row.sampled_by.server, row.sampled_by.version].append(_differences(row))
        for (agent, server, version), differences_by_row in by_origin.items():
            differences = torch.cat(differences_by_row).abs()
            if not len(differences):
                continue
            mean, largest = differences.mean().item(), differences.max().item()
            finding = (
                f"The log-probabilities of {agent!r} on {server} (version {version} of the adapter) differ from the "
                f"trainer's by {mean:.3g} on average over {len(differences)} tokens, and by {largest:.3g} at most"
            )
            if not mean <= self._tolerance:
                raise FidelityError(
                    f"{finding}. The tolerance is {self._tolerance:g}. The server has other weights, or computes in "
                    "another precision; its turns were not used for training. If the difference is expected, increase "
                    "`fidelity_tolerance`."
                )
            if mean > _WARN_SHARE * self._tolerance and (agent, server) not in self._warned:
                self._warned.add((agent, server))
                logger.warning(f"{finding}. An average above `fidelity_tolerance={self._tolerance:g}` stops the run.")

    def _report(self, rows: Sequence[Row], weights: Sequence[torch.Tensor]) -> None:
        differences: dict[str, tuple[int, float, float]] = {}
        for agent in {row.agent for row in rows}:
            found = torch.cat([_differences(row).abs() for row in rows if row.agent == agent])
            differences[agent] = len(found), found.sum().item(), found.max().item() if len(found) else 0.0
        token_weights = torch.cat(list(weights)) if weights else torch.empty(0)
        weight_range = tuple(map(float, token_weights.aminmax())) if len(token_weights) else None
        masked = (token_weights == 0.0).sum().item()
        local_stats = differences, len(token_weights), token_weights.sum().item(), masked, weight_range
        everywhere = self._processes.gather([local_stats])
        self._report_differences([value for value, *_ in everywhere])
        if count := sum(number for _, number, *_ in everywhere):
            name = "sampling/importance_sampling_ratio"
            bounds = [bounds for *_, bounds in everywhere if bounds is not None]
            self._metrics.add(f"{name}/min", min(low for low, _ in bounds))
            self._metrics.add(f"{name}/mean", sum(total for _, _, total, _, _ in everywhere) / count)
            self._metrics.add(f"{name}/max", max(high for _, high in bounds))
            self._metrics.add("sampling/masked_tokens", sum(number for *_, number, _ in everywhere) / count)

    def _report_differences(self, everywhere: Sequence[dict[str, tuple[int, float, float]]]) -> None:
        name = "sampling/sampling_logp_difference"
        agents = sorted({agent for by_agent in everywhere for agent in by_agent})
        for agent in [None, *agents]:  # `None`: all agents together
            differences = [value for by_agent in everywhere for key, value in by_agent.items() if agent in (None, key)]
            if count := sum(number for number, _, _ in differences):
                prefix = "" if agent is None else f"agents/{agent}/"
                self._metrics.add(f"{prefix}{name}/mean", sum(total for _, total, _ in differences) / count)
                self._metrics.add(f"{prefix}{name}/max", max(largest for _, _, largest in differences))


def _differences(row: Row) -> torch.Tensor:
    """Log-probabilities of a row's tokens on the server, minus those under the trainer's weights, `(L,)`."""
    return cast(torch.Tensor, row.sampling_logps) - cast(torch.Tensor, row.old_per_token_logps).float()


# Settings of `generate` that vLLM has under the same name, with the values that do not change the distribution
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
}
# Settings of `generate` that do not affect sampling, or that requests set elsewhere
_IGNORED_SETTINGS = (
    *("max_new_tokens", "temperature", "do_sample", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("cache_implementation", "disable_compile"),
)
# Number of the latest pins over which staleness is counted
_MAX_PINS = 1000
# Library entry of the base model without an adapter. It is not a valid agent name.
BASE = "=base"


class VLLMGenerator(Generator):
    batches = False

    def __init__(
        self,
        policies: Policies,
        samplings: Mapping[str, Sampling],
        library: AdapterLibrary,
        settings: Callable[[Sampling], dict[str, Any]],  # all settings of `generate`
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        processes: Processes | None = None,  # of which the first publishes for all
    ):
        self.library, self.servers, self._policies = library, library.servers, policies
        self._samplings, self._settings, self._end_token_ids = samplings, settings, list(end_token_ids)
        self._processes = processes
        self._stops = {sampling: StopStrings(tokenizer, sampling.stop) for sampling in samplings.values()}
        self._requests = {agent: self._request_settings(agent) for agent in samplings}
        self._connections: dict[asyncio.AbstractEventLoop, ServerPool] = {}
        self._pins: list[dict[str, Version]] = []
        self._recent_pins: deque[dict[str, int]] = deque(maxlen=_MAX_PINS)  # version numbers of the latest pins
        # Versions to sample from, if not the current versions
        self._pinned = contextvars.ContextVar[dict[str, Version] | None]("marft_pinned", default=None)
        self._asleep = self.servers.sleep  # in sleep mode, servers start asleep

    def settings(self, agent: str) -> dict[str, Any]:
        return self._settings(self._samplings[agent])

    @property
    def adapters(self) -> set[str]:
        return set(map(self._policies.get_adapter, self._samplings))

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        return self._stops[self._samplings[agent]].are_in(ids)

    def samples_scored_distribution(self, agent: str) -> bool:
        """`True` if an agent samples from the distribution under which its turns are scored."""
        settings, sampling = self.settings(agent), self._samplings[agent]
        is_unfiltered = all(settings.get(name) in neutral for name, neutral in _NEUTRAL_VALUES.items())
        return is_unfiltered and settings["temperature"] == sampling.temperature

    def publish(self, alone: bool = False) -> None:
        """
        Publish the current weights. The first process does so, and broadcasts the new names. With `alone`, only this
        process calls; it must be the first, or the weights must be unchanged since the last call.
        """
        processes = None if alone else self._processes
        with contextlib.nullcontext() if processes is None else processes.failing_together():
            run_coroutine(self._wake)
            current = self.library.publish(self._pinned_versions()) if self._is_main else None
        if processes is None:
            return
        current = processes.broadcast(current)
        if self.servers.own is None:
            self.library.adopt(current, self._pinned_versions())
            return
        with processes.failing_together():
            if not processes.is_main:
                self.library.follow(current, self._pinned_versions())

    def pin(self) -> dict[str, Version]:
        """Return the current versions of all adapters, which servers keep until [`~VLLMGenerator.release`]."""
        pin = self.library.current
        self._pins.append(pin)
        self._recent_pins.append({entry: version.number for entry, version in pin.items()})
        return pin

    def release(self, pin: dict[str, Version]) -> None:
        self._pins = [other for other in self._pins if other is not pin]

    @contextlib.contextmanager
    def using(self, pin: dict[str, Version]) -> Iterator[None]:
        """Sample turns from the versions of a [`~VLLMGenerator.pin`] within the context."""
        reset_token = self._pinned.set(pin)
        try:
            yield
        finally:
            self._pinned.reset(reset_token)

    def staleness(self, adapter: str, version: int) -> int:
        """Return how many different pinned versions of an adapter are newer than `version`."""
        return sum(number > version for number in {pin[adapter] for pin in self._recent_pins})

    def _pinned_versions(self) -> list[Version]:
        return [version for pin in self._pins for version in pin.values()]

    def close(self) -> None:
        """Remove the adapters from the servers."""
        if self._is_main or self.servers.own is not None:
            run_coroutine(self._wake)
            self.library.close(delete_files=self._is_main)
            run_coroutine(self._sleep)

    @property
    def _is_main(self) -> bool:
        return self._processes is None or self._processes.is_main

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Connect to the servers, for the current event loop."""
        await self._wake()
        loop = asyncio.get_running_loop()
        async with ServerPool(self.servers, self.library.make_ready) as pool:
            self._connections[loop] = pool
            try:
                yield
            finally:
                if self._connections.get(loop) is pool:
                    del self._connections[loop]
        await self._sleep()

    async def _wake(self) -> None:
        if self._asleep:
            # The server is another process, so free the memory that the allocator of this process has cached
            clear_device_cache(garbage_collection=True)
            await self.library.wake()
            self._asleep = False

    async def _sleep(self) -> None:
        if self.servers.sleep:
            await self.library.sleep()
            self._asleep = True

    async def generate(
        self, observed: Sequence[Observation], greedy: bool = False, sampling: Mapping[str, float] | None = None
    ) -> list[SampledTurn]:
        return await asyncio.gather(*[self._sample(observation, greedy, sampling) for observation in observed])

    async def _sample(self, observed: Observation, greedy: bool, sampling: Mapping[str, float] | None) -> SampledTurn:
        agent, live = observed.agent, observed.live
        agent_sampling = self._samplings[agent]
        entry = self._policies.get_adapter(agent)
        if observed.by_reference:
            entry = BASE if self._policies.base_is_reference(agent) else make_reference_name(entry)
        version, seed = (self._pinned.get() or self.library.current)[entry], make_seed(observed.key)
        overrides = {"temperature": 0.0} if greedy else sampling or {}
        settings = {**self._requests[agent], "seed": seed, **overrides}
        limit = agent_sampling.max_completion_length
        if live is not None and live.limit is not None:
            limit = min(limit, live.limit)
        if live is not None and live.schema is not None:
            settings["structured_outputs"] = {"json": live.schema}
        request = GenerateRequest(version.name, observed.ids, limit, settings)
        on_tokens = None if live is None else live.on_tokens
        generated, server = await self._connections[asyncio.get_running_loop()].generate(request, on_tokens)
        ids = self._stops[agent_sampling].cut(generated.ids)
        is_scored = not (greedy or sampling or observed.by_reference) and self.samples_scored_distribution(agent)
        logps = generated.logps[: len(ids)] if is_scored else None
        return SampledTurn(ids, logps, SampledBy(server, version.number, seed))

    def _request_settings(self, agent: str) -> dict[str, Any]:
        """Return the settings that all requests for an agent share, under vLLM's names."""
        settings, sampling = self.settings(agent), self._samplings[agent]
        known = {*_NEUTRAL_VALUES, *_IGNORED_SETTINGS}
        unknown = sorted(name for name, value in settings.items() if name not in known and value is not None)
        if unknown or settings.get("do_sample") is False:
            raise ValueError(
                f"`generation_kwargs` has {(unknown or ['do_sample'])[0]!r}, which is not supported with vLLM. "
                f"Remove it, or set `use_vllm=False`. Supported settings: temperature, {', '.join(_NEUTRAL_VALUES)}."
            )
        overrides = {name: settings[name] for name in _NEUTRAL_VALUES if settings.get(name) is not None}
        stops = {"stop": list(sampling.stop)} if sampling.stop else {}
        ends = {"ignore_eos": True, "stop_token_ids": self._end_token_ids}
        return {"temperature": settings["temperature"], "top_p": 1.0, "top_k": 0, **overrides, **ends, **stops}


def make_reference_name(adapter: str) -> str:
    return f"={adapter}-reference"
