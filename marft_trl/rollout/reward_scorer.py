# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Score episodes, re-runs and turns with TRL's reward code, and check reward functions and what they return."""

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
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import trl.rewards
from torch import nn
from transformers import TrainerState
from trl import is_conversational
from trl.trainer.utils import get_callable_name, is_async_callable

from .. import rewards
from ..adapters.manifest import check_model_name
from ..agents import AgentSpec
from ..algorithms.functional import team_rewards
from ..config.dataset_checks import REWARD_ARGUMENTS, TURN_ARGUMENTS, named_sets
from ..config.team_setup import RunContext
from ..episodes.records import Episode, Turn
from ..rewards import environment_reward
from ..seams.libraries import get_logger
from ..seams.trl import TrlRewards
from ..system.event_loop import finished
from ..system.hints import did_you_mean
from ..system.processes import Processes, exiting_forked_children
from ..system.randomness import UserRandomness
from ..system.watchdog import TookTooLong, progress, time_limit
from .failures import Failures, call_reward, wait_here


logger = get_logger(__name__)

# Warn if the correlation of two agents' rewards is below this number, over at least this number of episodes
_MIN_CORRELATION, _MIN_EPISODES = -0.5, 8
PATIENCE = 5  # generation batches in a row without an advantage, before an agent is warned of
MAX_REWARD = 1e15  # squares of larger ones approach the maximum of float32, and a group's deviation would be infinite
_ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "trainer_state")  # by TRL
_BLOCKED_EXTRA_SECONDS = 5.0  # after the limit of a call, until functions that block the event loop are interrupted


