"""
Which slow tests a change runs: those of the rooms that it touches, a fixed core, and a quarter of the rest by the day.

```bash
python tests/selection.py --bounded  # files, one a line; on the standard error, what is left out
python tests/selection.py --vllm     # exit status 0 if tests on a real server are due, 3 if not
```

What has changed is the difference from `MARFT_CHANGED_SINCE`, or from the newest commit that is a day older than the
last one. All files run where that is not known, and after changes that may break any test. All of them take an hour on
a fast machine: with `--bounded`, the core and as many others as fit 16 minutes of this machine run, others each day.
`make test-slow` runs all.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import time
from pathlib import Path


ROOT = Path(__file__).parent.parent
# Kills, resumes, equality with TRL, several processes, the Hub: run for every change
CORE = ["kills", "resume", "persistence", "equals_grpo", "distributed", "team"]
# A room of the package, and the slow tests that guard it beside the core
ROOMS = {
    "adapters": ["opponents", "strangers", "secrets"],
    "algorithms": ["unbiased", "small_teams", "critics", "central_critic", "signal"],
    "config": ["settings"],
    "episodes": ["failures", "tools", "orchestrated"],
    "extras/apps": ["applications", "gateway", "page", "examples"],
    "extras/commands": ["command"],
    "extras/engines": ["served", "sharding"],
    "extras/report": ["report", "recipes", "examples"],
    "extras/sandbox": ["jail", "rewards"],
    "extras/tasks": ["task_families", "tasks"],
    "learning": ["devices", "forward", "mixing", "critics", "agent_weight", "fitting", "unbiased", "game_gradients"],
    "prompts": ["tools", "speakers"],
    "reporting": ["evaluation", "report", "transcripts"],
    "rewards": ["rewards"],
    "rollout": ["tools", "served", "dynamic_sampling", "opponents", "own_returns"],
    "runs": ["checkpoints", "failures", "settings"],
    "seams": ["forward", "mixing", "sharding", "critics"],
    "shared_prefix": ["devices", "forward", "fitting"],
    "system": ["devices", "failures", "examples", "secrets", "sharding"],
    "team": ["tools", "secrets", "strangers", "gateway", "members"],
    "trainer": ["devices", "settings", "evaluation", "served", "workflow_learning"],
    "workflows": ["orchestrated", "workflow_learning", "examples"],
}
# Modules beside the rooms, whose tests are those of rooms that use them
ROOMS |= {"__main__": ["command"], "agents": ["tools", "secrets"], "tiny": ["examples"]}
# Whose changes may break any test
ALL_OF_THEM = re.compile(
    r"marft_trl/(config/\w+|configs|__init__)\.py|tests/(?!test_)|pyproject\.toml|constraints\.txt|Makefile"
)
# Seconds for slow tests in CI, and a file's share of them on a machine whose loop of [`slowness`] takes a second
BUDGET, SECONDS_OF_FILE = 16 * 60, 25.0
# Whose changes are tried on a real server
SERVED = re.compile(r"marft_trl/(extras/engines|prompts|rollout|adapters)|tests/(scripts/)?(test_)?vllm")
NOT_DUE = 3  # exit status; that of an error is 1


def git(*arguments: str) -> list[str] | None:
    """Lines of the output; `None` if it failed."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else None


def changed() -> list[str] | None:
    """Files that differ from the commit before the change; `None` where that is not known."""
    since = os.environ.get("MARFT_CHANGED_SINCE")
    if not since:
        last = (git("log", "-1", "--format=%ct") or ["0"])[0]
        since = next(iter(git("log", "-1", "--format=%H", f"--before={int(last) - 24 * 3600}") or []), None)
    return git("diff", "--name-only", since) if since else None


def slow_files() -> set[str]:
    """Names of the files that have slow tests, without `test_` and `.py`."""
    files = (ROOT / "tests").glob("test_*.py")
    marked = {path.stem.removeprefix("test_") for path in files if re.search(r"mark\.slow\b", path.read_text())}
    return marked - {"vllm"}


def rooms_of(paths: list[str]) -> set[str]:
    inside = [path.removeprefix("marft_trl/").removesuffix(".py") for path in paths if path.startswith("marft_trl/")]
    return {"/".join(path.split("/")[: 2 if path.startswith("extras/") else 1]) for path in inside}


def chosen(paths: list[str] | None, day: int) -> set[str]:
    """Names of the test files that run; all of them if nobody knows what has changed."""
    every = slow_files()
    if paths is None or any(map(ALL_OF_THEM.match, paths)):
        return every
    names = set(CORE) | {name for room in rooms_of(paths) for name in ROOMS.get(room, [])}
    names |= {path.split("test_")[-1].removesuffix(".py") for path in paths if path.startswith("tests/test_")}
    rest = sorted(every - names)
    return (names & every) | set(rest[day % 4 :: 4])


def slowness() -> float:
    """Seconds of a short loop of what tests do: interpreted code. About one on a fast machine, two on a slow one."""
    start, total = time.perf_counter(), 0
    for number in range(12_000_000):
        total += number & 3
    return time.perf_counter() - start


def bounded(names: set[str], day: int, seconds: float) -> set[str]:
    """The core and as many of the other names as fit the budget, others each day. `seconds`: those of [`slowness`]."""
    most = max(int(BUDGET / (SECONDS_OF_FILE * max(seconds, 0.1))), len(CORE))
    others = sorted(names - set(CORE))
    start = day * 7 % max(len(others), 1)
    return (names & set(CORE)) | set([*others[start:], *others[:start]][: most - len(CORE)])


def main() -> None:
    paths = changed()
    if "--vllm" in sys.argv:
        sys.exit(0 if paths is None or any(map(SERVED.match, paths)) else NOT_DUE)
    day = datetime.date.today().timetuple().tm_yday
    names = chosen(paths, day)
    if "--bounded" in sys.argv:
        seconds = slowness()
        names = bounded(names, day, seconds)
        print(f"the loop took {seconds:.2f} s: {len(names)} files of slow tests fit", file=sys.stderr)
    left_out = sorted(slow_files() - names)
    print("slow tests left out:", ", ".join(left_out) or "none", file=sys.stderr)
    print("\n".join(f"tests/test_{name}.py" for name in sorted(names)))


if __name__ == "__main__":
    main()
