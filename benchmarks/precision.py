"""
CPU seconds of a run of `examples/real.py` in bfloat16, with evaluations in one batch, beside one in float32, as it
runs where a processor does not multiply bfloat16. Both run at the same time, each on one thread.

    python benchmarks/precision.py [--families chain_sum ...] [--seeds 0 ...] [--max_steps 22]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from marft_trl.extras.report.cells import Cell, run_cell
from marft_trl.reporting.evaluation import scores


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import real


def one(kind, family, seed, max_steps, folder):
    """Train and evaluate; print CPU seconds and accuracies."""
    experiment = real.make(family, max_steps)
    if kind == "float32":
        real.has_bfloat16 = lambda: False  # as on a processor that does not
        args = real.make(family, max_steps).args
        assert not args.bf16 and args.mixed_precision == "no"
        experiment = experiment.changed(args=args)
        experiment = experiment.with_args(per_device_eval_batch_size=48)
    run_cell(experiment, Cell("team", seed, Path(folder)))
    used = resource.getrusage(resource.RUSAGE_SELF)
    before, after = (float(scores([folder], name=name).mean()) for name in ("start", "end"))
    print(json.dumps({"seconds": used.ru_utime + used.ru_stime, "before": before, "after": after}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["chain_sum"], choices=list(real.FAMILIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--max_steps", type=int, default=22)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, family, seed, max_steps, folder = options.one
        one(kind, family, int(seed), int(max_steps), folder)
        return
    if not real.has_bfloat16():
        print("This processor does not multiply bfloat16: there is nothing to compare.")
        return
    print("| family, seed | float32: CPU seconds, right answers | bfloat16 | ratio |\n|---|---|---|---|")
    for family in options.families:
        for seed in options.seeds:
            found = side_by_side(family, seed, options.max_steps)
            cells = [
                f"{its['seconds']:.0f} s, {its['before']:.1%} to {its['after']:.1%}"
                for its in (found["float32"], found["bfloat16"])
            ]
            ratio = found["bfloat16"]["seconds"] / found["float32"]["seconds"]
            print(f"| {family}, {seed} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)


def side_by_side(family, seed, max_steps):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for kind in ("float32", "bfloat16"):
            command = [sys.executable, "-W", "ignore", __file__, "--one", kind, family, str(seed), str(max_steps)]
            running[kind] = subprocess.Popen(
                [*command, f"{folder}/{kind}"], env=environment, stdout=subprocess.PIPE, text=True
            )
        said = {kind: process.communicate()[0] for kind, process in running.items()}
    return {kind: json.loads(text.splitlines()[-1]) for kind, text in said.items()}


if __name__ == "__main__":
    main()
