# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Metrics of an evaluation: rewards of the team and its agents, and the accuracy of several episodes of a question."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
from trl.trainer.utils import get_callable_name

from ..config.dataset_checks import named_sets
from ..episodes.images import as_json
from ..episodes.records import Turn
from ..rewards import boxed
from ..system.files import write_atomically
from ..system.run_metrics import AGENT_METRICS, length_metrics
from .metrics import avg_at_k, interval, maj_at_k, pass_at_k


if TYPE_CHECKING:
    import evaluate


FILE = "evaluations.jsonl"
Vote = Callable[[str], Hashable | None]  # what is compared when samples vote
_LONGEST_VOTE = 200  # characters in the file


def last_box(text: str) -> str | None:
    """The default vote: the content of the last `\\boxed{}` of an answer, or else the whole answer."""
    inside = boxed(text)
    return (text if inside is None else inside).strip() or None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def sample_rows(
    records: Sequence[Mapping[str, Any]], vote: Vote, right_at: float, right_by: str | None
) -> list[dict[str, Any]]:
    """
    Rows of the samples of an evaluation: `question`, `sample` (0, 1, ... within its question), `right` (0.0 or 1.0:
    whether the reward, or that of the function `right_by`, is at least `right_at`), `vote`, `reward`, a column for
    each reward function, `turns` and `tokens`.
    """
    counts: dict[str, int] = defaultdict(int)
    rows = []
    for record in records:
        # From the dataset row: the same in every run, in whatever order rows come
        question = _digest(json.dumps(record["row"], sort_keys=True, default=as_json, ensure_ascii=False))
        score = record["reward"] if right_by is None else record["rewards"][right_by]
        voted = vote(record["answer"])
        text = None if voted is None else str(voted)
        if text is not None and len(text) > _LONGEST_VOTE:  # told from others that begin alike
            text = f"{text[:_LONGEST_VOTE]}... ({_digest(text)})"
        rows.append(
            {
                "question": question,
                "sample": counts[question],
                "right": float(score is not None and score >= right_at),
                "vote": text,
                "reward": record["reward"],
                **{f"rewards/{name}": value for name, value in record["rewards"].items()},
                "turns": len(record["turns"]),
                "tokens": sum(len(turn.completion_ids) for turn in record["turns"]),
            }
        )
        counts[question] += 1
    return rows


def by_question(rows: Sequence[Mapping[str, Any]], measure: str) -> dict[str, float]:
    """A measure for each question: `"avg"` (all samples), `"pass@<k>"` or `"maj@<k>"`."""
    kind, _, number = measure.partition("@")
    if kind not in ("avg", "pass", "maj") or (number and not number.isdecimal()) or (kind != "avg" and not number):
        raise ValueError(f"`measure` must be 'avg', 'pass@<k>' or 'maj@<k>', got {measure!r}.")
    samples: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        samples[row["question"]].append(row)
    measures = {}
    for question, sample in samples.items():
        right = [row["right"] for row in sample]
        k = int(number) if number else len(sample)
        if kind == "pass":
            measures[question] = pass_at_k(len(sample), int(sum(right)), k)
        elif kind == "maj":
            measures[question] = maj_at_k([row["vote"] for row in sample], right, k)
        else:
            measures[question] = avg_at_k(right, k)
    return measures


def at_k(rows: Sequence[Mapping[str, Any]], values: Sequence[int]) -> dict[str, float]:
    samples = min(Counter(row["question"] for row in rows).values())
    metrics: dict[str, float] = {}
    for name in (f"avg@{samples}", *(f"{kind}@{k}" for k in values for kind in ("pass", "maj"))):
        found = interval(list(by_question(rows, name).values()))
        metrics |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
    return metrics


def write_samples(folder: Path, rows: Sequence[Mapping[str, Any]], name: str, step: int, seed: int) -> Path:
    """Add samples to the file of a run. A resumed run evaluates again and replaces those of this step and later."""
    file = folder / FILE
    before = read_samples(file) if file.exists() else []
    kept = [sample for sample in before if sample["set"] != name or sample["step"] < step]
    everything = [*kept, *({"set": name, "step": step, "seed": seed, **row} for row in rows)]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in everything))
    return file


