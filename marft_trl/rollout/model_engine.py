# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Generation with a model alone, as TRL's `GRPOTrainer` (1.16) does it in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..config.sampling import Sampling
from ..seams.generation import forward_in_precision, generating_in_precision


class ModelEngine:
    """
    Runs `generate` of a model.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): model that generates with its active adapter.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): tokenizer with a padding token.
        generation (`Mapping[str, Any]`): settings of `generate` that are the same for all agents, including
            `do_sample` and `eos_token_id`.
        autocast (`torch.dtype`, *optional*): precision that the model computes in, if it differs from the precision of
            its weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        generation: Mapping[str, Any],
        autocast: torch.dtype | None = None,
    ):
        self.model, self.tokenizer = model, tokenizer
        self._generation, self.autocast = dict(generation), autocast
        ends = self._generation.get("eos_token_id", tokenizer.eos_token_id)
        self.ends: list[int] = [ends] if isinstance(ends, int) else list(ends)

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        """All settings of `generate` for an agent's sampling."""
        return {**self._generation, **sampling.as_generation_kwargs()}

    @torch.no_grad()
    def generate(
        self, prompt_ids: list[list[int]], settings: Mapping[str, Any], options: Mapping[str, Any]
    ) -> list[list[int]]:
        """Sample a completion for each prompt, up to and including its end-of-sequence token."""
        device, width = self.model.device, max(map(len, prompt_ids))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in prompt_ids], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompt_ids], device=device)
        config = GenerationConfig(**settings, disable_compile=True)
        with forward_in_precision(self.model, self.autocast), generating_in_precision(self.model, self.autocast):
            rows = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **options)
        return [self._up_to_end(row) for row in rows[:, width:].tolist()]

    @torch.no_grad()
    def next_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits `(V,)` after some tokens, in float32."""
        with forward_in_precision(self.model, self.autocast):
            return self.model(input_ids=torch.tensor([list(ids)], device=self.model.device)).logits[0, -1].float()

    def _up_to_end(self, ids: list[int]) -> list[int]:
        return ids[: next((index for index, token in enumerate(ids) if token in self.ends), len(ids)) + 1]
