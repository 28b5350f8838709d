"""
Run all cells of a published experiment, and write one table. A cell that is done is not repeated, so the same command
goes on with a grid that was interrupted.

    python examples/recipes/grid.py --grids marft --output_dir grid -- --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct
    python examples/recipes/grid.py --grids all --dry_run --workers 2     # every cell for a step on a tiny model

What follows `--` are options of `train.py` for all cells. `grids.py` has the grids. With `--dry_run`, models and
problems are made up, and nothing is downloaded. The table says which cells this machine leaves out, and why. Several
workers share the cells; where there are several GPUs, each has one of its own.
"""

import argparse
import contextlib
import csv
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import yaml
from grids import GRIDS, name_of


HERE = Path(__file__).parent
# A step on a tiny model
DRY = {
    **{
        "max_steps": 1,
        "lora_r": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "report_to": "none",
    },
    **{"max_completion_length": 8, "eval_size": 2, "gradient_accumulation_steps": 1, "save_strategy": "no"},
    **{"num_generations_eval": 1, "steps_per_generation": 1, "logging_steps": 1, "code_timeout": 2.0},
    **{
        "context_overflow": "end_episode",
        "log_completions": False,
        "use_cpu": True,
        "lora_target_modules": "all-linear",
    },
    **{"gradient_checkpointing": False, "disable_tqdm": True, "num_train_epochs": 1},
}
SHOWN = ("eval_reward", "eval_completions/mean_length", "eval_num_tokens")


def cells_of(grids):
    """The cells of grids, by name."""
    return {f"{grid}/{name_of(cell)}": cell for grid in grids for cell in GRIDS[grid]()}


def options_of(cell, folder, further, dry_model=None):
    """Arguments of `train.py` for a cell."""
    recipe = HERE / f"{cell['recipe']}.yaml"
    given = {name: value for name, value in cell.items() if name not in ("recipe", "kind")}
    settings = yaml.safe_load(recipe.read_text()) | given
    given["output_dir"] = str(folder)
    if dry_model is not None:
        given |= {**DRY, "model_name_or_path": dry_model}
        sample = HERE / "samples" / f"{settings['problems']}.jsonl"
        if sample.exists():
            given["problem_files"] = str(sample)
        if (
            settings.get("preset") not in ("marft-a", "marft-t", "mappo", "c3", "at-grpo")
            and settings.get("advantage") != "gae"
        ):
            given["num_generations"] = 4
    flat = [
        text
        for name, value in given.items()
        for text in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
    ]
    return ["--config", str(recipe), *flat, *further]


def run_cell(cell, folder, further, dry_model):
    """Train and evaluate a cell, and write its result."""
    from train import main as train

    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with open(folder / "log.txt", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            metrics, error = train(options_of(cell, folder / "team", further, dry_model)), None
        except (Exception, SystemExit) as problem:
            traceback.print_exc()
            metrics, error = {}, f"{type(problem).__name__}: {problem}"[:300]
    result = {"cell": cell, "metrics": metrics, "error": error, "seconds": round(time.perf_counter() - start, 1)}
    part = folder / "result.part"
    part.write_text(json.dumps(result, default=str))
    os.replace(part, folder / "result.json")
    gc.collect()


def left_out(cell):
    """Why a cell cannot run on this machine, or `None`."""
    settings = yaml.safe_load((HERE / f"{cell['recipe']}.yaml").read_text()) | cell
    problems = settings["problems"]
    if problems not in ("math", "gsm8k", "deepscaler", "deepcoder", "codeforces") and not importlib.util.find_spec(
        "reasoning_gym"
    ):
        return "reasoning-gym is not installed"
    if problems in ("math", "gsm8k", "deepscaler") and not importlib.util.find_spec("math_verify"):
        return "math-verify is not installed"
    return "programs need Linux" if problems in ("deepcoder", "codeforces") and sys.platform != "linux" else None


def write_table(cells, folder):
    """One row for each cell: what it changes, how it ended, and its evaluation."""
    rows = []
    for name, cell in cells.items():
        file, reason = folder / name / "result.json", left_out(cell)
        result = (
            json.loads(file.read_text())
            if file.exists()
            else {"metrics": {}, "error": reason or "not run", "seconds": ""}
        )
        figures = [result["metrics"].get(key, "") for key in SHOWN]
        rows.append([name, "ok" if result["error"] is None else result["error"], result["seconds"], *figures])
    head = ["cell", "state", "seconds", *SHOWN]
    with open(folder / "grid.csv", "w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    shown = [
        [
            f"{value:.3f}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")
            for value in row
        ]
        for row in rows
    ]
    lines = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *shown]]
    (folder / "grid.md").write_text("\n".join(lines) + "\n")
    return rows


def tiny(folder):
    """A folder with a tiny model and its tokenizer."""
    from marft_trl.tiny import tiny_model, tiny_tokenizer

    if not (folder / "config.json").exists():
        tokenizer = tiny_tokenizer()
        tiny_model(len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=["all"], choices=["all", *GRIDS])
    parser.add_argument("--dry_run", action="store_true", help="every cell for a step on a tiny model")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--worker", type=int, help="number of this process, for `--workers`")
    parser.add_argument("--output_dir", type=Path, default=Path("grid-output"))
    own, further = (sys.argv[1:], [])
    if "--" in own:
        own, further = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    cells = cells_of(GRIDS if "all" in options.grids else options.grids)
    model = tiny(options.output_dir / "tiny") if options.dry_run else None
    if options.worker is None and options.workers > 1:
        command = [sys.executable, "-W", "ignore", __file__, *own]
        for process in [
            subprocess.Popen(  # noqa: S603
                [*command, "--worker", str(number), *(["--", *further] if further else [])], env=environment(number)
            )
            for number in range(options.workers)
        ]:
            process.wait()
    else:
        mine = list(cells)[options.worker or 0 :: options.workers if options.worker is not None else 1]
        for name in mine:
            if not (options.output_dir / name / "result.json").exists() and left_out(cells[name]) is None:
                print(name, flush=True)
                run_cell(cells[name], options.output_dir / name, further, model)
    if options.worker is None:
        rows = write_table(cells, options.output_dir)
        failed = [row for row in rows if row[1] != "ok"]
        print(f"{len(rows) - len(failed)} of {len(rows)} cells are done: {options.output_dir}/grid.md")
        for name, state, *_ in failed[:20]:
            print(f"  {name}: {state}")
        sys.exit(bool(failed))


def environment(number):
    """Variables of a worker: a GPU of its own where there are several."""
    import torch

    if torch.cuda.device_count() > 1:
        return {**os.environ, "CUDA_VISIBLE_DEVICES": str(number % torch.cuda.device_count())}
    return dict(os.environ)


if __name__ == "__main__":
    main()