def read_samples(file: str | Path) -> list[dict[str, Any]]:
    with open(file, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def scores(
    files: Sequence[str | Path], measure: str = "avg", name: str | None = None, step: int | None = None
) -> np.ndarray:
    """
    Scores of runs, for [`~reporting.metrics.interval`] and [`~reporting.metrics.paired_difference`].

    Args:
        files (`Sequence`):
            The `evaluations.jsonl` of each run, or the folders that they are in. Runs differ in their seed.
        measure (`str`, *optional*, defaults to `"avg"`):
            `"avg"`, `"pass@<k>"` or `"maj@<k>"`.
        name (`str`, *optional*):
            Name of the evaluation set. Not needed if there is one.
        step (`int`, *optional*):
            Optimizer step of the evaluation. Defaults to the last one of each run.

    Returns: `numpy.ndarray` of shape `(runs, questions)`, questions in the order of their names.

    Raises:
        ValueError: a run has no such evaluation, or runs have other questions.
    """
    if isinstance(files, (str, Path)):
        raise TypeError(f"`scores` takes a list of runs, got a single run. Write `[{str(files)!r}]`.")
    tables = []
    for file in map(Path, files):
        if not (file / FILE if file.is_dir() else file).is_file():
            raise FileNotFoundError(f"{file} has no {FILE}, which evaluations write if `eval_k` is set.")
        rows = read_samples(file / FILE if file.is_dir() else file)
        sets = sorted({row["set"] for row in rows})
        if name is None and len(sets) > 1:
            raise ValueError(f"{file} has the evaluation sets {', '.join(sets)}. Choose one with `name=`.")
        samples = [row for row in rows if row["set"] == (name or sets[0])]
        at = max((row["step"] for row in samples), default=None) if step is None else step
        samples = [row for row in samples if row["step"] == at]
        if not samples:
            raise ValueError(f"{file} has no evaluation of {name!r} at step {step}; it has {', '.join(sets)}.")
        tables.append(by_question(samples, measure))
    other = next((index for index, table in enumerate(tables) if set(table) != set(tables[0])), None)
    if other is not None:
        raise ValueError(f"{files[other]} and {files[0]} were evaluated on different questions.")
    return np.array([[table[question] for question in sorted(tables[0])] for table in tables])


# A metric of the `evaluate` package, or a callable `metric(answers, **columns)` that returns a number or a dict
EvalMetric: TypeAlias = "evaluate.EvaluationModule | Callable[..., Any]"


def is_of_evaluate(metric: object) -> TypeGuard[evaluate.EvaluationModule]:
    """`True` for a metric of the `evaluate` package, which is loaded if there is one: who made it has loaded it."""
    module = sys.modules.get("evaluate")
    return module is not None and isinstance(metric, module.EvaluationModule)


def check_eval_metrics(eval_metrics: object, eval_dataset: Any, column: str) -> list[EvalMetric]:
    """Return the metrics as a list. Raises unless they are metrics, and their references are in `column`."""
    metrics = list(eval_metrics) if isinstance(eval_metrics, (list, tuple)) else [eval_metrics]
    for metric in metrics:
        if not is_of_evaluate(metric) and not callable(metric):
            raise TypeError(
                "`eval_metrics` takes metrics of the `evaluate` package (`evaluate.load(...)`) and callables "
                f"`metric(answers, **columns)`; got {metric!r} of type {type(metric).__name__}."
            )
    named = [metric.name for metric in metrics if is_of_evaluate(metric)]
    for name, dataset in named_sets(eval_dataset).items():
        columns = dataset.column_names
        if named and columns is not None and column not in columns:
            raise ValueError(
                f"The metric `{named[0]}` needs references, but `{name}` has no column {column!r}; it has "
                f"{sorted(columns)}. Set `eval_reference_column=`."
            )
    return metrics


def summarize(records: Sequence[dict[str, Any]], agents: Sequence[str]) -> dict[str, float]:
    metrics = {"reward": _mean(record["reward"] for record in records)}
    metrics["reward_std"] = _std([record["reward"] for record in records])
    for name in records[0]["rewards"]:
        values = [record["rewards"][name] for record in records]
        metrics |= {f"rewards/{name}/mean": _mean(values), f"rewards/{name}/std": _std(values)}
    metrics |= _lengths([turn for record in records for turn in record["turns"]])
    for agent in agents:
        turns = [(turn, record["reward"]) for record in records for turn in record["turns"] if turn.agent == agent]
        if turns:
            metrics[f"agents/{agent}/reward"] = _mean(reward for _, reward in turns)
            lengths = _lengths([turn for turn, _ in turns])
            metrics |= {f"agents/{agent}/{name}": lengths[name] for name in lengths.keys() & AGENT_METRICS}
        metrics[f"agents/{agent}/turns"] = len(turns) / len(records)
    return metrics


def question_means(records: Sequence[dict[str, Any]], size: int) -> dict[str, list[float]]:
    """Mean rewards of each question, whose `size` records are next to each other, by metric of [`summarize`]."""
    scores = {"reward": [record["reward"] for record in records]}
    for name in records[0]["rewards"]:
        scores[f"rewards/{name}/mean"] = [record["rewards"][name] for record in records]
    means = {
        name: [_mean(values[start : start + size]) for start in range(0, len(values), size)]
        for name, values in scores.items()
    }
    return {name: [mean for mean in values if not math.isnan(mean)] for name, values in means.items()}


def _lengths(turns: Sequence[Turn]) -> dict[str, float]:
    return length_metrics([len(turn.completion_ids) for turn in turns], [turn.truncated for turn in turns])


def measure_answers(
    metrics: Sequence[EvalMetric], answers: Sequence[str], columns: Mapping[str, list], reference_column: str
) -> dict[str, float]:
    measured: dict[str, float] = {}
    for metric in metrics:
        if is_of_evaluate(metric):
            result = metric.compute(predictions=list(answers), references=columns[reference_column])
            measured |= _numbers(result, metric.name)
        else:
            name = get_callable_name(metric)
            try:
                result = metric(list(answers), **columns)
            except Exception as error:
                error.add_note(f"Raised by the metric `{name}`, called as `{name}(answers, {', '.join(columns)})`.")
                raise
            measured |= _numbers(result if isinstance(result, Mapping) else {name: result}, name)
    return measured


def _numbers(result: Mapping[str, Any], metric: str) -> dict[str, float]:
    numbers = {key: value for key, value in result.items() if hasattr(value, "__float__")}
    if result and not numbers:
        raise TypeError(f"The metric `{metric}` returned {str(result)[:80]}; it must return numbers.")
    return {key: float(value) for key, value in numbers.items()}


def _mean(values) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _std(values: Sequence[float | None]) -> float:
    known, mean = [value for value in values if value is not None], _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1)) if len(known) > 1 else math.nan
