# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Rewards of episodes, re-runs and turns by TRL's reward code, with checks of functions, scores and their reach."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from transformers import TrainerState
from trl import is_conversational
from trl.trainer.utils import get_callable_name, is_async_callable

from ..adapters.manifest import check_model_name
from ..algorithms.functional import team_rewards
from ..config.dataset_checks import REWARD_ARGUMENTS, TURN_ARGUMENTS, column_names, named_sets
from ..config.team_setup import RunContext
from ..episodes.records import Episode, Turn
from ..rewards import environment_reward
from ..seams.libraries import get_logger
from ..seams.trl import TrlRewards
from ..system.event_loop import finished
from ..system.processes import Processes, ending_forks
from ..system.randomness import UserRandomness
from ..system.watchdog import TookTooLong, progress, time_limit
from .failures import Failures, OnFailure, call_reward, wait_here


logger = get_logger(__name__)


class OwnReturns:
    """
    Rewards that agents receive by name, and whether they stay apart or are added up (`MARFTConfig.returns`).

    Args:
        setting: `"team"`, `"agent"`, or `None`: `"agent"` from the first batch on in which an agent is rewarded by
            name.
    """

    def __init__(self, setting: str | None, rewards: TrlRewards, processes: Processes):
        self._setting, self._rewards, self._processes = setting, rewards, processes
        self._were_named = False

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {"were_named": self._were_named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._were_named = state["were_named"]

    @property
    def are_on(self) -> bool:
        """`True` if every agent learns from its own return, as far as is known."""
        return self._setting == "agent" or (self._setting is None and self._were_named)

    def note(self, episodes: Sequence[Episode]) -> bool:
        """Check the episodes of this process in a batch. Return whether every agent learns from its own return."""
        if self._setting is None and not self._were_named:
            named = torch.tensor([float(any(episode.own for episode in episodes))], dtype=torch.float64)
            self._were_named = bool(self._processes.max(named).item())
            if self._were_named:
                logger.info(
                    "Agents are rewarded by name, so every agent learns from its own return. To train all of them on "
                    "the sum, set `returns='team'`."
                )
        return self.are_on

    @property
    def weight(self) -> float:
        """Weight of rewards that are earned in the workflow; 0 if nothing counts them."""
        if environment_reward.__name__ not in self._rewards.names:
            return 0.0
        return self._rewards.weights[self._rewards.names.index(environment_reward.__name__)].item()

    def received(self, episode: Episode, agent: str) -> torch.Tensor:
        """What an agent received by name after each turn of an episode `(K,)`, weighted."""
        rewards = episode.own.get(agent, (0.0,) * len(episode.turns))
        return self.weight * torch.tensor(rewards, dtype=torch.float32)

    def shared(self, episode: Episode) -> torch.Tensor:
        """What the turns of an episode earned for all agents `(K,)`, weighted."""
        earned = self.weight * torch.tensor(episode.earned, dtype=torch.float32)
        return earned - sum((self.received(episode, agent) for agent in episode.own), torch.zeros(len(earned)))

    def get_agent_reward(self, reward: float, episode: Episode, agent: str) -> float:
        """
        An agent's part of the reward of an episode: what all receive, and what it received by name. The reward itself
        with `returns="team"`.

        Args:
            reward: the sum of all that was received in the episode.
        """
        if self._setting == "team" or not episode.own:
            return reward
        others = sum(sum(value) for name, value in episode.own.items() if name != agent)
        return reward - self.weight * others


# Warn if the correlation of two agents' rewards is below the first number, over at least this number of episodes
_OPPOSED, _ENOUGH_EPISODES = -0.5, 8
# Number of generation batches in a row without an advantage after which there is a warning about an agent
PATIENCE = 5


class RewardReach:
    """
    Warns or raises if rewards do not reach the agents. With `returns="team"`, the team's reward is the sum of the
    rewards of its agents, so agents with opposed rewards learn little or nothing from it. With `returns="agent"`, an
    agent that is never rewarded by name learns nothing where the team has no other rewards.
    """

    def __init__(self, agents: Sequence[str]):
        self._in_a_row = dict.fromkeys(agents, 0)
        self._warned: set[tuple[str, ...]] = set()
        self._cancelled = 0  # episodes in a row whose rewards cancel

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; JSON-serializable."""
        return {"in_a_row": self._in_a_row, "warned": sorted(map(list, self._warned)), "cancelled": self._cancelled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._in_a_row |= state["in_a_row"]
        self._warned, self._cancelled = {tuple(names) for names in state["warned"]}, state["cancelled"]

    def check_acted(self, acted: Collection[str]) -> None:
        """
        Warn once if no trained agent acted in a batch.

        Args:
            acted: names of the agents that took a turn, of all processes.
        """
        trained = list(self._in_a_row)
        if acted and not set(acted) & set(trained) and ("", *sorted(acted)) not in self._warned:
            self._warned.add(("", *sorted(acted)))
            logger.warning(
                f"Only {', '.join(map(repr, sorted(acted)))} took turns in the episodes of a batch, but only "
                f"{', '.join(map(repr, trained))} would be trained, so no agent learns from the batch. Check "
                "that the workflow or the application requests turns from the trained agents."
            )

    def check_earned(self, earned: Sequence[Mapping[str, float]], is_all: bool = True) -> None:
        """
        Check the rewards that agents earned in the episodes of a batch.

        Args:
            earned: reward of each agent, for every episode of all processes.
            is_all: `True` if the team gets no other rewards.

        Raises:
            ValueError: the team gets no other rewards, and the rewards of its agents have cancelled in all of the last
                eight or more episodes in which any were earned.
        """
        some = [item for item in earned if any(item.values())]
        names = sorted({name for entry in some for name, value in entry.items() if value})
        if len(names) < 2:
            return
        cancel = all(abs(sum(entry.values())) <= 1e-6 * sum(map(abs, entry.values())) for entry in some)
        self._cancelled = self._cancelled + len(some) if cancel else 0
        if is_all and self._cancelled >= _ENOUGH_EPISODES:
            raise ValueError(
                f"The rewards of the agents {', '.join(map(repr, names))} sum to zero in all of the last "
                f"{self._cancelled} episodes with rewards. With `returns='team'`, all agents learn from the sum, so "
                "no agent would learn anything. Set `returns='agent'`, so that each agent learns from its own "
                "rewards, or add a team reward that does not cancel."
            )
        if len(some) < _ENOUGH_EPISODES:
            return
        values = torch.tensor([[entry.get(name, 0.0) for entry in some] for name in names], dtype=torch.float64)
        for (i, first), (j, other) in itertools.combinations(enumerate(names), 2):
            if (first, other) in self._warned or not (values[i].std() > 0 and values[j].std() > 0):
                continue
            correlation = torch.corrcoef(values[[i, j]])[0, 1].item()
            if correlation < _OPPOSED:
                self._warned.add((first, other))
                logger.warning(
                    f"THE REWARDS OF THE AGENTS {first!r} AND {other!r} ARE OPPOSED (correlation {correlation:.2f} "
                    f"over {len(some)} episodes), but both agents learn from the team's sum, in which the rewards "
                    "cancel. Set `returns='agent'`, so that each agent learns from its own rewards."
                )

    def check_named(self, named: Sequence[Mapping[str, float]], acted: Sequence[str]) -> None:
        """
        Warn about agents that are never rewarded, if all rewards are given to agents by name.

        Args:
            named: what agents received, for every episode of all processes.
            acted: names of the agents that acted in them.
        """
        known = {name for value in named for name in value}
        for name in acted:
            if known and name in self._in_a_row and name not in known and (name, "") not in self._warned:
                self._warned.add((name, ""))
                logger.warning(
                    f"NO REWARD CAN REACH THE AGENT {name!r}: every agent learns from its own rewards, but "
                    f"{len(named)} episodes rewarded only {', '.join(map(repr, sorted(known)))} by name. Add the "
                    "agent to the reward mapping, add a team reward function, or set `returns='team'`."
                )

    def note_advantages(self, have_some: Mapping[str, bool]) -> None:
        """
        Check the advantages of a generation batch.

        Args:
            have_some: `True` for each trained agent that has a turn with a non-zero advantage on any process.
        """
        if not any(have_some.values()):  # no agent has an advantage; other metrics show this
            return
        for name, has_some in have_some.items():
            self._in_a_row[name] = 0 if has_some else self._in_a_row[name] + 1
            if self._in_a_row[name] == PATIENCE and (name,) not in self._warned:
                self._warned.add((name,))
                logger.warning(
                    f"NO REWARD REACHES THE AGENT {name!r}: in {PATIENCE} generation batches in a row it had no turn "
                    "with a nonzero advantage, while other agents learned. Check its turns in the transcripts "
                    "(`log_completions=True`), the settings `credit` and `advantage`, and whether the workflow "
                    "requests turns from it."
                )


# Squares of larger rewards have no place in single precision, so the deviation of a group would be infinite
MAX_REWARD = 1e15


def check_rewards(reward_funcs: Sequence, train_dataset, eval_dataset=None) -> None:
    """
    Raise if a reward function has an argument that neither the datasets nor the trainer provide.

    Args:
        reward_funcs: Functions, models, or names of models.
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
                f"A reward function must be a callable, a reward model or the name of a reward model, got {func!r} of "
                f"type {type(func).__name__}."
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
        functions: reward functions of each agent's turns.
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
            "give the argument a default value."
        )
    refused = [name for name in _ALWAYS_PASSED if not _takes(func, name)]
    if refused:
        raise ValueError(
            f"The reward function `{get_callable_name(func)}` does not accept `{refused[0]}`, but the trainer passes "
            f"{', '.join(_ALWAYS_PASSED)} and all columns of the dataset, as TRL does. Add `**kwargs` to its "
            "arguments."
        )


