"""Tiny models of the families that the fast paths are tested on, with an adapter that changes them."""

import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from .helpers import shake


VOCABULARY = 64
COMMON = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# Windows are shorter than the rows, so that they slide
FAMILIES = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 6},
    "gemma3_text": {
        **{"head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 5.0},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma4_text": {  # the last layers read the keys and values of the first
        **dict.fromkeys(("head_dim", "global_head_dim", "hidden_size_per_layer_input"), 8),
        **{"sliding_window": 6, "num_kv_shared_layers": 1},
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
# Mixtures of experts: PEFT rewrites the config of an adapter on all layers of most of them
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **{"num_hidden_layers": 2, "head_dim": 8},
}
LATENT = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "num_key_value_heads": 4,
}
LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
MIXTURES = {
    **dict.fromkeys(("qwen3_moe", "mixtral", "qwen2_moe"), EXPERTS),
    "qwen3_next": {**EXPERTS, **LINEAR},
    **dict.fromkeys(("olmoe", "glm4_moe"), EXPERTS),
    **{name: {**EXPERTS, **LATENT} for name in ("deepseek_v2", "deepseek_v3")},
    **dict.fromkeys(("gpt_oss", "granitemoe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe"), EXPERTS),
}
# Only for the table of docs/reference/models.md
OTHERS = {
    "gemma3n_text": {
        **dict.fromkeys(("head_dim", "hidden_size_per_layer_input", "laurel_rank"), 8),
        **{"sliding_window": 6, "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "phimoe": EXPERTS,
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 64, "attention_chunk_size": 64},
}
TARGETS = {"gpt2": ["c_attn", "c_fc"], "phi3": ["qkv_proj", "down_proj"]}


def family_base(family, vocabulary=VOCABULARY):
    common = COMMON if family != "gpt2" else {k: v for k, v in COMMON.items() if k.endswith("_id")}
    sizes = {"vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary}
    config = AutoConfig.for_model(family, **{**common, **{**FAMILIES, **MIXTURES, **OTHERS}[family], **sizes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float()


def family_model(family, temperature=0.7):
    """A model of a family with a LoRA that changes it and TRL's head."""
    model = family_base(family)
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    targets = TARGETS.get(family, ["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets)).train()
    shake(model, 0.1)
    return model


def ragged_rows(seed, others_words=False):
    """Rows of three groups that share a system prompt; `others_words` varies the ends of prompts. One row is empty."""
    draw = random.Random(seed)

    def tokens(low, high):
        return [draw.randint(3, VOCABULARY - 1) for _ in range(draw.randint(low, high))]

    prompts, completions = [], []
    for _ in range(3):
        question = [5, 6, 7, 8, *tokens(3, 12)]
        for member in range(3):
            prompts.append([*question, *(tokens(0, 5) if others_words else [])])
            completions.append(tokens(1, 9) if prompts[1:] or member else [])
    return prompts, completions


def logps_alone(model, prompts, completions, temperature):
    """Log-probabilities and entropies `(N,)` of all completions' tokens, each row alone and without padding."""
    logps, entropies = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        if completion:
            logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            log_probs = (logits.float() / temperature).log_softmax(dim=-1)
            logps.append(log_probs.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1))
            entropies.append(-(log_probs.exp() * log_probs).sum(dim=-1))
    return torch.cat(logps), torch.cat(entropies)
