"""
A typical training script: a team of two that trains on several machines. `machines.py` starts it.

    torchrun --nnodes 2 --node_rank 0 --nproc_per_node 1 --master_addr node0 --master_port 29500 train.py BASE OUT

At the end it prints a hash of the adapters' weights, so that runs can be compared.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.tiny import tiny_dataset

from peft import LoraConfig


TEAM = [AgentSpec("planner", system_prompt="Plan."), AgentSpec("solver", system_prompt="Solve.")]
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def reward_of(options):
    rank, mark = int(os.environ.get("RANK", 0)), Path(options.out, "has_failed")

    def reward(completions, trainer_state=None, **kwargs):
        step = trainer_state.global_step if trainer_state is not None else -1
        if options.fail and not mark.exists():
            failing_rank, failing_step, kind = options.fail.split(":")
            if int(failing_rank) == rank and int(failing_step) == step:
                mark.touch()
                if kind == "kill":
                    os.kill(os.getpid(), 9)
                raise RuntimeError("the judge is gone")
        if options.seconds:
            time.sleep(options.seconds)
        return [float(sum(map(ord, str(completion))) % 7) / 7 for completion in completions]

    return reward


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("out")
    parser.add_argument("--fail", help="RANK:STEP:raise or RANK:STEP:kill, the first time")
    parser.add_argument("--seconds", type=float, default=0.0, help="that a reward takes")
    parser.add_argument("--settings", type=json.loads, default={}, help="of MARFTConfig, as JSON")
    options = parser.parse_args()
    if os.environ.get("SHARD_ON_CPU"):  # FSDP2 on a machine without a GPU
        sys.path.insert(0, str(Path(__file__).parents[3]))
        import tests.shard_on_cpu  # noqa: F401
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_steps": 1,
        "logging_steps": 1,
        "use_cpu": not os.environ.get("SHARD_ON_CPU"),
        "bf16": False,
        "gradient_checkpointing": False,
        "max_tokens_per_micro_batch": 4096,
    }
    trainer = MARFTTrainer(
        model=options.base,
        agents=TEAM,
        reward_funcs=reward_of(options),
        args=MARFTConfig(f"{options.out}/run", **settings | options.settings),
        train_dataset=tiny_dataset(64),
        peft_config=LORA,
    )
    trainer.train(resume_from_checkpoint=True)
    digest = hashlib.sha256()
    for name in sorted(trainer.policies.names):
        for tensor in trainer.policies.parameters(name).values():
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    count = trainer.accelerator.num_processes
    print(f"HASH {digest.hexdigest()[:12]} of {count} processes after step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
