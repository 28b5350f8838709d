"""
Train the paper's team of two on mathematics: a reasoner plans and an actor answers.

    python examples/math_duo.py --quick  # a few steps of a tiny model on small sums, offline
    python examples/math_duo.py --config examples/math_duo.yaml
    accelerate launch examples/math_duo.py --config examples/math_duo.yaml --learning_rate 1e-5
    torchrun --nproc_per_node 8 examples/math_duo.py --config examples/math_duo.yaml

    # a local file of records with `prompt` and `solution` (JSON lines or Parquet), and any model
    python examples/math_duo.py --model_name_or_path path/to/model --dataset_file problems.jsonl --output_dir math-duo

The reward needs `pip install -e ".[all]"`. Every setting of the YAML file is also a command-line
option. Options take precedence over the YAML file.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.tiny import exact_answer, tiny_dataset, tiny_team_model

from datasets import load_dataset
from peft import LoraConfig
from trl import ModelConfig, TrlParser, get_quantization_config
from trl.rewards import accuracy_reward


REASONER = (
    "Two LLM agents (reasoner -> actor) collaborate to solve a mathematical problem. You are the reasoner: analyse "
    "the problem, plan the steps and find the intermediate results. The actor gives the final answer with your help."
)
ACTOR = (
    "Two LLM agents (reasoner -> actor) collaborate to solve a mathematical problem. You are the actor: follow the "
    "reasoner's steps, check them, and give the final answer in \\boxed{}."
)

# Settings of `--quick`. Those that follow on the command line take precedence
QUICK = (
    "--output_dir math-duo-output --use_peft true --max_steps 2 --eval_size 8 --num_generations 4 --logging_steps 1 "
    "--per_device_train_batch_size 8 --gradient_accumulation_steps 1 --max_completion_length 16 --report_to none"
)


@dataclass
class ScriptArguments:
    """
    Arguments of the script.

    Args:
        dataset_name (`str`, *optional*):
            Dataset on the Hub with the columns `prompt` and `solution`.
        dataset_file (`str`, *optional*):
            Local file (`.jsonl`, `.json` or `.parquet`) to use instead of a dataset on the Hub.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of the dataset.
        eval_size (`int`, *optional*, defaults to `100`):
            Number of problems held out for evaluation.
        agents (`list[dict]`, *optional*):
            Agents of the team, each as a mapping of `AgentSpec` fields. Defaults to the reasoner and the actor.
        quick (`bool`, *optional*, defaults to `False`):
            Whether to train a tiny model on small sums for a few steps, instead of the named model and dataset.
    """

    dataset_name: str | None = field(default=None, metadata={"help": "Dataset on the Hub with `prompt`, `solution`."})
    dataset_file: str | None = field(default=None, metadata={"help": "Local .jsonl, .json or .parquet file."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset."})
    eval_size: int = field(default=100, metadata={"help": "Number of problems held out for evaluation."})
    agents: list[dict] | None = field(
        default=None, metadata={"help": "Agents of the team, as mappings of AgentSpec fields, in a YAML file."}
    )
    quick: bool = field(default=False, metadata={"help": "Train a tiny model on small sums for a few steps."})


def load_problems(script_args: ScriptArguments):
    if script_args.quick:
        dataset = tiny_dataset(64)
    elif (script_args.dataset_name is None) == (script_args.dataset_file is None):
        raise ValueError("Set exactly one of `--dataset_name` (on the Hub) and `--dataset_file` (local).")
    elif script_args.dataset_file is not None and not Path(script_args.dataset_file).stat().st_size:
        raise ValueError(f"`--dataset_file {script_args.dataset_file}` is empty.")
    elif script_args.dataset_name is not None:
        dataset = load_dataset(script_args.dataset_name, split=script_args.dataset_split)
    else:
        kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
        kind = kinds.get(Path(script_args.dataset_file).suffix)
        if kind is None:
            raise ValueError(f"`--dataset_file` must end in {', '.join(kinds)}; got {script_args.dataset_file!r}.")
        dataset = load_dataset(kind, data_files=script_args.dataset_file, split="train")
    if isinstance(dataset[0]["prompt"], str):  # `accuracy_reward` reads messages
        dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    if script_args.eval_size == 0:
        return dataset, None
    if script_args.eval_size >= len(dataset):
        raise ValueError(
            f"`--eval_size {script_args.eval_size}` leaves nothing to train on: there are {len(dataset)} problems. "
            "Lower it, or set `--eval_size 0` to train without evaluation."
        )
    parts = dataset.train_test_split(test_size=script_args.eval_size, seed=0)
    return parts["train"], parts["test"]


def main():
    parser = TrlParser((ScriptArguments, MARFTConfig, ModelConfig))
    options = [*QUICK.split(), *sys.argv[1:]] if "--quick" in sys.argv else sys.argv[1:]
    script_args, training_args, model_args = parser.parse_args_and_config(options)
    if script_args.quick:
        model_args.model_name_or_path = tiny_team_model(steps=100)
    if model_args.model_name_or_path is None:
        raise ValueError("Set `--model_name_or_path` to a model on the Hub or a local folder.")
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    agents = [AgentSpec("reasoner", system_prompt=REASONER), AgentSpec("actor", system_prompt=ACTOR)]
    train_dataset, eval_dataset = load_problems(script_args)
    trainer = MARFTTrainer(
        model=model_args.model_name_or_path,
        agents=[AgentSpec(**agent) for agent in script_args.agents] if script_args.agents else agents,
        reward_funcs=exact_answer if script_args.quick else accuracy_reward,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=LoraConfig(
            r=model_args.lora_r,
            lora_alpha=model_args.lora_alpha,
            lora_dropout=model_args.lora_dropout,
            target_modules=model_args.lora_target_modules or ["q_proj", "v_proj"],
        )
        if model_args.use_peft
        else None,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    if eval_dataset is not None:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.end()
    print(f"saved team: {training_args.output_dir} (base: {model_args.model_name_or_path})")


if __name__ == "__main__":
    main()
