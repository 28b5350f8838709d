# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What is wrong with the user's data and functions, said before the first generation or a wrong number."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch import nn
from trl import is_conversational
from trl.trainer.utils import get_callable_name, is_async_callable


# What the trainer itself passes to reward functions; a dataset column of such a name would collide with it.
REWARD_ARGUMENTS = (
    *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "turns", "earned"),
    "environments",
)
# What functions that score single turns get besides.
TURN_ARGUMENTS = (*REWARD_ARGUMENTS, "turn", "answer_turn")
_SCAN_ROWS = 1000
# The prompt of a row whose environment says what the task is, as in TRL
PLACEHOLDER = [{"role": "user", "content": ""}]


# ---- Datasets ----


def check_datasets(train_dataset, eval_dataset, prompts_per_generation: int) -> None:
    """
    Raise unless every dataset can be trained or evaluated on.

    Args:
        train_dataset (`Dataset` or `IterableDataset`):
            As passed to the trainer.
        eval_dataset (`Dataset`, `IterableDataset`, `dict` or `None`):
            As passed to the trainer.
        prompts_per_generation (`int`):
            Distinct prompts that one generation batch needs.

    Raises:
        TypeError: not a dataset.
        ValueError: no prompts, too few of them, or a row whose prompt cannot be used.
    """
    if train_dataset is None:
        raise ValueError(
            "`train_dataset` is required unless an `environment_factory` is provided. Pass a dataset with a `prompt` "
            "column."
        )
    if not isinstance(train_dataset, (Dataset, IterableDataset)):
        raise TypeError(
            f"`train_dataset` must be a `Dataset` or `IterableDataset`, got `{type(train_dataset).__name__}`."
        )
    check_dataset(train_dataset, "train_dataset")
    enough = islice(train_dataset, prompts_per_generation) if isinstance(train_dataset, IterableDataset) else None
    count = len(train_dataset) if enough is None else sum(1 for _ in enough)
    if count < prompts_per_generation:
        raise ValueError(
            f"`train_dataset` has {count} prompts, but one generation batch needs "
            f"{prompts_per_generation} (`generation_batch_size / num_generations`), so not a single step would be "
            "trained. Add prompts, or lower `per_device_train_batch_size` or `steps_per_generation`."
        )
    for name, dataset in named_sets(eval_dataset).items():
        check_dataset(dataset, name)


def named_sets(eval_dataset) -> dict[str, Any]:
    """The evaluation sets by the names they have in messages."""
    if isinstance(eval_dataset, Mapping):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in eval_dataset.items()}
    return {} if eval_dataset is None else {"eval_dataset": eval_dataset}


