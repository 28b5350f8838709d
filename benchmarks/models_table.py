"""
Which families of models a team can be made of, from their chat templates and architectures: the table of
`docs/reference/models.md`.

    python benchmarks/models_table.py

Templates are those that TRL 1.16 ships, on small tokenizers that have the control tokens of each family. Architectures
have their real code and random weights of a few thousand numbers. Nothing is downloaded.
"""

import contextlib
import sys
import warnings
from pathlib import Path

from marft_trl import AgentSpec
from marft_trl.episodes.records import Turn
from marft_trl.rollout.chat_template import ChatTemplate
from marft_trl.rollout.preparing import prepare_tools
from marft_trl.rollout.prompts import PromptBuilder
from marft_trl.rollout.reasoning import EarlierReasoning
from marft_trl.shared_prefix.forward import why_not
from marft_trl.workflows import Sequential

import torch
from transformers import AutoConfig, AutoModelForCausalLM


sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.tokenizers_and_templates import FAMILIES, PLAIN_MARKS, tokenizer_of


# Template, and the architecture of its models with what its smallest config needs
ARCHITECTURES = {
    "qwen2_5": ("Qwen 2.5", "qwen2", {}),
    "qwen3": ("Qwen 3", "qwen3", {"head_dim": 8}),
    "llama3": ("Llama 3", "llama", {}),
    "gemma3": ("Gemma 3, text only", "gemma3_text", {"head_dim": 8, "sliding_window": 6}),
    "gemma4": (
        "Gemma 4, text only",
        "gemma4_text",
        {"head_dim": 8, "global_head_dim": 8, "sliding_window": 6, "vocab_size_per_layer_input": 64}
        | {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    ),
    "phi3": ("Phi 3", "phi3", {}),
    "deepseekv3": ("DeepSeek V3", None, {}),
    "glm4moe": (
        "GLM 4.5",
        "glm4_moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "gptoss": ("GPT-OSS", "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "lfm2": ("LFM 2", "lfm2", {"layer_types": ["conv", "full_attention"]}),
    "llama2": ("Llama 2", "llama", {}),
    "zephyr": ("Zephyr", "mistral", {"sliding_window": 6}),
    "vicuna": ("Vicuna", "llama", {}),
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
TEAM = [AgentSpec("planner", system_prompt="Plan."), AgentSpec("solver", system_prompt="Solve.")]


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: A number.
        b: Another.
    """
    return a + b


def is_right(tokenizer):
    """Whether what an agent is shown is what the template makes of the same messages, written by hand."""

    def tokenize(prompts):
        return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]

    question = [{"role": "user", "content": "1 + 1?"}]
    turns = [Turn("planner", "Add them.", 0), Turn("solver", "2", 1), Turn("planner", "Sure?", 2)]
    (shown,) = PromptBuilder(tokenizer, tokenize).build([(TEAM[1], question, turns)])
    return tokenizer.decode(shown.ids) == tokenizer.apply_chat_template(
        shown.content, tokenize=False, add_generation_prompt=True
    )


def has_tools(tokenizer):
    with contextlib.suppress(ValueError):
        prepare_tools(tokenizer, [AgentSpec("solver", tools=[add])], Sequential())
        return True
    return False


def shares(kind, extra):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **extra})
    return why_not(AutoModelForCausalLM.from_config(config).float().eval())


def yes(value):
    return "yes" if value else "no"


def main():
    warnings.simplefilter("ignore")
    print("| family | marked by control tokens | tools | cuts reasoning off | shared prefixes |")
    print("|---|---|---|---|---|")
    for family, (name, kind, extra) in ARCHITECTURES.items():
        assert family in {*FAMILIES, *PLAIN_MARKS}, "a family of which no test tries the prompts"
        tokenizer = tokenizer_of("byte_level", family)
        template = ChatTemplate(tokenizer)
        assert is_right(tokenizer) and template.renders_system, name
        why = shares(kind, extra) if kind is not None else "not tried"
        cells = [
            yes(not template.plain_marks()),
            yes(has_tools(tokenizer)),
            yes(EarlierReasoning(template).is_cut),
            "yes" if why is None else why if kind is None else f"no: {why}",
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
