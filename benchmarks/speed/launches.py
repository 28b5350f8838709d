"""
Count what a GPU would have to launch, without a GPU: passes of a training step, and kernels of a decoding step.

    python benchmarks/speed/launches.py [--page]

A launch costs the host 25 to 40 us, whatever the kernel computes, so counts determine the time of small batches. A
pass is a call of the base model; the first step, which measures memory, is not counted. Kernels are the operations of
PyTorch that are not views, for each layer: the difference between models of three and of two layers. `rms_norm` counts
as one, as on CUDA. Counts are the same on every machine.
"""

import argparse
import contextlib
import functools
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from marft_trl import MARFTConfig, MARFTTrainer
from marft_trl.seams.lora_layers import DecodingLayers
from marft_trl.shared_prefix.decoding import FixedSteps, GrowingSteps
from marft_trl.tiny import tiny_agents, tiny_dataset, tiny_model, tiny_tokenizer

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


# `figures` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures


class Kernels(TorchDispatchMode):
    """Counts operations that are not views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        returns = function._schema.returns
        is_view = bool(returns) and all(out.alias_info is not None and not out.alias_info.is_write for out in returns)
        name = str(function)
        if not is_view and not any(part in name for part in ("empty", "detach", "_unsafe_view")):
            self.names.append(name)
        return result


@contextlib.contextmanager
def fused_norms(kernels):
    """`rms_norm` is a kernel on CUDA. On a CPU it is eight operations."""
    original = F.rms_norm

    def counted(*args, **kwargs):
        before = len(kernels.names)
        result = original(*args, **kwargs)
        kernels.names[before:] = ["rms_norm"]
        return result

    F.rms_norm = counted
    try:
        yield
    finally:
        F.rms_norm = original


def decoding_kernels(layers, steps="fixed", packed=True, rows=4):
    """Names of the kernels of a step of decoding: Qwen3 in bfloat16 with a LoRA of r 8 on all linear layers."""
    torch.manual_seed(0)
    model = tiny_model(300, num_hidden_layers=layers).to(torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).eval()
    base, mask, lengths = model.get_base_model(), torch.ones(rows, 16, dtype=torch.long), torch.full((rows,), 5)
    if steps == "fixed":
        decoding = FixedSteps(base, rows, 16, torch.device("cpu"))
        decoding.start(mask, lengths)
    else:
        decoding = GrowingSteps(base, 16, mask, lengths, is_padded=False)
    decoding.begin(4)
    tokens = torch.ones(rows, 1, dtype=torch.long)
    with torch.no_grad(), DecodingLayers(lambda: model).on() if packed else contextlib.nullcontext():
        decoding.logits(tokens)
        kernels = Kernels()
        with kernels, fused_norms(kernels):
            decoding.logits(tokens)
    return kernels.names


def kernels_of_a_layer(**options):
    """Names of the kernels of a layer in a step of decoding."""
    more, fewer = decoding_kernels(3, **options), decoding_kernels(2, **options)
    names = list(more)
    for name in fewer:
        names.remove(name)
    return names


class FromTheSecondStep(TrainerCallback):
    """Resets the counts after the first step, which also measures memory."""

    def __init__(self, counts):
        self.counts = counts

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.counts.clear()


def passes_of_a_step(trainer):
    """Passes over whole rows: without a gradient (prompts and scores), with one, and backward."""
    base = trainer.accelerator.unwrap_model(trainer.model).get_base_model().model
    counts, forward, backward = Counter(), base.forward, trainer.accelerator.backward

    @functools.wraps(forward)
    def counted(*args, **kwargs):
        states = (output := forward(*args, **kwargs)).last_hidden_state
        counts["with a gradient" if states.requires_grad else "without" if states.size(1) > 1 else "of a token"] += 1
        return output

    def counted_backward(loss, **kwargs):
        counts["backward"] += loss.grad_fn is not None  # the Trainer's own call has no graph
        return backward(loss, **kwargs)

    base.forward, trainer.accelerator.backward = counted, counted_backward
    trainer.add_callback(FromTheSecondStep(counts))
    trainer.train()
    return counts


def make(kind, batch_size, accumulation, iterations=1):
    tokenizer, folder = tiny_tokenizer(), tempfile.mkdtemp()
    torch.manual_seed(0)
    model = tiny_model(len(tokenizer))
    settings = {
        **{"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation, "max_steps": 2},
        **{"num_generations": 4, "max_completion_length": 12, "num_iterations": iterations, "bf16": False},
        **{"save_strategy": "no", "report_to": [], "disable_tqdm": True, "gradient_checkpointing": False, "seed": 1},
    }
    lora = LoraConfig(r=4, target_modules="all-linear")
    common = {"train_dataset": tiny_dataset(64), "processing_class": tokenizer, "peft_config": lora}
    if kind == "GRPOTrainer":
        return GRPOTrainer(model, score, args=GRPOConfig(folder, **settings), **common)
    agents = tiny_agents() if kind == "duo" else tiny_agents()[:1]
    return MARFTTrainer(model, score, args=MARFTConfig(folder, **settings), agents=agents, **common)


def score(completions, **kwargs):
    return [float(index % 3) for index in range(len(completions))]


KINDS = {"GRPOTrainer": "GRPOTrainer", "one agent": "one agent", "duo": "two agents in a chain"}
DECODING = {
    "as the loop of transformers runs them (shapes that grow)": {"steps": "growing", "packed": False},
    "fixed shapes, layers of PEFT and transformers": {"packed": False},
    "fixed shapes, layers for decoding": {},
}


def tables(measurements):
    """Passes of a step. Splits of a batch that need the same passes share a row."""
    rows = []
    for kind, runs in measurements["passes"].items():
        splits = {}
        for size, slices, *counts in runs:
            splits.setdefault(tuple(counts), []).append(f"{size} x {slices}")
        for counts, names in splits.items():
            *first, last = names
            rows.append([KINDS[kind], f"{', '.join(first)} or {last}" if first else last, *counts])
    columns = ["passes of a step", "rows", "without a gradient", "with one", "backward"]
    return {"passes": figures.markdown(columns, rows)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = figures.parse(parser)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    passes = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for split in ((32, 1), (8, 4), (2, 16)):
            with contextlib.redirect_stdout(None):
                counts = passes_of_a_step(make(kind, *split))
            passes[kind].append([*split, *(counts[name] for name in ("without", "with a gradient", "backward"))])
    kernels = {name: len(kernels_of_a_layer(**settings)) for name, settings in DECODING.items()}
    measurements = {"made": figures.made("python benchmarks/speed/launches.py"), "passes": passes, "kernels": kernels}
    print(tables(measurements)["passes"], end="\n\n")
    print(figures.markdown(["kernels of a layer and token", ""], kernels.items()))
    if options.page:
        figures.publish("passes", measurements)


if __name__ == "__main__":
    main()
