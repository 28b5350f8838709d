# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Trains a tiny team on a pretended device (`tests/pretend_device.py`) and prints the results as JSON.

    python tests/scripts/train_pretended.py solo|duo|half|critic|parallel [--layouts whole spread named near apart]
"""

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path


sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import pretend_device  # noqa: E402


DEVICE = pretend_device.install()

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer  # noqa: E402
from marft_trl.learning import batching as micro_batcher  # noqa: E402
from marft_trl.learning.memory import ActivationCost  # noqa: E402
from marft_trl.tiny import tiny_dataset, tiny_model, tiny_tokenizer  # noqa: E402
from marft_trl.workflows import Workflow  # noqa: E402

import torch  # noqa: E402
from accelerate import dispatch_model  # noqa: E402
from peft import LoraConfig  # noqa: E402


# Activations cannot be measured: the pretended device has no memory addresses
micro_batcher.measure_activations = lambda *args, **kwargs: ActivationCost(1e4, 1e3, 1e3)


class Fan(Workflow):
    """All agents answer at once, so that they are decoded and trained in passes of several adapters."""

    async def run(self, episode):
        turns = await asyncio.gather(*(episode.turn(name, sees=[]) for name in episode.agents))
        episode.answer = turns[-1]


SETTINGS = {
    **{"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12, "max_steps": 2},
    **{"learning_rate": 1e-2, "optim": "adamw_torch", "max_tokens_per_micro_batch": 10**6, "logging_steps": 1},
    **{"gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "dataloader_pin_memory": False},
}
PLAIN = {"bf16": False}  # by default, mixed precision is on
TEAMS = {
    "solo": (PLAIN, 1, None),
    "duo": (PLAIN, 2, None),
    "half": ({}, 2, None),
    "critic": (PLAIN | {"advantage": "gae", "critic": "shared", "beta": 0.1, "num_iterations": 2}, 2, None),
    "parallel": (PLAIN, 4, Fan()),
}


def reward(completions, **kwargs):
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


def base(layout: str, tokenizer, folder: str):
    """A model, or the folder of a model that the trainer loads (`named`)."""
    model = tiny_model(len(tokenizer))
    if layout == "named":
        with pretend_device.apart():
            model.save_pretrained(folder)
        return folder
    if layout in ("whole", "near", "apart"):
        return model
    layers = len(model.model.layers)
    devices = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 0}  # embeddings are tied
    devices |= {f"model.layers.{index}": int(index >= layers // 2) for index in range(layers)}
    return dispatch_model(model, {name: f"pretend:{index}" for name, index in devices.items()}, force_hooks=True)


class Phases:
    """Counts waits and product types within some calls."""

    def __init__(self):
        self.phase = "other"
        self.waits: Counter[tuple[str, str]] = Counter()
        self.products: Counter[tuple[str, str]] = Counter()
        pretend_device.LISTENERS[:] = [lambda kind: self.waits.update([(self.phase, kind)])]
        pretend_device.PRODUCTS[:] = [lambda dtype: self.products.update([(self.phase, str(dtype))])]

    def around(self, owner, name: str, phase: str) -> None:
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            before, self.phase = self.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before

        setattr(owner, name, counted)

    def of(self, counts: Counter) -> dict[str, dict[str, int]]:
        return {name: {kind: count for (phase, kind), count in counts.items() if phase == name} for name, _ in counts}


def weights_of(policies) -> dict[str, list]:
    """A copy of the weights of each policy."""
    return {
        name: [weight.detach().clone() for weight in policies.parameters(name).values()] for name in policies.names
    }


def train(team: str, layout: str, overrides: dict) -> dict:
    settings, count, workflow = TEAMS[team]
    tokenizer = tiny_tokenizer()
    places = {"near": "pretend:0", "apart": "pretend:1"}  # of a second base
    with pretend_device.Pretend(), tempfile.TemporaryDirectory() as folder:
        args = MARFTConfig(f"{folder}/run", **{**SETTINGS, **settings, **overrides})
        agents = [AgentSpec(f"a{index}", system_prompt=f"Work {index}.") for index in range(count)]
        if layout in places:
            second = tiny_model(len(tokenizer)).to(places[layout])
            agents[1] = dataclasses.replace(agents[1], model=second, processing_class=tokenizer)
        trainer = MARFTTrainer(
            model=base(layout, tokenizer, f"{folder}/base"),
            processing_class=tokenizer,
            agents=agents,
            workflow=workflow,
            reward_funcs=reward,
            args=args,
            train_dataset=tiny_dataset(16),
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        policies, phases = trainer.policies, Phases()
        phases.around(trainer, "_generate_and_score_completions", "score")
        phases.around(trainer, "training_step", "train")
        phases.around(trainer.accelerator.unwrap_model(trainer.model), "generate", "generate")
        before = weights_of(policies)
        trainer.train()
        after = weights_of(policies)
        weights = [weight for policy_weights in after.values() for weight in policy_weights]
        frozen = [parameter for parameter in trainer.model.parameters() if not parameter.requires_grad]
        return {
            "moved": [name for name in after if not all(map(torch.equal, before[name], after[name]))],
            "devices": sorted({str(p.device) for m in (trainer.model, *policies.further) for p in m.parameters()}),
            "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
            "weights": sum(float(weight.sum()) for weight in weights),
            "dtypes": {
                "base": sorted({str(parameter.dtype) for parameter in frozen}),
                "adapters": sorted({str(weight.dtype) for weight in weights}),
            },
            "waits": phases.of(phases.waits),
            "products": phases.of(phases.products),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("team", choices=sorted(TEAMS))
    parser.add_argument(
        "--layouts", nargs="+", default=["whole"], choices=["whole", "spread", "named", *("near", "apart")]
    )
    parser.add_argument("--settings", type=json.loads, default={})
    options = parser.parse_args()
    results = {layout: train(options.team, layout, options.settings) for layout in options.layouts}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
