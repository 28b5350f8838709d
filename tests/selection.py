"""
Select the slow tests for a change: those of the rooms it touches, a fixed core, and a quarter of the rest by the day.

```bash
python tests/selection.py         # files, one per line; on stderr, those left out
python tests/selection.py --vllm  # exit status 0 if tests on a real server are due, 3 if not
```

The change is the difference from `MARFT_CHANGED_SINCE`, or from the newest commit at least a day older than the last.
If that is not known, or after changes that may break any test, all files run. CI stops after some minutes
(`SLOW_SECONDS`), so the order changes each day. `make test-slow` runs all.
"""

from __future__ import annotations

import datetime
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parent.parent
# Kills, resumes, equality with TRL, several processes, the Hub, every example: run for every change
CORE = ["kills", "resume", "persistence", "equals_grpo", "distributed", "team", "examples"]
# The rooms of the package, and the slow tests that guard each in addition to the core
ROOMS = {
    "adapters": ["strangers", "secrets"],
    "algorithms": ["unbiased", "small_teams", "critics", "central_critic", "signal"],
    "config": ["settings"],
    "episodes": ["failures", "tools", "orchestrated"],
    "extras/apps": ["applications", "serve", "page"],
    "extras/commands": ["command"],
    "extras/engines": ["served", "sharding"],
    "extras/report": ["report", "recipes"],
    "extras/sandbox": ["jail", "rewards"],
    "extras/tasks": ["task_families", "tasks"],
    "learning": ["devices", "forward", "critics", "agent_weight", "fitting", "unbiased", "game_gradients"],
    "prompts": ["tools", "speakers"],
    "reporting": ["evaluation", "report", "transcripts"],
    "rewards": ["rewards"],
    "rollout": ["tools", "served", "dynamic_sampling", "own_returns"],
    "runs": ["checkpoints", "failures", "settings"],
    "seams": ["forward", "sharding", "critics"],
    "shared_prefix": ["devices", "forward", "fitting"],
    "system": ["devices", "failures", "secrets", "sharding"],
    "team": ["tools", "secrets", "strangers", "serve", "members"],
    "trainer": ["devices", "settings", "evaluation", "served", "workflow_learning"],
    "workflows": ["orchestrated", "workflow_learning"],
}
# Modules outside the rooms, with the tests of rooms that use them
ROOMS |= {"__main__": ["command"], "agents": ["tools", "secrets"], "tiny": []}
# Files whose changes may break any test
ALL_OF_THEM = re.compile(
    r"marft_trl/(config/\w+|configs|__init__)\.py|tests/(?!test_)|pyproject\.toml|constraints\.txt|Makefile"
)
# Files whose changes are tested on a real server
SERVED = re.compile(r"marft_trl/(extras/engines|prompts|rollout|adapters)|tests/(scripts/)?(test_)?vllm")
NOT_DUE = 3  # exit status; that of an error is 1


def git(*arguments: str) -> list[str] | None:
    """Lines of the output; `None` if it failed."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else None


def changed() -> list[str] | None:
    """Files that differ from the commit before the change; `None` if that is not known."""
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
    """Names of the test files that run; all of them if the change is not known."""
    every = slow_files()
    if paths is None or any(map(ALL_OF_THEM.match, paths)):
        return every
    names = set(CORE) | {name for room in rooms_of(paths) for name in ROOMS.get(room, [])}
    names |= {path.split("test_")[-1].removesuffix(".py") for path in paths if path.startswith("tests/test_")}
    rest = sorted(every - names)
    return (names & every) | set(rest[day % 4 :: 4])


def ordered(names: set[str], day: int) -> list[str]:
    """Alternate files of the core with the others, beginning with different files each day."""
    core, others = sorted(names & set(CORE)), sorted(names - set(CORE))
    turned = [[*files[day % len(files) :], *files[: day % len(files)]] for files in (core, others) if files]
    return [name for pair in itertools.zip_longest(*turned) for name in pair if name]


def main() -> None:
    paths = changed()
    if "--vllm" in sys.argv:
        sys.exit(0 if paths is None or any(map(SERVED.match, paths)) else NOT_DUE)
    day = datetime.date.today().timetuple().tm_yday
    names = chosen(paths, day)
    left_out = sorted(slow_files() - names)
    print("slow tests left out:", ", ".join(left_out) or "none", file=sys.stderr)
    print("\n".join(f"tests/test_{name}.py" for name in ordered(names, day)))


if __name__ == "__main__":
    main()