def check_dataset(dataset: Dataset | IterableDataset, what: str) -> None:
    """Raise unless the dataset has a usable `prompt` in every row (in its first row, when it is streamed)."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise TypeError(f"`{what}` must be a `Dataset` or `IterableDataset`, got `{type(dataset).__name__}`.")
    columns = column_names(dataset)
    if columns is None:
        raise ValueError(f"`{what}` is empty: it has no rows to take prompts from.")
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"`{what}` is empty: it has 0 rows to take prompts from (columns: {columns}).")
    if "prompt" not in columns:
        raise ValueError(
            f"`{what}` has no column `prompt`; it has {columns}. Rename the column that holds the prompts: "
            "`dataset.rename_column('question', 'prompt')`."
        )
    collisions = sorted(set(columns) & set(TURN_ARGUMENTS))
    if collisions:
        raise ValueError(
            f"`{what}` has columns named {collisions}, which are names of arguments that reward functions get from "
            "the trainer. Rename the columns."
        )
    rows = islice(dataset, 1) if isinstance(dataset, IterableDataset) else _prompts(dataset)
    check_prompts(rows, what, start=0)


def column_names(dataset: Dataset | IterableDataset) -> list[str] | None:
    """Names of the columns; `None` for a stream without a single row."""
    if dataset.column_names is not None:
        return list(dataset.column_names)
    first = next(iter(dataset), None)
    return None if first is None else list(first)


def _prompts(dataset: Dataset) -> Iterable[dict[str, Any]]:
    only = dataset.select_columns("prompt")
    for start in range(0, len(only), _SCAN_ROWS):
        for prompt in only[start : start + _SCAN_ROWS]["prompt"]:
            yield {"prompt": prompt}


def check_prompts(rows: Iterable[dict[str, Any]], what: str, start: int | None = None) -> None:
    """
    Raise at the first row whose prompt is missing, empty, or of another kind than the first one's.

    Args:
        rows (`Iterable[dict]`):
            Rows with a `prompt`.
        what (`str`):
            Name of the dataset, for the message.
        start (`int`, *optional*):
            Position of the first row in the dataset, where it is known.
    """
    first_kind = None
    for offset, row in enumerate(rows):
        where = f"row {start + offset} of `{what}`" if start is not None else f"a row of `{what}`"
        if "prompt" not in row:
            raise ValueError(f"There is no `prompt` in {where}; it has {sorted(row)}.")
        kind = _kind_of(row["prompt"], where)
        first_kind = first_kind or kind
        if kind != first_kind:
            raise ValueError(
                f"The prompt in {where} is {kind}, while the first one is {first_kind}. Use one kind throughout: "
                "strings, or lists of messages."
            )


def _kind_of(prompt: object, where: str) -> str:
    if prompt is None:
        raise ValueError(f"The prompt in {where} is None. Remove the row: `dataset.filter(lambda r: r['prompt'])`.")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(
                f"The prompt in {where} is empty. Remove the row: `dataset.filter(lambda r: r['prompt'].strip())`."
            )
        return "text"
    if not isinstance(prompt, list):
        raise TypeError(
            f"The prompt in {where} is a {type(prompt).__name__}; it must be a string or a list of messages."
        )
    if not prompt or not is_conversational({"prompt": prompt}):
        raise ValueError(
            f"The prompt in {where} is a list, but not one of messages with `role` and `content`: {str(prompt)[:80]}."
        )
    for message in prompt:
        if message["content"] is None or (message["content"] == "" and prompt != PLACEHOLDER):
            raise ValueError(f"The prompt in {where} has a {message['role']!r} message without content.")
        if not isinstance(message["content"], str):
            raise ValueError(
                f"The prompt in {where} has a {message['role']!r} message whose content is not text. Vision-language "
                "prompts are not supported."
            )
    return "a list of messages"


# ---- Reward functions ----


def check_rewards(reward_funcs: Sequence, train_dataset, eval_dataset=None) -> None:
    """
    Raise if a reward function cannot be called with what the datasets and the trainer have.

    Args:
        reward_funcs (`Sequence`):
            Functions, models, or names of models.
        train_dataset, eval_dataset:
            As passed to the trainer, after [`check_datasets`].

    Raises:
        TypeError: not something that can score.
        ValueError: no reward function, or one that needs a column the dataset does not have.
    """
    if not reward_funcs:
        raise ValueError(
            "No reward source provided. Pass `reward_funcs` (a function such as `trl.rewards.accuracy_reward`, a list "
            "of functions, or a reward model), or an `environment_factory` whose environment defines a `get_reward` "
            "method."
        )
    datasets = {"train_dataset": train_dataset, **named_sets(eval_dataset)}
    columns = {name: column_names(dataset) or [] for name, dataset in datasets.items()}
    for func in reward_funcs:
        if not isinstance(func, (str, nn.Module)) and not callable(func):
            raise TypeError(
                f"A reward function must be callable, a reward model or the name of one; got {func!r} of type "
                f"{type(func).__name__}."
            )
        for name, its_columns in columns.items():
            _check_arguments(func, name, its_columns)


def check_turn_rewards(functions: Mapping[str, Sequence[Callable]], train_dataset) -> None:
    """
    Raise if a function that scores single turns needs what neither the dataset nor the trainer has.

    Args:
        functions (`Mapping[str, Sequence[Callable]]`): the functions of each agent.
        train_dataset: as passed to the trainer, after [`check_datasets`].
    """
    columns = column_names(train_dataset) or []
    for its_functions in functions.values():
        for func in its_functions:
            _check_arguments(func, "train_dataset", columns, TURN_ARGUMENTS)


def _check_arguments(
    func: Any, dataset: str, columns: Sequence[str], passed: Sequence[str] = REWARD_ARGUMENTS
) -> None:
    if isinstance(func, (str, nn.Module)):
        return
    available = {*columns, *passed} - {"prompt"}
    missing = [name for name in _required_arguments(func) if name not in available]
    if missing:
        raise ValueError(
            f"The reward function `{get_callable_name(func)}` needs {missing}, but `{dataset}` has the columns "
            f"{sorted(columns)} and the trainer passes {list(passed)}. Add the column to the dataset, or "
            "give the argument a default."
        )


def _required_arguments(func: Callable) -> list[str]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


def checked_reward(func):
    """
    A reward function whose results are checked before they count: one finite number or `None` per completion.

    Models and names of models are returned as they are. The wrapper keeps the name of the function, hands it copies of
    the lists, and is asynchronous if the function is.
    """
    if isinstance(func, (str, nn.Module)):
        return func
    name = get_callable_name(func)

    async def later(**kwargs):
        return check_scores(await func(**_copies(kwargs)), name, len(kwargs["prompts"]))

    def now(**kwargs):
        return check_scores(func(**_copies(kwargs)), name, len(kwargs["prompts"]))

    wrapper: Callable = later if is_async_callable(func) else now
    functools.update_wrapper(wrapper, func, assigned=("__doc__", "__module__"), updated=())
    wrapper.__name__ = wrapper.__qualname__ = name
    return wrapper


def _copies(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A function that sorts or clears its lists must not reach into the trainer's."""
    copies = {key: list(value) if isinstance(value, list) else value for key, value in kwargs.items()}
    for key in ("prompts", "completions", "completion_ids", "turns"):
        if key in copies:
            copies[key] = [_copy(item) for item in copies[key]]
    return copies


