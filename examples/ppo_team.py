"""
Train a team of three on mathematics with PPO: a shared critic, GAE through the chain and a reward per agent.

    python examples/ppo_team.py --quick  # a few steps of a tiny model on small sums, offline
    python examples/ppo_team.py --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --dataset_name trl-lib/DeepMath-103K \
        --output_dir ppo-team --load_in_4bit true
    accelerate launch examples/ppo_team.py --model_name_or_path path/to/model --dataset_file problems.jsonl \
        --output_dir ppo-team --critic per_agent --level action --action_logprob token

Each record has `prompt` and `solution`. The reward needs `pip install -e ".[all]"`. Every field
of `MARFTConfig` is a command-line option, which takes precedence over `SETTINGS`. `--preset grpo` replaces all of
`SETTINGS` with the settings of a preset. `docs/reference/algorithms.md` explains the fields.
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.tiny import exact_answer, tiny_dataset, tiny_team_model

from datasets import load_dataset
from peft import LoraConfig
from trl import ModelConfig, TrlParser, get_quantization_config
from trl.rewards import accuracy_reward


PLANNER = "You are the planner of a team. Write at most four numbered steps that solve the problem. Do not compute."
SOLVER = "You are the solver of a team. Follow the planner's steps and put the answer in \\boxed{}."
VERIFIER = "You are the verifier of a team. Check the solution, and give the final answer in \\boxed{}."


SETTINGS = {
    "advantage": "gae",
    "critic": "shared",
    "credit": "per_step",
    "own_reward_weight": 0.5,  # half from the turn itself, half from the team's answer
    "num_generations": 1,
    "num_iterations": 2,
    "critic_warmup_steps": 4,
    "target_kl": 0.05,
}
# Settings of `--quick`. Those that follow on the command line take precedence
QUICK = (
    "--output_dir ppo-team-output --max_steps 4 --critic_warmup_steps 1 --per_device_train_batch_size 8 "
    "--gradient_accumulation_steps 1 --max_completion_length 16 --logging_steps 1 --report_to none"
)


@dataclass
class ScriptArguments:
    """
    Arguments of the script.

    Args:
        dataset_name (`str`, *optional*):
            Dataset on the Hub with the columns `prompt` and `solution`. The split `train` is used.
        dataset_file (`str`, *optional*):
            Local JSON lines file to use instead of a dataset on the Hub.
        quick (`bool`, *optional*, defaults to `False`):
            Whether to train a tiny model on small sums for a few steps, instead of the named model and dataset.
    """

    dataset_name: str | None = field(default=None, metadata={"help": "Dataset on the Hub with `prompt`, `solution`."})
    dataset_file: str | None = field(default=None, metadata={"help": "Local JSON lines file."})
    quick: bool = field(default=False, metadata={"help": "Train a tiny model on small sums for a few steps."})


def numbered_steps(completion_ids, turn, turns, **columns):
    """Reward of the planner's turns: one half per numbered step, at most 1."""
    return [min(len(re.findall(r"^\s*\d+\.", own_turn.text, re.MULTILINE)) / 2, 1.0) for own_turn in turn]


def right_answer(completions, solution, **columns):
    """Reward of the solver's and the verifier's turns: 1 for a right answer."""
    return accuracy_reward(completions, solution=solution)


def team(own_rewards: bool, right=right_answer) -> list[AgentSpec]:
    planned, right = (numbered_steps, right) if own_rewards else (None, None)
    return [
        AgentSpec("planner", system_prompt=PLANNER, reward_funcs=planned),
        AgentSpec("solver", system_prompt=SOLVER, reward_funcs=right),
        AgentSpec("verifier", system_prompt=VERIFIER, reward_funcs=right),
    ]


def main():
    parser = TrlParser((ScriptArguments, MARFTConfig, ModelConfig))
    has_preset = any(argument.split("=")[0] == "--preset" for argument in sys.argv)
    parser.set_defaults(use_peft=True, **({} if has_preset else SETTINGS))
    options = [*QUICK.split(), *sys.argv[1:]] if "--quick" in sys.argv else sys.argv[1:]
    script_args, training_args, model_args = parser.parse_args_and_config(options)
    if script_args.quick:
        model_args.model_name_or_path, dataset = tiny_team_model(steps=100), tiny_dataset(64)
    elif (script_args.dataset_name is None) == (script_args.dataset_file is None):
        raise ValueError("Set exactly one of `--dataset_name` (on the Hub) and `--dataset_file` (local).")
    elif script_args.dataset_file is not None and not Path(script_args.dataset_file).stat().st_size:
        raise ValueError(f"`--dataset_file {script_args.dataset_file}` is empty.")
    elif script_args.dataset_name is not None:
        dataset = load_dataset(script_args.dataset_name, split="train")
    else:
        dataset = load_dataset("json", data_files=script_args.dataset_file, split="train")
    if isinstance(dataset[0]["prompt"], str):  # `accuracy_reward` reads messages
        dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = MARFTTrainer(
        model=model_args.model_name_or_path,
        agents=team(training_args.credit == "per_step", exact_answer if script_args.quick else right_answer),
        reward_funcs=exact_answer if script_args.quick else accuracy_reward,
        args=training_args,
        train_dataset=dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=LoraConfig(
            r=model_args.lora_r,
            lora_alpha=model_args.lora_alpha,
            target_modules=model_args.lora_target_modules or "all-linear",
        ),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub()
    trainer.end()
    print(f"saved team: {training_args.output_dir} (base: {model_args.model_name_or_path})")


if __name__ == "__main__":
    main()
