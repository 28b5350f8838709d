"""
Warm up a team on its own best turns, then continue with reinforcement learning. A pretrained duo on sums, on a CPU.

    python examples/warm_up.py                      # seed 0: about ten minutes on two cores
    python examples/warm_up.py --seeds 0 1 2
    python examples/warm_up.py --quick              # a few steps of everything with a tiny model, which learns nothing

One round of rejection sampling: the untrained team answers each question several times, one right episode of each
question is kept, and `SFTTrainer` trains each agent on its own turns in these episodes. Reinforcement learning starts
from these adapters and, for comparison, from fresh ones. Needs `pip install -e ".[all]"`.
"""

import argparse
import random
import re
import time
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Team
from marft_trl.extras.tasks import smollm2
from marft_trl.tiny import tiny_team_model

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer


AGENTS = [
    # Truncated turns have no end token to learn from, so turns stop after their first sentence
    AgentSpec("helper", system_prompt="Work out the answer in a few words.", max_completion_length=16, stop="."),
    AgentSpec("solver", system_prompt="Give only the answer.", max_completion_length=16, stop="."),
]


def sums(seed):
    """Training and held-out questions."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(seed).shuffle(pairs)
    rows = [{"prompt": [{"role": "user", "content": f"{a} + {b} = ?"}], "answer": str(a + b)} for a, b in pairs]
    return Dataset.from_list(rows[30:]), Dataset.from_list(rows[:30])


def is_right(text, answer):
    return float(re.findall(r"\d+", text)[-1:] == [answer])


def right(completions, answer, **kwargs):
    """The last number of the team's answer is the sum."""
    return [is_right(completion[0]["content"], target) for completion, target in zip(completions, answer, strict=True)]


def lora():
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")


def make_trainer(model, folder, options, seed, **arguments):
    train, held_out = sums(seed)
    args = MARFTConfig(
        str(folder),
        learning_rate=5e-4,
        per_device_train_batch_size=32,
        num_generations=8,
        num_generations_eval=8,
        per_device_eval_batch_size=240,
        max_steps=options.max_steps,
        save_strategy="no",
        report_to="none",
        logging_steps=2,
        seed=seed,
    )
    return MARFTTrainer(
        model=model,
        agents=AGENTS,
        reward_funcs=right,
        args=args,
        train_dataset=train,
        eval_dataset=held_out.select(range(4 if options.quick else len(held_out))),
        **arguments,
    )


def warm_up(base, folder, options, seed):
    """A model with the adapters of agents that have learned from their own best turns."""
    train, _ = sums(seed)
    trainer = make_trainer(base, folder / "untrained", options, seed, peft_config=lora())
    trainer.save_model()
    team = Team.from_pretrained(folder / "untrained", model=base)
    rows = list(train.select(range(options.questions)))
    episodes = team.run(rows, num_samples=options.num_samples, seed=seed)
    rewards = [is_right(episode.answer.text, episode.row["answer"]) for episode in episodes]
    print(f"rejection sampling: {sum(rewards):.0f} of {len(rewards)} episodes are right")
    threshold = 0.0 if options.quick else 1.0  # the tiny model cannot add
    for agent in AGENTS:
        dataset = team.to_dataset(episodes, agent=agent.name, rewards=rewards, best=1, threshold=threshold)
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_pretrained(base),
            SFTConfig(
                str(folder / agent.name),
                num_train_epochs=2,
                learning_rate=5e-4,
                per_device_train_batch_size=8,
                save_strategy="no",
                report_to="none",
                use_cpu=not torch.accelerator.is_available(),
                seed=seed,
            ),
            train_dataset=dataset,
            processing_class=AutoTokenizer.from_pretrained(folder / "untrained"),
            peft_config=lora(),
        )
        trainer.train()
        trainer.save_model()
        print(f"{agent.name}: warmed up on {len(dataset)} turns")
    first, *others = (agent.name for agent in AGENTS)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / first, adapter_name=first)
    for name in others:
        model.load_adapter(folder / name, name)
    return model


def run(base, folder, options, seed):
    """Shares of right answers and seconds, with and without the warm-up."""
    fresh = make_trainer(base, folder / "fresh", options, seed, peft_config=lora())
    results = {"untrained": fresh.evaluate()["eval_reward"]}
    start = time.time()
    fresh.train()
    results |= {"RL": fresh.evaluate()["eval_reward"], "RL, seconds": time.time() - start}
    start = time.time()
    warm = warm_up(base, folder, options, seed)
    results["warm-up, seconds"] = time.time() - start
    tokenizer = AutoTokenizer.from_pretrained(folder / "untrained")
    trainer = make_trainer(warm, folder / "warm-rl", options, seed, processing_class=tokenizer)
    results["warm"] = trainer.evaluate()["eval_reward"]
    start = time.time()
    trainer.train()
    results |= {"warm, RL": trainer.evaluate()["eval_reward"], "warm, RL, seconds": time.time() - start}
    trainer.save_model()
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument(
        "--questions", type=int, default=70, help="number of training questions for rejection sampling"
    )
    parser.add_argument("--num_samples", type=int, default=8)
    parser.add_argument("--model", help="folder of a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--output_dir", type=Path, default=Path("warm-up-output"))
    parser.add_argument("--quick", action="store_true", help="a few steps of everything with a tiny model")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.quick:
        options.max_steps, options.questions, options.num_samples = 1, 8, 4
    base = options.model or (tiny_team_model(steps=100) if options.quick else smollm2())
    print(f"{'seed':>4}  untrained -> {options.max_steps} steps of RL | warm-up -> {options.max_steps} steps of RL")
    for seed in options.seeds:
        results = run(base, options.output_dir / f"seed-{seed}", options, seed)
        line = "{seed:4}  {untrained:.1%} -> {RL:.1%} | {warm:.1%} -> {warm, RL:.1%}"
        print(line.format_map({"seed": seed, **results}))
        print("; ".join(f"{name} {value:.0f}" for name, value in results.items() if "seconds" in name), flush=True)
    print(f"saved team: {options.output_dir / f'seed-{seed}' / 'warm-rl'} (base: {base})")


if __name__ == "__main__":
    main()
