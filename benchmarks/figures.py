"""
Figures of pages: `docs/reports/data/<name>.json` has the results of a benchmark, and pages have the tables made from
them, between `<!-- <block> -->` and `<!-- end of <block> -->`. `printed.json` has tables as a command printed
them, and `sentences` of pages, where the single measurements were not kept.

    python benchmarks/figures.py     # write the tables of all pages again, from the data

A benchmark writes both with `--page`, after a run with its default settings. `tests/test_figures.py` compares them.
With `--check`, a benchmark of learning repeats one run of its data file and ends with an error if a figure differs.
"""

import importlib
import json
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path

import torch


ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "reports" / "data"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("torch", "transformers", "trl", "peft")
SHOWN = (*PACKAGES, "vllm")

# Data files by the benchmark that makes tables of them. `tables(found)` returns the text of each block.
MADE_BY = {
    "central_critic": "learning/central_critic",
    "credit_fidelity": "learning/credit_fidelity",
    "equal_tokens": "learning/learning",
    "kuhn": "learning/kuhn_poker",
    "learning": "learning/learning",
    "passes": "speed/launches",
    "plans": "recipe_plans",
    "real": "learning/real_page",
    "scaling": "speed/scaling",
    "self_play": "learning/nim",
    "servers": "servers/engines",
    "serving": "servers/serving",
    "spared_passes": "speed/spared_passes",
    "staleness": "servers/staleness",
}


def processor() -> str:
    """
    Name of the processor, as Linux has it, with family and model, which a name such as "AMD EPYC" does not show, and
    the instruction set that PyTorch uses. Both affect the last digits.
    """
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = re.findall(r"^model name\s*: (.*)$", text, re.MULTILINE) or [platform.machine()]
    numbers = [re.search(rf"^{field}\s*: (\d+)$", text, re.MULTILINE) for field in ("cpu family", "model")]
    which = ", ".join(number[1] for number in numbers if number is not None)
    return f"{names[0]}{f' ({which})' if which else ''}, {torch.backends.cpu.get_cpu_capability()}"


def made(command: str) -> dict:
    """Command, processor and versions of a run."""
    return {
        "command": command,
        "processor": processor(),
        "versions": {package: version(package) for package in PACKAGES},
    }


def parse(parser, free=("output_dir", "jobs"), repeats=None):
    """
    Parse the command line of a benchmark, with `--page`, and `--check` if a run can be repeated, which `repeats`
    names. Both go with the default settings alone.
    """
    parser.add_argument("--page", action="store_true", help="write the data file, and the tables of pages")
    if repeats is not None:
        parser.add_argument("--check", action="store_true", help=f"repeat one run ({repeats}): an error if it differs")
    options = parser.parse_args()
    other = [
        name
        for name, value in vars(options).items()
        if name not in ("page", "check", *free) and value != parser.get_default(name)
    ]
    for action in ("page", "check"):
        if getattr(options, action, False) and other:
            parser.error(f"`--{action}` is for the default settings. Leave out `--{'`, `--'.join(other)}`.")
    return options


def compare(measurements: dict, before, after) -> None:
    """
    Compare a run of a data file with its repetition.

    Raises:
        SystemExit: a figure differs.
    """
    after = json.loads(json.dumps(after))
    print(f"in the data file: {before}\nrepeated:         {after}")
    if after != before:
        made = measurements["made"]
        raise SystemExit(f"The figures differ. Those of the file: {made['processor']}, {shown(made['versions'])}.")


def publish(name: str, measurements: dict) -> None:
    """Write measurements to the data file, and their tables into the pages."""
    _write(name, measurements)
    _leave_out_printed(made_by(name).tables(measurements))
    for page, text in pages(blocks()).items():
        page.write_text(text, encoding="utf-8")


def made_by(name: str):
    """The benchmark that makes the tables of a data file. It imports the modules of its folder by their names."""
    folder, _, module = MADE_BY[name].rpartition("/")
    path = str(Path(__file__).parent / folder)
    if path not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module(module)


def _write(name: str, measurements: dict) -> None:
    """Write a data file, with lists of numbers and texts on one line."""
    text = json.dumps(measurements, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)
    (DATA / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _leave_out_printed(names) -> None:
    """Remove earlier tables without a data file."""
    printed = load("printed")
    left = {name: run for name, run in printed.items() if name not in names}
    if left != printed:
        _write("printed", left)


def load(name: str) -> dict:
    """Load a data file."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def blocks() -> dict[str, str]:
    """The text of every block."""
    printed = load("printed")
    texts = {name: markdown(run["columns"], run["rows"]) for name, run in printed.items() if name != "sentences"}
    for name in MADE_BY:
        if (DATA / f"{name}.json").exists():
            texts |= made_by(name).tables(load(name))
    return {**texts, "made": table_of_runs()}


def pages(texts: dict[str, str]) -> dict[Path, str]:
    """The pages that change, with their blocks."""
    changed_pages = {}
    for page in PAGES:
        before = text = page.read_text(encoding="utf-8")
        for name in re.findall(r"<!-- end of ([\w -]+) -->", before):
            if name in texts:
                text = pasted(text, name, texts[name])
        if text != before:
            changed_pages[page] = text
    return changed_pages


def pasted(text: str, name: str, table: str) -> str:
    """A page with a table between the two comments of a block."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}" if rest else text


def markdown(columns, rows) -> str:
    """A Markdown table."""
    head, *body = (re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(map(str, cells))} |") for cells in [columns, *rows])
    return "\n".join([head, "|---" * len(columns) + "|", *body])


def table_of_runs() -> str:
    """The commands that wrote the data files, with processors and versions."""
    printed = load("printed")
    runs = [load(name)["made"] for name in ("peers", *MADE_BY) if (DATA / f"{name}.json").exists()]
    runs += [run for name, run in printed.items() if name != "sentences"] + printed["sentences"]
    rows = [(f"`{run['command']}`", run["processor"], run.get("version") or shown(run["versions"])) for run in runs]
    return markdown(["command", "processor", "versions"], sorted(set(rows)))


def shown(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items() if name in SHOWN)


if __name__ == "__main__":
    for page, text in pages(blocks()).items():
        page.write_text(text, encoding="utf-8")
