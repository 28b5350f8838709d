# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Tiny vision-language models with their processors, made offline in a moment, and without torchvision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from marft_trl import tiny

import numpy as np
import torch
import transformers
import trl
from PIL import Image
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.smolvlm import processing_smolvlm


Family = Callable[[], tuple[PreTrainedModel, ProcessorMixin]]

# What the text models and the vision towers have in common
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}

# As published with LLaVA 1.5: all images come first, and a space ends each text
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# As published with InternVL 3: a line break after each image
INTERNVL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As published with Mistral Small 3.1, less its default system prompt: no line breaks between turns
MISTRAL3 = (
    "{% macro write(content) %}{% if content is string %}{{ content }}{% else %}{% for block in content %}"
    "{% if block['type'] == 'text' %}{{ block['text'] }}{% elif block['type'] == 'image' %}[IMG]{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '[SYSTEM_PROMPT]' + write(message['content']) + '[/SYSTEM_PROMPT]' }}"
    "{% elif message['role'] == 'user' %}{{ '[INST]' + write(message['content']) + '[/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ write(message['content']) + eos_token }}"
    "{% else %}{{ raise_exception('Only user, system and assistant roles are supported!') }}{% endif %}{% endfor %}"
)


def picture(seed: int, size: tuple[int, int] = (56, 56)) -> Image.Image:
    """An image of random noise, `size` pixels wide and high."""
    width, height = size
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8))


