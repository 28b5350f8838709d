# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Generation with transformers: batched calls of `generate` under the right adapters."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..adapters.policies import Policies
from ..config.team_setup import GREEDY, Sampling
from ..prompts.builder import Observation
from ..seams.generation import (
    TrlEngine,
    forward_in_precision,
    generating_by,
    generating_in_precision,
    masks_what_comes_later,
)
from ..seams.libraries import get_logger
from ..seams.lora_layers import DecodingLayers, MixedLora
from ..seams.vision import ImageProcessor
from ..shared_prefix.decoding import Recorder, StepStore, can_decode, decode
from ..shared_prefix.forward import RowAdapters
from .generator import DrawnByRow, Generator, LiveRows, SampledTurn
from .turn_reader import StopStringCriterion, StopStrings


logger = get_logger(__name__)

# Most rows per agent for which turns of several agents are decoded together: with few rows, further rows cost little
MIXED_ROWS = 16


# Settings that name tokens of a model
_TOKENS = ("_token_id", "suppress_tokens")


class ModelEngine:
    """
    Runs `generate` of a model under its active adapter. `generation` has the settings that all agents share, and
    `of_agent` those of an agent; tokens are always the model's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        generation: Mapping[str, Any],
        autocast: torch.dtype | None = None,
        of_agent: Callable[[Sampling], Mapping[str, Any]] = Sampling.as_generation_kwargs,
    ):
        self.model, self.tokenizer, self._of_agent = model, tokenizer, of_agent
        self._tokens = {name: value for name, value in generation.items() if name.endswith(_TOKENS)}
        self._generation, self.autocast = dict(generation), autocast
        ends = self._generation.get("eos_token_id", tokenizer.eos_token_id)
        self.end_token_ids: list[int] = [ends] if isinstance(ends, int) else list(ends)

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        return {**self._generation, **self._of_agent(sampling), **self._tokens}

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: list[list[int]],
        settings: Mapping[str, Any],
        options: Mapping[str, Any],
        images: Callable[[torch.Tensor, Sequence[int]], dict[str, Any]] | None = None,
    ) -> list[list[int]]:
        device, width = self.model.device, max(map(len, prompt_ids))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in prompt_ids], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompt_ids], device=device)
        config = GenerationConfig(**settings, disable_compile=True)
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            **({} if images is None else images(ids, [width] * len(ids))),
        }
        with contextlib.ExitStack() as stack:  # empty in most teams: a served request pays for each context
            for in_precision in (forward_in_precision, generating_in_precision) if self.autocast else ():
                stack.enter_context(in_precision(self.model, self.autocast))
            rows = self.model.generate(**inputs, generation_config=config, **options)
        return [self._up_to_end(row) for row in rows[:, width:].tolist()]

    @torch.no_grad()
    def next_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits `(V,)` after some tokens, in float32."""
        with forward_in_precision(self.model, self.autocast):
            return self.model(input_ids=torch.tensor([list(ids)], device=self.model.device)).logits[0, -1].float()

    def _up_to_end(self, ids: list[int]) -> list[int]:
        return ids[: next((index for index, token in enumerate(ids) if token in self.end_token_ids), len(ids)) + 1]


class _DecodingGroup(NamedTuple):
    """What the rows of one call of `generate` have in common. The adapter is empty if they differ in it."""

    adapter: str
    sampling: Sampling
    has_images: bool