# Arguments that TRL passes to every reward function
_ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "trainer_state")


def _takes(func: Callable, name: str) -> bool:
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return True
    return name in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _required_arguments(func: Callable) -> list[str]:
    """Return the required arguments of a function, and of the function that it calls for the episode's outcome."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]
    made, outcome = getattr(func, "_marft_outcome", (None, func))
    return own + (_required_arguments(outcome) if made is func else [])


def checked_reward(func, policy: OnFailure | None = None, failures: Failures | None = None):
    """
    Wrap a reward function so that its time is limited and its results are checked: one finite number or `None` per
    completion.

    Models and names of models are returned unchanged. The wrapper keeps the name of the function, passes copies of the
    lists and of the trainer's state to it, and is asynchronous if the function is.

    Args:
        policy: what happens if it fails; by default its error ends the run.
        failures: gets what was skipped.
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
                if policy.timeout is None or time.monotonic() - start < policy.timeout:  # raised by the function
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
    Context manager: errors of a reward function name the function. `sys.exit`, and exceptions that end an iterator or
    a task, become a `RuntimeError`. A forked child process that returns from the function ends here.
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
    """Return a hint for functions that expect messages but get strings, or an empty string."""
    if isinstance(error, TypeError) and "string indices must be integers" in str(error):
        return (
            " Completions are strings because the dataset's prompts are strings. If the function expects messages, "
            'write the prompts as `[{"role": "user", "content": question}]`.'
        )
    return ""


