# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Seams of vision-language models: processors of transformers (5.23), and the inputs that TRL's passes (1.16) take."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import PeftConfig
from transformers import PreTrainedModel, ProcessorMixin
from trl import GRPOTrainer


# Results of processors that are not inputs of a pass
_TOKENS = ("input_ids", "attention_mask")
_MOST_PIECES = 1_000  # whose tokens are kept
# Arguments of TRL's pass. It cuts those of images for its micro-batches
_PASSED = frozenset(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)


class ImageProcessor:
    """Tokens of template text with places for images, and inputs of the model. Images of a size have equal tokens."""

    def __init__(self, processor: ProcessorMixin):
        self.processor, self._ids = processor, dict[Any, list[int]]()
        self._mark = str(processor.image_token)  # that chat templates write for an image

    def count(self, text: str) -> int:
        """Number of places for images in template text."""
        return text.count(self._mark)

    def encode(self, text: str, images: Sequence[Any]) -> list[int]:
        """Token ids of template text with a place for each of these images."""
        key = text, *(image.size for image in images)
        if key not in self._ids:
            if len(self._ids) >= _MOST_PIECES:
                self._ids.clear()
            try:
                inputs = self.processor(text=[text], images=[list(images)], add_special_tokens=False)
            except Exception as error:  # such as a shape that a family does not take
                sizes = ", ".join("{} x {}".format(*image.size) for image in images)
                raise ValueError(f"The processor cannot take images of {sizes} pixels: {error}") from error
            self._ids[key] = [int(token) for token in inputs["input_ids"][0]]
        return self._ids[key]

    def inputs(self, images: Sequence[Sequence[Any]], ids: torch.Tensor, ends: Sequence[int]) -> dict[str, Any]:
        """
        Inputs of `GRPOTrainer._get_per_token_logps_and_entropies` for rows with images: pixels and their places, and
        the types of the tokens `ids` `(B, S)`, for models that have them. Images are before `ends` in each row.
        """
        rows = [list(row) for row in images]
        found = self._of_images(rows)
        inputs = {name: field for name, field in found.items() if name not in _TOKENS}
        for name in [name for name in inputs if name.endswith("token_type_ids")]:
            types = torch.tensor(self.processor.create_mm_token_type_ids(ids.tolist()), device=ids.device)
            is_prompt = torch.arange(ids.size(1), device=ids.device) < torch.tensor(ends, device=ids.device)[:, None]
            inputs[name] = types * ((types == 1) & is_prompt)  # an agent may have sampled the token of a video
        if unknown := sorted(inputs.keys() - _PASSED):
            raise ValueError(
                f"`{type(self.processor).__name__}` makes the inputs {', '.join(unknown)}, which the passes of "
                "GRPOTrainer do not take. Use a vision-language model that GRPOTrainer trains."
            )
        inputs["num_images"] = list(map(len, rows))
        pixels = inputs["pixel_values"]
        if "spatial_shapes" in inputs or (pixels.ndim == 4 and pixels.size(0) != sum(inputs["num_images"])):
            inputs["num_tiles"] = [self._of_images([row])["pixel_values"].size(0) for row in rows]
        return {
            name: field.to(ids.device) if isinstance(field, torch.Tensor) else field for name, field in inputs.items()
        }

    def for_model(self, images: Sequence[Sequence[Any]], ids: torch.Tensor, ends: Sequence[int]) -> dict[str, Any]:
        """As `inputs`, but those that the model itself takes."""
        return {name: field for name, field in self.inputs(images, ids, ends).items() if not name.startswith("num_")}

    def _of_images(self, rows: list[list[Any]]) -> Any:
        texts = [self._mark * len(row) for row in rows]
        return self.processor(text=texts, images=rows, padding=True, return_tensors="pt")


def of_images(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs from [`~ImageProcessor.inputs`] among those of TRL's loss."""
    return {name: tensors[name] for name in tensors if name in _PASSED}


def as_tokenizer(processing_class: Any) -> Any:
    """A tokenizer, or that of a processor, with the chat template of the processor, which not all tokenizers have."""
    if not isinstance(processing_class, ProcessorMixin):
        return processing_class
    tokenizer = processing_class.tokenizer
    tokenizer.chat_template = processing_class.chat_template or tokenizer.chat_template
    return tokenizer


def without_vision(config: PeftConfig, model: PreTrainedModel) -> PeftConfig:
    """Leave modules outside of the language model out of `"all-linear"`, with which PEFT (0.21) would adapt all."""
    text_model = getattr(model, "get_decoder", lambda: None)()
    if getattr(config, "target_modules", None) != "all-linear" or config.exclude_modules is not None:
        return config
    prefix = next((name for name, module in model.named_modules() if module is text_model), "")
    if prefix and text_model is not model.base_model:
        config.exclude_modules = rf"(?!{re.escape(prefix)}\.).*"
    return config
