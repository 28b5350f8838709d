"""
Learning of the quickstart's team on turns of earlier weights: `max_staleness` 0, 1 and 4, and generation by
transformers. `--variants "4, unbounded"` measures learning without any bound.

    make benchmark-staleness
    MARFT_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/servers/staleness.py [--page]

Each run has `--batches` generation batches with `--updates` updates each. "Unbounded" has `max_staleness=4` with a
policy ratio that is never clipped and importance weights that are never cut. The end is the share of right answers on
500 held-out questions, sampled at temperature 1. Runs found in `--output_dir` are not repeated. The table has
means over seeds, and standard deviations between seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from marft_trl.tiny import tiny_team_model

import torch
from peft import LoraConfig


# `figures` is in the folder above, and the quickstart's training in `learning`
sys.path.insert(0, str(Path(__file__).parents[1] / "learning"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures
import learning
from vllm_server import Server, vllm_version


UNBOUNDED = {
    "vllm_importance_sampling_mode": "sequence_truncate",
    "vllm_importance_sampling_clip_max": 1e30,
    "epsilon": 1e9,
}
VARIANTS = {
    "0, generation by transformers": {"use_vllm": False},
    "0": {"max_staleness": 0},
    "1": {"max_staleness": 1},
    "4": {"max_staleness": 4},
    "4, unbounded": {"max_staleness": 4, **UNBOUNDED},
}


def run_variant(name, seed, options):
    settings = {
        "use_vllm": True,
        "vllm_server_base_url": options.url,
        "num_iterations": options.updates,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": options.schedule,
        "beta": 0.0,
        **VARIANTS[name],
    }
    with tempfile.TemporaryDirectory() as folder:
        result = learning.run("grpo", seed, options.batches, options.prompts, folder, settings, held_out=500)
    print(json.dumps({"variant": name, **result}))


def finished_runs(path):
    """Results of earlier calls, by variant and seed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(result["variant"], result["seed"]): result for result in map(json.loads, lines)}


def in_process(job, options):
    name, seed = job
    if job in (done := finished_runs(options.output_dir / "staleness.jsonl")):
        return done[job]
    values = {"url": options.url, "batches": options.batches, "prompts": options.prompts}
    values |= {"updates": options.updates, "learning_rate": options.learning_rate, "schedule": options.schedule}
    flags = [text for key, value in values.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-W", "ignore", __file__, "--one", name, str(seed), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}, seed {seed}:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, seed {seed}: {result['start']:.3f} -> {result['end']:.3f}", file=sys.stderr, flush=True)
    with open(options.output_dir / "staleness.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    return result


COLUMNS = ["start", "mean training reward", "end", "last quarter of training"]


def data(results):
    """Content of the data file: the columns of each run, by variant."""
    runs = {}
    for result in results:
        quarter = statistics.fmean(result["curve"][-max(1, len(result["curve"]) // 4) :])
        values = [result["start"], result["area"], result["end"], quarter]
        runs.setdefault(result["variant"], []).append([round(value, 4) for value in values])
    return {"made": figures.made("make benchmark-staleness"), "columns": COLUMNS, "runs": runs}


def tables(measurements):
    """Means over seeds, and standard deviations between seeds of the last two columns."""
    rows = []
    for name, runs in measurements["runs"].items():
        columns = list(zip(*runs, strict=True))
        cells = [f"{100 * statistics.fmean(values):.1f}" for values in columns]
        spreads = [f" ± {100 * statistics.stdev(values):.1f}" if len(runs) > 1 else "" for values in columns]
        rows.append([name, *(f"{cell}{spread} %" for cell, spread in zip(cells, ["", "", *spreads[2:]], strict=True))])
    return {"staleness": figures.markdown(["`max_staleness`", *measurements["columns"]], rows)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS)[:4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--updates", type=int, default=1, help="updates on a generation batch")
    parser.add_argument("--learning_rate", type=float, default=1.5e-3)
    parser.add_argument("--schedule", default="linear", help="of the learning rate; it ends at 0, so weights settle")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--url", help="URL of a running server with the quickstart's model")
    parser.add_argument("--output_dir", type=Path, default=Path("benchmark-output/staleness"))
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "SEED"), help=argparse.SUPPRESS)
    options = figures.parse(parser, free=("jobs", "port", "url", "output_dir", "one"))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.one:
        run_variant(options.one[0], int(options.one[1]), options)
        return
    options.output_dir.mkdir(parents=True, exist_ok=True)
    jobs = [(name, seed) for seed in range(options.seeds) for name in options.variants]

    def run():
        with ThreadPoolExecutor(options.jobs) as pool:
            measurements = data(list(pool.map(lambda job: in_process(job, options), jobs)))
        print(tables(measurements)["staleness"])
        if options.page:
            measurements["made"]["versions"]["vllm"] = vllm_version()
            figures.publish("staleness", measurements)

    if options.url:
        run()
        return
    model = tiny_team_model()
    extra = ["--dtype", "float32"] if options.device == "cuda" else []
    with tempfile.TemporaryDirectory() as folder:
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        with Server(str(model), config, folder, options.port, options.device, extra=extra) as server:
            options.url = server.url
            run()


if __name__ == "__main__":
    main()
