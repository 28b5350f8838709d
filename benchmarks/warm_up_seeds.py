"""
Reinforcement learning from fresh adapters and after a warm-up (`examples/warm_up.py`), over several seeds.

    python benchmarks/warm_up_seeds.py [--seeds 0 1 2] [--page]
"""

import argparse
import sys
from pathlib import Path

import figures
from transformers.utils import logging


# Those of the example
SETTINGS = {"max_steps": 6, "questions": 70, "num_samples": 8}
COLUMNS = {
    "untrained": "untrained",
    "RL": f"{SETTINGS['max_steps']} steps",
    "warm": "warmed up",
    "warm, RL": f"warmed up, then {SETTINGS['max_steps']} steps",
}


def tables(found):
    """Percent of right answers, by seed."""
    rows = [[seed, *(f"{100 * run[name]:.1f}" for name in COLUMNS)] for seed, run in found["runs"].items()]
    return {"warm-up": figures.markdown(["seed", *COLUMNS.values()], rows)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output_dir", type=Path, default=Path("warm-up-output"))
    options = figures.parse(parser)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import warm_up

    runs = {}
    for seed in options.seeds:
        settings = argparse.Namespace(**SETTINGS)
        measured = warm_up.run(warm_up.smollm2(), options.output_dir / f"seed-{seed}", settings, seed)
        runs[seed] = {name: round(value, 4) for name, value in measured.items()}
        print(f"seed {seed}: {runs[seed]}", file=sys.stderr, flush=True)
    found = {"made": figures.made("python benchmarks/warm_up_seeds.py"), **SETTINGS, "runs": runs}
    print(tables(found)["warm-up"])
    if options.page:
        figures.publish("warm-up", found)


if __name__ == "__main__":
    main()
