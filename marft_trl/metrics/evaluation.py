# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Metrics of an evaluation: rewards of the team and of each agent, and metrics over the team's answers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from trl.trainer.utils import get_callable_name

from ..config.dataset_checks import column_names, named_sets
from ..episodes.records import Turn
from ..system.run_metrics import AGENT_METRICS, length_metrics


if TYPE_CHECKING:
    import evaluate

# A metric of the `evaluate` package, or a callable `metric(answers, **columns)` that returns a number or a
# dict of numbers
EvalMetric: TypeAlias = "evaluate.EvaluationModule | Callable[..., Any]"


def is_of_evaluate(metric: object) -> TypeGuard[evaluate.EvaluationModule]:
    """`True` for a metric of the `evaluate` package, which is loaded if there is one: who made it has loaded it."""
    module = sys.modules.get("evaluate")
    return module is not None and isinstance(metric, module.EvaluationModule)


def check_eval_metrics(eval_metrics: object) -> list[EvalMetric]:
    """
    Check the metrics and return them as a list.

    Raises:
        TypeError: an item is neither a metric of the `evaluate` package nor a callable.
    """
    if eval_metrics is None:
        return []
    metrics = list(eval_metrics) if isinstance(eval_metrics, (list, tuple)) else [eval_metrics]
    for metric in metrics:
        if not is_of_evaluate(metric) and not callable(metric):
            raise TypeError(
                "`eval_metrics` takes metrics of the `evaluate` package (`evaluate.load(...)`) and callables "
                f"`metric(answers, **columns)`; got {metric!r} of type {type(metric).__name__}."
            )
    return metrics


def check_references(metrics: Sequence[EvalMetric], eval_dataset, column: str) -> None:
    """
    Raise if an evaluation dataset lacks the column that metrics of the `evaluate` package take as references.

    Raises:
        ValueError: the message names the metric, the dataset and its columns.
    """
    named = [metric.name for metric in metrics if is_of_evaluate(metric)]
    for name, dataset in named_sets(eval_dataset).items():
        columns = column_names(dataset) or []
        if named and column not in columns:
            raise ValueError(
                f"The metric `{named[0]}` needs references, but `{name}` has no column {column!r}; it has "
                f"{sorted(columns)}. Set `eval_reference_column=`."
            )


def summarize(records: Sequence[dict[str, Any]], agents: Sequence[str]) -> dict[str, float]:
    """
    Compute metrics over episodes: rewards, lengths and numbers of turns.

    Args:
        records (`Sequence[dict]`):
            One record per episode, with `reward` (`float` or `None`), `rewards` (`dict` of reward function to
            `float` or `None`) and `turns` (`list[Turn]`).
        agents (`Sequence[str]`):
            Names of the agents.
    """
    metrics = {"reward": _mean(record["reward"] for record in records)}
    metrics["reward_std"] = _std([record["reward"] for record in records if record["reward"] is not None])
    for name in records[0]["rewards"]:
        metrics[f"rewards/{name}/mean"] = _mean(record["rewards"][name] for record in records)
        metrics[f"rewards/{name}/std"] = _std(
            [record["rewards"][name] for record in records if record["rewards"][name] is not None]
        )
    turns = [turn for record in records for turn in record["turns"]]
    metrics |= _lengths(turns)
    for agent in agents:
        its = [(turn, record["reward"]) for record in records for turn in record["turns"] if turn.agent == agent]
        if its:
            metrics[f"agents/{agent}/reward"] = _mean(reward for _, reward in its)
            lengths = _lengths([turn for turn, _ in its])
            metrics |= {f"agents/{agent}/{name}": lengths[name] for name in lengths.keys() & AGENT_METRICS}
        metrics[f"agents/{agent}/turns"] = len(its) / len(records)
    return metrics


def question_means(records: Sequence[dict[str, Any]], size: int) -> dict[str, list[float]]:
    """
    Rewards of each question as means over its episodes, by metric of [`summarize`]: what intervals are made of.

    Args:
        records (`Sequence[dict]`): as in [`summarize`], those of a question next to each other.
        size (`int`): number of episodes of a question.
    """
    scores = {"reward": [record["reward"] for record in records]}
    scores |= {f"rewards/{name}/mean": [one["rewards"][name] for one in records] for name in records[0]["rewards"]}
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
    """
    Compute metrics over the team's answers.

    Args:
        metrics (`Sequence`):
            Metrics of the `evaluate` package, or callables.
        answers (`Sequence[str]`):
            Text of the team's answer in each episode.
        columns (`Mapping[str, list]`):
            Columns of the dataset, and `turns`, with one value per episode.
        reference_column (`str`):
            Name of the column that metrics of the `evaluate` package get as `references`.

    Raises:
        TypeError: a callable returned neither a number nor a dict of numbers.
    """
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


def _std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
