# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Time of a program in the sandbox and in a bare interpreter. The runs alternate.

    python benchmarks/speed/sandbox.py
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from unittest import mock

from marft_trl.extras.sandbox import jail


PROGRAM = "print(sum(map(int, input().split())))"


def bare() -> None:
    subprocess.run([sys.executable, "-I", "-c", PROGRAM], input=b"1 2\n", capture_output=True, check=True)


def fenced() -> None:
    with mock.patch.object(jail, "_working_bubblewrap", return_value=()):
        assert jail.run_python(PROGRAM, stdin="1 2\n").stdout == "3\n"


def with_bubblewrap() -> None:
    assert jail.run_python(PROGRAM, stdin="1 2\n").stdout == "3\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    ways = {"a bare interpreter (`python -I`)": bare, "the fence alone": fenced}
    if jail._working_bubblewrap():
        ways["the fence and bubblewrap"] = with_bubblewrap
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # caches the checks of the machine
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    first = statistics.median(next(iter(seconds.values())))
    print("| | ms a program (median) | fastest - slowest | ratio |\n|---|---|---|---|")
    for name, times in seconds.items():
        middle, low, high = statistics.median(times), min(times), max(times)
        print(f"| {name} | {middle * 1e3:.0f} | {low * 1e3:.0f} - {high * 1e3:.0f} | {middle / first:.2f} |")


if __name__ == "__main__":
    main()