class AgentReturns:
    """Rewards of agents by name. A `setting` of `None` becomes `"agent"` with the first batch that has any."""

    def __init__(self, setting: str | None, rewards: TrlRewards, processes: Processes):
        self._setting, self._rewards, self._processes = setting, rewards, processes
        self._found_named_rewards = False

    def state_dict(self) -> dict[str, Any]:
        return {"were_named": self._found_named_rewards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._found_named_rewards = state["were_named"]

    @property
    def are_per_agent(self) -> bool:
        """`True` if every agent learns from its own return, judging by the batches so far."""
        return self._setting == "agent" or (self._setting is None and self._found_named_rewards)

    def note(self, episodes: Sequence[Episode]) -> bool:
        """Look for rewards by name in a batch of this process, and return `are_per_agent`. Collective."""
        if self._setting is None and not self._found_named_rewards:
            has_named = torch.tensor([float(any(episode.own for episode in episodes))], dtype=torch.float64)
            self._found_named_rewards = bool(self._processes.max(has_named).item())
            if self._found_named_rewards:
                logger.info(
                    "Agents are rewarded by name, so every agent learns from its own return. To train all of them on "
                    "the sum, set `returns='team'`."
                )
        return self.are_per_agent

    @property
    def weight(self) -> float:
        """Weight of the rewards earned in the workflow; 0 if `reward_funcs` does not include them."""
        weights = dict(zip(self._rewards.names, self._rewards.weights.tolist(), strict=True))
        return weights.get(environment_reward.__name__, 0.0)

    def named_rewards(self, episode: Episode, agent: str) -> torch.Tensor:
        """Weighted rewards `(K,)` that an agent received by name after each turn of an episode."""
        rewards = episode.own.get(agent, (0.0,) * len(episode.turns))
        return self.weight * torch.tensor(rewards, dtype=torch.float32)

    def shared_rewards(self, episode: Episode) -> torch.Tensor:
        """Weighted rewards `(K,)` that all agents received after each turn of an episode."""
        earned = self.weight * torch.tensor(episode.earned, dtype=torch.float32)
        return earned - sum((self.named_rewards(episode, agent) for agent in episode.own), torch.zeros(len(earned)))

    def get_agent_reward(self, reward: float, episode: Episode, agent: str) -> float:
        """Return the reward of an episode, without what others got by name unless `returns` is "team"."""
        if self._setting == "team" or not episode.own:
            return reward
        reward_of_others = sum(sum(rewards) for name, rewards in episode.own.items() if name != agent)
        return reward - self.weight * reward_of_others


class RewardReachChecker:
    """Warns or raises if rewards do not reach trained agents: opposed ones cancel in a sum, or all go to others."""

    def __init__(self, agents: Sequence[str]):
        self._batches_without_advantage = dict.fromkeys(agents, 0)  # in a row
        self._warned: set[tuple[str, ...]] = set()  # names of the functions and agents of each warning
        self._num_cancelled = 0  # episodes in a row in which the rewards of the agents cancel

    def state_dict(self) -> dict[str, Any]:
        warned = sorted(map(list, self._warned))
        return {"in_a_row": self._batches_without_advantage, "warned": warned, "cancelled": self._num_cancelled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches_without_advantage |= state["in_a_row"]
        self._warned, self._num_cancelled = {tuple(names) for names in state["warned"]}, state["cancelled"]

    def check_acted(self, acted: Collection[str]) -> None:
        trained = list(self._batches_without_advantage)
        if acted and not set(acted) & set(trained) and ("", *sorted(acted)) not in self._warned:
            self._warned.add(("", *sorted(acted)))
            logger.warning(
                f"Only {', '.join(map(repr, sorted(acted)))} took turns in the episodes of a batch, but only "
                f"{', '.join(map(repr, trained))} would be trained, so no agent learns from the batch. Check "
                "that the workflow or the application requests turns from the trained agents."
            )

    def check_opposed(self, earned: Sequence[Mapping[str, float]], no_other_rewards: bool = True) -> None:
        """
        Warn if the rewards that agents earned in the episodes of all processes are opposed. Raises `ValueError` if the
        team gets no other rewards, and they have cancelled in all of the last eight or more episodes with rewards.
        """
        rewarded = [rewards for rewards in earned if any(rewards.values())]
        names = sorted({name for rewards in rewarded for name, reward in rewards.items() if reward})
        if len(names) < 2:
            return
        cancel = all(abs(sum(rewards.values())) <= 1e-6 * sum(map(abs, rewards.values())) for rewards in rewarded)
        self._num_cancelled = self._num_cancelled + len(rewarded) if cancel else 0
        if no_other_rewards and self._num_cancelled >= _MIN_EPISODES:
            raise ValueError(
                f"The rewards of the agents {', '.join(map(repr, names))} sum to zero in all of the last "
                f"{self._num_cancelled} episodes with rewards. With `returns='team'`, all agents learn from the sum, "
                "so no agent would learn anything. Set `returns='agent'`, so that each agent learns from its own "
                "rewards, or add a team reward that does not cancel."
            )
        if len(rewarded) < _MIN_EPISODES:
            return
        values = torch.tensor([[rewards.get(name, 0.0) for rewards in rewarded] for name in names], dtype=torch.double)
        for (i, first), (j, second) in itertools.combinations(enumerate(names), 2):
            if (first, second) in self._warned or not (values[i].std() > 0 and values[j].std() > 0):
                continue
            correlation = torch.corrcoef(values[[i, j]])[0, 1].item()
            if correlation < _MIN_CORRELATION:
                self._warned.add((first, second))
                logger.warning(
                    f"THE REWARDS OF THE AGENTS {first!r} AND {second!r} ARE OPPOSED (correlation {correlation:.2f} "
                    f"over {len(rewarded)} episodes), but both agents learn from the team's sum, in which the rewards "
                    "cancel. Set `returns='agent'`, so that each agent learns from its own rewards."
                )

    def check_rewarded_by_name(self, named_rewards: Sequence[Mapping[str, float]], acted: Sequence[str]) -> None:
        rewarded = {name for rewards in named_rewards for name in rewards}
        for name in acted:
            is_trained = name in self._batches_without_advantage
            if rewarded and is_trained and name not in rewarded and (name, "") not in self._warned:
                self._warned.add((name, ""))
                logger.warning(
                    f"NO REWARD CAN REACH THE AGENT {name!r}: every agent learns from its own rewards, but "
                    f"{len(named_rewards)} episodes rewarded only {', '.join(map(repr, sorted(rewarded)))} by name. "
                    "Add the agent to the reward mapping, add a team reward function, or set `returns='team'`."
                )

    def note_advantages(self, has_advantage: Mapping[str, bool]) -> None:
        if not any(has_advantage.values()):  # no agent learns; other metrics show this
            return
        counts = self._batches_without_advantage
        for name, learns in has_advantage.items():
            counts[name] = 0 if learns else counts[name] + 1
            if counts[name] == PATIENCE and (name,) not in self._warned:
                self._warned.add((name,))
                logger.warning(
                    f"NO REWARD REACHES THE AGENT {name!r}: in {PATIENCE} generation batches in a row it had no turn "
                    "with a nonzero advantage, while other agents learned. Check its turns in the transcripts "
                    "(`log_completions=True`), the settings `credit` and `advantage`, and whether the workflow "
                    "requests turns from it."
                )


def check_reward_functions(reward_funcs: Sequence, train_dataset, eval_dataset=None) -> None:
    if not reward_funcs:
        raise ValueError(
            "No reward source provided. Pass `reward_funcs` (a function such as `trl.rewards.accuracy_reward`, a list "
            "of functions, or a reward model), or an `environment_factory` whose environment defines `get_reward`."
        )
    datasets = {"train_dataset": train_dataset, **named_sets(eval_dataset)}
    columns_of = {name: dataset.column_names for name, dataset in datasets.items()}
    for func in reward_funcs:
        if not isinstance(func, (str, nn.Module)) and not callable(func):
            raise TypeError(
                f"A reward function must be a callable, a reward model or the name of a reward model, got {func!r} of "
                f"type {type(func).__name__}."
            )
        if isinstance(func, str):
            _check_reward_name(func)
        for name, columns in columns_of.items():
            _check_arguments(func, name, columns)


def _check_reward_name(name: str) -> None:
    """Raise for the name of a reward function, which is no model, and for a model that cannot be there."""
    known = {*trl.rewards.__all__, *rewards.__all__}
    if name in known:
        raise ValueError(
            f"`reward_funcs={name!r}` is the name of a reward function, and a text stands for a reward model. Import "
            f"the function, and pass it: `reward_funcs={name}`."
        )
    try:
        check_model_name(name, "reward_funcs")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}{did_you_mean(name, known)}") from None


def unique_names(names: Sequence[str]) -> list[str]:
    """Return the names with a number appended to repeated names, e.g. `["a", "a_2"]` for `["a", "a"]`."""
    unique: list[str] = []
    for index, name in enumerate(names):
        candidates = (f"{name}_{number}" for number in itertools.count(2))
        unused = (candidate for candidate in candidates if candidate not in unique and candidate not in names)
        unique.append(name if names.index(name) == index else next(unused))
    return unique


def check_turn_reward_functions(functions: Mapping[str, Sequence[Callable]], train_dataset) -> None:
    for func in itertools.chain.from_iterable(functions.values()):
        _check_arguments(func, "train_dataset", train_dataset.column_names, TURN_ARGUMENTS)


def _check_arguments(
    func: Any, dataset: str, columns: Sequence[str] | None, passed: Sequence[str] = REWARD_ARGUMENTS
) -> None:
    if isinstance(func, (str, nn.Module)):
        return
    available = {*(columns or ()), *passed} - {"prompt"}
    missing = [name for name in _required_arguments(func) if name not in available]
    if missing and columns is not None:  # a stream may have any
        raise ValueError(
            f"The reward function `{get_callable_name(func)}` needs {missing}, but `{dataset}` has the columns "
            f"{sorted(columns)} and the trainer passes {list(passed)}. Add the column, or give the argument a default."
        )
    parameters = _parameters(func)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    accepted = {parameter.name for parameter in parameters}
    if rejected := [name for name in _ALWAYS_PASSED if not takes_any and name not in accepted]:
        raise ValueError(
            f"The reward function `{get_callable_name(func)}` does not accept `{rejected[0]}`, but the trainer passes "
            f"{', '.join(_ALWAYS_PASSED)} and all columns, as TRL does. Add `**kwargs` to its arguments."
        )


def _parameters(func: Callable) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def _required_arguments(func: Callable) -> list[str]:
    """Return the required arguments of a function, and of its outcome function, see [`get_solver_reward`]."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in _parameters(func) if p.kind in kinds and p.default is inspect.Parameter.empty]
    wrapper, outcome = getattr(func, "_marft_outcome", (None, func))
    return required + (_required_arguments(outcome) if wrapper is func else [])


def _judging_agent(function: Any) -> str | None:
    """The agent whose verdict a reward function reads, also behind `functools.partial` and `functools.wraps`."""
    while (inner := getattr(function, "__wrapped__", None) or getattr(function, "func", None)) is not None:
        function = inner
    return getattr(function, "judging_agent", None)


def check_judges(agents: Sequence[AgentSpec], team: Sequence[Any], of_agents: Mapping[str, Sequence[Any]]) -> None:
    """Raise `ValueError` for a judge that is unknown, or trained on its own scores; `of_agents` score own turns."""
    by_name = {agent.name: agent for agent in agents}
    trained = {agent.adapter for agent in agents if agent.trainable}
    for owner, functions in {"": team, **of_agents}.items():
        for judge in filter(None, map(_judging_agent, functions)):
            if judge not in by_name:
                raise ValueError(
                    f"`judge_reward({judge!r})` names an unknown agent. The team's agents are "
                    f"{', '.join(map(repr, by_name))}.{did_you_mean(judge, by_name)}"
                )
            # Its adapter may be that of a trained agent
            is_trained = by_name[judge].has_policy and by_name[judge].adapter in trained
            if is_trained and owner in ("", judge):
                raise ValueError(
                    f"`judge_reward({judge!r})` would train {judge!r} on its own scores, so the agent would learn to "
                    f"give itself the highest score. Freeze the agent with a separate adapter (`AgentSpec({judge!r}, "
                    "trainable=False)`), let a function write its turns (`reply=...`), or let this function reward "
                    "only other agents (`AgentSpec(reward_funcs=...)`)."
                )


def wrap_reward_function(func, timeout: float | None = None, failures: Failures | None = None):
    """
    Wrap a reward function, but no model, with a time limit of a call in seconds and a check of its scores. It keeps
    its name, is asynchronous if it was, and gets copies. Without `failures`, errors are raised.
    """
    if isinstance(func, (str, nn.Module)):
        return func
    name = get_callable_name(func)

    async def call_async(**kwargs):
        async def call(positions):
            start = time.monotonic()
            progress()
            try:
                with naming_function(name, is_async=True):
                    scores = await asyncio.wait_for(func(**_select_arguments(kwargs, positions)), timeout)
            except TimeoutError as error:
                if timeout is None or time.monotonic() - start < timeout:  # raised by the function
                    raise
                raise TookTooLong(_timeout_message(name, timeout, "it")) from error
            finally:
                progress()
            return check_scores(scores, name, len(positions))

        return await call_reward(call, len(kwargs["prompts"]), name, failures, asyncio.sleep)

    def call_sync(**kwargs):
        async def call(positions):
            message = functools.partial(_timeout_message, name, timeout)
            with time_limit(timeout, message), naming_function(name):
                scores = func(**_select_arguments(kwargs, positions))
            return check_scores(scores, name, len(positions))

        return finished(call_reward(call, len(kwargs["prompts"]), name, failures, wait_here))

    wrapper: Callable = call_async if is_async_callable(func) else call_sync
    functools.update_wrapper(wrapper, func, assigned=("__doc__", "__module__"), updated=())
    wrapper.__name__ = wrapper.__qualname__ = name
    return wrapper


@contextlib.contextmanager
def naming_function(name: str, is_async: bool = False) -> Iterator[None]:
    """Name the function in errors; those that would end the process, an iterator or a task become `RuntimeError`s."""
    try:
        with exiting_forked_children():
            yield
    except SystemExit as error:
        raise RuntimeError(f"The reward function `{name}` called `sys.exit({error.code!r})`.") from error
    except (StopIteration, StopAsyncIteration, GeneratorExit) as error:
        if is_async and isinstance(error, GeneratorExit):  # the coroutine was closed early
            raise
        # `from None`, since `contextlib` re-raises a `StopIteration` that is the cause of another error
        raise RuntimeError(f"The reward function `{name}` raised {type(error).__name__}.") from None
    except asyncio.CancelledError as error:
        with contextlib.suppress(RuntimeError):  # no event loop runs
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        raise RuntimeError(f"The reward function `{name}` raised {type(error).__name__}.") from error
    except Exception as error:
        hint = ""
        if isinstance(error, TypeError) and "string indices must be integers" in str(error):
            hint = (
                " Completions are strings because the dataset's prompts are strings. If the function expects "
                'messages, write the prompts as `[{"role": "user", "content": question}]`.'
            )
        error.add_note(f"Raised by the reward function `{name}`.{hint}")
        raise


def _timeout_message(name: str, seconds: float | None, where: str) -> str:
    return (
        f"The reward function `{name}` has not returned for {seconds:g} seconds ({where} is running). Add a time "
        "limit to slow calls, or increase `reward_timeout`."
    )


def _select_arguments(kwargs: dict[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    """Return copies of the arguments for these completions, so that functions cannot change the trainer's."""
    count = len(kwargs["prompts"])
    arguments = {key: list(value) if isinstance(value, list) else value for key, value in kwargs.items()}
    if len(positions) < count:
        for key, value in arguments.items():
            if isinstance(value, list) and len(value) == count:
                arguments[key] = [value[index] for index in positions]
            elif key in ("log_extra", "log_metric"):  # a call must log one value per completion
                arguments[key] = lambda *args, **kwargs: None
    for key in ("prompts", "completions", "completion_ids", "turns"):
        if key in arguments:
            arguments[key] = [_copy(item) for item in arguments[key]]
    if isinstance(arguments.get("trainer_state"), TrainerState):
        arguments["trainer_state"] = ReadOnlyState(arguments["trainer_state"])
    return arguments


class ReadOnlyState(TrainerState):
    def __init__(self, state: TrainerState):
        copies = {key: list(value) if isinstance(value, list) else value for key, value in vars(state).items()}
        self.__dict__.update(copies)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"A reward function cannot set `trainer_state.{name}`, which belongs to the trainer.")


