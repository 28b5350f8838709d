"""
Three agents answer a question, see one another's answers, and answer again; the majority is the team's answer.

    marft plan team.py
    marft train team.py --model path/to/a/model
"""

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.workflows import Debate

from datasets import Dataset
from peft import LoraConfig


# Settings of MARFTConfig; options of the command line and of a YAML file (--config) take precedence
SETTINGS = {
    "output_dir": "debate",
    "learning_rate": 1e-5,
    "max_steps": 100,
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "max_completion_length": 64,
    "log_completions": True,
    "num_completions_to_print": 0,
}
NAMES = ["ann", "ben", "cleo"]
# One adapter for all three; without `adapter=`, each has its own
AGENTS = [AgentSpec(name, adapter="debater", system_prompt="Answer with a number alone.") for name in NAMES]


def right(completions, answer, **kwargs):
    """1 if the answer of the majority is right."""
    return [
        float(completion[-1]["content"].strip() == target)
        for completion, target in zip(completions, answer, strict=True)
    ]


def make(args, model="Qwen/Qwen2.5-0.5B-Instruct"):
    """Create the trainer. Further parameters, such as `model`, are command-line options as well."""
    pairs = [(a, b) for a in range(12, 60) for b in range(12, 60)]
    rows = [{"prompt": [{"role": "user", "content": f"{a} + {b} = ?"}], "answer": str(a + b)} for a, b in pairs]
    parts = Dataset.from_list(rows).train_test_split(test_size=100, seed=0)
    return MARFTTrainer(
        model=model,
        agents=AGENTS,
        workflow=Debate(NAMES, rounds=2),
        reward_funcs=right,
        args=args,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )


if __name__ == "__main__":
    make(MARFTConfig(**SETTINGS)).train()
