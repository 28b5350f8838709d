"""
Memory and time of a step of every recipe on its model, without the Hub and without a GPU.

    python benchmarks/recipe_plans.py [--page]        # all recipes; needs 16 GB of memory
    python benchmarks/recipe_plans.py --recipes math_duo

Models have the published shapes and random weights in bfloat16, and the tokenizer of SmolLM2, so that
`trainer.memory_plan()` returns the plan of the real models, on a GPU with `--memory` bytes. The activations of a token
are measured on rows of 128 tokens with one and with two layers, and extrapolated: each further layer adds the same
amount. With access to the Hub, `train.py --dry_run true` prints the plan of the real model.

Times are calculated for turns of the maximum length, at `--bandwidth` and `--flops` (by default 60 % of the
memory bandwidth and 40 % of the bfloat16 rate that NVIDIA states for an H100 SXM). A decoding step reads all weights
and the cache. A pass through the model takes two operations for each weight and token, and four for each pair of
tokens, head dimension and layer; a backward pass through a frozen base takes as much. Nothing was measured on a GPU.
Engines that decode less than a whole batch at a time, or with overheads, take longer.
"""

import argparse
import gc
import sys
import tempfile
import warnings
from pathlib import Path

from marft_trl.config.checks import uses_candidates
from marft_trl.extras.tasks import smollm2
from marft_trl.learning import batching
from marft_trl.learning import memory as memory_sizes
from marft_trl.learning.memory import GRADIENTS, ActivationCost, head_size, readable

import figures
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


