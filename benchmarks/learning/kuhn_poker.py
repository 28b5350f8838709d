"""
The exploitability of language models in Kuhn poker (`examples/kuhn.py`), over players, baselines and seeds.

    make kuhn                                           # 22 minutes on two cores
    python benchmarks/learning/kuhn_poker.py --arms own-rae --seeds 1 --max_steps 100 --device cuda
    python benchmarks/learning/kuhn_poker.py --check    # repeat one run; exit with an error if a digit differs

Prints means over seeds of the exploitability before, during and after training, with 95 % intervals (Student's t), and
writes `kuhn.png` into `--output_dir`. Finished runs are kept there, so the same command resumes an interrupted call.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch


# `figures` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures


EXAMPLE = Path(__file__).parents[2] / "examples" / "kuhn.py"
ARMS = {
    "own-rae": "a LoRA for each seat, `rae`",
    "own-group": "a LoRA for each seat, `group`",
    "one-rae": "one LoRA, `rae`",
    "copies-rae": "one LoRA against past copies, `rae`",
}
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantiles by the number of seeds


def settings_of(base, options):
    """Settings that a finished run must share with this call to be reused."""
    made = {key: value for key, value in figures.made("make kuhn").items() if key != "command"}
    code = hashlib.sha256(EXAMPLE.read_bytes()).hexdigest()[:12]
    return {"base": base, "steps": options.max_steps, "device": options.device, "code": code, **made}


def run(arm, seed, base, options):
    """Train in a subprocess, unless the run is finished. Returns its measurements and strategies."""
    players, baseline = arm.split("-")
    settings = settings_of(base, options)
    file = options.output_dir / "runs" / f"{arm}-{seed}-{options.max_steps}-{options.device}.json"
    result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if result.get("settings") != settings:
        command = [sys.executable, "-W", "ignore", str(EXAMPLE), "--players", players, "--baseline", baseline]
        command += ["--seed", str(seed), "--max_steps", str(options.max_steps), "--device", options.device]
        command += ["--output_dir", str(options.output_dir), *(["--model", options.model] if options.model else [])]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(f"{arm}, seed {seed}:\n{done.stderr[-3000:]}")
        measured = [line for line in done.stdout.splitlines() if "exploitability" in line]
        print(f"{arm}, seed {seed}: {measured[-1]}", flush=True)
        result = json.loads((options.output_dir / f"{arm}-{seed}.json").read_text(encoding="utf-8"))
        result["settings"] = settings
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(result), encoding="utf-8")
    return result


def interval(values, least=-math.inf):
    """`0.31 [0.22, 0.40]`: mean and 95 % interval, of values that are at least `least`."""
    mean = statistics.fmean(values)
    if len({*values}) < 2:  # all of one model, before training
        return f"{mean:.3f}"
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} [{max(mean - half, least):.3f}, {mean + half:.3f}]"


def tables(measurements):
    """
    Exploitability in chips a game: at the start, in the middle, at the end, of the average strategies, and how far the
    first arm with one LoRA is from each other arm at the end, seed by seed.
    """
    rows, steps = [], None
    columns = {arm: [list(zip(*run, strict=True)) for run in runs] for arm, runs in measurements["runs"].items()}
    for arm, runs in columns.items():
        steps = runs[0][0]
        cells = [interval([run[2][index] for run in runs], 0.0) for index in (0, len(steps) // 2, -1)]
        cells.append(interval([run[3][-1] for run in runs], 0.0))
        if "one-rae" in columns:
            pairs = zip(columns["one-rae"], runs, strict=True)
            cells.append(interval([shared[2][-1] - run[2][-1] for shared, run in pairs]) if arm != "one-rae" else "")
        rows.append([ARMS[arm], *cells])
    names = ["players", "before", f"{steps[len(steps) // 2]} steps", f"{steps[-1]} steps", "average of the strategies"]
    return {"kuhn": figures.markdown([*names, "one LoRA, `rae`, minus this row"][: len(rows[0])], rows)}


def draw(measurements, file):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(measurements["runs"]), figsize=(11, 3.2), sharey=True, squeeze=False)
    for axis, (arm, runs) in zip(axes[0], measurements["runs"].items(), strict=True):
        for number, measured in enumerate(runs):
            steps = [row[0] for row in measured]
            axis.plot(steps, [row[2] for row in measured], color="C0", label=None if number else "last strategies")
            axis.plot(steps, [row[3] for row in measured], color="C1", label=None if number else "average")
        axis.axhline(11 / 24, color="gray", linestyle=":", label="coins")
        axis.set_title(ARMS[arm].replace("`", ""), fontsize=8)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("exploitability (chips a game)")
    axes[0][0].set_ylim(bottom=0)
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


COLUMNS = ["step", "legal", "last", "average", "second move"]


def rounded(result):
    """Measurements by step, with the probability of the second move (bet or call) in each information set."""
    second = [[round(list(moves.values())[1], 4) for moves in policy.values()] for policy in result["policies"]]
    return [
        [step, *(round(value, 4) for value in values), chances]
        for (step, *values), chances in zip(result["measured"], second, strict=True)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 6))
    parser.add_argument("--max_steps", type=int, default=30)
    parser.add_argument("--model", help="folder, or name on the Hub (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path("kuhn-output"))
    options = figures.parse(parser, repeats="the first, seed 0")
    sys.path.insert(0, str(EXAMPLE.parent))
    import kuhn

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.check:
            options.output_dir = Path(folder)
        options.output_dir.mkdir(parents=True, exist_ok=True)
        base = options.model or kuhn.smollm2()
        kuhn.taught_model(base, options.output_dir, device=options.device)  # once, before the runs
        if options.check:
            recorded = figures.load("kuhn")
            (arm, (before, *_)), *_ = recorded["runs"].items()
            figures.compare(recorded, before, rounded(run(arm, 0, base, options)))
            return
    start = time.monotonic()
    jobs = [(arm, seed) for seed in range(options.seeds) for arm in options.arms]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = dict(zip(jobs, pool.map(lambda job: run(*job, base, options), jobs), strict=True))
    runs = {arm: [rounded(results[arm, seed]) for seed in range(options.seeds)] for arm in options.arms}
    sets = list(next(iter(results.values()))["policies"][0])
    measurements = {"made": figures.made("make kuhn"), "columns": COLUMNS, "information sets": sets, "runs": runs}
    print(tables(measurements)["kuhn"])
    print(f"This call took {(time.monotonic() - start) / 60:.0f} minutes.")
    draw(measurements, options.output_dir / "kuhn.png")
    print(f"picture: {options.output_dir}/kuhn.png")
    if options.page:
        figures.publish("kuhn", measurements)
        draw(measurements, figures.DATA.parent / "kuhn.png")


if __name__ == "__main__":
    main()
