"""
How much do the fast tests notice? Single changes of the package, drawn by a seed, each against the tests that run it.

```bash
make mutation                                        # 40 changes; hours on two cores
python tests/mutations.py draw --seed 0 --count 40   # prints them
```

`contexts` runs the fast tests once and notes which test runs which line (coverage contexts) and how long it takes.
`run` makes each change in a copy of the tree and runs the tests of its line, the shortest first, until one fails. A
line that is run while modules are imported has the tests that run anything of its file. A change that no test notices
is printed, with the number of tests that ran.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path


ROOT = Path(__file__).parent.parent
FAST = "not slow and not exhaustive and not vllm"
SECONDS = 1800  # for the tests of one change


@dataclass(frozen=True)
class Change:
    kind: str
    path: str  # from the root of the tree
    line: int  # from 1
    before: str
    after: str

    def applied(self, tree: Path) -> int:
        """Change the file in a tree. Returns the number of the line, which may have moved since it was drawn."""
        lines = (tree / self.path).read_text().split("\n")
        places = [number for number, line in enumerate(lines) if line == self.before]
        if not places:
            raise ValueError(f"{self.path} has no line {self.before!r} any more")
        place = min(places, key=lambda number: abs(number + 1 - self.line))
        lines[place] = self.after
        (tree / self.path).write_text("\n".join(lines))
        return place + 1


SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}
COMPARED = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")},
    **{ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
}


class Finder(ast.NodeVisitor):
    """All changes of one file, by kind."""

    def __init__(self, path: str, text: str):
        self.path, self.lines = path, text.split("\n")
        self.found: dict[str, list[Change]] = {}
        self.visit(ast.parse(text))

    def add(self, kind: str, node_line: int, start: int, end: int, new: str) -> None:
        line = self.lines[node_line - 1]
        raw = line.encode()  # columns of the syntax tree count bytes
        changed = (raw[:start] + new.encode() + raw[end:]).decode()
        if changed != line:
            self.found.setdefault(kind, []).append(Change(kind, self.path, node_line, line, changed))

    def replace(self, kind: str, node: ast.AST, new: str) -> None:
        if node.lineno == node.end_lineno:
            self.add(kind, node.lineno, node.col_offset, node.end_col_offset, new)

    def between(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replace an operator between two nodes of one line."""
        if left.end_lineno == right.lineno:
            gap = self.lines[left.end_lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
            if re.fullmatch(rf"[)\s]*{re.escape(old)}[(\s]*", gap):
                self.add(kind, right.lineno, left.end_col_offset, right.col_offset, gap.replace(old, new, 1))

    def visit_BinOp(self, node):
        if type(node.op) in SIGNS:
            self.between("swapped sign", node.left, node.right, *SIGNS[type(node.op)])
        self.generic_visit(node)

    def visit_Compare(self, node):
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.between("comparison", left, right, *COMPARED[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self.between("comparison", node.values[0], node.values[1], old, new)
        self.generic_visit(node)

    def visit_Constant(self, node):
        if type(node.value) is int:
            self.replace("off by one", node, str(node.value + 1))

    def visit_Expr(self, node):
        if isinstance(node, ast.AugAssign) or isinstance(node.value, (ast.Call, ast.Await)):
            self.replace("dropped line", node, "pass")
        self.generic_visit(node)

    visit_AugAssign = visit_Expr

    def visit_JoinedStr(self, node):
        """Numbers within texts are not changed."""

    def visit_FunctionDef(self, node):
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.default(default)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node):
        value = node.value
        if isinstance(value, ast.Call):  # `field(default=...)`
            value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
        if value is not None:
            self.default(value)
        self.generic_visit(node)

    def default(self, node) -> None:
        if not isinstance(node, ast.Constant):
            return
        value, wrong = node.value, "1"
        if isinstance(value, bool):
            wrong = str(not value)
        elif isinstance(value, (int, float, str)):
            wrong = repr(value + ("x" if isinstance(value, str) else 1))
        self.replace("wrong default", node, wrong)


def draw(seed: int, count: int, tree: Path = ROOT) -> list[Change]:
    """Draw changes: a kind first, so that rare kinds count as much as frequent ones, then a change of this kind."""
    kinds: dict[str, list[Change]] = {}
    for path in sorted((tree / "marft_trl").rglob("*.py")):
        for kind, changes in Finder(str(path.relative_to(tree)), path.read_text()).found.items():
            kinds.setdefault(kind, []).extend(changes)
    chance = random.Random(seed)
    drawn: dict[Change, None] = {}
    while len(drawn) < count:
        drawn[chance.choice(kinds[chance.choice(sorted(kinds))])] = None
    return list(drawn)


def environment(tree: Path) -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def pytest_runtest_logreport(report):
    """As a plugin of pytest: seconds of each test, in `MARFT_TEST_SECONDS`."""
    target = os.environ.get("MARFT_TEST_SECONDS")
    if target and not os.environ.get("PYTEST_XDIST_WORKER"):
        with open(target, "a") as file:
            file.write(json.dumps([report.nodeid, report.duration]) + "\n")


def note_contexts(tree: Path, folder: Path) -> None:
    """Run the fast tests of a tree; leaves `coverage` and `seconds` in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "seconds").unlink(missing_ok=True)
    paths = {"COVERAGE_FILE": str(folder / "coverage"), "MARFT_TEST_SECONDS": str(folder / "seconds")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "tests.mutations", "-m", FAST]
    command += ["--cov=marft_trl", "--cov-context=test", "--cov-report=", "--timeout", "900"]
    process = subprocess.run(command, cwd=tree, env={**environment(tree), **paths})
    if process.returncode != 0:
        raise SystemExit("The tests fail without a change, so no change can be judged.")


class Contexts:
    """The tests that run a line, the shortest first."""

    def __init__(self, tree: Path, folder: Path):
        from coverage import CoverageData

        self._tree = tree
        self._data = CoverageData(str(folder / "coverage"))
        self._data.read()
        self._seconds: dict[str, float] = {}
        for line in (folder / "seconds").read_text().splitlines():
            name, seconds = json.loads(line)
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def tests(self, path: str, line: int) -> list[str]:
        lines = self._data.contexts_by_lineno(str(self._tree / path))
        contexts, selected = set(lines.get(line, [])) - {""}, set()
        for context in contexts or set().union(*lines.values()) - {""}:
            name, _, phase = context.rpartition("|")
            # Every test of the file may check the results of a fixture
            tests_of_file = {test for test in self._seconds if test.split("::")[0] == name.split("::")[0]}
            selected |= tests_of_file if phase == "setup" else {name}
        return sorted(selected & self._seconds.keys(), key=lambda name: self._seconds[name])


def run_tests(copy: Path, names: Path) -> tuple[bool, str]:
    """Whether one of the tests fails in a tree, and the first that does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout", "120", "-p", "no:xdist", f"@{names}"]
    settings = {**environment(copy), "TMPDIR": str(names.parent)}
    try:
        run = subprocess.run(command, cwd=copy, env=settings, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"not known after {SECONDS} s"
    if run.returncode not in (0, 1, 2):  # no test has failed, nor a module that tests import
        raise RuntimeError(f"pytest ended with {run.returncode}: {(run.stdout + run.stderr)[-600:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.stdout, re.MULTILINE)
    return run.returncode != 0, (failed or [""])[0]


def noticed(change: Change, tree: Path, contexts: Contexts) -> dict:
    """Whether a test of its line fails, which passes without the change: some test may depend on the order."""
    with tempfile.TemporaryDirectory() as folder:
        copy, names = Path(folder) / "tree", Path(folder) / "tests.txt"
        shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", "*.egg-info"))
        line = change.applied(copy)
        tests = contexts.tests(change.path, line)
        result = {**asdict(change), "line": line, "tests": len(tests)}
        if not tests:
            return {**result, "noticed": False, "by": ""}
        names.write_text("\n".join(tests))
        start = time.monotonic()
        is_noticed, by = run_tests(copy, names)
        if is_noticed:
            names.write_text("\n".join(tests[: tests.index(by) + 1] if by in tests else tests))
            shutil.copy(tree / change.path, copy / change.path)
            if run_tests(copy, names)[0]:
                is_noticed, by = False, f"{by} fails without the change"
    return {**result, "noticed": is_noticed, "by": by, "seconds": round(time.monotonic() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("command", choices=["draw", "contexts", "run"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree whose tests run")
    parser.add_argument("--changes", type=Path, help="changes as JSON lines, drawn before; without it they are drawn")
    parser.add_argument("--folder", type=Path, default=Path("mutation-output"), help="contexts and results")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    tree = options.tree.resolve()
    if options.command == "contexts":
        note_contexts(tree, options.folder.resolve())
        return
    lines = options.changes.read_text().splitlines() if options.changes else []
    changes = [Change(**json.loads(line)) for line in lines] or draw(options.seed, options.count, tree)
    if options.command == "draw":
        print("\n".join(json.dumps(asdict(change)) for change in changes))
        return
    contexts, results = Contexts(tree, options.folder.resolve()), []
    with ThreadPoolExecutor(options.workers) as pool, open(options.folder / "results.jsonl", "a") as file:
        for result in pool.map(lambda change: noticed(change, tree, contexts), changes):
            results.append(result)
            print(json.dumps(result), file=file, flush=True)
            if not result["noticed"]:
                print(f"NOT NOTICED by {result['tests']} tests: {result['path']}:{result['line']} ({result['kind']})")
                print(f"  - {result['before'].strip()}\n  + {result['after'].strip()}", flush=True)
    print(f"noticed: {sum(result['noticed'] for result in results)} of {len(results)}")


if __name__ == "__main__":
    main()
