# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Checks of reward functions before the first generation, and of every score that they return."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerState
from trl.trainer.utils import get_callable_name, is_async_callable

from ..config.dataset_checks import REWARD_ARGUMENTS, TURN_ARGUMENTS, column_names, named_sets
from ..system.event_loop import finished
from ..system.processes import ending_forks
from ..system.watchdog import TookTooLong, progress, time_limit
from ..weights.manifest import check_model_name
from .failures import Failures, OnFailure, call_reward, wait_here


# Squares of larger rewards have no place in single precision, so the deviation of a group would be infinite
MAX_REWARD = 1e15


def check_rewards(reward_funcs: Sequence, train_dataset, eval_dataset=None) -> None:
    """
    Raise if a reward function has an argument that neither the datasets nor the trainer provide.

    Args:
        reward_funcs (`Sequence`):
            Functions, models, or names of models.
        train_dataset, eval_dataset:
            As passed to the trainer, after [`check_datasets`].

    Raises:
        TypeError: an item is not a function, a model or the name of a model.
        ValueError: there is no reward function, or one needs a column that a dataset does not have.
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
        if isinstance(func, str):
            check_model_name(func, "reward_funcs")
        for name, its_columns in columns.items():
            _check_arguments(func, name, its_columns)


def numbered(names: Sequence[str]) -> list[str]:
    """Names of functions, those that occur again with a number that makes them new ones."""
    found: list[str] = []
    for at, name in enumerate(names):
        numbers = (f"{name}_{number}" for number in itertools.count(2))
        free = (new for new in numbers if new not in found and new not in names)
        found.append(name if names.index(name) == at else next(free))
    return found


def check_turn_rewards(functions: Mapping[str, Sequence[Callable]], train_dataset) -> None:
    """
    Raise if a reward function of single turns has an argument that neither the dataset nor the trainer provides.

    Args:
        functions (`Mapping[str, Sequence[Callable]]`): reward functions of each agent's turns.
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
    refused = [name for name in _ALWAYS_PASSED if not _takes(func, name)]
    if refused:
        raise ValueError(
            f"The reward function `{get_callable_name(func)}` takes no `{refused[0]}`, but the trainer passes all of "
            f"{', '.join(_ALWAYS_PASSED)} and the columns of the dataset, as TRL does. Add `**kwargs` to its "
            "arguments."
        )


# Arguments that TRL passes to every reward function
_ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "trainer_state")


def _takes(func: Callable, name: str) -> bool:
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return True
    return name in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def _required_arguments(func: Callable) -> list[str]:
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


def checked_reward(func, policy: OnFailure | None = None, failures: Failures | None = None):
    """
    Wrap a reward function so that its time is limited and its results are checked: one finite number or `None` per
    completion.

    Models and names of models are returned unchanged. The wrapper keeps the name of the function, passes copies of the
    lists and of the trainer's state to it, and is asynchronous if the function is.

    Args:
        func (`Callable`, `nn.Module` or `str`): the reward function.
        policy ([`OnFailure`], *optional*): what happens if it fails; by default its error ends the run.
        failures ([`Failures`], *optional*): gets what was skipped.
    """
    if isinstance(func, (str, nn.Module)):
        return func
    name, policy, failures = get_callable_name(func), policy or OnFailure(), failures or Failures()

    async def later(**kwargs):
        async def call(positions):
            start = time.monotonic()
            progress()
            try:
                with named(name, is_async=True):
                    scores = await asyncio.wait_for(func(**_arguments(kwargs, positions)), policy.timeout)
            except TimeoutError as error:
                if policy.timeout is None or time.monotonic() - start < policy.timeout:  # one of its own
                    raise
                raise TookTooLong(_too_long(name, policy.timeout, "it")) from error
            finally:
                progress()
            return check_scores(scores, name, len(positions))

        return await call_reward(call, len(kwargs["prompts"]), name, policy, failures, asyncio.sleep)

    def now(**kwargs):
        async def call(positions):
            with time_limit(policy.timeout, functools.partial(_too_long, name, policy.timeout)), named(name):
                scores = func(**_arguments(kwargs, positions))
            return check_scores(scores, name, len(positions))

        return finished(call_reward(call, len(kwargs["prompts"]), name, policy, failures, wait_here))

    wrapper: Callable = later if is_async_callable(func) else now
    functools.update_wrapper(wrapper, func, assigned=("__doc__", "__module__"), updated=())
    wrapper.__name__ = wrapper.__qualname__ = name
    return wrapper


