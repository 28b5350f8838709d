"""
Train the quickstart's team with every preset and several seeds, and compare accuracy, time and generated tokens.

    make benchmark-learning
    python benchmarks/learning/learning.py --check [--equal_tokens]
    python benchmarks/learning/learning.py --presets marft-t grpo --seeds 2 --batches 20
    python benchmarks/learning/learning.py --presets reinforce++ --set lr_scheduler_type=linear learning_rate=3e-3

All runs start from the quickstart's model and see the same number of episodes: `--batches` generation batches of
`--prompts` questions with 8 episodes each (8 times as many questions where a preset has one episode of each).
Learning rates are chosen for this task and are the same for all presets, except for those in `TUNED`. All other
settings are those of the preset. `--set` overrides any setting. With `--equal_tokens`, presets that sample candidates
or re-runs get fewer episodes, so that all generate about as many tokens.

"Start" and "end" are accuracies of sampled answers (temperature 1) on 400 held-out questions. "Area" is the mean
training reward over generation batches. "Explained variance" is the mean over the last quarter of the batches. The
script writes `learning.csv`, `learning.png` and `runs.jsonl` into `--output_dir`.
"""

import argparse
import ast
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.config.presets import PRESETS
from marft_trl.reporting import team_exact_match
from marft_trl.tiny import exact_answer, tiny_agents, tiny_dataset, tiny_team_model

import torch
from peft import LoraConfig
from transformers import PrinterCallback, set_seed
from transformers.utils import logging


# `figures` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures


# Settings for this task, in addition to the preset. A LoRA on a tiny model needs a much larger learning rate than a
# LoRA on a language model.
TASK = {"learning_rate": 1.5e-3, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}
TUNED: dict[str, dict] = {
    "marft-a": {"learning_rate": 5e-4, "critic_learning_rate": 1e-3},
    "marft-t": {"learning_rate": 5e-4, "critic_learning_rate": 1e-3},
    "mappo": {"learning_rate": 5e-4, "critic_learning_rate": 1e-3},
}
# Turns that are generated for an episode of two agents, relative to its own: the rewards of candidates are those of
# episodes that are completed from them, and re-runs generate what follows a turn
COST = {"at-grpo": 6.0, "c3": 12.0, "ccpo": 1.5}
# Presets that the page on credit compares at equal tokens
CREDIT = ["c3", "ccpo", "magrpo", "mappo", "at-grpo"]
# A single agent with the same number of generated tokens: PPO compared with the group baseline.
SOLO = {"solo-ppo": "marft-t", "solo-grpo": "grpo"}