class TransformersGenerator(Generator):
    """
    Generator of a model, which mixes adapters in a batch if its layers allow that.

    Args:
        share: compute the common prefix of several observations only once.
        records: record the log-probabilities of sampled tokens, where prefixes are shared.
        images: processes images of observations, for a vision-language model.
        is_sharded: a sharded base neither mixes adapters nor replays graphs, whose weights have to stay in place.
    """

    def __init__(
        self,
        engine: ModelEngine | TrlEngine,
        policies: Policies,
        samplings: Mapping[str, Sampling],
        share: bool,
        records: bool = False,
        is_sharded: bool = False,
        images: ImageProcessor | None = None,
    ):
        model = engine.model
        names = list(dict.fromkeys(map(policies.get_adapter, samplings)))  # an agent without a policy has none
        names = [name for name in names if policies.models.get(name) is model]
        can_mix = share and not is_sharded and MixedLora.find_obstacle(model, names) is None
        self._mixed = MixedLora(model) if can_mix else None  # decodes few rows of several agents together
        self._share, self.records, self._is_sharded = share, share and records, is_sharded
        self._engine, self._policies, self._samplings = engine, policies, samplings
        self._is_noted, self._images = False, images
        self._store: StepStore | None = None  # made when steps keep their shapes
        self._layers = DecodingLayers(lambda: engine.model)
        # A copied tokenizer: threads cannot share one, and the thread that samples may differ from the one that reads
        stops = {sampling.stop for sampling in samplings.values()}
        self._stops = {stop: StopStrings(copy.deepcopy(engine.tokenizer) if stop else None, stop) for stop in stops}

    async def generate(
        self, observed: Sequence[Observation], greedy: bool = False, sampling: Mapping[str, float] | None = None
    ) -> list[SampledTurn]:
        overrides: dict[str, Any] = dict(sampling or {})
        sampled: dict[int, SampledTurn] = {}
        for by_reference in (False, True):
            groups: dict[_DecodingGroup, list[int]] = {}
            for index, observation in enumerate(observed):
                if observation.by_reference == by_reference:
                    agent_sampling: Sampling = dataclasses.replace(self._samplings[observation.agent], **overrides)
                    adapter, has_images = self._policies.get_adapter(observation.agent), bool(observation.images)
                    group = _DecodingGroup(adapter, agent_sampling, has_images)
                    groups.setdefault(group, []).append(index)
            for group, indices in (groups if by_reference else self._joined(groups)).items():
                group_turns = self._generate_group(group, [observed[index] for index in indices], overrides, greedy)
                sampled |= zip(indices, group_turns, strict=True)
        return [sampled[index] for index in range(len(observed))]

    def _generate_group(
        self, group: _DecodingGroup, observed: Sequence[Observation], overrides: dict[str, Any], greedy: bool
    ) -> list[SampledTurn]:
        """The turns of one call of `generate`, either all by references or none."""
        agent, by_reference, sampling = observed[0].agent, observed[0].by_reference, group.sampling
        self._policies.activate(agent)
        speaker = self._policies.reference(agent) if by_reference else contextlib.nullcontext()
        recorder = Recorder() if self.records and not by_reference else None
        settings = self._engine.settings(sampling) | overrides | (GREEDY if greedy else {})
        live = self._live_rows(observed, settings)
        adapters = [self._policies.get_adapter(observation.agent) for observation in observed]
        is_mixed = len(set(adapters)) > 1 and self._mixed is not None
        if is_mixed:
            speaker = cast(MixedLora, self._mixed).on()
        images = None
        if group.has_images:
            images = functools.partial(
                cast(Any, self._images).for_model, [observation.images for observation in observed]
            )
        own_loop = self._share and images is None  # TRL's and transformers' loop takes images
        options = self._options(sampling, settings, recorder, adapters if is_mixed else None, live, own_loop)
        loop = options.get("custom_generate")
        layers: contextlib.AbstractContextManager[Hashable | None] = contextlib.nullcontext()
        if loop is not None:
            settings = {**settings, "cache_implementation": None}  # the loop makes the cache itself
            layers = self._layers.on() if loop.keywords["is_fixed"] else layers
        with speaker, layers as key, generating_by(self._engine.model, settings):
            if loop is not None:
                loop.keywords["key"] = key
            try:
                ids = [observation.ids for observation in observed]
                sampled = self._engine.generate(ids, settings, options, images)
            except torch.OutOfMemoryError:
                self.drop_cache()  # a smaller batch is tried with less room
                raise
        logps = recorder.logps.tolist() if recorder is not None and recorder.logps is not None else None
        if live is not None:
            sampled = [ids[:limit] for ids, limit in zip(sampled, live.limits, strict=True)]
        turns = list(map(self._stops[sampling.stop].cut, sampled)) if sampling.stop else sampled
        return [SampledTurn(ids, logps[i][: len(ids)] if logps is not None else None) for i, ids in enumerate(turns)]

    @property
    def keeps_cache(self) -> bool:
        settings = self._engine.settings(next(iter(self._samplings.values())))
        return self._engine.model.device.type == "cuda" and self._find_capture_obstacle(settings) is None

    def keeps_shapes(self, settings: Mapping[str, Any], sampling: Sampling, live: LiveRows | None) -> bool:
        """Whether decoding steps keep their shapes, so that a GPU can replay them: if set, and by default on a GPU."""
        wanted, is_gpu = settings.get("cache_implementation"), self._engine.model.device.type == "cuda"
        if not is_gpu and wanted != "static":
            return False
        obstacle = self._find_capture_obstacle(settings)
        if is_gpu and not self._is_noted:
            self._is_noted = True
            log = logger.info if obstacle is None or wanted == "dynamic" else logger.warning
            log(f"Decoding {'replays CUDA graphs' if obstacle is None else f'does not use CUDA graphs: {obstacle}'}.")
        if live is not None and sampling.stop:  # who listens would hear what comes after a stop string
            return False
        return obstacle is None

    def _find_capture_obstacle(self, settings: Mapping[str, Any]) -> str | None:
        if settings.get("cache_implementation") == "dynamic":
            return '`cache_implementation="dynamic"` is set'
        if self._is_sharded:
            return "the base model is sharded"
        if not masks_what_comes_later(self._engine.model):
            return "`attn_implementation` is neither `sdpa` nor `eager`"
        return None if self._share else "`share_prefixes=False` is set, or the base model cannot share prefixes"

    def _live_rows(self, observed: Sequence[Observation], settings: Mapping[str, Any]) -> LiveRows | None:
        turns = [observation.live for observation in observed if observation.live is not None]
        if not turns:
            return None
        device, ends = self._engine.model.device, settings["eos_token_id"]
        ends = [ends] if isinstance(ends, int) else ends or []
        return LiveRows(turns, ends, settings["max_new_tokens"], bool(settings["do_sample"]), device)

    def _joined(self, groups: dict[_DecodingGroup, list[int]]) -> dict[_DecodingGroup, list[int]]:
        joined: dict[_DecodingGroup, list[int]] = {}
        for group, indices in groups.items():
            alike = [value for item, value in groups.items() if item[1:] == group[1:]]
            is_small = sum(map(len, alike)) <= MIXED_ROWS * len(alike)
            may_be = self._mixed is not None and len(alike) > 1 and is_small and not group.has_images
            if may_be and self._can_decode(self._engine.settings(group.sampling)):
                group = group._replace(adapter="")
            joined.setdefault(group, []).extend(indices)
        return joined

    def _can_decode(self, settings: Mapping[str, Any]) -> bool:
        return self._share and can_decode(GenerationConfig(**settings))

    def settings(self, agent: str) -> dict[str, Any]:
        return self._engine.settings(self._samplings[agent])

    def _options(
        self,
        sampling: Sampling,
        settings: Mapping[str, Any],
        recorder: Recorder | None,
        adapters: Sequence[str] | None = None,
        live: LiveRows | None = None,
        own_loop: bool = True,
    ) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if sampling.stop:
            options["stopping_criteria"] = [StopStringCriterion(self._stops[sampling.stop])]
        if own_loop and self._can_decode(settings):
            # `generation_kwargs` may set a sampling temperature that differs from the temperature of scoring
            sampled_at = settings["temperature"] if settings["do_sample"] else None
            recorder = recorder if sampled_at == sampling.temperature else None
            rows = None if adapters is None else RowAdapters(adapters, cast(MixedLora, self._mixed).use)
            is_fixed = self.keeps_shapes(settings, sampling, live)
            if is_fixed and self._store is None:
                self._store = StepStore()
            options["custom_generate"] = functools.partial(
                decode, recorder=recorder, adapters=rows, is_fixed=is_fixed, store=self._store, watch=live
            )
        elif live is not None:
            live.other = next(iter(options.get("stopping_criteria", ())), None)
            options["stopping_criteria"] = [live]
            if live.draws is not None:
                options["logits_processor"] = [DrawnByRow(live.draws)]
        return options

    def drop_cache(self) -> None:
        if self._store is not None:
            self._store.clear()

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        stop = self._samplings[agent].stop
        return bool(stop) and self._stops[stop].are_in(ids)
