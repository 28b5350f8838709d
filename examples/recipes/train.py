"""
MARFT's experiments, one command each.

    python examples/recipes/train.py --config examples/recipes/deepscaler.yaml
    python examples/recipes/train.py --config examples/recipes/deepscaler.yaml --num_agents 3 --critic per_agent \
        --anonymous numbered --shared_adapter true --output_dir deepscaler-3-anonymous
    torchrun --nproc_per_node 8 examples/recipes/train.py --config examples/recipes/deepcoder.yaml

    # print the plan of a run: agents, who sees whom, batches, memory and prompts
    python examples/recipes/train.py --config examples/recipes/math_duo.yaml --dry_run true

The YAML files hold the published settings; the command line takes precedence. `docs/reports/recipes.md` has the grid.
The rewards need `pip install -e ".[all]"` or, for programs, Linux.
"""

import math
from dataclasses import dataclass, field

from marft_trl import MARFTConfig, MARFTTrainer
from marft_trl.extras.sandbox import get_code_reward
from marft_trl.rewards import math_reward

from peft import LoraConfig
from problems import SOURCES, load_problems, source_of
from teams import ROLES, WORKFLOWS, check_team, make_team, make_workflow
from trl import ModelConfig, TrlParser, get_quantization_config


PROGRAMS_AT_ONCE = 4


@dataclass
class RecipeArguments:
    """
    Arguments of the script, besides those of `MARFTConfig` and `ModelConfig`.

    Args:
        problems (`str`, *optional*, defaults to `"math"`):
            `"math"`, `"gsm8k"`, `"deepscaler"`, `"deepcoder"`, `"codeforces"`, or a family of reasoning-gym such as
            `"countdown"`.
        problem_files (`list[str]`, *optional*):
            Local files with the columns of the dataset, instead of the Hub's.
        profile (`str`, *optional*, defaults to `"duo"`):
            Roles of the team: `"duo"`, `"math"`, `"code"`, `"judge"`, `"vote"` or `"review"`.
        workflow (`str`, *optional*, defaults to `"chain"`):
            `"chain"`, `"orchestrated"` (the first agent decides who is next), `"evaluated"` (the second one approves),
            `"voting"` (all answer, the most frequent answer counts) or `"judged"` (several solve, the last one
            chooses). `"evaluated"` needs the roles `"review"`, `"voting"` the roles `"vote"`.
        num_agents (`int`, *optional*, defaults to `2`):
            1 to 4.
        shared_adapter (`bool`, *optional*, defaults to `False`):
            Whether all agents act with one LoRA.
        anonymous (`str`, *optional*, defaults to `"no"`):
            `"no"`, `"numbered"` or `"none"`, see the trainer.
        eval_size (`int`, *optional*, defaults to `100`):
            Problems to evaluate on: from the test split of MATH and GSM8K, held out for other datasets.
        gym_size (`int`, *optional*, defaults to `5000`):
            Questions to generate from a family of reasoning-gym.
        code_timeout (`float`, *optional*, defaults to `10.0`):
            Seconds for each test of a program, or for all tests of a function. All tests of a program together have 16
            times as long, at most ten minutes.
        train (`bool`, *optional*, defaults to `True`):
            Whether to train before the evaluation.
        dry_run (`bool`, *optional*, defaults to `False`):
            Print what training would do, and stop.
    """

    problems: str = field(default="math", metadata={"help": f"{', '.join(SOURCES)}, or a reasoning-gym family."})
    problem_files: list[str] | None = field(default=None, metadata={"help": "Local files in place of the Hub's."})
    profile: str = field(default="duo", metadata={"choices": [*ROLES], "help": "Roles of the team."})
    workflow: str = field(default="chain", metadata={"choices": WORKFLOWS, "help": "Who acts when."})
    train: bool = field(default=True, metadata={"help": "Whether to train before the evaluation."})
    num_agents: int = field(default=2, metadata={"help": "Agents in the team, 1 to 4."})
    shared_adapter: bool = field(default=False, metadata={"help": "Whether all agents act with one LoRA."})
    anonymous: str = field(default="no", metadata={"choices": ["no", "numbered", "none"], "help": "Ablation."})
    eval_size: int = field(default=100, metadata={"help": "Number of problems to evaluate on."})
    gym_size: int = field(default=5000, metadata={"help": "Questions to generate from a family of reasoning-gym."})
    code_timeout: float = field(default=10.0, metadata={"help": "Seconds for a test of a program."})
    dry_run: bool = field(default=False, metadata={"help": "Print what training would do, and stop."})