def _copy(item: Any) -> Any:
    if not isinstance(item, list):
        return item
    return [dict(part) if isinstance(part, dict) else part for part in item]


def check_scores(scores: Any, name: str, expected: int) -> list[float | None]:
    """Return the scores of a reward function as a list: for each completion, one finite number or `None`."""
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


class TurnRewards(NamedTuple):
    """Rewards of `N` turns by the functions of their agents."""

    sums: torch.Tensor  # (N,), sum over the functions, NaN if none of them applied
    by_function: list[dict[str, float]]  # of each turn; NaN if a function did not apply


class RewardScorer:
    def __init__(
        self,
        run: RunContext,
        rewards: TrlRewards,
        turn_functions: Mapping[str, Sequence[Callable]],
        randomness: UserRandomness,
        failures: Failures | None,
    ):
        self._rewards, self._randomness, self._processes = rewards, randomness, run.processes
        self._timeout = run.args.reward_timeout
        self._turn_functions = {
            name: [wrap_reward_function(func, self._timeout, failures) for func in functions]
            for name, functions in turn_functions.items()
        }
        self._names = {
            agent: unique_names([get_callable_name(func) for func in functions])
            for agent, functions in turn_functions.items()
        }

    def score_batch(self, episodes: Sequence[Episode]) -> torch.Tensor:
        """Rewards `(E, F)` of a generation batch over all processes; NaN if a function does not apply. Collective."""
        with self._processes.failing_together(), self._rewards.without_gathering():
            local_rewards = self._score_completed(episodes)
        return self._processes.gather_rows(local_rewards)

    def _score_completed(self, episodes: Sequence[Episode]) -> torch.Tensor:
        """Rewards `(E, F)` of episodes; NaN for skipped episodes."""
        indices = [index for index, episode in enumerate(episodes) if episode.failure is None]
        if not indices:
            return torch.full((len(episodes), len(self._rewards.weights)), torch.nan)
        completed = [episodes[index] for index in indices]
        answers = [cast(Turn, episode.answer) for episode in completed]
        scores = self._score([as_row(episode) for episode in completed], answers)
        rewards = scores.new_full((len(episodes), scores.size(1)), torch.nan)
        rewards[indices] = scores
        return rewards

    def combine_rewards(self, per_func: torch.Tensor) -> torch.Tensor:
        """Weighted sum `(E,)` of rewards `(E, F)`; NaN if no function scored an episode."""
        return team_rewards(per_func, self._rewards.weights.to(per_func.device))

    def score_episodes(self, episodes: Sequence[Episode]) -> torch.Tensor:
        """The team's reward `(E,)` for episodes of this process; NaN if no function scored an episode."""
        with self._rewards.locally():
            return self.combine_rewards(self._score_completed(episodes)).cpu()

    def score_turns(self, episodes: Sequence[Episode], turns: Sequence[Turn]) -> TurnRewards:
        """Sum the rewards of a turn or candidate of each episode. A turn that called tools gets its final turn's."""
        rewards = TurnRewards(torch.full((len(turns),), torch.nan), [{} for _ in turns])
        finals = [episode.final_turn_of(turn) for episode, turn in zip(episodes, turns, strict=True)]
        for agent, functions in self._turn_functions.items():
            own_turns = {i: turn for i, turn in enumerate(finals) if turn is not None and turn.agent == agent}
            if not own_turns or not functions:
                continue
            rows = [_turn_row(episodes[index], turn) for index, turn in own_turns.items()]
            with self._rewards.locally(functions):
                per_func = self._score(rows, list(own_turns.values()))
            ones = torch.ones(len(functions), device=per_func.device)
            rewards.sums[list(own_turns)] = team_rewards(per_func, ones).cpu()
            for index, values in zip(own_turns, per_func.tolist(), strict=True):
                rewards.by_function[index] = dict(zip(self._names[agent], values, strict=True))
        return rewards

    def score_as_answers(self, episodes: Sequence[Episode], turns: Sequence[Turn]) -> torch.Tensor:
        """The team's reward `(N,)` for each candidate as if it were the answer of its incomplete episode."""
        pairs = zip(episodes, turns, strict=True)
        rows = [{**as_row(episode), "turns": [*episode.turns, turn]} for episode, turn in pairs]
        with self._rewards.locally():
            return self.combine_rewards(self._score(rows, turns)).cpu()

    def _score(self, rows: Sequence[dict[str, Any]], answers: Sequence[Turn]) -> torch.Tensor:
        """Rewards `(N, F)` of answers to the prompts of dataset rows."""
        prompts = [row["prompt"] for row in rows]
        completions: list[Any] = [turn.text for turn in answers]
        if is_conversational({"prompt": prompts[0]}):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        limit = None if self._timeout is None else self._timeout + _BLOCKED_EXTRA_SECONDS
        with self._randomness.user_states(), time_limit(limit, functools.partial(_blocked_message, limit)):
            try:
                return self._rewards(rows, prompts, completions, [list(turn.completion_ids) for turn in answers])
            except concurrent.futures.CancelledError as error:
                if getattr(error, "__notes__", None):  # raised by the function that the note names
                    raise
                raise RuntimeError(
                    "An asynchronous reward function canceled tasks that it did not start. Cancel only its own tasks: "
                    "`asyncio.all_tasks()` also contains the trainer's tasks."
                ) from error


def as_row(episode: Episode) -> dict[str, Any]:
    columns = {"turns": list(episode.turns), "earned": sum(episode.earned, 0.0), "environments": episode.environment}
    # With the images of the row in the messages, as in TRL
    return {**episode.row, "prompt": episode.prompt, **columns}


def _turn_row(episode: Episode, turn: Turn) -> dict[str, Any]:
    is_candidate = turn not in episode.turns
    turns = [*episode.turns, turn] if is_candidate else list(episode.turns)
    return {**as_row(episode), "turns": turns, "turn": turn, "answer_turn": None if is_candidate else episode.answer}


def _blocked_message(seconds: float | None, where: str) -> str:
    return (
        f"The reward functions have not returned for {seconds:g} seconds ({where} is running). An asynchronous "
        "reward function may block the event loop. Await slow calls, or increase `reward_timeout`."
    )
