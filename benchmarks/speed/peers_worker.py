"""Worker of `peers.py` for TRL and marft_trl. For each input line, it runs a step and prints its cost as JSON."""

import json
import os
import sys
import time
import warnings
from pathlib import Path


os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.tiny import tiny_model, tiny_tokenizer
from marft_trl.workflows import Workflow

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer


ROLES = {"left": "Write the steps.", "right": "Write the answer."}
PPO = {"advantage": "gae", "level": "token"}


class SideBySide(Workflow):
    """Both agents answer the prompt without seeing each other's turns."""

    async def run(self, episode):
        for agent in episode.agents:
            await episode.turn(agent, sees=[])


def memory(field: str) -> int:
    """Value of a memory field in `/proc/self/status`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def messages(tokenizer, role: str, index: int, length: int) -> list[dict[str, str]]:
    """Create a prompt that has `length` tokens in the chat template of the tokenizer."""
    words = [str((index * 7 + place) % 9 + 1) for place in range(length)]

    def prompt(count):
        text = " ".join(words[:count])
        return [{"role": "system", "content": ROLES[role]}, {"role": "user", "content": text}]

    for count in range(1, length):
        ids = tokenizer.apply_chat_template(prompt(count), add_generation_prompt=True, return_dict=True)["input_ids"]
        if len(ids) >= length:
            return prompt(count)
    raise ValueError(f"no prompt has {length} tokens")


def prepare(job: dict) -> None:
    """Save a model, a tokenizer and the prompts as texts, for workers that cannot import this package."""
    tokenizer, model = tiny_tokenizer(), make_model(job)
    folder = Path(job["folder"])
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")

    def text(role: str, index: int) -> str:
        prompt = messages(tokenizer, role, index, job["prompt_tokens"])
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)

    texts = {role: [text(role, index) for index in range(job["prompts"])] for role in ROLES}
    (folder / "prompts.json").write_text(json.dumps(texts))


def make_model(job: dict):
    size = {"hidden_size": job["hidden"], "intermediate_size": 3 * job["hidden"], "num_hidden_layers": job["layers"]}
    model = tiny_model(job["vocabulary"], **size)
    model.generation_config.eos_token_id = None
    return model


def reward(completions, **kwargs):
    return [float(index % 3) for index in range(len(completions))]


def settings(job: dict) -> dict:
    return {
        "per_device_train_batch_size": job["prompts"] * job["generations"],
        "num_generations": job["generations"],
        "max_completion_length": job["new_tokens"],
        "generation_kwargs": {"min_new_tokens": job["new_tokens"]},
        "max_steps": 10**6,
        "learning_rate": 1e-6,
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def make(job: dict):
    """Create the trainer and the dataset rows of its steps."""
    tokenizer, model = tiny_tokenizer(), make_model(job)
    name = job["contender"]
    role = "right" if name == "trl-right" else "left"
    prompts = [messages(tokenizer, role, index, job["prompt_tokens"]) for index in range(job["prompts"])]
    critic = {"critic": name.removeprefix("ppo-"), **PPO} if name.startswith("ppo-") else {}
    arguments = {"reward_funcs": reward, "processing_class": tokenizer}
    arguments["peft_config"] = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    if name.startswith("trl"):
        config, trainer_class = GRPOConfig(job["folder"], **settings(job)), GRPOTrainer
    else:
        prompts = [prompt[1:] for prompt in prompts]  # the agents bring their system prompts
        config, trainer_class = MARFTConfig(job["folder"], **settings(job), **critic), MARFTTrainer
        roles = ["left"] if name == "solo" else list(ROLES)
        arguments["agents"] = [AgentSpec(role, system_prompt=ROLES[role]) for role in roles]
        arguments["workflow"] = SideBySide()
    dataset = Dataset.from_dict({"prompt": prompts})
    trainer = trainer_class(model=model, args=config, train_dataset=dataset, **arguments)
    trainer.create_optimizer_and_scheduler(100)
    trainer.current_gradient_accumulation_steps = 1
    return trainer, [{"prompt": prompt} for prompt in prompts for _ in range(job["generations"])]


def step(trainer, rows) -> float:
    """Run one optimizer step on the given rows, as `Trainer` does, and return its CPU seconds."""
    start = time.process_time()
    trainer._buffered_inputs = None
    trainer.training_step(trainer.model, rows, None)
    trainer._clip_grad_norm(trainer.model)
    trainer.optimizer.step()
    trainer.model.zero_grad()
    return time.process_time() - start


def main():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    before = memory("VmRSS")
    trainer, rows = make(json.loads(sys.argv[1]))
    for _ in sys.stdin:
        print(json.dumps({"seconds": step(trainer, rows), "peak": memory("VmHWM") - before}), flush=True)


if __name__ == "__main__":
    main()
