"""
Compare the cost of a training step of TRL, CoMLRL and marft_trl on the same task.

    make benchmark-peers                                                # all sizes, into benchmark-output/peers.json
    python benchmarks/speed/peers.py --sizes tiny --comlrl none         # a part
    python benchmarks/speed/peers.py --tables [--page]                  # the tables of the last run, or the page

The task has two agents, each with its own prompt for the same problem, 4 generations of each prompt, and LoRA on the
queries and values. The agents do not see each other's turns, because CoMLRL does not support this. Prompts and
completions have fixed numbers of tokens. TRL trains each agent with a separate `GRPOTrainer`.

Each system runs in a process with one thread. The processes alternate, one complete step at a time (generation,
rewards, forward, backward, optimizer). Times are CPU seconds. The table has medians and, in brackets, the range of the
ratios of neighbouring steps. Memory is the peak of a process minus its memory before the model was built. CoMLRL is
installed in a separate environment, which is created if it does not exist. `--page` writes `docs/reports/peers.md` and
`docs/reports/data/peers.json`, after a whole run alone; `tests/test_figures.py` compares the pages with the data.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
import venv
from pathlib import Path


# `figures` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures
from peers_worker import prepare


HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIZES = {  # prompts, hidden size, layers, vocabulary
    "tiny": (16, 128, 4, 2048),
    "mid": (4, 512, 8, 2048),
    "V32k": (8, 128, 4, 32768),
}
RATIOS = {  # title: numerator, denominators (summed)
    "two agents / two TRL steps": ("team", ("trl-left", "trl-right")),
    "two agents / CoMLRL": ("team", ("comlrl",)),
    "one agent / one TRL step": ("solo", ("trl-left",)),
    "PPO, frozen critic / two agents": ("ppo-frozen", ("team",)),
    "PPO, shared critic / two agents": ("ppo-shared", ("team",)),
}
REPORTS = ROOT / "docs" / "reports"
DATA, PAGE = REPORTS / "data" / "peers.json", REPORTS / "peers.md"
CONTENDERS = ("trl-left", "trl-right", "comlrl", "team", "solo", "ppo-frozen", "ppo-shared")


class Contender:
    """Worker process that runs one training step per call of `step`."""

    def __init__(self, python: str, job: dict, script: str = "peers_worker.py"):
        command = [python, "-W", "ignore", str(HERE / script), json.dumps(job)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # an unread pipe would fill up
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
        constraints = ROOT / "constraints.txt"
        command = [python, "-m", "pip", "install", "--quiet", "-c", constraints, "torch", "peft", "comlrl==1.4.3"]
        subprocess.run([str(part) for part in command], check=True)
    return str(python)


def measure(size: str, options) -> dict:
    """Seconds of each step by contender, and peak memory in bytes."""
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
                    seconds[name].append(round(result["seconds"], 4))
                peaks[name] = result["peak"]
        for contender in contenders.values():
            contender.stop()
    return {"seconds": seconds, "peaks": peaks}


def ratios(size: dict, above: str, below: tuple[str, ...]) -> list[float]:
    """Ratios of neighboring steps of one size; none if a contender was left out."""
    seconds = size["seconds"]
    if not all(name in seconds for name in (above, *below)):
        return []
    return [a / sum(b) for a, *b in zip(seconds[above], *(seconds[name] for name in below), strict=True)]


def table(sizes: dict[str, dict]) -> str:
    lines = [f"| | {' | '.join(sizes)} |", "|---" * (len(sizes) + 1) + "|"]
    for title, (above, below) in RATIOS.items():
        every = [ratios(size, above, below) for size in sizes.values()]
        cells = [
            f"**{statistics.median(steps):.2f}** ({min(steps):.2f} - {max(steps):.2f})" if steps else ""
            for steps in every
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    for title, below in (("one TRL run", "trl-left"), ("CoMLRL", "comlrl")):
        cells = [
            f"**{size['peaks']['team'] / size['peaks'][below]:.2f}**" if below in size["peaks"] else ""
            for size in sizes.values()
        ]
        lines.append(f"| peak memory of two agents / of {title} | {' | '.join(cells)} |")
    for name in CONTENDERS:
        times = [size["seconds"].get(name) for size in sizes.values()]
        cells = [f"{statistics.median(seconds):.2f} s" if seconds else "" for seconds in times]
        lines.append(f"| {name}, CPU seconds of a step | {' | '.join(cells)} |")
    for name in CONTENDERS:
        peaks = [size["peaks"].get(name) for size in sizes.values()]
        lines.append(
            f"| {name}, peak memory | {' | '.join(f'{peak / 1e6:.0f} MB' if peak else '' for peak in peaks)} |"
        )
    return "\n".join(lines)


def page(results: dict) -> str:
    """`docs/reports/peers.md` of the data of a run."""
    made = results["made"]
    sizes = "; ".join(
        f"*{name}*: {prompts} prompts, hidden size {hidden}, {layers} layers, a vocabulary of {vocabulary:,}"
        for name, (prompts, hidden, layers, vocabulary) in SIZES.items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    text = (
        f"Two agents with LoRAs on queries and values, prompts of {made['prompt_tokens']} tokens, 4 generations of "
        f"{made['new_tokens']} new tokens each. {sizes}. The agents do not see each other's turns, because CoMLRL "
        "does not support this; TRL trains each agent with its own `GRPOTrainer`. Every system runs in a process with "
        f"one thread, and the processes take turns, step by step. The table has medians of {made['repeats']} steps, "
        "and in brackets the range of the ratios of neighboring steps. Differences below 15 % are not significant on "
        f"a shared machine. `make benchmark-peers` made it on a CPU ({made['processor']}) with {versions}, CoMLRL "
        "1.4.3."
    )
    return f"# Against TRL and CoMLRL\n\n{textwrap.fill(text, 119)}\n\n{table(results['sizes'])}\n"


def summary(results: dict) -> str:
    """The table of `docs/reports/comparison.md`."""
    titles = {
        "tiny": "hidden 128, vocabulary 2k",
        "mid": "hidden 512, vocabulary 2k",
        "V32k": "hidden 128, vocabulary 32k",
    }
    made, sizes = results["made"], results["sizes"]
    head = f"prompts of {made['prompt_tokens']} tokens, {made['new_tokens']} new ones"
    lines = [f"| {head} | {' | '.join(titles[name] for name in sizes)} |", "|---" * (len(sizes) + 1) + "|"]
    for key in ("two agents / two TRL steps", "two agents / CoMLRL"):
        cells = [f"{statistics.median(ratios(size, *RATIOS[key])):.2f}" for size in sizes.values()]
        lines.append(f"| time: {key} | {' | '.join(cells)} |")
    for title, below in (("one TRL run", "trl-left"), ("CoMLRL", "comlrl")):
        cells = [f"{size['peaks']['team'] / size['peaks'][below]:.2f}" for size in sizes.values()]
        lines.append(f"| peak memory: two agents / {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--comlrl", default=str(ROOT / ".venv-comlrl"), help="CoMLRL environment, or 'none'.")
    parser.add_argument("--output", type=Path, default=Path("benchmark-output") / "peers.json")
    parser.add_argument("--tables", action="store_true", help="Run nothing.")
    parser.add_argument("--page", action="store_true", help="Write the page and its data.")
    options = parser.parse_args()
    if options.tables:
        results = json.loads(options.output.read_text() if options.output.exists() else DATA.read_text())
    else:
        made = {name: getattr(options, name) for name in ("prompt_tokens", "new_tokens", "repeats")}
        made |= figures.made("make benchmark-peers")
        results = {"made": made, "sizes": {}}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        for size in options.sizes:
            results["sizes"][size] = measure(size, options)
            print(table({size: results["sizes"][size]}), flush=True)
            options.output.write_text(json.dumps(results, indent=1) + "\n")  # nothing is lost if a later size fails
    print(page(results))
    if options.page:
        if list(results["sizes"]) != list(SIZES) or any(
            "comlrl" not in size["peaks"] for size in results["sizes"].values()
        ):
            parser.error("`--page` needs a complete run: all sizes, with CoMLRL.")
        DATA.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