def run(
    name: str,
    seed: int,
    batches: int,
    prompts: int,
    folder: str,
    changed: dict | None = None,
    held_out: int = 400,
    equal_tokens: bool = False,
) -> dict:
    """Run one training and return its metrics and the training reward of every generation batch."""
    logging.set_verbosity_error()
    preset = SOLO.get(name, name)
    settings = {**TASK, **TUNED.get(preset, {}), **(changed or {})}
    config = MARFTConfig(folder, preset=preset, use_cpu=True, **settings)
    group = 1 if config.num_generations == 1 else 8
    episodes = 8 * prompts
    if equal_tokens:
        episodes = max(round(episodes / COST.get(preset, 1.0) / group), 1) * group
    args = MARFTConfig(
        folder,
        preset=preset,
        per_device_train_batch_size=episodes,
        num_generations=group,
        num_generations_eval=1,
        per_device_eval_batch_size=200,
        max_steps=batches * config.num_iterations,
        gradient_checkpointing=False,
        logging_steps=config.num_iterations,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=seed,
        use_cpu=True,
        **settings,
    )
    agents = tiny_agents()
    if name in SOLO:
        agents = [AgentSpec("reasoner", system_prompt="Write the steps.", max_completion_length=24)]
    trainer = MARFTTrainer(
        model=tiny_team_model(),
        agents=agents,
        reward_funcs=exact_answer if name not in SOLO else last_number,
        args=args,
        train_dataset=tiny_dataset(4000, seed=0),
        eval_dataset=tiny_dataset(held_out, seed=1),
        eval_metrics=team_exact_match() if name not in SOLO else None,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.remove_callback(PrinterCallback)
    set_seed(0)
    start = trainer.evaluate()["eval_reward"]
    set_seed(seed)
    begin = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begin
    set_seed(0)
    end = trainer.evaluate()["eval_reward"]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    rewards = [entry["reward"] for entry in logs if "reward" in entry]
    tokens = sum(entry["agents/" + a.name + "/completions/mean_length"] * episodes for entry in logs for a in agents)
    tokens += sum(entry.get("branches/tokens", 0.0) for entry in logs)
    explained = [entry["critic/explained_variance"] for entry in logs if "critic/explained_variance" in entry]
    return {
        "preset": name,
        "seed": seed,
        "start": start,
        "end": end,
        "area": statistics.fmean(rewards),
        "seconds": seconds,
        "tokens": tokens,
        "explained_variance": statistics.fmean(explained[-max(len(explained) // 4, 1) :]) if explained else None,
        "curve": rewards,
    }


def last_number(completions, solution, **kwargs):
    """Reward of the single agent: 1 if the last number of its steps is the right answer, else 0."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(text.rpartition("=")[2].strip() == target) for text, target in zip(texts, solution, strict=True)]


def in_process(name: str, seed: int, options) -> dict:
    command = [sys.executable, "-W", "ignore", __file__, "--one", name, str(seed)]
    command += ["--batches", str(options.batches), "--prompts", str(options.prompts), "--set", *options.set]
    command += ["--equal_tokens"] if options.equal_tokens else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}, seed {seed}:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"{name:12} seed {seed}: {result['start']:.3f} -> {result['end']:.3f}", flush=True)
    with open(options.output_dir / "runs.jsonl", "a", encoding="utf-8") as file:  # nothing lost if a later run fails
        file.write(json.dumps(result) + "\n")
    return result


def setting(text: str) -> tuple[str, object]:
    """Split `"learning_rate=3e-3"` into a name and a value. Values that are not Python literals remain strings."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def table(results: list[dict]) -> str:
    """Markdown table with medians and ranges over seeds."""
    lines = [
        "| preset | start | end | area | seconds | generated tokens | explained variance |",
        "|---|---|---|---|---|---|---|",
    ]
    presets = {}
    for result in results:
        presets.setdefault(result["preset"], []).append(result)
    for name, runs in sorted(presets.items(), key=lambda item: -statistics.median(run["end"] for run in item[1])):
        cells = [name]
        for key, form in (("start", "{:.1%}"), ("end", "{:.1%}"), ("area", "{:.3f}"), ("seconds", "{:.0f}")):
            values = [run[key] for run in runs]
            spread = f" ({form.format(min(values))} - {form.format(max(values))})" if key in ("end", "area") else ""
            cells.append(form.format(statistics.median(values)) + spread)
        cells.append(f"{statistics.median(run['tokens'] for run in runs):,.0f}")
        explained = [run["explained_variance"] for run in runs if run["explained_variance"] is not None]
        cells.append(f"{statistics.median(explained):.2f}" if explained else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5))
    colors = plt.get_cmap("tab20").colors
    axes.set_prop_cycle(color=[*colors[::2], *colors[1::2]])
    for name in dict.fromkeys(result["preset"] for result in results):
        curves = [result["curve"] for result in results if result["preset"] == name]
        length = min(map(len, curves))
        mean = [statistics.fmean(curve[i] for curve in curves) for i in range(length)]
        smooth = [statistics.fmean(mean[max(0, i - 4) : i + 1]) for i in range(length)]
        axes.plot(range(1, length + 1), smooth, label=name, linestyle="--" if name in SOLO else "-")
    axes.set_xlabel("generation batch")
    axes.set_ylabel("training reward (mean over seeds, 5 batches)")
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=[*PRESETS, *SOLO], help="all, or those of the credit page")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="settings that override presets")
    parser.add_argument("--equal_tokens", action="store_true", help="fewer episodes where a preset generates more")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path("benchmark-output/learning"))
    parser.add_argument("--one", nargs=2, metavar=("PRESET", "SEED"), help=argparse.SUPPRESS)
    options = figures.parse(parser, free=("output_dir", "jobs", "equal_tokens", "one"), repeats="`c3`, seed 0")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.one:
        name, seed = options.one
        with tempfile.TemporaryDirectory() as folder:
            changed = dict(map(setting, options.set))
            sizes = options.batches, options.prompts
            print(json.dumps(run(name, int(seed), *sizes, folder, changed, equal_tokens=options.equal_tokens)))
        return
    name = "equal_tokens" if options.equal_tokens else "learning"
    if options.check:
        with tempfile.TemporaryDirectory() as folder:
            options.output_dir = Path(folder)
            repeated, recorded = data("", [in_process("c3", 0, options)]), figures.load(name)
        rows = [dict(zip(found["columns"], found["runs"]["c3"][0], strict=True)) for found in (recorded, repeated)]
        figures.compare(recorded, *({key: value for key, value in row.items() if key != "seconds"} for row in rows))
        return
    options.output_dir.mkdir(parents=True, exist_ok=True)
    options.presets = options.presets or (CREDIT if options.equal_tokens else [*PRESETS, *SOLO])
    tiny_team_model()  # built once, before the runs start
    jobs = [(name, seed) for seed in range(options.seeds) for name in options.presets]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda job: in_process(*job, options), jobs))
    with open(options.output_dir / "learning.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(results[0]))
        writer.writeheader()
        writer.writerows(results)
    draw(results, options.output_dir / "learning.png")
    print(f"\n{table(results)}\n\nwritten to {options.output_dir}/")
    if options.page:
        command = (
            "python benchmarks/learning/learning.py --equal_tokens"
            if options.equal_tokens
            else "make benchmark-learning"
        )
        figures.publish(name, data(command, results))


def data(command: str, results: list[dict]) -> dict:
    """Content of the data file: the figures of each run, without its curve."""
    columns = ["start", "end", "area", "seconds", "tokens", "explained_variance"]
    runs = {}
    for result in sorted(results, key=lambda result: result["seed"]):
        figures_of_run = [result[column] and round(result[column], 4) for column in columns]
        runs.setdefault(result["preset"], []).append(figures_of_run)
    return {"made": figures.made(command), "columns": columns, "runs": runs}


def tables(measurements: dict) -> dict[str, str]:
    """The tables of pages: all presets, or those that are compared at equal tokens."""
    results = [
        {"preset": preset, **dict(zip(measurements["columns"], run, strict=True))}
        for preset, runs in measurements["runs"].items()
        for run in runs
    ]
    is_equal = "--equal_tokens" in measurements["made"]["command"]
    columns = ["preset", *(["start"] if is_equal else []), "end", "seconds", "generated tokens"]
    head, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(results).splitlines()]
    places = [head.index(column) for column in columns]
    rows = [[cells[place] for place in places] for cells in lines]
    return {"equal_tokens" if is_equal else "learning": figures.markdown(columns, rows)}


if __name__ == "__main__":
    main()
