"""
Two agents on small sums in words: the reasoner writes the steps, the actor reads the answer from them.

    marft plan team.py                        # who sees whom, batches, memory
    marft train team.py                       # on a CPU, offline, in minutes
    marft train team.py --learning_rate 1e-3 --model Qwen/Qwen2.5-0.5B-Instruct
    marft chat duo --model tiny
"""

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.tiny import tiny_dataset, tiny_team_model

from peft import LoraConfig


# Settings of MARFTConfig; options of the command line and of a YAML file (--config) take precedence
SETTINGS = {
    "output_dir": "duo",
    "learning_rate": 1.5e-3,
    "max_steps": 60,
    "num_generations": 8,
    "per_device_train_batch_size": 64,  # episodes: 8 questions, each 8 times
    "log_completions": True,
    "num_completions_to_print": 0,
    "logging_steps": 5,
}
AGENTS = [
    AgentSpec("reasoner", system_prompt="Write the steps.", max_completion_length=24),
    AgentSpec("actor", system_prompt="Write the answer.", max_completion_length=6),
]


def right(completions, solution, **kwargs):
    """1 if the answer of the team, which is the turn of the last agent, is right."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(text.strip() == target) for text, target in zip(texts, solution, strict=True)]


def make(args, model="tiny"):
    """Create the trainer. Further parameters, such as `model`, are command-line options as well."""
    return MARFTTrainer(
        model=tiny_team_model() if model == "tiny" else model,
        agents=AGENTS,
        reward_funcs=right,
        args=args,
        train_dataset=tiny_dataset(4000, seed=0),  # columns `prompt` and `solution`
        eval_dataset=tiny_dataset(200, seed=1),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )


if __name__ == "__main__":
    make(MARFTConfig(**SETTINGS)).train()
