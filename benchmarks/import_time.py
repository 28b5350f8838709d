# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Import times next to TRL's, as medians over alternating fresh interpreters.

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
    for marft, trl in PAIRS:
        times: dict[str, list[float]] = {marft: [], trl: []}
        for _ in range(RUNS):
            for statement, samples in times.items():
                samples.append(seconds(statement))
        marft_seconds, trl_seconds = (statistics.median(times[statement]) for statement in (marft, trl))
        print(f"{marft}: {marft_seconds:.2f} s; {trl}: {trl_seconds:.2f} s; ratio {marft_seconds / trl_seconds:.2f}")


if __name__ == "__main__":
    main()
