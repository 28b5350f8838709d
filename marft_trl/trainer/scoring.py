# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer's part that scores: log-probabilities under the right adapter and temperature, what rows share once."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import nn
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import add_fused_lm_head

from .. import forward
from ..configs import MARFTConfig
from ..rollout.transformers_generator import Sampling
from . import functional
from .adapters import Policies
from .batching import MicroBatch, Row, Slice, collate


logger = get_logger(__name__)


class ScoringTemperature:
    """
    Switches the temperature of TRL's fused LM head, which is built for one.

    Args:
        models (`Iterable[PreTrainedModel]`):
            Models with TRL's head at `default`: the base and, without adapters, the reference.
        temperatures (`Iterable[float]`):
            Temperatures of all agents.
        default (`float`):
            The trainer's temperature.
        head (`dict`):
            Further arguments of TRL's `add_fused_lm_head`.
    """

    def __init__(self, models: Iterable[PreTrainedModel], temperatures: Iterable[float], default: float, head: dict):
        self._current = default
        if set(temperatures) == {default}:
            return
        for model in models:
            self._install(model, {*temperatures, default}, default, head)

    def switch_to(self, temperature: float) -> None:
        """Score at this temperature from now on."""
        self._current = temperature

    def _install(self, model: PreTrainedModel, temperatures: set[float], default: float, head: dict) -> None:
        forwards = {default: model.forward}
        for temperature in temperatures - {default}:
            add_fused_lm_head(model, temperature=temperature, **head)
            forwards[temperature] = model.forward
            model.forward = forwards[default]

        # Keep the original signature: `generate` validates its model kwargs against it
        @functools.wraps(type(model).forward)
        def forward(_, *args, **kwargs):
            return forwards[self._current](*args, **kwargs)

        model.forward = types.MethodType(forward, model)