RECIPES = Path(__file__).parent.parent / "examples" / "recipes"
_QWEN = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
_QWEN2_1B = {
    **_QWEN,
    **{"model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "intermediate_size": 8960},
    **{"num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768},
}
_QWEN2_3B = {
    **_QWEN,
    **{"model_type": "qwen2", "hidden_size": 2048, "num_hidden_layers": 36, "intermediate_size": 11008},
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768},
}
_QWEN3 = {**_QWEN, "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128}
# Published shapes of the models
SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN2_1B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": {
        **_QWEN2_1B, "tie_word_embeddings": False, "max_position_embeddings": 131072
    },
    "Qwen/Qwen2.5-3B-Instruct": _QWEN2_3B,
    "Qwen/Qwen2.5-Coder-3B-Instruct": _QWEN2_3B,
    "Qwen/Qwen3-1.7B": {
        **_QWEN3,
        **{"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "num_attention_heads": 16},
        "max_position_embeddings": 40960,
    },
    "Qwen/Qwen3-4B-Instruct-2507": {
        **_QWEN3,
        **{"hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "num_attention_heads": 32},
        "max_position_embeddings": 262144,
    },
}  # fmt: skip


def make(recipe, folder, **shape):
    """The trainer of a recipe, and the name of its model. `shape` changes the model's."""
    from problems import SOURCES
    from train import make_trainer, parse

    flags = ["--config", str(RECIPES / f"{recipe}.yaml"), "--output_dir", str(folder), "--eval_size", "0"]
    flags += ["--use_cpu", "true", "--bf16", "true", "--report_to", "none"]
    arguments, training, model = parse(flags)
    if arguments.problems in SOURCES:
        # As often as a generation batch needs
        arguments.problem_files = [str(RECIPES / "samples" / f"{arguments.problems}.jsonl")] * 40
    arguments.gym_size = 256
    shape = SHAPES[model.model_name_or_path] | shape
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    return make_trainer(arguments, training, model, base, processing_class=tokenizer), model.model_name_or_path


def cost_with(layers, measured):
    """
    Activations of a token in a model with `layers` layers. `measured` has those of small models, by number of layers.
    Each layer adds the same amount to what a pass keeps; `ActivationCost` counts one layer more (two if checkpointed).
    """
    (few, of_few), (more, of_more) = measured.items()

    def at(kept_in, of):
        first, second = kept_in(few, of_few), kept_in(more, of_more)
        return first + (second - first) / (more - few) * (of - few)

    def kept(count, cost):
        return cost.per_token / (1 + GRADIENTS / count)

    linear = at(kept, layers)
    per_repeat = at(lambda count, cost: cost.per_repeat / (1 + GRADIENTS / count), layers)
    inputs = at(lambda count, cost: cost.per_checkpointed - 2 * kept(count, cost) / count, layers)
    return ActivationCost(
        per_token=linear * (1 + GRADIENTS / layers),
        per_repeat=per_repeat * (1 + GRADIENTS / layers),
        per_checkpointed=inputs + 2 * linear / layers,
    )


def cost_of(recipe, folder):
    """Activations of a token of the recipe's model."""
    measured = {}
    for layers in (1, 2):
        trainer, name = make(recipe, folder / str(layers), num_hidden_layers=layers)
        measured[layers] = trainer.parts.batcher.measure(128)
        trainer.end()
        del trainer
        gc.collect()
    return cost_with(SHAPES[name]["num_hidden_layers"], measured)


def plan_on_gpu(trainer, cost, memory):
    """Let the trainer plan for a device with `memory` bytes, and return its memory plan."""
    batcher, vocabulary = trainer.parts.batcher, trainer.model.config.vocab_size
    batcher.measure = lambda length: cost
    for module in (batching, memory_sizes):
        module.head_size = lambda vocabulary, scored, device: head_size(vocabulary, scored, torch.device("cuda"))
    taken = trainer.memory_plan()
    held = taken.base + taken.adapters + taken.critic + taken.gradients + taken.optimizer

    def room(scored, fixed=0.0):
        return max(0.7 * (memory - held) - head_size(vocabulary, scored, torch.device("cuda")) - fixed, 1.0)

    batcher.free_for_activations = room
    return trainer.memory_plan()


class Work:
    """
    Operations and bytes of a step with turns of the maximum length. Each turn has its candidates, and each candidate,
    except in the last turn, has the turns that complete its episode. Re-runs for credit, which no recipe has, are not
    counted.

    Args:
        trainer: the trainer of a recipe.
    """

    def __init__(self, trainer):
        self.args, self.config = trainer.args, trainer.model.config
        rehearsal = trainer.parts.planner.rehearse(trainer.train_dataset[0])
        self.turns = [(length, self.args.max_completion_length) for _, length, _ in rehearsal.prompts]
        self.candidates = self.args.turn_candidates if uses_candidates(self.args) else 1
        self.completed = self.candidates * self.args.candidate_samples if self.candidates > 1 else 0
        layers = [p for name, p in trainer.model.named_parameters() if ".layers." in name and "lora_" not in name]
        self.weights = sum(p.numel() for p in layers)
        self.head = self.config.vocab_size * self.config.hidden_size
        heads, kv = self.config.num_attention_heads, self.config.num_key_value_heads
        dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        self.cached = 2 * 2 * self.config.num_hidden_layers * kv * dim  # bytes of a token, in bfloat16
        self.attended = 4 * self.config.num_hidden_layers * heads * dim
        self.checkpointing = bool(self.args.gradient_checkpointing)
        self.has_critic = self.args.critic not in (None, "frozen")

    @property
    def batches(self):
        """Generation batches in an optimizer step."""
        return self.args.gradient_accumulation_steps / (self.args.steps_per_generation * self.args.num_iterations)

    @property
    def waves(self):
        """Turns that are generated at once, as tuples of their number by episode, their prompt and their length."""
        generated = []
        for index, turn in enumerate(self.turns):
            generated.append((self.candidates, *turn))
            generated += [(self.completed, *later) for later in self.turns[index + 1 :] if self.completed]
        return generated

    @property
    def decoding_steps(self):
        return sum(new for _, _, new in self.waves)

    def seconds_of_generation(self, bandwidth, flops):
        episodes = self.args.per_device_train_batch_size * self.args.steps_per_generation
        read = sum(
            new * 2 * (self.weights + self.head) + episodes * count * self.cached * new * (length + new / 2)
            for count, length, new in self.waves
        )
        worked = sum(episodes * count * self.passed(length + new, new) for count, length, new in self.waves)
        return self.batches * (read / bandwidth + worked / flops)

    def passed(self, tokens, scored):
        """Operations of a pass of one row."""
        return 2 * (self.weights * tokens + self.head * scored) + self.attended * tokens**2 / 2

    def seconds_of_training(self, flops):
        episodes = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        learning = (2 + self.checkpointing) * (1 + self.has_critic)
        # Log-probabilities and values of the rollout, once for all uses of it; the reference
        once = (1 + (self.args.beta > 0) + (self.args.critic is not None)) / self.args.num_iterations
        row = sum(self.candidates * self.passed(length + new, new) for length, new in self.turns)
        return (learning + once) * episodes * row / flops


def length_of(args, seconds):
    """Hours of a run, or of an epoch by 1,000 prompts where its length depends on the dataset."""
    if args.max_steps > 0:
        return f"{args.max_steps} steps: {args.max_steps * seconds / 3600:.3g} h"
    prompts = args.per_device_train_batch_size * args.gradient_accumulation_steps / args.num_generations
    hours = 1000 * args.num_iterations / prompts * seconds / 3600
    return f"{args.num_train_epochs:g} epochs: {hours:.3g} h by epoch and 1,000 prompts"


def plan_of(recipe, options):
    """Bytes, seconds and lengths of a step of a recipe, and how long a run of it takes."""
    with tempfile.TemporaryDirectory() as folder:
        cost = cost_of(recipe, Path(folder))
        trainer, name = make(recipe, Path(folder) / "whole")
        memory, work = plan_on_gpu(trainer, cost, options.memory), Work(trainer)
        lines = trainer.plan().splitlines()
        trainer.end()
    generation = work.seconds_of_generation(options.bandwidth, options.flops)
    training = work.seconds_of_training(options.flops)
    if options.plans:
        print("\n".join(["", f"## {recipe}", *lines[: lines.index("") + 30]]), file=sys.stderr)
    return {
        "model": name,
        "longest row": max(length + new for length, new in work.turns),
        "is too long": any("TOO LONG" in line for line in lines),
        "bytes": [round(size) for size in (memory.base, memory.activations, memory.cache, memory.total)],
        "decoding steps": [work.batches, work.decoding_steps],
        "seconds": [round(generation, 3), round(training, 3)],
        "run": length_of(trainer.args, generation + training),
    }


def tables(measurements):
    """A row for each recipe."""
    rows = []
    for recipe, made in measurements["plans"].items():
        longest = f"{made['longest row']:,}{' (longer than the window)' * made['is too long']}"
        seconds = [f"{float(f'{value:.3g}'):,g}" for value in made["seconds"]]
        rows.append([f"`{recipe}`", longest, *map(readable, made["bytes"]), *seconds, made["run"]])
    columns = ["recipe", "longest row", "base", "activations", "cache", "at once"]
    columns += ["seconds of generation", "seconds of training", "a run"]
    return {"plans": figures.markdown(columns, rows)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=sorted(path.stem for path in RECIPES.glob("*.yaml")))
    parser.add_argument("--memory", type=float, default=80e9, help="bytes of the GPU")
    parser.add_argument("--bandwidth", type=float, default=2.0e12, help="bytes per second")
    parser.add_argument("--flops", type=float, default=4.0e14, help="operations per second")
    parser.add_argument("--plans", action="store_true", help="print the plans too, to stderr")
    options = figures.parse(parser, free=("plans",))
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(RECIPES))
    measurements = {"made": figures.made("python benchmarks/recipe_plans.py"), "plans": {}}
    for recipe in options.recipes:
        measurements["plans"][recipe] = made = plan_of(recipe, options)
        batches, steps = made["decoding steps"]
        print(f"{recipe}: {made['model']}, {batches:g} x {steps:,} decoding steps", file=sys.stderr, flush=True)
        gc.collect()
    print(tables(measurements)["plans"])
    if options.page:
        figures.publish("plans", measurements)


if __name__ == "__main__":
    main()
