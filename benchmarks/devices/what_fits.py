"""
Memory of teams by model, number of agents and GPU: the table of `docs/reference/what_fits.md`. No GPU needed.

    python benchmarks/devices/what_fits.py                  # all models; needs 12 GB of memory and some minutes
    python benchmarks/devices/what_fits.py --models 0.5B

Models have the published shapes and random weights. A trainer is built with one and with two layers, and its
`memory_plan()` is extrapolated: each further layer and each further agent adds the same. Rows have 2,048 tokens,
of which 512 are new; 8 episodes are generated at once; adapters have rank 16 on all linear layers, in float32, with
Adam. A team fits if one row with gradient checkpointing fits into 70 % of the free memory, as in the trainer.
"""

import argparse
import gc
import sys
import tempfile
import warnings
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.extras.tasks import smollm2
from marft_trl.learning.memory import cache_size, head_size

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


# `recipe_plans` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

from recipe_plans import cost_with


_QWEN = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
SHAPES = {
    "0.5B": _QWEN
    | {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "tie_word_embeddings": True}
    | {"num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5B": _QWEN
    | {"hidden_size": 1536, "num_hidden_layers": 28, "intermediate_size": 8960, "tie_word_embeddings": True}
    | {"num_attention_heads": 12, "num_key_value_heads": 2},
    "7B": _QWEN
    | {"vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "70B": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 80}
    | {"intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False}
    | {"max_position_embeddings": 131072},
}
LENGTH, NEW, EPISODES = 2048, 512, 8
AGENTS, CARDS = (1, 2, 3, 8), (8, 12, 16, 24, 80)
# Bytes of a weight in 4 bits with its constants, which are not quantized again
FOUR_BITS = 0.5 + 4 / 64


def measured(shape, layers, folder):
    """The plan of one agent on a model with `layers` layers, and the cost of a token's activations."""
    shape = {**shape, "num_hidden_layers": layers}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    linear = sum(p.numel() for name, p in base.named_parameters() if ".layers." in name and p.dim() == 2)
    trainer = MARFTTrainer(
        base,
        agents=[AgentSpec("solver")],
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=MARFTConfig(
            str(folder),
            per_device_train_batch_size=2,
            num_generations=2,
            max_steps=1,
            max_completion_length=16,
            bf16=True,
            use_cpu=True,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["How many?"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(smollm2()),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    plan, cost = trainer.memory_plan(), trainer.parts.batcher.measure(128)
    trainer.end()
    return plan, cost, linear


def parts_of(shape):
    """Bytes of a model by part (per agent for adapters and their state), and the number of weights to quantize."""
    plans = {}
    for layers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            plans[layers] = measured(shape, layers, Path(folder))
        gc.collect()
    (one_layer, cost_of_one, linear), (two_layers, cost_of_two, _) = plans[1], plans[2]
    layers = shape["num_hidden_layers"]

    def whole(name):
        first, second = getattr(one_layer, name), getattr(two_layers, name)
        return first + (second - first) * (layers - 1)

    sizes = {name: whole(name) for name in ("base", "adapters", "gradients", "optimizer")}
    return sizes, cost_with(layers, {1: cost_of_one, 2: cost_of_two}), linear * layers


def needed(shape, sizes, cost, agents, base):
    """Bytes of a device on which a team can be trained."""
    cuda = torch.device("cuda")
    config = AutoConfig.for_model(shape["model_type"], **{k: v for k, v in shape.items() if k != "model_type"})
    held = base + agents * (sizes["adapters"] + sizes["optimizer"])
    learning = held + agents * sizes["gradients"]
    row = cost.bytes_per_token(True) * LENGTH + head_size(shape["vocab_size"], NEW, cuda)
    return max(learning + row / 0.7, held + cache_size(config, EPISODES, LENGTH, 2))


def lines_of(name):
    shape = SHAPES[name]
    sizes, cost, linear = parts_of(shape)
    for precision, base in (("bf16", sizes["base"]), ("4 bits", sizes["base"] - linear * (2 - FOUR_BITS))):
        cells = []
        for agents in AGENTS:
            size = needed(shape, sizes, cost, agents, base) / 1e9
            card = next((f"on {card} GB" for card in CARDS if size <= 0.95 * card), "more than one")
            cells.append(f"{size:.1f} GB ({card})")
        yield f"| {name}, {precision} | {base / 1e9:.1f} GB | {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    titles = [f"{count} agent{'s' * (count > 1)}" for count in AGENTS]
    print(f"| model | base | {' | '.join(titles)} |\n|---|---|{'---|' * len(titles)}")
    for name in options.models:
        print("\n".join(lines_of(name)), flush=True)


if __name__ == "__main__":
    main()