class TeamScoring(GRPOTrainer):
    """Overrides of `GRPOTrainer` (checked against TRL 1.16) around log-probabilities and entropies."""

    args: MARFTConfig
    policies: Policies
    _samplings: dict[str, Sampling]
    _micro_batches: Callable[..., Iterator[MicroBatch]]
    _add_to_window: Callable[[str, torch.Tensor, torch.Tensor], None]
    _wants_features: Callable[[str], bool]
    _keep_features: Callable[[MicroBatch, torch.Tensor], None]
    _episodes_per_prompt: int

    def _prepare_scoring(self) -> None:
        base = self._base_of(self.model)
        self._temperature = ScoringTemperature(
            [base] if self.ref_model is None else [base, self.ref_model],
            [sampling.temperature for sampling in self._samplings.values()],
            default=self.temperature,
            head={"cast_lm_head_to_fp32": self.args.cast_lm_head_to_fp32, "outputs": ("log_probs", "entropy")},
        )
        self._loss_inputs: dict[str, torch.Tensor] | None = None
        self._loss_adapter = ""
        self._entropy_thresholds: dict[str, torch.Tensor] = {}
        self._shares_prefixes = self.args.share_prefixes and self._can_share(base)
        # TRL's pass leaves positions to the model, which counts padding in front of a prompt: no matter to most
        with self.accelerator.autocast():
            needs_positions = not self._shares_prefixes and forward.needs_positions(base)
        self._gives_positions = self._shares_prefixes or (needs_positions and not self.aux_loss_enabled)

    def _can_share(self, base: PreTrainedModel) -> bool:
        reentrant = (self.args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        if reentrant and self.args.gradient_checkpointing is not False:
            why = "reentrant checkpointing takes no gradient to keys and values that were computed before"
        elif self.aux_loss_enabled:
            why = "the routers' outputs of a mixture of experts are part of the loss"
        else:
            why = forward.why_not(base)
        if why is not None:
            logger.warning(f"What rows have in common is computed anew for each (`share_prefixes`): {why}.")
        return why is None

    def _samples_what_it_scores(self) -> bool:
        """Whether generation computes what scoring computes, to the precision of float32 and without noise."""
        base = self._base_of(self.model)
        settings = base.config.get_text_config().to_dict().items()
        drops = any(value for name, value in settings if "drop" in name and isinstance(value, float))
        noisy = drops or any(isinstance(module, nn.Dropout) and module.p > 0 for module in base.modules())
        weights = [tensor for tensor in base.parameters() if tensor.is_floating_point()]
        precise = self.accelerator.mixed_precision == "no" and all(it.dtype == torch.float32 for it in weights)
        exact = torch.get_float32_matmul_precision() == "highest" and not getattr(base, "is_quantized", False)
        return precise and exact and not noisy

    def _base_of(self, model: nn.Module) -> PreTrainedModel:
        """The language model under the wrappers of accelerate and PEFT."""
        model = self.accelerator.unwrap_model(model)
        is_peft = self.policies.has_adapters and model is not self.ref_model
        return model.get_base_model() if is_peft else model

    def _group_of(self, count: int) -> list[int]:
        """For each of the `count` episodes of this process, which of the groups of all processes it belongs to."""
        first = self.accelerator.process_index * count
        return [(first + index) // self._episodes_per_prompt for index in range(count)]

    def _act(self, agent: str) -> None:
        self.policies.activate(agent)
        self._temperature.switch_to(self._samplings[agent].temperature)

    def _collate(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        return collate(rows, self._tokenizer.pad_token_id, self.pad_to_multiple_of, self.accelerator.device)

    # ---- Log-probabilities ----

    def _score(self, rows: Sequence[Row], name: str) -> None:
        """Fill in log-probabilities of the sampled tokens under the agents' policies or references."""
        is_reference = name == "ref_per_token_logps"
        for batch in self._micro_batches(rows):
            tensors = self._collate(batch.rows)
            ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1)
            mask = torch.cat([tensors["prompt_mask"], tensors["completion_attention"]], dim=1)
            self._act(batch.agent)
            model: nn.Module = self.model
            as_reference: contextlib.AbstractContextManager = contextlib.nullcontext()
            if is_reference and self.ref_model is not None:
                model = self.ref_model
            elif is_reference:
                as_reference = self.policies.reference(batch.agent)
            width = tensors["completion_ids"].size(1)
            with as_reference:
                if self._gives_positions:
                    logps, _, hidden = self._placed_logps(model, ids, mask, width)
                    if is_reference and self._wants_features(batch.agent):
                        self._keep_features(batch, hidden)
                else:
                    logps, _, _ = super()._get_per_token_logps_and_entropies(model, ids, mask, width)
            for row, its in zip(batch.rows, logps.cpu(), strict=True):
                setattr(row, name, its[: len(row.completion_ids)].clone())

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        if self._gives_positions and self._loss_inputs is not None:
            logps, entropies, _ = self._placed_logps(model, input_ids, attention_mask, logits_to_keep)
            aux_loss = None
        else:
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        if self._loss_inputs is None:
            return logps, entropies, aux_loss
        return *self._as_actions(logps, entropies, self._loss_inputs), aux_loss

    def _placed_logps(
        self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Log-probabilities and entropies `(B, T)` of completions, 0 where they are masked (entropies of a separate
        reference too), and the hidden states `(B, V, H)` they were read from. Every row begins at position 0.

        Args:
            model (`nn.Module`): whose active adapter scores.
            input_ids, attention_mask (`torch.Tensor` of shape `(B, P + T)`): rows; prompts padded on the left.
            width (`int`): `T`, columns of the completions.
        """
        base, is_there = self._base_of(model), attention_mask.bool()
        prompts = [ids[its].tolist() for ids, its in zip(input_ids[:, :-width], is_there[:, :-width], strict=True)]
        completions = [ids[its].tolist() for ids, its in zip(input_ids[:, -width:], is_there[:, -width:], strict=True)]
        with self.accelerator.autocast():
            hidden = forward.hidden_states(base.base_model, prompts, completions, self._shares_prefixes)
            lengths = torch.tensor([len(completion) for completion in completions], device=hidden.device)
            read = torch.arange(hidden.size(1), device=hidden.device) < lengths.unsqueeze(1)
            tokens = torch.tensor([token for its in completions for token in its], device=hidden.device)
            logps, entropies = forward.score(base, hidden[read], tokens.long())
        empty = torch.zeros(input_ids.size(0), width, device=hidden.device)
        logps = empty.masked_scatter(is_there[:, -width:], logps)
        entropies = empty if entropies is None else empty.masked_scatter(is_there[:, -width:], entropies)
        return logps, entropies, hidden

    @torch.no_grad()
    def _high_entropy_thresholds(self, slice_: Slice, learning: frozenset[str]) -> dict[str, torch.Tensor]:
        """
        With `top_entropy_quantile`, for each agent whose rows of a slice fall into several micro-batches or processes
        the entropy above which its tokens are trained, so that the cut changes nothing. It takes another pass.
        """
        if self.top_entropy_quantile >= 1.0:
            return {}
        rows = [row for row in slice_.rows if row.is_trained and row.adapter in learning]
        batches: dict[str, list[MicroBatch]] = {name: [] for name in self._samplings}
        for batch in self._micro_batches(rows):
            batches[batch.agent].append(batch)
        thresholds = {}
        for agent, its in batches.items():
            if self.accelerator.num_processes == 1 and len(its) < 2:
                continue
            entropies = [self._entropies(batch) for batch in its]
            own = [torch.cat(entropies).tolist()] if entropies else []
            everywhere = [value for of_process in gather_object(own) for value in of_process]
            if everywhere:
                values = torch.tensor(everywhere, device=self.accelerator.device)
                thresholds[agent] = torch.quantile(values, 1 - self.top_entropy_quantile)
        return thresholds

    def _entropy_mask(self, agent: str) -> Callable[..., torch.Tensor]:
        """TRL's mask of the tokens of high entropy, by a threshold that is known or over those of a micro-batch."""
        known = self._entropy_thresholds.get(agent)
        if known is None:  # the micro-batch holds all of the agent's tokens in the slice
            return self.get_high_entropy_mask

        def mask_above(entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
            return (entropies * mask.float() >= known) & mask.bool()

        return mask_above

    def _entropies(self, batch: MicroBatch) -> torch.Tensor:
        """Entropies of the tokens of a micro-batch that its loss counts `(N,)`."""
        tensors = self._collate(batch.rows)
        ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1)
        mask = torch.cat([tensors["prompt_mask"], tensors["completion_mask"]], dim=1)
        self._act(batch.agent)
        width = tensors["completion_ids"].size(1)
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self._gives_positions:
                _, entropies, _ = self._placed_logps(self.model, ids, mask, width)
            else:
                _, entropies, _ = super()._get_per_token_logps_and_entropies(
                    self.model, ids, mask, width, compute_entropy=True
                )
        return entropies[tensors["completion_mask"].bool()].float()

    def _as_actions(
        self, logps: torch.Tensor, entropies: torch.Tensor, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take note of the divergence; at action level, make of `inputs` and entropies what TRL's loss has to see."""
        mask, old = inputs["completion_mask"], inputs.get("old_per_token_logps", logps.detach())
        counted = mask.bool()
        if self.args.level == "token":
            self._add_to_window(self._loss_adapter, (logps - old)[counted], entropies[counted])
            return logps, entropies
        ratios = functional.action_log_ratios(logps - old, mask, inputs["action_divisors"]).clamp(-20, 20)
        self._add_to_window(self._loss_adapter, ratios[counted.any(dim=1)], entropies[counted])
        # TRL takes the mean log-ratio over a turn's tokens: with these each of them is the turn's.
        inputs["old_per_token_logps"] = logps - ratios.unsqueeze(1)
        # TRL takes the mean entropy over tokens: with these it is the mean over turns of their mean.
        shares = mask.sum() / (mask.sum(dim=1, keepdim=True).clamp(min=1) * len(mask))
        return logps, entropies * shares

    def _action_divisors(self, rows: Sequence[Row]) -> torch.Tensor:
        """What the log-probabilities of turns, summed over tokens, are divided by `(B,)`."""
        of = {"sum": lambda row: 1, "token": lambda row: len(row.completion_ids), "word": lambda row: row.words}
        divisors = [max(of[self.args.action_logprob](row), 1) for row in rows]
        return torch.tensor(divisors, dtype=torch.float32, device=self.accelerator.device)
