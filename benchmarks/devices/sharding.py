"""
Memory and traffic of teams on a base of 70B in shards, by arithmetic: on eight GPUs, on two nodes.

    python benchmarks/devices/sharding.py

Models and adapters are built without weights (on the meta device), so parameters are counted, not estimated. The sizes
of shards are those of `marft_trl.seams.sharding.shard_sizes`, which `tests/test_sharding.py` compares with what two
processes hold. Activations with gradient checkpointing are the inputs of the layers, and the tensors of one layer.
Times assume `--bandwidth` and `--flops`; nothing here has been measured on a GPU.
"""

import argparse
import warnings

from marft_trl.learning.memory import readable
from marft_trl.seams.sharding import shard_sizes

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig


SHAPE = {
    **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    **{"num_key_value_heads": 8, "vocab_size": 128256},
}
TARGETS, RANK, TOKENS = "all-linear", 16, 4096
# Bytes per 4-bit weight with double quantization, in addition to half a byte; each process has all of them
CONSTANTS = 0.0159
# Name, bytes of an element of the base's layers, processes that share it
SETUPS = [
    ("8 x 80 GB: 4 train in shards, 4 serve", 2.0, 4),
    ("8 x 80 GB: 4 train in 4-bit shards, 4 serve", 0.5, 4),
    ("2 nodes: 8 x 80 GB train in shards, 8 serve", 2.0, 8),
]


def build():
    """A model in bf16 with one adapter, without weights, and the parameters of the adapter."""
    config = LlamaConfig(**SHAPE, tie_word_embeddings=False, dtype=torch.bfloat16)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = get_peft_model(base, LoraConfig(r=RANK, target_modules=TARGETS))
    return model, [p for name, p in model.named_parameters() if "lora_" in name]


def row(setup, options):
    """One line of the table, and the traffic of a micro-batch."""
    name, width, world = setup
    model, adapter = build()
    sizes = shard_sizes(model, adapter, world)
    config, layers = model.config, [p for n, p in model.named_parameters() if ".layers." in n and "lora_" not in n]
    in_layers, total = sum(p.numel() for p in layers), sum(p.numel() for p in model.parameters())
    of_adapter = sum(p.numel() for p in adapter)
    base = total - of_adapter
    held = sizes.held + (width - 2.0) * in_layers / world  # only layers are quantized
    held += CONSTANTS * in_layers if width < 1 else 0
    layer, embeddings = in_layers / config.num_hidden_layers * width, config.vocab_size * config.hidden_size * 2
    gathered = max(2 * layer, embeddings + layer)
    adapters = options.agents * of_adapter * 16  # fp32: weights, gradients, two moments
    kept = TOKENS * config.num_hidden_layers * config.hidden_size * 2
    within = TOKENS * 2 * (8 * config.hidden_size + 3 * config.intermediate_size)
    everything = held + gathered + adapters + kept + within
    # Forward and backward; the embeddings once. Where rows share a prefix, there are two passes of each kind
    traffic = (world - 1) / world * (2 * in_layers * width + embeddings)
    cells = [held, gathered, adapters, kept + within, everything]
    line = f"| {name} | 70B, {base / 1e9:.1f}B | " + " | ".join(readable(cell) for cell in cells) + " |"
    seconds, per_token = traffic / options.bandwidth, 6 * base / options.flops
    return line, f"| {name} | {readable(traffic)} | {seconds:.2f} s | {seconds / per_token:,.0f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, default=300e9, help="bytes per second that a GPU receives")
    parser.add_argument("--flops", type=float, default=400e12, help="operations per second of a GPU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lines, traffic = zip(*(row(setup, options) for setup in SETUPS), strict=True)
    print("| on each GPU | base | weights | gathered at once | adapters | activations | together |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    print("\n| | gathered for a micro-batch | time | tokens of a micro-batch that take as long |")
    print("|---|---|---|---|")
    print("\n".join(traffic))
    _, adapter = build()
    size = sum(p.numel() for p in adapter)
    print(f"\nAn adapter of the 70B team: {size:,} weights, {readable(2 * size)} in bf16 for a server.")


if __name__ == "__main__":
    main()
