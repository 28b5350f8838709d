"""
Train a team of two different models, offline and in minutes: the reasoner on one base, the actor on a smaller one.

    python examples/two_models.py                                    # two embedded models: minutes on a CPU
    python examples/two_models.py --quick                            # a few steps of everything
    python examples/two_models.py --reasoner Qwen/Qwen2.5-1.5B-Instruct --actor HuggingFaceTB/SmolLM2-135M-Instruct

The models have different sizes, tokenizers and chat templates. Each agent gets a LoRA on its own base, and reads the
other's turn as text. The reward is 1 for a right answer of the team and 0 otherwise.
"""

import argparse
import dataclasses
from pathlib import Path

from marft_trl import MARFTConfig, MARFTTrainer, Team
from marft_trl.reporting import team_exact_match
from marft_trl.tiny import (
    exact_answer,
    tiny_agents,
    tiny_dataset,
    tiny_model,
    tiny_team_model,
    tiny_tokenizer,
    warm_up,
)

from peft import LoraConfig
from transformers.utils import logging


TEMPLATE = (
    "{% for message in messages %}<|im_start|>[{{ message['role'] }}] {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def small_model(folder: Path, steps: int) -> str:
    """A model of a quarter of the size with another tokenizer and template, taught for half a minute."""
    if not (folder / "config.json").exists():
        print("Building the small model (once) ...", flush=True)
        tokenizer = tiny_tokenizer(words=("[user]", "[system]", "[reasoner]"))
        tokenizer.chat_template = TEMPLATE
        model = tiny_model(len(tokenizer), hidden_size=64, intermediate_size=192, head_dim=16)
        warm_up(model, tokenizer, steps)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reasoner", help="model of the reasoner (default: the embedded tiny model)")
    parser.add_argument("--actor", help="model of the actor (default: a smaller one)")
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--teaching_steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("two-models-output"))
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    options = parser.parse_args()
    if options.quick:
        options.teaching_steps, options.max_steps = 50, 2
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    first = options.reasoner or tiny_team_model(steps=100 if options.quick else 800)
    second = options.actor or small_model(
        options.output_dir / f"small-base-{options.teaching_steps}", options.teaching_steps
    )
    reasoner, actor = tiny_agents()
    trainer = MARFTTrainer(
        model=first,
        agents=[reasoner, dataclasses.replace(actor, model=second)],  # the only line for a second model
        reward_funcs=exact_answer,
        args=MARFTConfig(
            str(options.output_dir),
            per_device_train_batch_size=64,  # 8 questions with 8 episodes each
            num_generations=8,
            num_generations_eval=1,
            per_device_eval_batch_size=200,
            max_steps=options.max_steps,
            learning_rate=1e-4 if options.reasoner else 1.5e-3,
            logging_steps=4,
            save_strategy="no",
            seed=options.seed,
        ),
        train_dataset=tiny_dataset(4000, seed=0),
        eval_dataset=tiny_dataset(40 if options.quick else 400, seed=1),
        eval_metrics=team_exact_match(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    print(trainer.plan().partition("\n\nWorkflow")[0])
    before = trainer.evaluate()["eval_exact_match"]
    trainer.train()
    after = trainer.evaluate()["eval_exact_match"]
    trainer.save_model()
    models = {base.name: model for base, model in zip(trainer.manifest().bases, (first, second), strict=True)}
    team = Team.from_pretrained(options.output_dir, model=models)
    print(f"\nright answers of the team: {100 * before:.1f} % before, {100 * after:.1f} % after training")
    print(f"the saved team answers: {team(trainer.eval_dataset[0]['prompt'], greedy=True)}")
    print(f"saved team: {options.output_dir} (base: {first}, and {second} of the actor)")


if __name__ == "__main__":
    main()
