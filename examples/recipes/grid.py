"""
Run all cells of a published experiment, and write one table. Finished cells are not repeated, so the same command
resumes an interrupted grid.

    python examples/recipes/grid.py --grids marft --cells "*/math_duo-num_agents_2-*"   # the first paper
    python examples/recipes/grid.py --grids all --dry_run --workers 2     # one step of every cell on a tiny model

Options after `--` go to `train.py` for all cells. `grids.py` defines the grids. With `--dry_run`, models and problems
are synthetic, and nothing is downloaded. The table lists the cells that cannot run on this machine, with the reason.
Several workers share the cells. On a machine with several GPUs, each worker has its own.
"""

import argparse
import contextlib
import csv
import fnmatch
import functools
import gc
import hashlib
import importlib.util
import json
import os
import re
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from marft_trl.extras.report import ChildProcesses

import yaml
from grids import GRIDS, name_of
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HfHubHTTPError
from problems import SOURCES


HERE = Path(__file__).parent
# Settings of a dry run: one step on a tiny model
DRY = {
    "max_steps": 1,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_generations_eval": 1,
    "max_completion_length": 8,
    "context_overflow": "end_episode",
    "eval_size": 2,
    "gym_size": 24,
    "code_timeout": 2.0,
    "lora_r": 4,
    "lora_target_modules": "all-linear",
    "gradient_checkpointing": False,
    "use_cpu": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "log_completions": False,
    "disable_tqdm": True,
    "report_to": "none",
}
# Presets and advantages that fix the number of episodes per prompt
OWN_EPISODES = ("marft-a", "marft-t", "mappo", "c3", "at-grpo", "gae")
SHOWN = ("eval_reward", "accuracy", "low", "high", "eval_completions/mean_length", "num_generated_tokens")


def cells_of(grids, pattern="*"):
    """The cells of grids whose names match a pattern, by name."""
    cells = {f"{grid}/{name_of(cell)}": cell for grid in grids for cell in GRIDS[grid]()}
    return {name: cell for name, cell in cells.items() if fnmatch.fnmatchcase(name, pattern)}


def settings_of(cell, further=()):
    """Settings of a cell: its recipe, its changes, and the sources of models and problems."""
    return yaml.safe_load((HERE / f"{cell['recipe']}.yaml").read_text()) | cell | sources_of(further)


def changes_of(cell, folder, further, dry_model=None, files=None):
    """What a cell changes of its recipe; `files` is a folder with problems, `<name>.jsonl` or `.parquet`."""
    changes = {name: value for name, value in cell.items() if name not in ("recipe", "kind")}
    changes["output_dir"] = str(folder)
    settings = settings_of(cell, further)
    if dry_model is not None:
        changes |= DRY | {"model_name_or_path": dry_model}
        files = HERE / "samples"
        if "agent_iteration_interval" in changes:  # a step for each of two agents
            changes |= {"agent_iteration_interval": 1, "max_steps": 2}
        if not {settings.get("preset"), settings.get("advantage")} & {*OWN_EPISODES}:
            changes["num_generations"] = 4
    local = file_of(settings["problems"], files)
    if local is not None:
        changes["problem_files"] = str(local)
    return changes


def options_of(cell, changes, further):
    """Arguments of `train.py` for a cell."""
    shown = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in changes.items()}
    flat = [text for name, value in shown.items() for text in (f"--{name}", value)]
    return ["--config", str(HERE / f"{cell['recipe']}.yaml"), *flat, *further]


def file_of(problems, files):
    """The file with some problems in a folder, or `None`."""
    paths = [Path(files) / f"{problems}{kind}" for kind in (".jsonl", ".json", ".parquet")] if files else []
    return next((path for path in paths if path.exists()), None)


def record_of(cell, changes, further):
    """
    Everything that affects the results of a cell: its recipe, its changes, options of all cells, and local problems.
    Folders are left out, since they may be moved.
    """
    files = sources_of(further).get("problem_files", [changes["problem_files"]] if "problem_files" in changes else [])
    record = {**settings_of(cell), **changes, "output_dir": None, "problem_files": None, "further options": further}
    record["content of problems"] = [digest_of(file, os.stat(file).st_mtime_ns) for file in files]
    return json.loads(json.dumps(record, default=str))


