# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Questions of reasoning-gym, and their scores as reward functions."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from ...rewards.functions import last_text


def load(module: str, package: str, what: str) -> Any:
    """Import a module of a package of tasks. `package`: its name on PyPI."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise ImportError(f"{what} needs {package!r}, which is not installed. Run `pip install {package}`.") from error


# The first entry of the path is the current folder, whose files must not shadow modules
_CODE = """
import sys
sys.path.pop(0)
import importlib, json
place, function, file = sys.argv[1:4]
try:
    outcome = {"result": getattr(importlib.import_module(place), function)(**json.load(sys.stdin))}
except ValueError as error:
    outcome = {"error": str(error)}
with open(file, "w", encoding="utf-8") as written:
    json.dump(outcome, written)
"""


def call_with_fixed_hashes(place: str, function: str, arguments: dict[str, Any]) -> Any:
    """Return `place.function(**arguments)`, all JSON data, from a new process with the hash seed 0."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path if isinstance(entry, str))
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"
        command = [sys.executable, "-W", "ignore", "-c", _CODE, place, function, str(file)]
        done = subprocess.run(  # noqa: S603
            command, check=False, capture_output=True, text=True, env=environment, input=json.dumps(arguments)
        )
        if done.returncode:
            raise RuntimeError(f"`{place}.{function}` failed in a subprocess:\n{done.stderr[-2000:]}")
        outcome = json.loads(file.read_text(encoding="utf-8"))
    if "error" in outcome:
        raise ValueError(outcome["error"])
    return outcome["result"]


# The package draws question `i` from `seed + i`, so seeds this far apart share no questions by design
_SEED_STEP = 2**20
# Families whose questions depend on the order of sets, and thus on the hash seed of the process (0.1.25)
_HASHED = {
    "isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"
}  # fmt: skip
# Maximum number of draws per requested question
_MOST_DRAWS = 50


def reasoning_gym(
    name: str, size: int = 500, seed: int = 0, without: Dataset | None = None, distinct: bool = False, **settings: Any
) -> Dataset:
    """
    Questions of a family of [reasoning-gym](https://github.com/open-thought/reasoning-gym), with the columns that its
    rewards need: `prompt`, `answer` (empty where there are many), `family` (name and settings), `entry`.

    Args:
        name (`str`): family, such as `"chain_sum"`, or `"composite"` with `datasets=[{"name": ..., "weight": ...,
            "config": {...}}, ...]`.
        size (`int`, *optional*, defaults to `500`): number of questions.
        seed (`int`, *optional*, defaults to `0`): other seeds draw other questions. Small families draw the same ones
            again: use `without` for a test set.
        without (`Dataset`, *optional*): questions that are left out, such as those of the test set. Their prompts may
            have been changed.
        distinct (`bool`, *optional*, defaults to `False`): whether every question occurs once, as in a test set.
        settings: as in `reasoning_gym.create_dataset`.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: there is no such family, a setting is not valid, a question cannot be kept in a dataset, or there
            are too few questions.
    """
    load("reasoning_gym", "reasoning-gym", "`reasoning_gym`")
    family = json.dumps({"name": name, **settings}, sort_keys=True)
    if without is not None and "entry" not in without.column_names:
        raise ValueError(
            f"`without` must be a dataset of `reasoning_gym` with the column `entry`, got {without.column_names}."
        )
    # Of entries, since prompts may have been changed, as by a hint at the format
    entries = () if without is None else without["entry"]
    known = sorted({str(parse_entry(entry)["question"]) for entry in entries})
    arguments: dict[str, Any] = {"family": family, "size": size, "seed": seed, "known": known, "distinct": distinct}
    names = {name, *(str(part.get("name")) for part in settings.get("datasets") or () if isinstance(part, Mapping))}
    if not sys.flags.hash_randomization or not names & _HASHED:  # this process has the hash seed 0
        return Dataset.from_list(draw(**arguments))
    return Dataset.from_list(call_with_fixed_hashes(__name__, "draw", arguments))