def _copy(item: Any) -> Any:
    if not isinstance(item, list):
        return item
    return [dict(part) if isinstance(part, dict) else part for part in item]


def check_scores(scores: Any, name: str, expected: int) -> list[float | None]:
    """
    The scores as a list, after checking them.

    Args:
        scores (`list`, `tuple`, `numpy.ndarray` or `torch.Tensor`):
            What a reward function returned.
        name (`str`):
            The function's name.
        expected (`int`):
            How many scores there have to be.

    Raises:
        TypeError: not a list, or an item that is not a number or `None`.
        ValueError: another number of scores, or one that is NaN or infinite.
    """
    if isinstance(scores, (torch.Tensor, np.ndarray)):
        if scores.ndim != 1:
            raise TypeError(
                f"The reward function `{name}` returned a {type(scores).__name__} of shape {tuple(scores.shape)}; it "
                f"must have one dimension, one score for each of the {expected} completions."
            )
        scores = scores.tolist()
    if not isinstance(scores, (list, tuple)):
        raise TypeError(
            f"The reward function `{name}` returned a {type(scores).__name__} ({str(scores)[:60]}); it must return a "
            f"list with one number, or None, for each of the {expected} completions."
        )
    if len(scores) != expected:
        raise ValueError(
            f"The reward function '{name}' returned {len(scores)} rewards, but {expected} were expected (one per "
            "prompt-completion pair). Make sure the reward function returns exactly one reward per completion."
        )
    return [_check_score(score, name, index) for index, score in enumerate(scores)]


def _check_score(score: Any, name: str, index: int) -> float | None:
    if score is None:
        return None
    if isinstance(score, (torch.Tensor, np.ndarray)) and score.size and np.prod(score.shape) == 1:
        score = score.item()
    if isinstance(score, (str, bytes)) or not isinstance(score, (bool, int, float, np.number, np.bool_)):
        raise TypeError(
            f"The reward function `{name}` returned {score!r} of type {type(score).__name__} for completion {index}; "
            "it must be a number, or None where the function does not apply."
        )
    if not math.isfinite(score) or abs(score) > torch.finfo(torch.float32).max:
        raise ValueError(
            f"The reward function `{name}` returned {float(score)!r} for completion {index}. Training on it would "
            "destroy the weights or silence its group. Return a finite number, or None to leave the completion out."
        )
    return float(score)
