"""
A planner, and a solver that may call a function; the planner does not see the calls, only the final text.

    marft plan team.py
    marft train team.py --model path/to/a/model
"""

import re

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer

from datasets import Dataset
from peft import LoraConfig


# Settings of MARFTConfig; options of the command line and of a YAML file (--config) take precedence
SETTINGS = {
    "output_dir": "calculator",
    "learning_rate": 1e-5,
    "max_steps": 100,
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "max_completion_length": 128,
}


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


TEAM = {"tools": [multiply]}  # for loading the trained team: `marft chat calculator --code team.py`
AGENTS = [
    AgentSpec("planner", system_prompt="Say in a sentence what has to be computed."),
    AgentSpec("solver", system_prompt="Compute it with your function, and answer with the number.", tools=[multiply]),
]


def right(completions, answer, **kwargs):
    """1 if the last number of the answer is right, so that a list of guesses earns nothing."""
    numbers = [re.findall(r"\d+", completion[-1]["content"].replace(",", "")) for completion in completions]
    return [float(found[-1:] == [target]) for found, target in zip(numbers, answer, strict=True)]


def make(args, model="Qwen/Qwen2.5-0.5B-Instruct"):
    """Create the trainer. Further parameters, such as `model`, are command-line options as well."""
    pairs = [(a, b) for a in range(13, 99, 4) for b in range(13, 99, 4)]
    rows = [{"prompt": [{"role": "user", "content": f"{a} * {b} = ?"}], "answer": str(a * b)} for a, b in pairs]
    data, lora = Dataset.from_list(rows), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    return MARFTTrainer(model, agents=AGENTS, reward_funcs=right, args=args, train_dataset=data, peft_config=lora)


if __name__ == "__main__":
    make(MARFTConfig(**SETTINGS)).train()