@contextlib.contextmanager
def named(name: str, is_async: bool = False) -> Iterator[None]:
    """
    Context manager: errors of a reward function have its name. One that calls `sys.exit`, or raises what ends an
    iterator or a task, has failed like one that raises. A child that it has forked ends here, if it comes back.
    """
    try:
        with ending_forks():
            yield
    except SystemExit as error:
        raise RuntimeError(f"The reward function `{name}` called `sys.exit({error.code!r})`.") from error
    except (StopIteration, StopAsyncIteration, GeneratorExit) as error:
        if is_async and isinstance(error, GeneratorExit):  # it is closed before its end
            raise
        # `from None`, since a `StopIteration` as the cause is what `contextlib` lets through
        raise RuntimeError(f"The reward function `{name}` raised {type(error).__name__}.") from None
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        raise RuntimeError(f"The reward function `{name}` raised {type(error).__name__}.") from error
    except Exception as error:
        error.add_note(f"Raised by the reward function `{name}`.{_hint(error)}")
        raise


def _hint(error: Exception) -> str:
    """For functions that expect the other kind of prompts."""
    if isinstance(error, TypeError) and "string indices must be integers" in str(error):
        return (
            " Completions are texts where the prompts of the dataset are texts. If it expects messages, write the "
            "prompts "
            'as `[{"role": "user", "content": question}]`.'
        )
    return ""


def _is_being_cancelled() -> bool:
    with contextlib.suppress(RuntimeError):  # no event loop runs
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return False


def _too_long(name: str, seconds: float | None, where: str) -> str:
    return (
        f"The reward function `{name}` has not returned for {seconds:g} seconds ({where} is running). Give what it "
        "waits for a time limit of its own, or set a larger `reward_timeout`."
    )


def _arguments(kwargs: dict[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    """
    Arguments for some of the completions. Lists and the state of the trainer are copies, so that a function that sorts
    or sets them does not affect the trainer.
    """
    count = len(kwargs["prompts"])
    arguments = {key: list(value) if isinstance(value, list) else value for key, value in kwargs.items()}
    if len(positions) < count:
        for key, value in arguments.items():
            if isinstance(value, list) and len(value) == count:
                arguments[key] = [value[index] for index in positions]
            elif key in ("log_extra", "log_metric"):  # take one value per completion and call
                arguments[key] = _log_nothing
    for key in ("prompts", "completions", "completion_ids", "turns"):
        if key in arguments:
            arguments[key] = [_copy(item) for item in arguments[key]]
    if isinstance(arguments.get("trainer_state"), TrainerState):
        arguments["trainer_state"] = ReadOnlyState.of(arguments["trainer_state"])
    return arguments


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of `log_extra` and `log_metric`."""


class ReadOnlyState(TrainerState):
    """The trainer's state as reward functions are shown it. It cannot be set."""

    @classmethod
    def of(cls, state: TrainerState) -> ReadOnlyState:
        """A copy of a state."""
        copy = cls.__new__(cls)
        copies = {key: list(value) if isinstance(value, list) else value for key, value in vars(state).items()}
        copy.__dict__.update(copies)
        return copy

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"`trainer_state.{name}` cannot be set by a reward function: it is the trainer's.")


def _copy(item: Any) -> Any:
    if not isinstance(item, list):
        return item
    return [dict(part) if isinstance(part, dict) else part for part in item]


def check_scores(scores: Any, name: str, expected: int) -> list[float | None]:
    """
    Check scores and return them as a list.

    Args:
        scores (`list`, `tuple`, `numpy.ndarray` or `torch.Tensor`):
            Return value of a reward function.
        name (`str`):
            Name of the function.
        expected (`int`):
            Expected number of scores.

    Raises:
        TypeError: `scores` is not a list, or an item is neither a number nor `None`.
        ValueError: there are more or fewer scores than expected, or a score is NaN or infinite.
    """
    if isinstance(scores, (torch.Tensor, np.ndarray)):
        if scores.ndim != 1:
            raise TypeError(
                f"The reward function `{name}` returned a {type(scores).__name__} of shape {tuple(scores.shape)}; it "
                f"must have one dimension, one score for each of the {expected} completions."
            )
        try:
            scores = scores.tolist()
        except (RuntimeError, NotImplementedError) as error:  # sparse, or on the meta device
            layout = f"{scores.layout}, on {scores.device}" if isinstance(scores, torch.Tensor) else scores.dtype
            raise TypeError(
                f"The reward function `{name}` returned a tensor whose numbers cannot be read ({layout}). Return a "
                "dense one, or a list of numbers."
            ) from error
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
    try:
        value = float(score)
    except OverflowError:  # an integer above all floats
        value = math.inf
    if not abs(value) <= MAX_REWARD:
        raise ValueError(
            f"The reward function `{name}` returned {value!r} for completion {index}. Training on it would "
            f"destroy the weights or silence its group. Return a finite number of at most {MAX_REWARD:g} in "
            "magnitude, or None to leave the completion out."
        )
    return value
