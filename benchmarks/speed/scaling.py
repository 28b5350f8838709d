"""
Measure how the cost of a step grows with agents, episodes, completion length, turns, and the spread of row lengths.

    make benchmark-scaling
    python benchmarks/speed/scaling.py --series agents memory --repeats 5

Each point is measured in a process with one thread. The processes alternate, one complete step at a time. Times are
medians of CPU seconds per generated token. The series are:

- `agents`: 1 to 8 agents, each with its own prompt.
- `episodes`: 1 to 64 episodes per batch.
- `completions`: 32 to 512 new tokens.
- `turns`: one agent that sees all its earlier turns.
- `memory`: memory of a process after its second update, with 1 to 8 agents whose adapters have 1.1 million weights
  each, compared with the size of their weights, gradients and moments.
- `ends`: generation only. Rows have 4 to 128 tokens, with our decoding loop (`spread`) and with the loop of
  transformers (`plain`). The cost of a token is compared with rows that all have 128 tokens (`full`).

The script prints a table, and writes a figure for each series into `--output_dir`.
"""

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path


# `figures` is in the folder above
sys.path.insert(0, str(Path(__file__).parents[1]))

import figures
from peers import Contender


SERIES = {  # name: the argument that varies, its values, and other settings
    "agents": ("agents", (1, 2, 4, 8), {}),
    "episodes": ("episodes", (1, 4, 16, 64), {}),
    "completions": ("new_tokens", (32, 128, 512), {"episodes": 16}),
    "turns": ("turns", (1, 2, 4, 8), {"agents": 1, "episodes": 16}),
    "memory": ("agents", (1, 2, 4, 8), {"hidden": 256, "rank": 64, "episodes": 4, "new_tokens": 8}),
    "ends": ("ends", tuple(f"{kind}, {rows} rows" for rows in (64, 256) for kind in ("full", "spread", "plain")), {}),
}
BASE = {"agents": 2, "episodes": 64, "completions": 32, "turns": 1}
LENGTHS = (4, 128)


# ---- Worker process of one point ----


def team_step(job):
    """Return a function that runs a step and returns its CPU seconds per token and the memory after it, in bytes."""
    from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
    from marft_trl.tiny import tiny_tokenizer
    from marft_trl.workflows import Workflow

    from datasets import Dataset
    from peers_worker import make_model, memory, messages, reward, settings
    from peft import LoraConfig

    class Turns(Workflow):
        async def run(self, episode):
            for agent in episode.agents:
                for _ in range(job["turns"]):
                    await episode.turn(agent, sees=[turn for turn in episode.turns if turn.agent == agent])

    tokenizer, model = tiny_tokenizer(), make_model(job)
    generations = min(4, job["episodes"])
    work = {**job, "prompts": job["episodes"] // generations, "generations": generations}
    alone = {"advantage": "none"} if generations == 1 else {}
    prompts = [messages(tokenizer, "left", index, 96)[1:] for index in range(work["prompts"])]
    trainer = MARFTTrainer(
        model=model,
        reward_funcs=reward,
        args=MARFTConfig(job["folder"], **{**settings(work), **alone}),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=job["rank"], target_modules="all-linear"),
        agents=[AgentSpec(f"agent{index}", system_prompt=f"You are {index}.") for index in range(job["agents"])],
        workflow=Turns(),
    )
    trainer.create_optimizer_and_scheduler(100)
    trainer.current_gradient_accumulation_steps = 1
    rows = [{"prompt": prompt} for prompt in prompts for _ in range(generations)]
    tokens = job["agents"] * job["turns"] * job["episodes"] * job["new_tokens"]

    def step():
        start = time.process_time()
        trainer.parts.state.slices = None
        trainer.training_step(trainer.model, rows, None)
        trainer.parts.updates.clip(trainer.args.max_grad_norm)
        trainer.optimizer.step()
        seconds = time.process_time() - start
        trainer.parts.state.slices = None
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        left = memory("VmRSS")
        trainer.model.zero_grad()
        adapter = sum(p.numel() * p.element_size() for p in trainer.policies.parameters("agent0").values())
        return {"value": seconds / tokens, "peak": left, "adapter": adapter}

    return step


def ends_step(job):
    """Return a function that generates rows of given lengths and returns the CPU seconds per kept token."""
    from marft_trl.shared_prefix.decoding import decode

    import torch
    from peers_worker import make_model
    from transformers import GenerationConfig, StoppingCriteria

    kind, rows = job["ends"].removesuffix(" rows").split(", ")
    model, rows, (shortest, longest) = make_model(job).eval(), int(rows), LENGTHS
    spread = torch.linspace(shortest, longest, rows).round().long()
    ends = torch.full((rows,), longest) if kind == "full" else spread

    class AtItsEnd(StoppingCriteria):
        """Stops each row at its length. The second token of a prompt encodes the index of the row."""

        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.size(1) - 64 >= ends[input_ids[:, 1] - 10]

    prompts = torch.full((rows, 64), 7)
    prompts[:, 1] = torch.arange(rows) + 10
    config = GenerationConfig(max_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0, disable_compile=True)
    own = {} if kind == "plain" else {"custom_generate": decode}

    def step():
        start = time.process_time()
        with torch.no_grad():
            model.generate(prompts, generation_config=config, stopping_criteria=[AtItsEnd()], **own)
        return {"value": (time.process_time() - start) / int(ends.sum()), "peak": 0}

    return step


