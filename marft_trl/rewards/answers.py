# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Extract mathematical answers from texts and compare them with `math_verify`, in a separate process.

A comparison can take seconds and a gigabyte, and `math_verify` limits its time with a signal that only the main thread
gets. Therefore [`AnswerComparer`] runs this file as a script: it reads pairs as JSON lines and answers with one score
per line. To start quickly, it imports nothing from the package.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any


# The last number of a text is its answer if there is no box. The number of digits is bounded to keep the time linear.
_NUMBER = re.compile(r"(?<![\d.,])-?\d{1,40}(?:,\d{3})*(?:\.\d{1,40})?(?![\d])")
_SECONDS = 5  # to parse or to compare an answer such as "9^9^9^9"
_STARTUP_SECONDS = 60
_MOST_CHARACTERS = 1000
# Address space of the process that compares; without any comparison, it takes about 0.4 GiB
_MEMORY = 2 << 30
_MOST_KNOWN = 4096  # cached scores


def boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}`, with balanced braces; `None` if it is missing or not closed. Linear time."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : end]
    return None


def math_answer(text: str) -> str | None:
    """Answer of a text: the content of the last `\\boxed{}`, or else the last number, or else `None`."""
    if (inside := boxed(text)) is not None:
        return inside
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def compare(answer: str, solution: str) -> float | None:
    """Score 1 if an answer equals the solution, else 0; `None` if the solution cannot be parsed. Main thread only."""
    gold = _gold(solution)
    if not gold:
        return None
    from math_verify import verify

    return float(verify(list(gold), _parse(answer), timeout_seconds=_SECONDS))


@functools.lru_cache
def _gold(solution: str) -> tuple:
    return tuple(_parse(boxed(solution) or solution) or _parse(math_answer(solution) or ""))


def _parse(text: str) -> list:
    from math_verify import parse

    return parse(f"${text}$", parsing_timeout=_SECONDS)


class AnswerComparer:
    """Compares answers in another process, which starts when needed. Threads may share it; a fork starts its own."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], float | None] = {}
        self._forget()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._process: Any = None

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
        """Score pairs of text and solution as [`compare`] does. A pair over the limits of time or memory scores 0."""
        answers = [(math_answer(text), solution) for text, solution in pairs]
        # A text without an answer is compared too: whether the solution can be parsed decides between 0 and `None`
        keys = [(answer if answer and len(answer) <= _MOST_CHARACTERS else "", gold) for answer, gold in answers]
        with self._lock:
            for key in dict.fromkeys(keys):
                if key not in self._known:
                    self._known[key] = self._score(*key)
            found = [self._known[key] for key in keys]
            for key in list(self._known)[:-_MOST_KNOWN]:
                del self._known[key]
            return found

    def _score(self, answer: str, solution: str) -> float | None:
        process = self._running()
        try:
            process.stdin.write(json.dumps([answer, solution]).encode() + b"\n")
            process.stdin.flush()
            line = _line(process.stdout, 4 * _SECONDS)
        except BrokenPipeError:  # the process ended before it read the pair
            line = b""
        except BaseException:  # such as a time limit of the caller: the answer would be read as the next pair's
            self.close()
            raise
        if line.endswith(b"\n"):
            return json.loads(line)
        self.close()
        return 0.0

    def _running(self) -> Any:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        program = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
        self._process = subprocess.Popen(  # noqa: S603  # our own program; what models wrote is data on its input
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            ready = _line(self._process.stdout, _STARTUP_SECONDS)
        except BaseException:
            self.close()
            raise
        if not ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            code = self._process.poll()
            self.close()
            why = f"within {_STARTUP_SECONDS} s" if code is None else f"(exit code {code})"
            raise RuntimeError(f"The process that compares mathematical answers did not start {why}.")
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()


def _line(pipe, seconds: float) -> bytes:
    """Read a line from a pipe. If the pipe ends or the time runs out, return the part that was read."""
    end, line = time.monotonic() + seconds, b""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    while not line.endswith(b"\n") and waiting.poll(max(0.0, end - time.monotonic()) * 1000):
        if not (piece := os.read(pipe.fileno(), 1 << 16)):
            break
        line += piece
    return line


def main() -> None:
    """Answer each pair on the standard input with its score, after a first line once everything is imported."""
    import math_verify  # noqa: F401

    logging.disable()  # warnings quote what models wrote

    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            score = compare(*json.loads(line))
        except (MemoryError, RecursionError):
            score = 0.0
        print(json.dumps(score), flush=True)


if __name__ == "__main__":
    main()