def _is_being_cancelled() -> bool:
    with contextlib.suppress(RuntimeError):  # no event loop runs
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return False


def _too_long(name: str, seconds: float | None, where: str) -> str:
    return (
        f"The reward function `{name}` has not returned for {seconds:g} seconds ({where} is running). Add a time "
        "limit to slow calls, or increase `reward_timeout`."
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
        arguments["trainer_state"] = ReadOnlyState.from_state(arguments["trainer_state"])
    return arguments


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Replacement for `log_extra` and `log_metric`."""


class ReadOnlyState(TrainerState):
    """Read-only copy of the trainer's state for reward functions."""

    @classmethod
    def from_state(cls, state: TrainerState) -> ReadOnlyState:
        """Copy a state."""
        copy = cls.__new__(cls)
        copies = {key: list(value) if isinstance(value, list) else value for key, value in vars(state).items()}
        copy.__dict__.update(copies)
        return copy

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"A reward function cannot set `trainer_state.{name}`, which belongs to the trainer.")


def _copy(item: Any) -> Any:
    if not isinstance(item, list):
        return item
    return [dict(part) if isinstance(part, dict) else part for part in item]


def check_scores(scores: Any, name: str, expected: int) -> list[float | None]:
    """
    Check scores and return them as a list.

    Args:
        scores: Return value of a reward function.
        expected: Expected number of scores.

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
                "dense tensor or a list of numbers."
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
            f"ruin the weights or zero the advantages of its group. Return a finite number of at most {MAX_REWARD:g} "
            "in magnitude, or None to leave the completion out."
        )
    return value


class RewardFunctions(Protocol):
    """The reward functions of a trainer, see [`TrlRewards`]. `F` functions."""

    @property
    def weights(self) -> torch.Tensor:
        """Their weights, `(F,)`."""

    def __call__(self, rows, prompts, completions, completion_ids) -> torch.Tensor:
        """Rewards `(E, F)` of the completions of all processes."""

    def alone(self) -> AbstractContextManager[None]:
        """Context manager: rewards are those of this process."""

    def locally(self, functions: Sequence[Callable] | None = None) -> AbstractContextManager[None]:
        """Context manager: rewards are those of this process, by other functions if some are given."""


class TurnRewards(NamedTuple):
    """
    Rewards of `N` turns by the functions of their agents.

    Args:
        sums (`torch.Tensor` of shape `(N,)`): NaN where none applied.
        by_function: for each turn the reward of each function by its name, NaN where it did not apply; empty for
            agents without functions, and for turns that another one stands for.
    """

    sums: torch.Tensor
    by_function: list[dict[str, float]]


# Seconds after which a blocked event loop is noticed, beyond the time limit of a call
_LATER = 5.0


class RewardScorer:
    """
    Scores episodes, and single turns outside of the one call per generation batch.

    Args:
        turn_functions: for each agent, the functions that score its own turns.
    """

    def __init__(
        self,
        run: RunContext,
        rewards: RewardFunctions,
        turn_functions: Mapping[str, Sequence[Callable]],
        randomness: UserRandomness,
        failures: Failures,
    ):
        self._rewards, self._randomness, self._processes = rewards, randomness, run.processes
        self._policy = policy = OnFailure.from_args(run.args)
        self._turn_functions = {
            name: [checked_reward(func, policy, failures) for func in functions]
            for name, functions in turn_functions.items()
        }
        self._names = {
            agent: numbered([get_callable_name(item) for item in value]) for agent, value in turn_functions.items()
        }

    def score_batch(self, episodes: Sequence[Episode]) -> torch.Tensor:
        """Rewards `(E, F)` of a generation batch, of all processes; NaN where a function does not apply."""
        if self._processes is None:
            return self._score_scorable(episodes)
        with self._processes.together(), self._rewards.alone():
            own = self._score_scorable(episodes)
        return self._processes.join(own)

    def _score_scorable(self, episodes: Sequence[Episode]) -> torch.Tensor:
        """Rewards of the episodes; NaN for those that were skipped."""
        kept = [index for index, episode in enumerate(episodes) if episode.failure is None]
        if not kept:
            return torch.full((len(episodes), len(self._rewards.weights)), torch.nan)
        some = [episodes[index] for index in kept]
        scores = self._score([as_row(episode) for episode in some], [_get_answer(episode) for episode in some])
        if len(kept) == len(episodes):
            return scores
        rewards = scores.new_full((len(episodes), scores.size(1)), torch.nan)
        rewards[kept] = scores
        return rewards

    def combine_rewards(self, per_func: torch.Tensor) -> torch.Tensor:
        """Weighted sum `(E,)` of rewards `(E, F)`, NaN where nothing scored an episode."""
        return team_rewards(per_func, self._rewards.weights.to(per_func.device))

    def score_episodes(self, episodes: Sequence[Episode]) -> torch.Tensor:
        """The team's reward `(E,)` for episodes of this process, NaN where nothing scored one."""
        if not episodes:
            return torch.zeros(0)
        with self._rewards.locally():
            return self.combine_rewards(self._score_scorable(episodes)).cpu()

    def score_turns(self, episodes: Sequence[Episode], turns: Sequence[Turn]) -> TurnRewards:
        """
        Reward of each turn: the sum of its agent's functions. A turn that called tools is scored by the final turn
        that came of it, not by its call.

        Args:
            turns: turns of these episodes, or candidates for one.
        """
        rewards = TurnRewards(torch.full((len(turns),), torch.nan), [{} for _ in turns])
        finals = [episode.final_turn_of(turn) for episode, turn in zip(episodes, turns, strict=True)]
        for agent, functions in self._turn_functions.items():
            mine = {i: turn for i, turn in enumerate(finals) if turn is not None and turn.agent == agent}
            if not mine or not functions:
                continue
            rows = [_turn_row(episodes[index], turn) for index, turn in mine.items()]
            with self._rewards.locally(functions):
                per_func = self._score(rows, list(mine.values()))
            ones = torch.ones(len(functions), device=per_func.device)
            rewards.sums[list(mine)] = team_rewards(per_func, ones).cpu()
            for index, values in zip(mine, per_func.tolist(), strict=True):
                rewards.by_function[index] = dict(zip(self._names[agent], values, strict=True))
        return rewards

    def as_answers(self, episodes: Sequence[Episode], turns: Sequence[Turn]) -> torch.Tensor:
        """
        The team's reward `(N,)` for each turn as if it were the answer of its episode, which is not completed.

        Args:
            turns: candidates for a turn of these episodes.
        """
        pairs = zip(episodes, turns, strict=True)
        rows = [{**as_row(episode), "turns": [*episode.turns, turn]} for episode, turn in pairs]
        with self._rewards.locally():
            return self.combine_rewards(self._score(rows, turns)).cpu()

    def _score(self, rows: Sequence[dict[str, Any]], answers: Sequence[Turn]) -> torch.Tensor:
        """Rewards `(N, F)` of turns as answers to the prompts of dataset rows."""
        prompts = [row["prompt"] for row in rows]
        completions: list[Any] = [turn.text for turn in answers]
        if is_conversational({"prompt": prompts[0]}):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        total = None if self._policy.timeout is None else self._policy.timeout + _LATER
        with self._randomness.user_states(), time_limit(total, functools.partial(_blocked, total)):
            try:
                return self._rewards(rows, prompts, completions, [list(turn.completion_ids) for turn in answers])
            except concurrent.futures.CancelledError as error:
                if getattr(error, "__notes__", None):  # of the function that it names
                    raise
                raise RuntimeError(
                    "An asynchronous reward function canceled tasks that it did not start. Cancel only its own tasks: "
                    "`asyncio.all_tasks()` also contains the trainer's tasks."
                ) from error


def as_row(episode: Episode) -> dict[str, Any]:
    """The dataset row of an episode, and the columns `turns`, `earned` and `environments` for reward functions."""
    own = {"turns": list(episode.turns), "earned": sum(episode.earned, 0.0), "environments": episode.environment}
    return {**episode.row, **own}


def _turn_row(episode: Episode, turn: Turn) -> dict[str, Any]:
    has_ended = turn in episode.turns  # else a candidate
    turns = list(episode.turns) if has_ended else [*episode.turns, turn]
    return {**as_row(episode), "turns": turns, "turn": turn, "answer_turn": episode.answer if has_ended else None}


def _get_answer(episode: Episode) -> Turn:
    if episode.answer is None:
        raise ValueError(f"Episode {episode.index} has no turn to score.")
    return episode.answer


def _blocked(seconds: float | None, where: str) -> str:
    return (
        f"The reward functions have not returned for {seconds:g} seconds ({where} is running). An asynchronous "
        "reward function may block the event loop. Await slow calls, or increase `reward_timeout`."
    )
