"""
Cost of a checkpoint, including hashing and syncing, next to that of `GRPOTrainer`.

    python benchmarks/speed/saving.py [--model MODEL] [--rank 16] [--steps 12]

Both trainers save after every second step of one run each, on the same base and LoRA: a team of two, and one
`GRPOTrainer`. The table has seconds (medians and the largest) and the share of the time of a run that saves every 50
steps.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

from marft_trl import MARFTConfig, MARFTTrainer
from marft_trl.tiny import tiny_agents, tiny_dataset, tiny_model, tiny_tokenizer

import torch
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions, **kwargs):
    return [float(index % 3) for index in range(len(completions))]


class Clock(TrainerCallback):
    """Seconds of steps and of saves."""

    def __init__(self):
        self.steps, self.saves, self._last = [], [], 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._last = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(time.perf_counter() - self._last)

    def timed(self, save):
        def call(*arguments, **named):
            start = time.perf_counter()
            save(*arguments, **named)
            self.saves.append(time.perf_counter() - start)

        return call


def run(trainer_class, options, folder: Path) -> Clock:
    clock, model, tokenizer = Clock(), options.model, None
    if model is None:
        tokenizer = tiny_tokenizer()
        model = tiny_model(len(tokenizer))
    is_team = trainer_class is MARFTTrainer
    args = (MARFTConfig if is_team else GRPOConfig)(
        str(folder / trainer_class.__name__),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=24,
        max_steps=options.steps,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=tiny_dataset(200),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear"),
        callbacks=[clock],
        **({"agents": tiny_agents()} if is_team else {}),
    )
    trainer._save_checkpoint = clock.timed(trainer._save_checkpoint)
    trainer.train()
    newest = max((folder / trainer_class.__name__).glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    clock.size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    return clock


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="name or folder; the embedded model if left out")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("trainer       step (s)  save (s)  largest  checkpoint (MB)  share at save_steps=50")
    with tempfile.TemporaryDirectory() as folder:
        for trainer_class in (GRPOTrainer, MARFTTrainer):
            clock = run(trainer_class, options, Path(folder))
            step, save = statistics.median(clock.steps[1:]), statistics.median(clock.saves[1:])
            print(
                f"{trainer_class.__name__:12}  {step:8.3f}  {save:8.3f}  {max(clock.saves):7.3f}  "
                f"{clock.size / 1e6:15.1f}  {save / (50 * step + save):.2%}"
            )


if __name__ == "__main__":
    main()
