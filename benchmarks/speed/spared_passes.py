"""
Measure the time that a training step saves by skipping rows without a training signal.

    python benchmarks/speed/spared_passes.py [--page]
    python benchmarks/speed/spared_passes.py --hidden 256 --layers 4

A team of two in which half of the groups have no signal, with and without the passes of their rows. Times are those of
the training part of a step (losses, backward passes, the optimizer) and of whole steps with generation; CPU
milliseconds of one thread. Variants alternate; shown are medians and the range of the ratio of neighboring steps.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.tiny import tiny_dataset, tiny_model, tiny_tokenizer

import torch
from peft import LoraConfig
from transformers import PrinterCallback
from transformers.utils import logging


# `figures` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures


class Steps:
    """A trainer that takes one step at a time."""

    def __init__(self, options, folder, agents, episodes, group, reward, **settings):
        tokenizer = tiny_tokenizer()
        sizes = {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden}
        model = tiny_model(len(tokenizer), num_hidden_layers=options.layers, **sizes)
        model.generation_config.eos_token_id = None
        self.trainer = MARFTTrainer(
            model=model,
            agents=agents,
            reward_funcs=reward,
            args=MARFTConfig(
                folder,
                per_device_train_batch_size=episodes,
                num_generations=group,
                max_completion_length=options.new_tokens,
                generation_kwargs={"min_new_tokens": options.new_tokens},
                gradient_checkpointing=False,
                max_steps=10**6,
                learning_rate=1e-5,
                bf16=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                logging_steps=10**6,
                use_cpu=True,
                **settings,
            ),
            train_dataset=tiny_dataset(256),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.model.train()
        self.rows = [self.trainer.train_dataset[index // group] for index in range(episodes)]

    def step(self) -> tuple[float, float]:
        """Milliseconds of the training part of a step, and of all of it."""
        trainer = self.trainer
        begin = time.process_time()
        slices = trainer.parts.batch_maker.for_training(self.rows)
        middle = time.process_time()
        trainer.accelerator.gradient_state._set_sync_gradients(True)
        for slice_ in slices:
            loss = trainer.compute_loss(trainer.model, slice_)
            trainer.accelerator.backward(loss)
        trainer.parts.loss.end_step(True)
        trainer.parts.updates.finish(True)
        trainer.parts.updates.clip(1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        end = time.process_time()
        return 1000 * (end - middle), 1000 * (end - begin)


def compare(variants: dict[str, Steps], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of the training part and of all of a step, by variant and repeat."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for round_ in range(repeats + 2):
        for name, steps in variants.items():
            taken = steps.step()
            if round_ > 1:
                times[name].append((round(taken[0], 1), round(taken[1], 1)))
    return times


def tables(measurements):
    """Medians of milliseconds, and of the ratios to the first variant of a team with their ranges."""
    rows = []
    for team, times in measurements["runs"].items():
        first = next(iter(times.values()))
        for name, steps in times.items():
            cells = []
            for part in range(2):
                ratios = [step[part] / other[part] for step, other in zip(steps, first, strict=True)]
                cells.append(f"{statistics.median(step[part] for step in steps):.0f} ms")
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
                cells.append("1" if steps is first else spread)
            rows.append([team, name, *cells])
    return {"spared_passes": figures.markdown(["team", "passes", "training", "ratio", "whole step", "ratio"], rows)}


def varied(completions, **kwargs):
    return [float(index % 3) for index in range(len(completions))]


def of_half(completions, **kwargs):
    """Every other group of four has no signal."""
    return [float(index % 3) if index // 4 % 2 else 0.0 for index in range(len(completions))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--new_tokens", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=64, help="episodes of the first table")
    parser.add_argument("--repeats", type=int, default=9)
    options = figures.parse(parser)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    team = [AgentSpec("reasoner", system_prompt="Write the steps."), AgentSpec("actor", system_prompt="Answer.")]
    runs = {}
    with tempfile.TemporaryDirectory() as path:
        chunk = {"max_tokens_per_micro_batch": 4096}
        sizes = options.episodes, 4
        runs["two agents, half of the groups without a signal"] = compare(
            {
                "all rows": Steps(options, path, team, *sizes, of_half, skip_rows_without_signal=False, **chunk),
                "rows with a signal": Steps(options, path, team, *sizes, of_half, **chunk),
                "every group has a signal": Steps(options, path, team, *sizes, varied, **chunk),
            },
            options.repeats,
        )
    measurements = {"made": figures.made("python benchmarks/speed/spared_passes.py"), "runs": runs}
    print(tables(measurements)["spared_passes"])
    if options.page:
        figures.publish("spared_passes", measurements)


if __name__ == "__main__":
    main()
