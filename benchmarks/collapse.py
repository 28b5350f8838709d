"""
Train teams until their reward drops from its peak, and compare what prevents the drop.

    python benchmarks/collapse.py --teams voting --adapters shared --rates 9e-3
    python benchmarks/collapse.py --teams voting --adapters own --rates 1e-2

The task: "Say 7" is answered with "7". A tiny model first imitates scripted agents, whose turns are right half of the
time, else random. Three teams: `evaluator` (a solver whose drafts a critic approves or not), `voting` (three voters
and their most frequent answer) and `orchestrator` (a boss that calls one of two workers), with one adapter for all
agents (`shared`) or one for each (`own`). The learning rate is constant after ten steps, and too high on purpose.

Arms: `plain` sums turns; `guarded` gives agents equal weight (`agent_weight="equal"`) and restores adapters after a
drop (`on_collapse="restore"`); `equal` and `restore` do one of the two. The run is evaluated every `--every` steps.
The table has the reward of the team's sampled answers on 500 other questions, which the run never sees, in percent: at
the start, its peak over the same steps, at the end, and what was lost, as medians and ranges over seeds.
"""

import argparse
import ast
import json
import random
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.tiny import scripted_turns, tiny_model, tiny_tokenizer, warm_up
from marft_trl.workflows import Debate, Orchestrated, UntilApproved

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging


WORDS = ("Say", "APPROVED", "bad", "boss", "left", "right", "solver", "critic", "one", "two", "three", "call", "done")
TOKENIZER = tiny_tokenizer(WORDS)
RIGHT = 0.5  # share of the scripted turns that are right
TEAMS = {
    "evaluator": (UntilApproved("solver", "critic", rounds=2), ("solver", "critic")),
    "voting": (Debate(["one", "two", "three"], rounds=1), ("one", "two", "three")),
    "orchestrator": (Orchestrated("boss", ["left", "right"], max_turns=3, fallback="left"), ("boss", "left", "right")),
}
ARMS: dict[str, dict] = {
    "plain": {},
    "equal": {"agent_weight": "equal"},
    "restore": {"on_collapse": "restore"},
    "guarded": {"agent_weight": "equal", "on_collapse": "restore"},
}


def question(draw):
    number = draw.randint(1, 9)
    return {"prompt": f"Say {number}", "solution": str(number)}


def answer_of(prompt):
    return prompt[-1]


def scripted(episode, agent, seen, draw):
    """The turn of a scripted agent."""
    right, is_right = answer_of(episode.prompt), draw.random() < RIGHT
    if agent == "critic":
        return "APPROVED" if (seen[-1].text == right) == is_right else "bad"
    if agent == "boss":
        return f"<call>{draw.choice(['left', 'right'])}</call>" if not seen else "<done/>"
    return right if is_right else str(draw.randint(1, 9))


def is_right(completions, solution, **columns):
    return [float(str(text).strip() == target) for text, target in zip(completions, solution, strict=True)]


def specs(name, is_shared):
    adapter = "team" if is_shared else None
    return [
        AgentSpec(agent, system_prompt=agent, max_completion_length=8, adapter=adapter) for agent in TEAMS[name][1]
    ]


def taught_model(folder: Path):
    """The model that plays all parts, made once."""
    if (folder / "config.json").exists():
        return str(folder)
    torch.set_num_threads(1)
    model = tiny_model(len(TOKENIZER))

    def rows():
        parts = [
            scripted_turns(TOKENIZER, flow, specs(name, False), question, scripted)
            for name, (flow, _) in TEAMS.items()
        ]
        while True:
            for part in parts:
                yield next(part)

    torch.manual_seed(0)
    warm_up(model, TOKENIZER, steps=600, learning_rate=1.5e-3, rows=rows())
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def questions(first):
    return Dataset.from_list([question(random.Random(first + index)) for index in range(500)])