def parse(args=None):
    """Arguments of the script, of `MARFTConfig` and of `ModelConfig`."""
    return TrlParser((RecipeArguments, MARFTConfig, ModelConfig)).parse_args_and_config(args)


def main(args=None, resume=None):
    """Run a recipe, and return the metrics of its evaluation. `resume` is that of `train(resume_from_checkpoint=)`."""
    recipe, training_args, model_args = parse(args)
    trainer = make_trainer(recipe, training_args, model_args)
    if recipe.dry_run:
        print(trainer.plan())
        trainer.end()
        return {}
    if recipe.train:
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or resume)
    metrics = {}
    if recipe.eval_size:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    metrics["num_generated_tokens"] = trainer.parts.reporter.generated_tokens  # in training
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=source_of(recipe.problems).path)
    trainer.end()
    return metrics


def make_trainer(recipe, training_args, model_args, model=None, **options):
    """
    The trainer of a recipe. `model` replaces the named model; `options` are further arguments of
    [`MARFTTrainer`].
    """
    check_team(recipe.profile, recipe.num_agents)
    train_dataset, eval_dataset = load_sets(recipe)
    kind = source_of(recipe.problems).kind
    outcome = reward_of(kind, recipe.code_timeout)
    own = outcome if training_args.credit == "per_step" else None
    if kind == "code" and training_args.reward_timeout is not None:
        rewards = 1 + (recipe.num_agents if own else 0)
        longest = rewards * seconds_of_programs(training_args, recipe.code_timeout)
        training_args.reward_timeout = max(training_args.reward_timeout, longest)
    if model is None:
        training_args.model_init_kwargs = {"dtype": model_args.dtype, **(training_args.model_init_kwargs or {})}
        options["quantization_config"] = get_quantization_config(model_args)
    return MARFTTrainer(
        model=model if model is not None else model_args.model_name_or_path,
        agents=make_team(recipe.profile, recipe.num_agents, own, recipe.shared_adapter),
        reward_funcs=outcome,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=LoraConfig(
            r=model_args.lora_r,
            lora_alpha=model_args.lora_alpha,
            target_modules=model_args.lora_target_modules or "all-linear",
        ),
        workflow=make_workflow(recipe.workflow, recipe.profile, recipe.num_agents, kind),
        anonymous=False if recipe.anonymous == "no" else recipe.anonymous,
        **options,
    )


def load_sets(recipe):
    """Problems to train on, and to evaluate on: from the test split if there is one, else held out."""
    dataset = load_problems(recipe.problems, recipe.problem_files, gym_size=recipe.gym_size)
    if not recipe.eval_size:
        return dataset, None
    if source_of(recipe.problems).has_test and not recipe.problem_files:
        test = load_problems(recipe.problems, split="test").shuffle(seed=0)
        return dataset, test.select(range(min(recipe.eval_size, len(test))))
    if recipe.eval_size >= len(dataset):
        raise ValueError(
            f"`--eval_size` ({recipe.eval_size}) leaves nothing to train on: there are {len(dataset)} problems."
        )
    parts = dataset.train_test_split(test_size=recipe.eval_size, seed=0)
    return parts["train"], parts["test"]


def reward_of(kind, code_timeout):
    """The reward of answers to a kind of problems."""
    if kind == "gym":
        from marft_trl.extras.tasks import reasoning_gym_exact

        return reasoning_gym_exact
    if kind == "code":
        return get_code_reward(
            seconds=code_timeout, total_seconds=seconds_of_program(code_timeout), workers=PROGRAMS_AT_ONCE
        )
    return math_reward


def seconds_of_program(code_timeout):
    """Time limit of a program for all of its tests."""
    return max(min(16 * code_timeout, 600.0), code_timeout)


def seconds_of_programs(args, code_timeout):
    """Maximum seconds of a batch of programs, with a minute for startup: the reward must not time out before."""
    batch = max(args.per_device_train_batch_size * args.steps_per_generation, args.per_device_eval_batch_size)
    return math.ceil(batch / PROGRAMS_AT_ONCE) * seconds_of_program(code_timeout) + 60.0


if __name__ == "__main__":
    main()
