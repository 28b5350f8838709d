"""Worker of `peers.py` for CoMLRL's MAGRPO. Like `peers_worker.py`, but it runs in CoMLRL's environment."""

import json
import os
import sys
import time
from pathlib import Path


os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TQDM_DISABLE="1", WANDB_MODE="disabled")

import torch
from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer


def memory(field: str) -> int:
    """Value of a memory field in `/proc/self/status`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def make(job: dict) -> MAGRPOTrainer:
    """Create a trainer whose `train` runs exactly one step, because its buffer holds all prompts."""
    folder = Path(job["folder"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    agents = [get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), config) for _ in range(2)]
    for agent in agents:
        agent.generation_config.eos_token_id = None
        agent.generation_config.min_new_tokens = job["new_tokens"]
    prompts = json.loads((folder / "prompts.json").read_text())
    args = MAGRPOConfig(
        num_train_epochs=1,
        num_generations=job["generations"],
        max_new_tokens=job["new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        num_turns=1,
        eval_interval=0,
        rollout_buffer_size=len(prompts["left"]),
        agent_learning_rate=1e-6,
    )
    return MAGRPOTrainer(
        agents=agents,
        num_agents=2,
        tokenizer=tokenizer,
        train_dataset=Dataset.from_dict(prompts),
        formatters=[lambda item: item["left"], lambda item: item["right"]],
        reward_func=lambda first, second: [float(len(completion) % 3) for completion in first],
        args=args,
    )


def main():
    torch.set_num_threads(1)
    before = memory("VmRSS")
    trainer = make(json.loads(sys.argv[1]))
    trainer.verbose = False
    for _ in sys.stdin:
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        print(json.dumps({"seconds": seconds, "peak": memory("VmHWM") - before}), flush=True)


if __name__ == "__main__":
    main()