def work(job):
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    step = ends_step(job) if "ends" in job else team_step(job)
    for _ in sys.stdin:
        print(json.dumps(step()), flush=True)


# ---- The series ----


def measure(name, repeats):
    argument, values, others = SERIES[name]
    plain = {"contender": name, "agents": 2, "episodes": 32, "new_tokens": 32, "turns": 1, "rank": 8}
    plain |= {"hidden": 128, "layers": 4, "vocabulary": 2048}
    with tempfile.TemporaryDirectory() as folder:
        jobs = [{**plain, **others, argument: value, "folder": folder} for value in values]
        points = [Contender(sys.executable, job, "scaling.py") for job in jobs]
        results = [[point.step() for point in points] for _ in range(repeats + 1)][1:]
        for point in points:
            point.stop()
    return values, [[result[index] for result in results] for index in range(len(values))]


TITLES = {
    "agents": "agents, each with its own prompt",
    "episodes": "episodes of a batch, two agents",
    "completions": "new tokens of a turn",
    "turns": "turns of one agent that sees all its turns",
}
ROWS = ("all with 128 tokens", "with 4 to 128", "the same, with the loop of transformers")


def heights(series):
    """Megabytes of a process, or CPU milliseconds per token, by value."""
    if "megabytes" in series:
        return [statistics.median(megabytes) for megabytes in series["megabytes"]]
    return [1000 * statistics.median(seconds) for seconds in series["seconds"]]


def tables(measurements):
    """Medians over repeats, and their ratios to a base."""
    rows, series = [], measurements["series"]
    for name, title in TITLES.items():
        if name in series:
            base = heights(series[name])[series[name]["values"].index(BASE[name])]
            rows.append(line(title, series[name]["values"], heights(series[name]), base))
    points = heights(series["ends"]) if "ends" in series else []
    for first in range(0, len(points), 3):
        count = series["ends"]["values"][first].split(", ")[1].split()[0]
        rows.append(line(f"generation of {count} rows", ROWS, points[first : first + 3], points[first]))
    if "memory" in series:
        counts, peaks = series["memory"]["values"], heights(series["memory"])
        more = (peaks[-1] - peaks[0]) / (counts[-1] - counts[0])
        state = series["memory"]["state"]
        texts = [
            f"memory for each further agent, {counts[0]} to {counts[-1]}",
            "its weights, gradient and moments; in all",
        ]
        rows.append([*texts, f"{state:.1f} MB, {more:.1f} MB", f"1, {more / state:.2f}"])
    return {"scaling": figures.markdown(["", "values", "CPU ms per token", "ratios"], rows)}


def line(title, values, points, base):
    """A row of the table: all values of a series."""
    separator = "; " if title.startswith("generation") else ", "
    ratios = ["1" if point == base else f"{point / base:.2f}" for point in points]
    return [title, separator.join(map(str, values)), ", ".join(f"{point:.3f}" for point in points), ", ".join(ratios)]


def draw(name, series, folder):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3))
    axes = figure.add_subplot()
    axes.plot([str(value) for value in series["values"]], heights(series), marker="o")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(name)
    axes.set_ylabel("megabytes" if name == "memory" else "CPU milliseconds per token")
    figure.tight_layout()
    figure.savefig(folder / f"scaling-{name}.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", nargs="+", choices=list(SERIES), default=list(SERIES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output_dir", type=Path, default=Path("benchmark-output/scaling"))
    options = figures.parse(parser)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    measurements = {"made": figures.made("make benchmark-scaling"), "series": {}}
    for name in options.series:
        values, results = measure(name, options.repeats)
        measurements["series"][name] = series = {"values": values}
        if name == "memory":
            series["megabytes"] = [[round(result["peak"] / 1e6, 1) for result in point] for point in results]
            series["state"] = round(4 * results[0][0]["adapter"] / 1e6, 1)  # weights, gradient, two moments
        else:
            series["seconds"] = [[round(result["value"], 7) for result in point] for point in results]
        print(f"{name}: {', '.join(f'{point:.3f}' for point in heights(series))}", flush=True)
        draw(name, series, options.output_dir)
    print(tables(measurements)["scaling"])
    if options.page:
        figures.publish("scaling", measurements)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        work(json.loads(sys.argv[1]))
    else:
        main()