class Watch(TrainerCallback):
    """Evaluates the team with fixed seeds and without effect on training, for the run and for the table."""

    def __init__(self, every):
        self.every, self.trainer, self.curve, self.others = every, None, [], questions(2 * 10**6)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            self.measure()

    def measure(self):
        with torch.random.fork_rng():
            set_seed(0)
            was_training = self.trainer.model.training
            self.trainer.evaluate()
            set_seed(1)
            self.curve.append(self.trainer.evaluate(self.others, metric_key_prefix="test")["test_reward"])
            self.trainer.model.train(was_training)


def run(team: str, adapters: str, arm: str, seed: int, options) -> dict:
    """Train a team once; returns the curve of evaluations."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    draw = random.Random(seed)
    watch = Watch(options.every)
    with tempfile.TemporaryDirectory() as folder:
        args = MARFTConfig(
            folder,
            learning_rate=options.rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            per_device_train_batch_size=options.episodes,
            per_device_eval_batch_size=500,
            num_generations=8,
            num_generations_eval=1,
            max_steps=options.steps,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
            use_cpu=True,
            **{**ARMS[arm], **dict(map(setting, options.set))},
        )
        trainer = MARFTTrainer(
            model=taught_model(options.model),
            agents=specs(team, adapters == "shared"),
            workflow=TEAMS[team][0],
            reward_funcs=is_right,
            args=args,
            train_dataset=Dataset.from_list([question(draw) for _ in range(2000)]),
            eval_dataset=questions(10**6),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        trainer.remove_callback(PrinterCallback)
        watch.trainer = trainer
        trainer.add_callback(watch)
        watch.measure()
        trainer.train()
        watch.measure()  # the final weights
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return {
        "team": team,
        "adapters": adapters,
        "arm": arm,
        "rate": options.rate,
        "seed": seed,
        "curve": watch.curve,
        "rewards": rewards,
    }


def setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teams", nargs="+", default=list(TEAMS))
    parser.add_argument("--adapters", nargs="+", default=["shared", "own"])
    parser.add_argument("--arms", nargs="+", default=["plain", "guarded"])
    parser.add_argument("--rates", nargs="+", type=float, default=[9e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "marft_trl_collapse_model")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        team, adapters, arm, rate, seed = json.loads(options.one)
        options.rate = rate
        print(json.dumps(run(team, adapters, arm, seed, options)))
        return
    taught_model(options.model)
    print("| team | adapters | learning rate | arm | start | peak | end | lost |\n|---|---|---|---|---|---|---|---|")
    for team in options.teams:
        for adapters in options.adapters:
            for rate in options.rates:
                for arm in options.arms:
                    report([in_process(team, adapters, arm, rate, seed, options) for seed in options.seeds])


def in_process(team, adapters, arm, rate, seed, options):
    job = json.dumps([team, adapters, arm, rate, seed])
    command = [sys.executable, "-W", "ignore", __file__, "--one", job, "--steps", str(options.steps)]
    command += ["--episodes", str(options.episodes), "--every", str(options.every), "--model", str(options.model)]
    done = subprocess.run([*command, "--set", *options.set], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{job}:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    if options.output:
        with open(options.output, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return result


def report(results):
    """A row of the table: percent, median and range over seeds."""

    def shown(values):
        low, high = 100 * min(values), 100 * max(values)
        return f"{100 * statistics.median(values):.1f} ({low:.1f} - {high:.1f})"

    first = results[0]
    curves = [result["curve"] for result in results]
    columns = [
        shown([curve[0] for curve in curves]),
        shown([max(curve) for curve in curves]),
        shown([curve[-1] for curve in curves]),
    ]
    columns.append(shown([max(curve) - curve[-1] for curve in curves]))
    names = [first["team"], first["adapters"], f"{first['rate']:g}", first["arm"]]
    print("| " + " | ".join([*names, *columns]) + " |", flush=True)


if __name__ == "__main__":
    main()