@functools.cache
def digest_of(file, modified):
    """SHA-256 of a file, read once for all cells."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def is_done(folder, record):
    """
    Whether a cell has run without an error. Exits if the folder has a result or a checkpoint of other settings.
    """
    begun, file = folder / "settings.json", folder / "result.json"
    done = file.exists() and json.loads(file.read_text())["error"] is None
    if not done and not any(folder.glob("team/checkpoint-*")):
        return False
    before = json.loads(begun.read_text()) if begun.exists() else {}
    changed = [name for name in {**before, **record} if before.get(name) != record.get(name)]
    if changed:
        shown = "; ".join(f"{name} was {before.get(name)!r}, is {record.get(name)!r}" for name in changed[:5])
        sys.exit(f"{folder} is the run of other settings: {shown}. Set another --output_dir, or delete that folder.")
    return done


class Runner:
    """
    Runs cells.

    Args:
        folder (`Path`): where they are written, each in a folder of its own.
        further (`list[str]`): options of all cells.
        dry_model (`str`, *optional*): model of a dry run.
        files (`Path`, *optional*): folder with problems.
    """

    def __init__(self, folder, further, dry_model=None, files=None):
        self.folder, self.further, self.dry_model, self.files = folder, further, dry_model, files

    def run(self, cells):
        """Run the cells that are not done."""
        for name, cell in cells.items():
            folder = self.folder / name
            changes = changes_of(cell, folder / "team", self.further, self.dry_model, self.files)
            record = record_of(cell, changes, self.further)
            if self.dry_model:
                record["model_name_or_path"] = "tiny"
            if not is_done(folder, record) and self.left_out(cell) is None:
                print(name, flush=True)
                self._run(folder, options_of(cell, changes, self.further), record)

    def _run(self, folder, options, record):
        """Train and evaluate a cell, and write its result. An interruption leaves no result and ends the grid."""
        from marft_trl import RunInterrupted

        from train import main as train

        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "settings.json", record)
        start = time.perf_counter()
        with open(folder / "log.txt", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                metrics, error = train(options, resume=True), None
            except RunInterrupted:
                raise
            except (Exception, SystemExit) as problem:
                traceback.print_exc()
                metrics, error = {}, f"{type(problem).__name__}: {problem}"[:300]
        seconds = round(time.perf_counter() - start, 1)
        write(folder / "result.json", {"metrics": metrics, "error": error, "seconds": seconds})
        gc.collect()

    def left_out(self, cell):
        """Why a cell cannot run on this machine, or `None`."""
        settings = settings_of(cell, self.further)
        problems = settings["problems"]
        if problems in ("deepcoder", "codeforces") and (reason := lacks_a_fence()):
            return reason
        if problems in ("math", "gsm8k", "deepscaler") and not importlib.util.find_spec("math_verify"):
            return "math-verify is not installed"
        if problems not in SOURCES and not importlib.util.find_spec("reasoning_gym"):
            return "reasoning-gym is not installed"
        if self.dry_model:
            return None
        if problems in SOURCES and not (file_of(problems, self.files) or settings.get("problem_files")):
            reason = is_out_of_reach(SOURCES[problems].path, "dataset")
            if reason:
                return f"{reason} and no --problems_dir"
        model = settings["model_name_or_path"]
        return None if Path(model).is_dir() else is_out_of_reach(model, "model")


def sources_of(further):
    """The options of all cells that select models and problems."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("model_name_or_path", "problems"):
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    parser.add_argument("--problem_files", nargs="+", default=argparse.SUPPRESS)
    return vars(parser.parse_known_args(further)[0])


@functools.cache
def lacks_a_fence():
    """Why programs cannot be run on this machine, or `None`."""
    from marft_trl.extras.sandbox import code_reward

    if sys.platform != "linux":
        return "programs need Linux"
    try:
        code_reward(["```python\nprint(1)\n```"], [{"inputs": [""], "outputs": ["1"]}])
    except RuntimeError as error:
        return f"programs cannot be fenced in: {error}"
    return None


@functools.cache
def is_out_of_reach(name, kind):
    """Why a dataset or a model cannot be loaded from a hub, or `None`."""
    cached = try_to_load_from_cache(name, "config.json" if kind == "model" else "README.md", repo_type=kind)
    if isinstance(cached, str):
        return None
    if HF_HUB_OFFLINE:
        return f"no hub for {name} (HF_HUB_OFFLINE)"
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=10)
    except HfHubHTTPError:  # the Hub has answered; the cell fails with its error
        return None
    except Exception as error:
        return f"no hub for {name} ({type(error).__name__})"
    return None


