"""
Compare the cost of a training step of a team on two bases with that of teams on one of them.

    python benchmarks/speed/bases.py                # small and large tiny models
    python benchmarks/speed/bases.py --repeats 9 --settings '{"critic": "per_agent", "advantage": "gae"}'

Teams of two agents take turns, one step at a time, in one process with one thread: both agents on the small model,
both on the large one, one on each in both orders, and both on copies of the large one. If several bases cost nothing
extra, the two orders together cost as much as the first two teams, and two copies as much as one base.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

from marft_trl import MARFTConfig, MARFTTrainer
from marft_trl.tiny import tiny_agents, tiny_dataset, tiny_model, tiny_tokenizer

import torch
from peers_worker import step
from peft import LoraConfig
from transformers.utils import logging


SIZES = {"small": {"hidden_size": 64, "head_dim": 16}, "large": {"hidden_size": 256, "head_dim": 64}}
TEAMS = {
    "small": ("small", None),
    "large": ("large", None),
    "small, large": ("small", "large"),
    "large, small": ("large", "small"),
    "two copies": ("large",) * 2,
}


def reward(completions, **kwargs):
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


def make_trainer(folder, name, tokenizer, settings):
    first, second = TEAMS[name]
    models = [None if size is None else tiny_model(len(tokenizer), **SIZES[size]) for size in (first, second)]
    reasoner, actor = (dataclasses.replace(agent, max_completion_length=24) for agent in tiny_agents())
    if second is not None:
        actor = dataclasses.replace(actor, model=models[1], processing_class=tokenizer)
    args = MARFTConfig(
        str(folder / name.replace(" ", "-")),
        **{"per_device_train_batch_size": 32, "num_generations": 8, "max_steps": 10**6, "report_to": "none"},
        **{"use_cpu": True, "disable_tqdm": True, "max_tokens_per_micro_batch": 4096, **settings},
    )
    return MARFTTrainer(
        model=models[0],
        processing_class=tokenizer,
        agents=[reasoner, actor],
        reward_funcs=reward,
        args=args,
        train_dataset=tiny_dataset(4000),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )


def steps_of(trainer):
    """Run one step for each call of `next`, and yield its CPU seconds."""
    trainer.create_optimizer()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = iter(trainer.get_train_dataloader())
    while True:
        yield step(trainer, next(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--settings", type=json.loads, default={}, help="further training arguments, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    tokenizer = tiny_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        steps = {name: steps_of(make_trainer(Path(folder), name, tokenizer, options.settings)) for name in TEAMS}
        rounds = [{name: next(of_team) for name, of_team in steps.items()} for _ in range(options.repeats + 1)][1:]
    for name in TEAMS:
        print(f"{name:12} {statistics.median(seconds[name] for seconds in rounds):7.3f} s of CPU time per step")
    pairs = [(seconds["small, large"] + seconds["large, small"], seconds) for seconds in rounds]
    ratios = [both / (seconds["small"] + seconds["large"]) for both, seconds in pairs]
    copies = [seconds["two copies"] / seconds["large"] for seconds in rounds]
    titles = {"two bases, both orders / small + large": ratios, "two copies / one shared base": copies}
    for title, series in titles.items():
        print(f"{title:38} {statistics.median(series):.2f} ({min(series):.2f} - {max(series):.2f})")


if __name__ == "__main__":
    main()
