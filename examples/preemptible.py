"""
A run that can be stopped or killed at any time and resumed with the same command, with bitwise identical results.

    python examples/preemptible.py --output_dir preemptible-output
    python examples/preemptible.py --quick               # a few steps
    # Ctrl+C, `kill`, `kill -9` or a lost machine; then the same command again

Two tiny agents learn sums on the CPU, offline. The reward gets stricter with the number of calls, so it has a state,
which is saved in checkpoints. If a reward function times out, its completions have no score and the run continues.
"""

import argparse
import hashlib
from pathlib import Path

from marft_trl import MARFTConfig, MARFTTrainer
from marft_trl.tiny import exact_answer, tiny_agents, tiny_dataset, tiny_team_model

import torch
from peft import LoraConfig
from safetensors.torch import load_file


class Stricter:
    """1 for a right answer, and a decreasing reward for a text that only begins with a digit."""

    __name__ = "stricter"

    def __init__(self):
        self.calls = 0

    def __call__(self, completions, solution, **kwargs):
        self.calls += 1
        right = exact_answer(completions, solution)
        consolation = 0.2 / self.calls
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [max(score, consolation * text[:1].isdigit()) for score, text in zip(right, texts, strict=True)]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="preemptible-output")
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--model", help="folder of a model (default: the embedded one)")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = options.model or tiny_team_model(steps=100 if options.quick else 800)
    trainer = MARFTTrainer(
        model=base,
        agents=tiny_agents(),
        reward_funcs=Stricter(),
        args=MARFTConfig(
            options.output_dir,
            max_steps=6 if options.quick else options.max_steps,
            per_device_train_batch_size=16,
            num_generations=8,
            learning_rate=1e-3,
            save_strategy="steps",
            save_steps=5,
            save_total_limit=2,
            reward_timeout=60,
            on_episode_error="skip",
            use_cpu=True,
            report_to=[],
        ),
        train_dataset=tiny_dataset(200),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    print(f"saved team: {options.output_dir} (base: {base})")
    for agent in trainer.agents:
        weights = load_file(Path(options.output_dir) / agent.name / "adapter_model.safetensors")
        digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights)))
        print(f"{agent.name}: {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
