"""
Compare the cost of a training step of TRL, CoMLRL and marft_trl on the same task.

    make benchmark-peers
    python benchmarks/peers.py --sizes tiny --repeats 5 --comlrl none

The task has two agents, each with its own prompt for the same problem, 4 generations of each prompt, and LoRA on the
queries and values. The agents do not see each other's turns, because CoMLRL does not support this. Prompts and
completions have fixed numbers of tokens. TRL trains each agent with a separate `GRPOTrainer`.

Each system runs in a process with one thread. The processes alternate, one complete step at a time (generation,
rewards, forward, backward, optimizer). Times are CPU seconds. The table has medians and, in brackets, the range of the
ratios of neighbouring steps. Memory is the peak of a process minus its memory before the model was built. CoMLRL is
installed in a separate environment, which is created if it does not exist.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from peers_worker import prepare


HERE = Path(__file__).parent
SIZES = {  # prompts, hidden size, layers, vocabulary
    "tiny": (16, 128, 4, 2048),
    "mid": (4, 512, 8, 2048),
    "V32k": (8, 128, 4, 32768),
}
RATIOS = {  # title: numerator, denominators (summed), and the goal for each size
    "two agents / two TRL steps": ("team", ("trl-left", "trl-right"), (0.50, 0.52, 0.25)),
    "two agents / CoMLRL": ("team", ("comlrl",), (0.33, 0.48, 0.32)),
    "one agent / one TRL step": ("solo", ("trl-left",), (0.52, 0.55, 0.27)),
    "PPO, frozen critic / two agents": ("ppo-frozen", ("team",), (1.25,) * 3),
    "PPO, shared critic / two agents": ("ppo-shared", ("team",), (1.60,) * 3),
}
MEMORY = (1.10, 1.10, 0.50)
CONTENDERS = ("trl-left", "trl-right", "comlrl", "team", "solo", "ppo-frozen", "ppo-shared")


class Contender:
    """Worker process that runs one training step per call of `step`."""

    def __init__(self, python: str, job: dict, script: str = "peers_worker.py"):
        command = [python, "-W", "ignore", str(HERE / script), json.dumps(job)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe that nobody reads would fill up
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def step(self) -> dict[str, float]:
        """Run a step and return its CPU seconds and the peak memory so far, in bytes."""
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
            while not (line := self._process.stdout.readline()).startswith("{"):
                if not line:
                    raise BrokenPipeError
        except BrokenPipeError:
            self._errors.seek(0)
            sys.exit(f"{self._process.args[3:]} ended:\n{self._errors.read()[-3000:]}")
        return json.loads(line)

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def comlrl_python(folder: Path) -> str:
    """Path of the Python interpreter of the CoMLRL environment, which is created if it does not exist."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing CoMLRL into {folder}", flush=True)
        venv.create(folder, with_pip=True)
        constraints = HERE.parent / "constraints.txt"
        command = [python, "-m", "pip", "install", "--quiet", "-c", constraints, "torch", "peft", "comlrl==1.4.3"]
        subprocess.run([str(part) for part in command], check=True)
    return str(python)


def measure(size: str, options) -> tuple[dict[str, list[float]], dict[str, float]]:
    prompts, hidden, layers, vocabulary = SIZES[size]
    names = [name for name in CONTENDERS if name != "comlrl" or options.comlrl != "none"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = {"prompts": prompts, "hidden": hidden, "layers": layers, "vocabulary": vocabulary, "folder": folder}
        job |= {"prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens, "generations": 4}
        pythons = dict.fromkeys(names, sys.executable)
        if options.comlrl != "none":
            pythons["comlrl"] = comlrl_python(Path(options.comlrl))
            prepare(job)
        scripts = {"comlrl": ("peers_comlrl.py",)}
        contenders = {
            name: Contender(pythons[name], {**job, "contender": name}, *scripts.get(name, ())) for name in names
        }
        for repeat in range(options.repeats + 1):
            for name, contender in contenders.items():
                result = contender.step()
                if repeat:  # the first round warms up
                    seconds[name].append(result["seconds"])
                peaks[name] = result["peak"]
        for contender in contenders.values():
            contender.stop()
    return seconds, peaks


def table(measured: dict[str, tuple[dict[str, list[float]], dict[str, float]]]) -> str:
    columns = list(measured)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in CONTENDERS:
        cells = [f"{statistics.median(its[name]):.2f} s" if name in its else "" for its, _ in measured.values()]
        lines.append(f"| {name}, CPU seconds of a step | {' | '.join(cells)} |")
    for title, (above, below, goals) in RATIOS.items():
        cells = []
        for size, (its, _) in measured.items():
            if not all(name in its for name in (above, *below)):
                cells.append("")
                continue
            ratios = [a / sum(b) for a, *b in zip(its[above], *(its[name] for name in below), strict=True)]
            goal = goals[list(SIZES).index(size)]
            spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
            cells.append(f"**{statistics.median(ratios):.2f}** ({spread}), goal {goal:.2f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    for name in CONTENDERS:
        cells = [f"{peaks[name] / 1e6:.0f} MB" if name in peaks else "" for _, peaks in measured.values()]
        lines.append(f"| {name}, peak memory | {' | '.join(cells)} |")
    cells = [
        f"**{peaks['team'] / peaks['trl-left']:.2f}**, goal {MEMORY[list(SIZES).index(size)]:.2f}"
        for size, (_, peaks) in measured.items()
    ]
    lines.append(f"| peak memory of two agents / of one TRL run | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--comlrl", default=str(HERE.parent / ".venv-comlrl"), help="CoMLRL environment, or 'none'.")
    parser.add_argument(
        "--output", type=Path, default=HERE.parent / "docs" / "reports" / "peers.md", help="File for the table."
    )
    options = parser.parse_args()
    measured = {}
    for size in options.sizes:
        measured[size] = measure(size, options)
        print(table({size: measured[size]}), flush=True)
    text = (
        f"Prompts of {options.prompt_tokens} tokens, 4 generations of {options.new_tokens} new tokens each; "
        f"{options.repeats} steps.\nMedians; in brackets the spread of the ratios of neighbouring steps.\n\n"
        f"{table(measured)}\n"
    )
    print(text)
    options.output.write_text(f"# Against TRL and CoMLRL\n\n{text}")


if __name__ == "__main__":
    main()
