# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Trains a tiny team on a pretended device (`tests/pretend_device.py`), and prints what became of it as JSON.

    python tests/scripts/train_pretended.py solo|duo|critic|parallel [--spread] [--settings JSON]
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path


sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import pretend_device  # noqa: E402


DEVICE = pretend_device.install()

import torch  # noqa: E402
from accelerate import dispatch_model  # noqa: E402
from peft import LoraConfig  # noqa: E402

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer  # noqa: E402
from marft_trl.learning import micro_batcher  # noqa: E402
from marft_trl.learning.memory import ActivationCost  # noqa: E402
from marft_trl.tiny import tiny_dataset, tiny_model, tiny_tokenizer  # noqa: E402
from marft_trl.workflows import Workflow  # noqa: E402


# There are no addresses to count bytes by
micro_batcher.measure_activations = lambda *args, **kwargs: ActivationCost(1e4, 1e3, 1e3)


class Fan(Workflow):
    """All agents answer at once, so that they are decoded and trained in passes of several adapters."""

    async def run(self, episode):
        turns = await asyncio.gather(*(episode.turn(name, sees=[]) for name in episode.agents))
        episode.answer = turns[-1]


TEAMS = {
    "solo": ({}, 1, None),
    "duo": ({}, 2, None),
    "critic": ({"advantage": "gae", "critic": "shared"}, 2, None),
    "parallel": ({"mixed_passes": True}, 4, Fan()),
}


def reward(completions, **kwargs):
    return [float(sum(map(ord, str(one))) % 7) for one in completions]


def base(spread: bool, tokenizer):
    model = tiny_model(len(tokenizer))
    if not spread:
        return model
    layers = len(model.model.layers)
    devices = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 0}
    devices |= {f"model.layers.{index}": int(index >= layers // 2) for index in range(layers)}
    return dispatch_model(model, {name: f"pretend:{index}" for name, index in devices.items()}, force_hooks=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("team", choices=sorted(TEAMS))
    parser.add_argument("--spread", action="store_true", help="the layers of the base lie on two devices")
    parser.add_argument("--settings", type=json.loads, default={})
    options = parser.parse_args()
    settings, count, workflow = TEAMS[options.team]
    tokenizer = tiny_tokenizer()
    with pretend_device.Pretend(), tempfile.TemporaryDirectory() as folder:
        args = MARFTConfig(
            folder,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=12,
            max_steps=2,
            learning_rate=1e-2,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            optim="adamw_torch",
            dataloader_pin_memory=False,
            max_tokens_per_micro_batch=10**6,
            gradient_checkpointing=False,
            bf16=False,
            **settings | options.settings,
        )
        trainer = MARFTTrainer(
            model=base(options.spread, tokenizer),
            processing_class=tokenizer,
            agents=[AgentSpec(f"a{index}", system_prompt=f"Work {index}.") for index in range(count)],
            workflow=workflow,
            reward_funcs=reward,
            args=args,
            train_dataset=tiny_dataset(16),
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        names = trainer.policies.names
        before = {name: [one.detach().clone() for one in trainer.policies.parameters(name).values()] for name in names}
        pretend_device.WAITS.clear()
        trainer.train()
        moved = [
            name
            for name in names
            if any(not torch.equal(a, b) for a, b in zip(before[name], trainer.policies.parameters(name).values()))
        ]
        devices = {str(one.device) for one in trainer.model.parameters()}
        losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        weights = sum(float(one.detach().sum()) for name in names for one in trainer.policies.parameters(name).values())
    print(
        json.dumps(
            {
                "moved": moved,
                "devices": sorted(devices),
                "losses": losses,
                "weights": weights,
                "waits": dict(pretend_device.WAITS),
            }
        )
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