def draw(family: str, size: int, seed: int, known: Sequence[str], distinct: bool) -> list[dict[str, Any]]:
    """Return rows of [`reasoning_gym`]. `family`: name and settings as JSON. `known` questions are left out."""
    seen = {*known}
    entries = load_family(family, size * (_MOST_DRAWS if seen or distinct else 1), seed * _SEED_STEP % (2**31 - 1))
    rows: list[dict[str, Any]] = []
    for index in range(len(entries)):
        entry = entries[index]
        question = str(entry["question"])
        if question not in seen:
            prompt = [{"role": "user", "content": question}]
            answer = "" if entry["answer"] is None else str(entry["answer"])
            rows.append({"prompt": prompt, "answer": answer, "family": family, "entry": _to_text(entry, entries)})
            if distinct:
                seen.add(question)
        if len(rows) == size:
            return rows
    kind = "distinct questions" if distinct else "questions"
    raise ValueError(
        f"`size` is {size}, but {len(entries):,} draws from {family} gave only {len(rows)} usable {kind}. Lower "
        "`size`, or choose settings with more questions."
    )


@functools.lru_cache(maxsize=256)
def load_family(family: str, size: int = 1, seed: int = 0) -> Any:
    settings = json.loads(family)
    package = load("reasoning_gym", "reasoning-gym", "`reasoning_gym`")
    if settings.get("datasets"):
        if not all(isinstance(dataset, Mapping) for dataset in settings["datasets"]):
            raise ValueError(
                '`datasets` of a composite must be a list such as [{"name": "gcd", "weight": 2}], got '
                f"{settings['datasets']!r}."
            )
        spec = load("reasoning_gym.composite", "reasoning-gym", "`reasoning_gym`").DatasetSpec
        settings["datasets"] = [spec(**{"weight": 1.0, "config": {}, **dataset}) for dataset in settings["datasets"]]
    try:
        return package.create_dataset(settings.pop("name"), size=size, seed=seed, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym cannot create questions for {family}: {error}") from error


def _to_text(entry: Mapping[str, Any], entries: Any) -> str:
    """Convert a question, with all that its score needs, to text: a Python literal, or JSON if that does not work."""
    for write, read in ((repr, ast.literal_eval), (json.dumps, json.loads)):
        try:
            text = write(dict(entry))
            again = read(text)
            answers = ("", entry["answer"])
            if all(entries.score_answer(item, again) == entries.score_answer(item, entry) for item in answers):
                return text
        except (ValueError, TypeError, SyntaxError):
            continue
    raise ValueError(f"A question of reasoning-gym cannot be stored in a dataset: {str(entry)[:200]}")


@functools.lru_cache(maxsize=4096)
def parse_entry(text: str) -> dict[str, Any]:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return json.loads(text)


def reasoning_gym_answer(text: str) -> str | None:
    """Return the content of the last `<answer>` tag of a text, or else the whole text; `None` if it is empty."""
    found = load("reasoning_gym.utils", "reasoning-gym", "`reasoning_gym_answer`").extract_answer(text)
    return (text if found is None else found).strip() or None


def get_reasoning_gym_reward(
    answer: Callable[[str], str | None] = reasoning_gym_answer, exact: bool = False
) -> Callable[..., list[float]]:
    """
    Make a reward function with the scores of reasoning-gym, from 0 to 1. Many families give a part for a text that
    holds the right answer. A text that reasoning-gym fails to read scores 0.

    Args:
        answer (`Callable`, *optional*): what is scored of a text, such as [`~marft_trl.rewards.math_answer`], its last
            number. Defaults to [`reasoning_gym_answer`].
        exact (`bool`, *optional*, defaults to `False`): whether only the full score counts: 1, or else 0.
    """

    def reasoning_gym_reward(completions: Sequence[Any], family: Sequence[str], entry: Sequence[str], **kwargs: Any):
        """Scores of answers to questions of [`reasoning_gym`], by the family's own rules: a reward function."""
        texts = [answer(last_text(completion)) for completion in completions]
        scores = [_score(*text) for text in zip(texts, family, entry, strict=True)]
        return [float(score >= 1.0) for score in scores] if exact else scores

    reasoning_gym_reward.__name__ = "reasoning_gym_exact" if exact else "reasoning_gym_reward"
    return reasoning_gym_reward


reasoning_gym_reward = get_reasoning_gym_reward()
reasoning_gym_exact = get_reasoning_gym_reward(exact=True)


def _score(text: str | None, family: str, entry: str) -> float:
    questions = load_family(family)
    if text is None:
        return 0.0
    try:
        return float(questions.score_answer(text, parse_entry(entry)))
    except Exception:  # some families parse the model's text without checks
        return 0.0