def published_template(name: str) -> str:
    """A published chat template. TRL has copies, by which it recognizes the models."""
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def make_tokenizer(
    tokens: Sequence[str] = (),
    named: dict[str, str] | None = None,
    eos: str = "<|im_end|>",
    bos: str | None = None,
    adds_bos: bool = False,
) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the special tokens of a family, of which some are attributes of the tokenizer."""
    named = named or {}
    tokenizer = tiny.tiny_tokenizer()
    names = {"eos_token": eos, **({"bos_token": bos} if bos else {})}
    tokenizer.add_special_tokens(names)
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [*tokens, *named.values()]}, replace_extra_special_tokens=False
    )
    tokenizer._set_model_specific_special_tokens(named)
    tokenizer.padding_side = "left"
    if adds_bos:  # at the start of every text, as the tokenizers of Llama and Gemma do
        tokenizer.add_bos_token = True
    return tokenizer


def text_config(tokenizer: PreTrainedTokenizerFast, **settings) -> dict[str, Any]:
    """The configuration of a text model for a tokenizer."""
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    return {**TEXT, "vocab_size": len(tokenizer), **ids, **settings}


def make_model(kind: str, **settings) -> PreTrainedModel:
    """A model of a family with random weights, the same at each call."""
    config = getattr(transformers, f"{kind}Config")(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()


class ForImages(ProcessorMixin):
    """
    Between a family's processor and its base class: the processor does without the parts that only videos and sounds
    need. A processor of videos cannot be made without torchvision.
    """

    UNUSED = ("video_processor", "feature_extractor")
    video_processor = SimpleNamespace(num_frames=None, fps=None)  # SmolVLM's `apply_chat_template` reads these

    def __init__(self, *args, **kwargs):
        for name in self.UNUSED:
            kwargs.pop(name, None)
        super().__init__(*(arg for arg in args if arg is not None), **kwargs)

    @classmethod
    def get_attributes(cls):
        return [name for name in super().get_attributes() if name not in cls.UNUSED]

    @classmethod
    def _get_arguments_from_pretrained(cls, *args, **kwargs):
        parts = iter(super()._get_arguments_from_pretrained(*args, **kwargs))
        return [None if name in cls.UNUSED else next(parts) for name in super().get_attributes()]


@functools.cache
def for_images(kind: str) -> type[ProcessorMixin]:
    """The processor class of a family, less its parts for videos and sounds. `AutoProcessor` loads what it saves."""
    bases = (getattr(transformers, f"{kind}Processor"), ForImages)
    processor_class = type(f"{kind}ProcessorForImages", bases, {"__module__": __name__})
    AutoProcessor.register(getattr(transformers, f"{kind}Config"), processor_class, exist_ok=True)
    return processor_class


def llava():
    tokenizer = make_tokenizer(["<image>"], eos="</s>", bos="<s>", adds_bos=True)
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA,
    )
    model = make_model(
        "Llava",
        text_config=text_config(tokenizer, model_type="llama"),
        vision_config={**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        image_token_index=processor.image_token_id,
        image_seq_length=4,
    )
    return model, processor


def llava_next():
    tokenizer = make_tokenizer(["<image>"], eos="</s>", bos="<s>", adds_bos=True)
    grids = [[28, 56], [56, 28], [56, 56]]
    processor = transformers.LlavaNextProcessor(
        image_processor=transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=grids
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=published_template("llava_next"),
    )
    model = make_model(
        "LlavaNext",
        text_config=text_config(tokenizer, model_type="mistral"),
        vision_config={**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        image_token_index=processor.image_token_id,
        image_grid_pinpoints=grids,
        image_seq_length=4,
    )
    return model, processor


def gemma3():
    tokenizer = make_tokenizer(
        ["<start_of_turn>"],
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        eos="<end_of_turn>",
        bos="<bos>",
        adds_bos=True,
    )
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=published_template("gemma3"),
    )
    model = make_model(
        "Gemma3",
        text_config=text_config(
            tokenizer,
            query_pre_attn_scalar=8,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config={
            **VISION,
            "model_type": "siglip_vision_model",
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    with torch.no_grad():  # zeros until a checkpoint is loaded: pictures would not matter
        weight = model.model.multi_modal_projector.mm_input_projection_weight
        weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return model, processor


def idefics2():
    tokenizer = make_tokenizer(
        ["<fake_token_around_image>", "<image>"], eos="<end_of_utterance>", bos="<s>", adds_bos=True
    )
    processor = transformers.Idefics2Processor(
        image_processor=transformers.Idefics2ImageProcessorPil(size={"shortest_edge": 28, "longest_edge": 56}),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=published_template("smolvlm").removeprefix("<|im_start|>"),
    )
    model = make_model(
        "Idefics2",
        text_config=text_config(tokenizer, model_type="mistral"),
        vision_config={**VISION, "image_size": 56, "patch_size": 14},
        perceiver_config={
            "hidden_size": 32,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 4,
            "resampler_head_dim": 8,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,  # else pictures would hardly matter
        },
        image_token_id=processor.image_token_id,
    )
    return model, processor


def tiles(kind: str, tokenizer: PreTrainedTokenizerFast, processor_class: type, template: str, **parts):
    """Idefics 3 or SmolVLM. A picture of 56 x 56 pixels becomes four tiles and the whole."""
    processor = processor_class(
        image_processor=getattr(transformers, f"{kind}ImageProcessorPil")(
            size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=published_template(template),
        **parts,
    )
    model = make_model(
        kind,
        text_config=text_config(tokenizer, model_type="llama"),
        vision_config={**VISION, "image_size": 56, "patch_size": 14},
        image_token_id=processor.image_token_id,
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model, processor


TILE_TOKENS = [
    *("<fake_token_around_image>", "<image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]


def idefics3():
    tokenizer = make_tokenizer(TILE_TOKENS, eos="<end_of_utterance>", bos="<|begin_of_text|>", adds_bos=True)
    return tiles("Idefics3", tokenizer, transformers.Idefics3Processor, "idefics3")


def smolvlm():
    if processing_smolvlm.num2words is None:  # its words are for videos only
        processing_smolvlm.num2words = str
    tokenizer = make_tokenizer(TILE_TOKENS, eos="<end_of_utterance>", bos="<|im_start|>")
    return tiles("SmolVLM", tokenizer, for_images("SmolVLM"), "smolvlm", video_processor=None)


def qwen(kind: str, template: str, vision: dict[str, Any], patch_size: int = 14, **text):
    """A Qwen model. A picture of 56 x 56 pixels becomes four tokens, or a few more."""
    tokenizer = make_tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    ids = tokenizer.convert_tokens_to_ids
    side = 2 * patch_size
    processor = for_images("Qwen3VL" if kind.startswith("Qwen3") else kind)(
        image_processor=transformers.Qwen2VLImageProcessorPil(
            patch_size=patch_size, min_pixels=4 * side**2, max_pixels=16 * side**2
        ),
        tokenizer=tokenizer,
        chat_template=published_template(template),
    )
    model = make_model(
        kind,
        text_config=text_config(tokenizer, **text),
        vision_config={"depth": 2, "num_heads": 4, "patch_size": patch_size, **vision},
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return model, processor


def qwen2_vl():
    vision = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    return qwen("Qwen2VL", "qwen2_5_vl", vision, rope_parameters=MROPE)


def qwen2_5_vl():
    vision = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
    vision |= {"fullatt_block_indexes": [1], "window_size": 56}
    return qwen("Qwen2_5_VL", "qwen2_5_vl", vision, rope_parameters=MROPE)


def qwen3_vl():
    vision = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return qwen("Qwen3VL", "qwen3_vl", vision, patch_size=16, rope_parameters=MROPE)


def qwen3_5():
    vision = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16}
    text = {"layer_types": ["linear_attention", "full_attention"], "rope_parameters": MROPE}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    return qwen("Qwen3_5", "qwen3_5_nothink", vision, patch_size=16, linear_value_head_dim=8, **text)


def internvl():
    tokenizer = make_tokenizer(
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
    )
    processor = for_images("InternVL")(
        image_processor=transformers.GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, max_patches=4),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=INTERNVL,
    )
    model = make_model(
        "InternVL",
        text_config=text_config(tokenizer, model_type="qwen2"),
        vision_config={**VISION, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=processor.image_token_id,
        image_seq_length=4,
    )
    return model, processor


def mistral3():
    tokenizer = make_tokenizer(
        ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        eos="</s>",
        bos="<s>",
        adds_bos=True,
    )
    processor = transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size=14),
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=MISTRAL3,
    )
    model = make_model(
        "Mistral3",
        text_config=text_config(tokenizer, model_type="mistral"),
        vision_config={**VISION, "model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 8},
        image_token_index=processor.image_token_id,
        spatial_merge_size=2,
    )
    return model, processor


def gemma4():
    tokenizer = make_tokenizer(
        ["<|turn>", "<|video|>"],
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
        eos="<turn|>",
        bos="<bos>",
        adds_bos=True,
    )
    processor = for_images("Gemma4")(
        feature_extractor=None,
        image_processor=transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70),
        tokenizer=tokenizer,
        video_processor=None,
        image_seq_length=70,
        chat_template=published_template("gemma4_v5"),
    )
    model = make_model(
        "Gemma4",
        text_config=text_config(
            tokenizer,
            global_head_dim=8,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=len(tokenizer),
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config={
            **VISION,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 640,
        },
        audio_config=None,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
        image_token_id=tokenizer.image_token_id,
        video_token_id=processor.video_token_id,
        boa_token_id=tokenizer.boa_token_id,
        eoa_token_index=tokenizer.eoa_token_id,
        audio_token_id=tokenizer.audio_token_id,
    )
    return model, processor


def lfm2_vl():
    tokenizer = make_tokenizer(
        ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"], bos="<|startoftext|>", adds_bos=True
    )
    processor = transformers.Lfm2VlProcessor(
        image_processor=transformers.Lfm2VlImageProcessor(
            encoder_patch_size=14,
            tile_size=56,
            min_image_tokens=4,
            max_image_tokens=16,
            size={"height": 56, "width": 56},
        ),
        tokenizer=tokenizer,
        chat_template=published_template("lfm2_2_5_vl"),
    )
    model = make_model(
        "Lfm2Vl",
        text_config=text_config(tokenizer, model_type="lfm2", layer_types=["conv", "full_attention"]),
        vision_config={
            **VISION,
            "model_type": "siglip2_vision_model",
            "patch_size": 14,
            "num_patches": 16,
            "vision_use_head": False,
        },
        image_token_id=processor.image_token_id,
        projector_hidden_size=32,
        downsample_factor=2,
    )
    return model, processor


FAMILIES: dict[str, Family] = {
    "llava": llava,
    "llava_next": llava_next,
    "gemma3": gemma3,
    "idefics2": idefics2,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_5": qwen3_5,
    "internvl": internvl,
    "gemma4": gemma4,
}
# Pixtral's module of processors imports torchvision, and LFM2-VL has no image processor without it
NEEDS_TORCHVISION: dict[str, Family] = {"mistral3": mistral3, "lfm2_vl": lfm2_vl}
