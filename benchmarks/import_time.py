# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Import times beside TRL's, as medians over fresh interpreters that take turns.

```bash
python benchmarks/import_time.py
```
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time


PAIRS = [
    ("import marft_trl", "import trl"),
    ("from marft_trl import MARFTTrainer", "from trl import GRPOTrainer"),
]
RUNS = 7


def seconds(statement: str) -> float:
    """Wall time of a fresh interpreter that runs a statement."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", statement], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    nothing = statistics.median(seconds("pass") for _ in range(RUNS))
    print(f"an interpreter alone: {nothing:.2f} s, included in all times")
    for ours, theirs in PAIRS:
        times: dict[str, list[float]] = {ours: [], theirs: []}
        for _ in range(RUNS):
            for statement, its in times.items():
                its.append(seconds(statement))
        mine, other = (statistics.median(times[statement]) for statement in (ours, theirs))
        print(f"{ours}: {mine:.2f} s; {theirs}: {other:.2f} s; ratio {mine / other:.2f}")


if __name__ == "__main__":
    main()
