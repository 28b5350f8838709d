"""
Train a team of two tiny agents, offline and in minutes, and show its accuracy before and after.

    make quickstart                                   # creates an environment first; DEVICE=cuda for a GPU
    python examples/quickstart.py --seed 1            # in an environment with marft_trl
    python examples/quickstart.py --quick             # everything in half a minute, which does not teach much

The reasoner writes the steps of a small sum, and the actor reads the answer from the steps. Both start from one model,
`--model` or one that has learned from demonstrations with errors. The reward is 1 for a right answer and 0 otherwise.
"""

import argparse
import dataclasses
from pathlib import Path

from marft_trl import MARFTConfig, MARFTTrainer, load_adapters
from marft_trl.prompts import team_view
from marft_trl.reporting import format_turns, save_learning_curve, team_exact_match
from marft_trl.tiny import exact_answer, tiny_agents, tiny_dataset, tiny_team_model

from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging


def steps_are_right(answers, solution, turns, **columns):
    """Accuracy of the reasoner: share of episodes in which the last number of its steps is the right answer."""
    ends = [episode[0].text.rpartition("=")[2] for episode in turns]
    return share("reasoner", ends, solution)


def reads_the_steps(answers, turns, **columns):
    """Accuracy of the actor: share of episodes in which it repeats the last number of the steps, right or wrong."""
    return share("actor", answers, [episode[0].text.rpartition("=")[2] for episode in turns])


def share(name, predictions, references):
    metrics = team_exact_match().compute(predictions=predictions, references=references)
    return {key.replace("exact_match", name): value for key, value in metrics.items()}


class Transcripts:
    """Metric that stores the latest evaluation: for each question, correctness and transcript."""

    def __call__(self, answers, prompt, solution, turns, **columns):
        rows = zip(answers, prompt, solution, turns, strict=True)
        self.latest = [
            (answer == target, format_turns(question, episode, title=f"right answer: {target}", answer=episode[-1]))
            for answer, question, target, episode in rows
        ]
        return {}


def emptied(agent, prompt, seen):
    """View of an agent in which the messages of its teammates are empty."""
    return team_view(agent, prompt, [dataclasses.replace(turn, raw_text="") for turn in seen])


def evaluate(trainer):
    trainer.view = emptied
    alone = trainer.evaluate(metric_key_prefix="eval_emptied")  # logged as `eval emptied`
    trainer.view = team_view
    set_seed(0)  # equal weights give equal samples
    return {**alone, **trainer.evaluate()}


def make_trainer(model, transcripts, args, count, **arguments):
    return MARFTTrainer(
        model=model,
        agents=tiny_agents(),
        reward_funcs=exact_answer,
        args=args,
        train_dataset=tiny_dataset(4000, seed=0),
        eval_dataset=tiny_dataset(count, seed=1),  # held out: their numbers never occur in training
        eval_metrics=[team_exact_match(), steps_are_right, reads_the_steps, transcripts],
        **arguments,
    )


def print_table(before, after, count):
    rows = {
        "the team's answer is right": "eval_exact_match",
        "the reasoner's steps are right": "eval_reasoner",
        "the actor repeats their result": "eval_actor",
        "right without the reasoner's message": "eval_emptied_exact_match",
    }
    print(f"\n{count} held-out questions, sampled at temperature 1 (95 % intervals)")
    print(f"{'':37}{'before':>22}{'after':>22}")
    for title, key in rows.items():
        cells = []
        for metrics in (before, after):
            value, low, high = (100 * metrics[f"{key}{end}"] for end in ("", "_low", "_high"))
            cells.append(f"{value:5.1f} % ({low:4.1f} - {high:4.1f})")
        print(f"{title:37}{cells[0]:>22}{cells[1]:>22}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--model", help="folder, or name on the Hub (default: the embedded tiny model)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output_dir", type=Path, default=Path("quickstart-output"))
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warm_up_steps, max_steps, count = (100, 4, 40) if options.quick else (800, options.max_steps, 400)
    base = options.model or tiny_team_model(steps=warm_up_steps)
    args = MARFTConfig(
        str(options.output_dir),
        per_device_train_batch_size=64,  # 8 questions with 8 episodes each
        num_generations=8,
        num_generations_eval=1,
        per_device_eval_batch_size=200,
        max_steps=max_steps,
        learning_rate=1e-4 if options.model else 1.5e-3,
        logging_steps=2,
        save_strategy="no",
        disable_tqdm=False,
        seed=options.seed,
        use_cpu=options.device == "cpu",
        bf16=options.device == "cuda" and bool(options.model),  # the tiny model gains nothing
    )
    transcripts = Transcripts()
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    trainer = make_trainer(base, transcripts, args, count, peft_config=lora)
    before, transcripts_before = evaluate(trainer), transcripts.latest
    trainer.train()
    after, transcripts_after = evaluate(trainer), transcripts.latest
    trainer.save_model()
    model = load_adapters(AutoModelForCausalLM.from_pretrained(base), options.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(options.output_dir)
    again = evaluate(make_trainer(model, transcripts, args, count, processing_class=tokenizer))

    pairs = list(zip(transcripts_before, transcripts_after, strict=True))
    (_, first), (_, last) = next((pair for pair in pairs if not pair[0][0] and pair[1][0]), pairs[0])
    print(f"\nA question the team got wrong before training\n{first}\n\nThe same question after training\n{last}")
    print_table(before, after, count)
    print(f"the saved adapters in a new model: {100 * again['eval_exact_match']:.1f} % right answers")
    save_learning_curve(trainer.state.log_history, options.output_dir, ["reward", "agents/reasoner/entropy"])
    name = base if options.quick else options.model or "tiny"
    print(f"""learning curve (PNG, CSV) and model card: {options.output_dir}/
saved team: {options.output_dir} (base: {base})

What next (`. .venv/bin/activate` first)
  marft chat {options.output_dir} --model {name}    # ask this team
  marft serve {options.output_dir} --model {name}   # the same in a browser, and for OpenAI's clients
  marft init duo && marft train && marft chat duo --model tiny   # a script of your own team""")


if __name__ == "__main__":
    main()
