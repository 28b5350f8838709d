"""
Compare the cost of a training step of a team with `GRPOTrainer` on the same tokens.

    make benchmark
    python benchmarks/speed/step_time.py --repeats 9 --new_tokens 32

Every episode has the same number of new tokens. Complete steps (generation, rewards, forward, backward, optimizer)
alternate between the trainers. Times are CPU seconds of one thread; the table has medians and the spread of the ratios
of neighbouring steps. One agent is compared with one `GRPOTrainer`. Two agents are compared with two trainers that do
the same work: one trains on the reasoner's prompts, the other on the actor's prompts with plans of the reasoner.
"""

import argparse
import statistics
import tempfile
import warnings

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.tiny import questions, tiny_model, tiny_tokenizer

import torch
from datasets import Dataset
from peers_worker import reward, step
from peft import LoraConfig
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer


def make(trainer_class, options, prompts, folder, agents=None):
    tokenizer = tiny_tokenizer()
    model = tiny_model(
        len(tokenizer),
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
    )
    model.generation_config.eos_token_id = None
    config = (MARFTConfig if agents else GRPOConfig)(
        folder,
        per_device_train_batch_size=options.episodes,
        num_generations=4,
        max_completion_length=options.new_tokens,
        generation_kwargs={"min_new_tokens": options.new_tokens},
        max_steps=10**6,
        learning_rate=0.0,
        gradient_checkpointing=options.gradient_checkpointing,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
        **({"agents": agents} if agents else {}),
    )
    trainer.create_optimizer_and_scheduler(100)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def team_rows(trainer, agent):
    return [row for slice_ in trainer.parts.state.slices for row in slice_.rows if row.agent == agent]


def chat(system, text):
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")

    tokenizer = tiny_tokenizer()
    texts = [row["prompt"] for row in questions(options.episodes // 4, seed=0)]
    first = [chat("Write the steps.", text) for text in texts]
    team_prompts = [[{"role": "user", "content": text}] for text in texts]
    team = [
        AgentSpec("reasoner", system_prompt="Write the steps."),
        AgentSpec("actor", system_prompt="Write the answer."),
    ]

    with tempfile.TemporaryDirectory() as folder:

        def rows(prompts):
            return [{"prompt": prompt} for prompt in prompts for _ in range(4)]

        trl_first = make(GRPOTrainer, options, first, folder)
        solo = make(MARFTTrainer, options, first, folder, [AgentSpec("solo")])
        duo = make(MARFTTrainer, options, team_prompts, folder, team)
        step(duo, rows(team_prompts))
        plan_texts = [tokenizer.decode(row.completion_ids) for row in team_rows(duo, "reasoner")][: len(texts)]
        plans = zip(texts, plan_texts, strict=True)
        second = [chat("Write the answer.", f"{text}\n\n[reasoner]\n{plan}") for text, plan in plans]
        trl_second = make(GRPOTrainer, options, second, folder)

        runs = {
            "TRL, reasoner's prompts": lambda: step(trl_first, rows(first)),
            "TRL, actor's prompts": lambda: step(trl_second, rows(second)),
            "one agent": lambda: step(solo, rows(first)),
            "two agents": lambda: step(duo, rows(team_prompts)),
        }
        times = {name: [] for name in runs}
        for repeat in range(options.repeats + 1):
            for name, run in runs.items():
                seconds = run()
                if repeat:  # the first round warms up
                    times[name].append(seconds)
        lengths = [len(row.prompt_ids) for row in team_rows(duo, "actor")]
        tokens = trl_second._tokenize_prompts(second)[0]
        print(f"actor's prompts: {statistics.mean(lengths):.0f} tokens in the team, "
              f"{statistics.mean(map(len, tokens)):.0f} in TRL")  # fmt: skip

    for name, seconds in times.items():
        print(f"{name:28} {statistics.median(seconds):6.3f} CPU s per step")
    solo_ratios = [a / b for a, b in zip(times["one agent"], times["TRL, reasoner's prompts"], strict=True)]
    both = zip(times["TRL, reasoner's prompts"], times["TRL, actor's prompts"], strict=True)
    duo_ratios = [a / (b + c) for a, (b, c) in zip(times["two agents"], both, strict=True)]
    for title, ratios in (("one agent / TRL's step", solo_ratios), ("two agents / two TRL steps", duo_ratios)):
        print(f"{title:28} {statistics.median(ratios):6.3f}   ({min(ratios):.3f} - {max(ratios):.3f})")


if __name__ == "__main__":
    main()
