"""
Train a team in an environment with several rounds: guess a number, cross a grid or empty a store.

    python examples/play.py --world grid                       # a tiny model, offline, some minutes on a CPU
    python examples/play.py --quick                            # a few steps of everything
    python examples/play.py --world store --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --learning_rate 1e-5

`worlds.py` defines the environments and the teams: one agent in several rounds ("guess"), a planner and a mover
("grid"), and an orchestrator with two executors ("store"). The reward of a round belongs to the turns of this round.
"""

import argparse
import random
from pathlib import Path

from marft_trl import MARFTConfig, MARFTTrainer
from marft_trl.reporting import save_learning_curve
from marft_trl.tiny import scripted_turns, tiny_model, tiny_tokenizer, warm_up

from datasets import Dataset
from peft import LoraConfig
from transformers import set_seed
from transformers.utils import logging
from worlds import WORLDS


def taught_model(world, seed, steps=600):
    """Train a tiny model to imitate the scripted agents of the world, whose turns are random two times in five."""
    tokenizer = tiny_tokenizer(world.words)
    model = tiny_model(len(tokenizer), seed=seed)
    set_seed(seed)
    print("Teaching a tiny model the rules ...", flush=True)
    rows = scripted_turns(tokenizer, world.workflow, world.agents, world.row, world.scripted, seed)
    warm_up(model, tokenizer, steps=steps, learning_rate=1.5e-3, rows=rows)
    return model, tokenizer


def make_trainer(world, model, tokenizer, args, seed, episodes):
    draw = random.Random(seed)
    return MARFTTrainer(
        model=model,
        processing_class=tokenizer,
        agents=world.agents,
        workflow=world.workflow,
        args=args,
        train_dataset=Dataset.from_list([world.row(draw) for _ in range(2000)]),
        eval_dataset=Dataset.from_list([world.row(draw) for _ in range(episodes)]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )


def play(world, output_dir, model, tokenizer=None, seed=0, max_steps=40, learning_rate=None, episodes=400):
    """
    Train the world's team with a tiny model and its tokenizer, or with a real model, which loads its own tokenizer.
    Each evaluation plays `episodes`.

    Returns: the trainer, and the evaluation metrics before and after training.
    """
    args = MARFTConfig(
        str(output_dir),
        per_device_train_batch_size=64,
        per_device_eval_batch_size=200,
        num_generations=8,
        num_generations_eval=1,
        credit_kind="rewards",  # the return of a turn is the sum of the rewards from this turn on
        max_steps=max_steps,
        learning_rate=learning_rate or (2e-3 if tokenizer is not None else 1e-5),
        gradient_checkpointing=tokenizer is None,
        logging_steps=2,
        save_strategy="no",
        disable_tqdm=False,
        seed=seed,
    )
    trainer = make_trainer(world, model, tokenizer, args, seed, episodes)
    before = trainer.evaluate()
    trainer.train()
    return trainer, before, trainer.evaluate()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=sorted(WORLDS), default="grid")
    parser.add_argument("--model_name_or_path", help="Model on the Hub or folder. Defaults to a tiny model.")
    parser.add_argument("--output_dir", type=Path, default=Path("play-output"))
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--teaching_steps", type=int, default=600, help="Supervised steps for the tiny model.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="A few steps of everything.")
    options = parser.parse_args()
    if options.quick:
        options.teaching_steps, options.max_steps = 30, 2
    episodes = 40 if options.quick else 400
    logging.set_verbosity_error()
    world, seed = WORLDS[options.world](), options.seed
    model, tokenizer = options.model_name_or_path, None
    if model is None:
        model, tokenizer = taught_model(world, seed, options.teaching_steps)
        model.save_pretrained(options.output_dir / "base")
        tokenizer.save_pretrained(options.output_dir / "base")
    trainer, before, after = play(
        world, options.output_dir, model, tokenizer, seed, options.max_steps, options.learning_rate, episodes
    )
    trainer.save_model()
    save_learning_curve(trainer.state.log_history, options.output_dir, ["reward"])
    print(
        f"reward of {episodes} episodes: {before['eval_reward']:.3f} before, {after['eval_reward']:.3f} after training"
    )
    print(f"saved team: {options.output_dir} (base: {options.model_name_or_path or options.output_dir / 'base'})")


if __name__ == "__main__":
    main()