def write(file, content):
    """Write JSON to a file atomically."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, default=str))
    os.replace(part, file)


def row_of(name, reason, folder):
    """Row of a cell: how it ended, or the reason why it was left out, and its evaluation."""
    file = folder / name / "result.json"
    if not file.exists():
        return [name, f"left out: {reason}" if reason else "not run", "", *[""] * len(SHOWN)]
    result = json.loads(file.read_text())
    metrics = dict(result["metrics"])
    for key, value in result["metrics"].items():  # such as eval_avg@8_low
        match = re.fullmatch(r"eval_avg@\d+(?:_(low|high))?", key)
        if match:
            metrics[match[1] or "accuracy"] = value
    figures = [metrics.get(key, "") for key in SHOWN]
    return [name, "ok" if result["error"] is None else result["error"], result["seconds"], *figures]


def in_cell(value):
    """A value in a table of Markdown."""
    return f"{value:.3f}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def write_table(reasons, folder):
    """One row for each cell, as CSV and as Markdown. `reasons` are those for leaving out cells, by name."""
    rows = [row_of(name, reason, folder) for name, reason in reasons.items()]
    head = ["cell", "state", "seconds", *SHOWN]
    with open(folder / "grid.csv", "w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    shown = [head, ["---"] * len(head), *([in_cell(value) for value in row] for row in rows)]
    (folder / "grid.md").write_text("".join(f"| {' | '.join(row)} |\n" for row in shown))
    return rows


def tiny(folder):
    """A folder with a tiny model and its tokenizer."""
    from marft_trl.tiny import tiny_model, tiny_tokenizer

    if not folder.exists():
        part, tokenizer = folder.with_suffix(".part"), tiny_tokenizer()
        tiny_model(len(tokenizer)).save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(folder)
    return str(folder)


def run_side_by_side(grid_args, further, workers):
    """Share the cells among processes, and exit if one of them fails."""
    command = [sys.executable, "-W", "ignore", __file__, *grid_args, "--worker"]
    more = ["--", *further] if further else []
    with ThreadPoolExecutor(workers) as pool, ChildProcesses() as children:  # children end first
        ended = list(
            pool.map(lambda number: children.run([*command, str(number), *more], environment(number)), range(workers))
        )
    if any(ended):
        sys.exit("A worker failed, see the error above.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=["all"], choices=["all", *GRIDS])
    parser.add_argument(
        "--cells", default="*", metavar="PATTERN", help="cells whose names match, such as '*/math_duo-*'"
    )
    parser.add_argument("--dry_run", action="store_true", help="every cell for a step on a tiny model")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--worker", type=int, help="number of this process, for `--workers`")
    parser.add_argument(
        "--problems_dir", type=Path, help="folder with problems, such as math.jsonl, in place of a hub"
    )
    parser.add_argument("--output_dir", type=Path, default=Path("grid-output"))
    grid_args, further = sys.argv[1:], []
    if "--" in grid_args:
        grid_args, further = grid_args[: grid_args.index("--")], grid_args[grid_args.index("--") + 1 :]
    options = parser.parse_args(grid_args)
    grids, folder = GRIDS if "all" in options.grids else options.grids, options.output_dir
    cells = cells_of(grids, options.cells)
    if not cells:
        parser.error(f"No cell of the grids has a name that matches {options.cells!r}, such as '*/math_duo-*'.")
    model = tiny(folder / "tiny") if options.dry_run else None
    if model is None and options.worker is None and not has_accelerator():
        print("There is no GPU: cells run on the CPU. Recipes are meant for a GPU with 80 GB.", file=sys.stderr)
    runner = Runner(folder, further, model, options.problems_dir)
    if options.worker is not None:
        runner.run(dict(list(cells.items())[options.worker :: options.workers]))
        return
    if options.workers > 1:
        run_side_by_side(grid_args, further, options.workers)
    else:
        runner.run(cells)
    # Include cells of earlier calls, if this call runs only a part
    shown = {name: cell for name, cell in cells_of(grids).items() if name in cells or (folder / name).exists()}
    rows = write_table({name: runner.left_out(cell) for name, cell in shown.items()}, folder)
    others = [(name, state) for name, state, *_ in rows if state != "ok"]
    print(f"{len(rows) - len(others)} of {len(rows)} cells are done: {folder}/grid.md")
    for name, state in others[:20]:
        print(f"  {name}: {state}")
    sys.exit(any(not state.startswith("left out") for _, state in others))


def has_accelerator():
    import torch

    return torch.accelerator.is_available()


def environment(number):
    """Environment variables of a worker: its own GPU where there are several."""
    import torch

    if torch.cuda.device_count() > 1:
        return {**os.environ, "CUDA_VISIBLE_DEVICES": str(number % torch.cuda.device_count())}
    return dict(os.environ)


if __name__ == "__main__":
    main()
