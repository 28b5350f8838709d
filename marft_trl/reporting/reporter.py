# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Log a run: metrics of rollouts, evaluations and games, the completions table, transcripts and learning curves."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from ..algorithms.baselines import CREDITS
from ..algorithms.functional import nan_std
from ..config.team_setup import RunContext, TeamSetup
from ..episodes.records import Messages
from ..rollout.reward_scorer import AgentReturns
from ..rollout.rollouts import Rollout
from ..seams.libraries import get_logger
from ..seams.trl import TrlRewards
from ..system.randomness import UserRandomness
from ..system.redaction import without_secrets
from ..system.run_metrics import AGENT_METRICS, length_metrics
from . import evaluation
from .transcripts import (
    INDEX,
    Advantage,
    Transcript,
    html_page,
    log_traces,
    page_name,
    remove_old_completions,
    without_pixels,
    write_index,
)


logger = get_logger(__name__)


def save_learning_curve(
    log_history: Sequence[dict], folder: str | os.PathLike, columns: Sequence[str] = ("reward", "entropy")
) -> None:
    """
    Write `learning_curve.csv` and `learning_curve.png` (one panel per column).

    Args:
        columns (`Sequence[str]`, *optional*, defaults to `("reward", "entropy")`):
            Names of the metrics to write. Metrics of an agent are named `agents/<name>/...`.

    Raises:
        ImportError: matplotlib is missing (`pip install matplotlib`). The CSV file is still written.
    """
    folder = Path(folder)
    entries = [entry for entry in log_history if any(column in entry for column in columns)]
    with open(folder / "learning_curve.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["step", *columns], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(entries)

    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.5 * len(columns)))
    for position, column in enumerate(columns, start=1):
        axes = figure.add_subplot(len(columns), 1, position)
        points = [(entry["step"], entry[column]) for entry in entries if entry.get(column) is not None]
        axes.plot([step for step, _ in points], [value for _, value in points])
        axes.set_ylabel(column)
        axes.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(folder / "learning_curve.png", dpi=120)


class GameMetrics:
    def __init__(self, team: TeamSetup, own: AgentReturns):
        self._agents, self._trained, self._own = team.names, team.trained, own

    def played(self, rollout: Rollout) -> list[dict[str, float] | None]:
        """Returns by agent of the episodes of this process; `None` if unscored, or if all agents share a return."""
        if not rollout.has_own_returns:
            return [None] * len(rollout.episodes)
        return [
            {name: self._own.get_agent_reward(reward, episode, name) for name in self._agents}
            if reward == reward and episode.turns
            else None
            for episode, reward in zip(rollout.episodes, rollout.local_rewards, strict=True)
        ]

    def metrics(self, played: Iterable[Mapping[str, float] | None]) -> dict[str, float]:
        """Returns of agents; win and draw rates of trained agents."""
        scored = [returns for returns in played if returns is not None]
        if not scored:
            return {}
        means = {name: sum(returns[name] for returns in scored) / len(scored) for name in self._agents}
        metrics = {f"agents/{name}/return": mean for name, mean in means.items()}
        for name in self._trained:
            for other in (other for other in self._agents if other != name):
                metrics |= _win_rates(scored, name, other)
        return metrics


def _win_rates(played: Sequence[Mapping[str, float]], name: str, other: str) -> dict[str, float]:
    pairs = [(returns[name], returns[other]) for returns in played]
    equal = [math.isclose(*pair, rel_tol=1e-5, abs_tol=1e-6) for pair in pairs]  # rewards add up in float32
    wins = sum(own_return > value and not same for (own_return, value), same in zip(pairs, equal, strict=True))
    rates = {"win_rate": wins / len(played), "draw_rate": sum(equal) / len(played)}
    return {f"agents/{name}/{rate}/{other}": share for rate, share in rates.items()}


# Number of episodes per logging step to print and to write as a page, if `num_completions_to_print` is not set.
MAX_TRANSCRIPTS = 16
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
TABLE_COLUMNS = ("mode", "episode", "turn", "agent", "sees")  # columns of the completions table that identify a turn


class TableRow(NamedTuple):
    prompt: Any
    completion: str
    rewards: Mapping[str, float | None]
    advantage: float | None
    columns: Mapping[str, Any]


class TurnFacts(NamedTuple):
    agent: str
    prompt_tokens: int  # of the observation
    tokens: int  # of the turn
    truncated: bool
    episode: int  # index among the episodes of all processes


class Reporter:
    """Reports rollouts and evaluations. `vote` extracts from the text of an answer the value that samples vote on."""

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        rewards: TrlRewards,
        get_tokenizer: Callable[[str], PreTrainedTokenizerBase],  # of an agent
        randomness: UserRandomness,
        eval_metrics: Sequence[evaluation.EvalMetric] = (),
        vote: evaluation.Vote = evaluation.last_box,
        games: GameMetrics | None = None,
    ):
        self._games = games
        self._agents, self._rewards, self._eval_metrics = team.names, rewards, list(eval_metrics)
        self._adapters = {agent.name: agent.adapter for agent in team.agents if agent.has_policy}
        self._get_tokenizer, self._randomness = get_tokenizer, randomness
        self._args, self._settings = run.args, run.settings
        self._metrics, self._state, self._processes = run.metrics, run.state, run.processes
        self._table: dict[str, list[TableRow]] = {"train": [], "eval": []}
        self._transcripts: list[Transcript] = []
        self._episode_rewards: list[float | None] = []  # of all episodes, with and without a transcript
        self._records: list[dict[str, Any]] = []  # episodes of the current evaluation
        self._warned_of_lost_reruns = False
        self.generated_tokens = 0  # in training, candidates and re-runs included
        self.evaluation_error = 0.0  # standard error of the reward of the last evaluation
        self.question_means: dict[str, list[float]] = {}  # rewards in the last evaluation of each set, by metric
        self.k_values: Sequence[int] | None = run.args.eval_k  # evaluations report pass@k and maj@k for these
        self._vote = vote
        run.state.fill_table((), (), (), {}, {})

    def state_dict(self) -> dict[str, Any]:
        return {"generated_tokens": self.generated_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generated_tokens = state["generated_tokens"]

    def rollout(
        self,
        rollout: Rollout,
        std: torch.Tensor | None,
        advantages: Sequence[Sequence[Advantage]],
        own_rewards: Sequence[Sequence[Mapping[str, float]]],
        generated: Mapping[str, int],
    ) -> None:
        """
        Report a training rollout. `std` (E,) is the standard deviation in the group of each episode. `advantages` has
        `None` for turns without a row, `own_rewards` may be empty, and `generated` counts candidates and re-runs.
        """
        all_sampled = rollout.drawn or rollout  # before episodes were selected by reward
        for index, name in enumerate(self._rewards.names):
            scores = all_sampled.rewards_per_func[:, index]
            self._metrics.add(f"rewards/{name}/mean", torch.nanmean(scores).item())
            self._metrics.add(f"rewards/{name}/std", nan_std(scores).item())
        self._metrics.add("reward", torch.nanmean(all_sampled.rewards).item())
        self._metrics.add("reward_std", nan_std(all_sampled.rewards).item())
        if std is not None and self._settings.group_size(training=True) > 1:
            share = share_of_zeros(std) if rollout.drawn is None else rollout.drawn.without_signal
            self._metrics.add("frac_reward_zero_std", share)
        self._metrics.add("frac_unscored", all_sampled.rewards.isnan().float().mean().item())
        self._report_turns(rollout, generated)
        if self._games is not None:
            played = self._processes.gather(self._games.played(rollout))
            for name, value in self._games.metrics(played).items():
                self._metrics.add(name, value)
        self._report_user_metrics()
        self._clear("train")
        self._tabulate(rollout, advantages, own_rewards)

    def _report_turns(self, rollout: Rollout, generated: Mapping[str, int]) -> None:
        places = [(turn, rollout.first + episode.index) for episode in rollout.episodes for turn in episode.turns]
        turns = self._processes.gather(
            [TurnFacts(t.agent, len(t.prompt_ids), len(t.completion_ids), t.truncated, place) for t, place in places]
        )
        counts_by_process = self._processes.gather([dict(generated)])
        for name in ("turns", "tokens") if any(counts_by_process) else ():
            self._metrics.add(f"branches/{name}", float(sum(counts.get(name, 0) for counts in counts_by_process)))
        self._report_reruns(*(sum(counts.get(name, 0) for counts in counts_by_process) for name in ("reruns", "lost")))
        self._state.count_tokens(sum(turn.prompt_tokens + turn.tokens for turn in turns))
        self._state.count_tokens(sum(counts.get("tokens", 0) for counts in counts_by_process))
        sampled = sum(turn.tokens for turn in turns if turn.agent in self._adapters)  # `reply` writes the others
        self.generated_tokens += sampled + sum(counts.get("tokens", 0) for counts in counts_by_process)
        if rollout.drawn is not None:
            drawn = self._processes.gather([(rollout.drawn.tokens, rollout.drawn.generated)])
            self._state.count_tokens(sum(tokens for tokens, _ in drawn))
            self.generated_tokens += sum(generated for _, generated in drawn)
        self._metrics.set("num_tokens", self._state.num_tokens_seen)
        self._metrics.set("num_generated_tokens", self.generated_tokens)
        for name, value in length_metrics([turn.tokens for turn in turns], [turn.truncated for turn in turns]).items():
            self._metrics.add(name, value)
        for agent in self._agents:
            agent_turns = [turn for turn in turns if turn.agent == agent]
            if agent_turns:
                lengths = length_metrics(
                    [turn.tokens for turn in agent_turns], [turn.truncated for turn in agent_turns]
                )
                for name in lengths.keys() & AGENT_METRICS:
                    self._metrics.add(f"agents/{agent}/{name}", lengths[name])
            self._metrics.add(f"agents/{agent}/turns", len(agent_turns) / len(rollout.rewards))
            rewards = rollout.rewards[[turn.episode for turn in agent_turns]] if agent_turns else rollout.rewards[:0]
            self._metrics.add(f"agents/{agent}/reward", torch.nanmean(rewards).item())

    def _report_reruns(self, count: int, lost: int) -> None:
        """Report re-runs, over all processes, that do not contain the turn they were made for."""
        if count:
            self._metrics.add("rerun/lost", lost / count)
        if lost and not self._warned_of_lost_reruns:
            self._warned_of_lost_reruns = True
            name = "credit" if CREDITS[self._args.credit].reruns else "advantage"
            logger.warning(
                f"{lost} of {count} re-runs of `{name}={getattr(self._args, name)!r}` do not contain the turn that "
                "they were made for, because the workflow showed the agent something else. These re-runs are "
                "ignored; a turn or candidate without another re-run gets the advantage 0. Observations must depend "
                "only on the dataset row and the turns: seed random numbers from the row, and do not use times or "
                "the order in which answers arrive. `rerun/lost` logs the share; this warning is logged once."
            )

    def _report_user_metrics(self) -> None:
        """Report the values that reward functions passed to `log_metric`, averaged over processes."""
        own = {name: (sum(values), len(values)) for name, values in self._state.take_user_metrics().items()}
        everywhere = self._processes.gather([own])
        for name in sorted({name for totals_by_name in everywhere for name in totals_by_name}):
            totals = [totals_by_name[name] for totals_by_name in everywhere if name in totals_by_name]
            self._metrics.add(name, sum(total for total, _ in totals) / sum(count for _, count in totals))

    def begin_evaluation(self) -> None:
        self._records = []
        self._metrics.clear("eval")  # the model may still be in training mode
        self._clear("eval")

    def evaluated(self, rollout: Rollout, rows: Sequence[dict[str, Any]], std: torch.Tensor | None) -> None:
        """Record a batch of an evaluation. `std` (E,) is the standard deviation in the group of each episode."""
        if std is not None:
            self._metrics.add("frac_reward_zero_std", share_of_zeros(std))
        self._metrics.set("num_tokens", self._state.num_tokens_seen)
        self._report_user_metrics()
        self._tabulate(rollout)
        played = self._games.played(rollout) if self._games is not None else [None] * len(rollout.episodes)
        records = [
            {
                "row": row,
                "played": played[index],
                "answer": episode.answer.text if episode.answer is not None else "",
                "reward": _to_float(rollout.rewards[rollout.first + index]),
                "rewards": self._rewards_by_function(rollout, index),
                "turns": list(episode.turns),
            }
            for index, (row, episode) in enumerate(zip(rows, rollout.episodes, strict=True))
        ]
        self._records.extend(self._processes.gather(records))

    def end_evaluation(self, dataset: Any, name: str = "eval") -> dict[str, float]:
        """The metrics, without a prefix and, but for streams, without rows that processes repeat at the end."""
        records = self._records
        with contextlib.suppress(TypeError):  # a stream has no length
            records = records[: len(dataset) * self._settings.group_size(training=False)]
        if not records:
            return {}
        metrics = evaluation.summarize(records, self._agents)
        means = evaluation.question_means(records, self._settings.group_size(training=False))
        self.question_means |= {f"{name}_{metric}": values for metric, values in means.items()}
        known = [record["reward"] for record in records if record["reward"] is not None]
        rewards = torch.tensor(known, dtype=torch.float64)
        self.evaluation_error = rewards.std().item() / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
        if self._games is not None:
            metrics |= self._games.metrics(record["played"] for record in records)
        columns = {key: [record["row"].get(key) for record in records] for key in records[0]["row"]}
        columns["turns"] = [record["turns"] for record in records]
        answers, reference = [record["answer"] for record in records], self._args.eval_reference_column
        with self._randomness.user_states():
            metrics |= evaluation.measure_answers(self._eval_metrics, answers, columns, reference)
            metrics |= self._sample_metrics(records, name)
        metrics |= self._metrics.means("eval")
        self._metrics.clear("eval")  # TRL would log them as `eval_<name>` for every set
        return metrics

    def _sample_metrics(self, records: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
        if self.k_values is None:
            return {}
        rows = evaluation.sample_rows(records, self._vote, self._args.eval_right_at, self._args.eval_right_by)
        if self._processes.is_main:
            step = self._state.optimizer_step
            evaluation.write_samples(Path(self._args.output_dir or "."), rows, name, step, self._args.seed)
        return evaluation.at_k(rows, self.k_values)

    def _rewards_by_function(self, rollout: Rollout, index: int) -> dict[str, float | None]:
        scores = rollout.rewards_per_func[rollout.first + index]
        return {name: _to_float(value) for name, value in zip(self._rewards.names, scores, strict=True)}

    def _clear(self, mode: str) -> None:
        self._table[mode].clear()
        self._transcripts.clear()
        self._episode_rewards.clear()

    def _tabulate(
        self,
        rollout: Rollout,
        advantages: Sequence[Sequence[Advantage]] | None = None,
        own_rewards: Sequence[Sequence[Mapping[str, float]]] = (),
    ) -> None:
        extra = self._user_columns(len(rollout.episodes))
        if not self._settings.log_completions:
            return
        mode = self._metrics.mode
        before = len(self._records) if mode == "eval" else 0
        step = self._state.optimizer_step + (mode == "train")  # the step that trains on them
        table, transcripts = [], []
        for index, episode in enumerate(rollout.episodes):
            position, rewards = rollout.first + index, self._rewards_by_function(rollout, index)
            turn_advantages = advantages[index] if advantages is not None else None
            own = own_rewards[index] if own_rewards else None
            # If none is printed, the page still shows some
            if position < (self._settings.num_completions_to_print or MAX_TRANSCRIPTS):
                title = f"step {step}, episode {before + position}"
                tokens = [self.token_texts(turn.agent, turn.completion_ids) for turn in episode.turns]
                known = (episode.row.get(name) for name in (self._args.eval_reference_column, "solution", "answer"))
                reference = next((item for item in known if isinstance(item, str) and item), "")
                total = _to_float(rollout.rewards[position])
                transcript = Transcript.of(episode, rewards, title, turn_advantages, tokens, own, total, reference)
                transcripts.append(dataclasses.replace(transcript, updates=self._state.optimizer_step))
            for turn in episode.turns:
                identity = (mode, before + position, turn.index, turn.agent, str(list(turn.sees)))
                columns = dict(zip(TABLE_COLUMNS, identity, strict=True))
                columns |= {column: values[index] for column, values in extra.items()}
                columns |= {"earned": episode.earned[turn.index]} if any(episode.earned) else {}
                columns |= {f"turn_reward/{name}": value for name, value in (own[turn.index] if own else {}).items()}
                advantage = _mean(turn_advantages[turn.index]) if turn_advantages is not None else None
                shown = without_pixels(turn.observation) if _has_lists(turn.observation) else turn.observation
                table.append(TableRow(shown, turn.raw_text, rewards, advantage, columns))
        self._episode_rewards += map(_to_float, rollout.rewards)
        self._table[mode] += self._processes.gather(table)
        self._transcripts += self._processes.gather(transcripts)

    def _user_columns(self, expected: int) -> dict[str, list]:
        """Values that reward functions passed to `log_extra`: one value per episode of this process."""
        extra = self._state.take_user_columns()
        for column, values in extra.items():
            if column in TABLE_COLUMNS:
                raise ValueError(f"`log_extra({column!r}, ...)` would overwrite a column of the table. Rename it.")
            if len(values) != expected:
                raise ValueError(
                    f"`log_extra({column!r}, ...)` got {len(values)} values for {expected} completions. A reward "
                    "function must log a list with one value per completion."
                )
        return extra

    def token_texts(self, agent: str, ids: Sequence[int]) -> list[str]:
        """Decode each token. Of tokens that share a character, the first gets its text; the others are empty."""
        tokenizer = self._get_tokenizer(agent)
        texts, start = tokenizer.batch_decode([[index] for index in ids]), 0
        while start < len(texts):
            end = start + 1
            while _UNKNOWN in texts[start] and end < len(texts) and _UNKNOWN in texts[end]:
                end += 1
            texts[start:end] = [tokenizer.decode(ids[start:end]), *[""] * (end - start - 1)]
            start = end
        return texts

    def before_log(self) -> bool:
        """Print and write transcripts, set the completions table that TRL writes, and return whether it is new."""
        has_new = bool(self._transcripts)  # not in the log at the end of training
        if self._settings.log_completions and self._processes.is_main:
            for transcript in self._transcripts[: self._settings.num_completions_to_print]:  # all for `None`
                print(transcript.as_text())
            self._write_page()
            if "trackio" in self._args.report_to:
                log_traces(self._transcripts, self._adapters)
            self._transcripts.clear()
        rows = [*self._table["train"], *self._table["eval"]]
        names = list(dict.fromkeys(name for row in rows for name in row.columns))
        self._state.fill_table(
            [row.prompt for row in rows],
            [row.completion for row in rows],
            [row.advantage for row in rows],
            rewards={name: [row.rewards[name] for row in rows] for name in (rows[0].rewards if rows else ())},
            extra={name: [row.columns.get(name) for row in rows] for name in names},
        )
        return has_new

    def after_log(self) -> None:
        """Clear the turns of an evaluation, which are logged once."""
        if self._metrics.mode == "eval":
            self._clear("eval")

    def _write_page(self) -> None:
        if not self._transcripts:
            return
        step = self._state.optimizer_step
        folder = Path(self._args.output_dir or ".") / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        run = without_secrets(self._args.run_name or "") or Path(self._args.output_dir or ".").resolve().name
        is_evaluation = self._metrics.mode == "eval"
        title = f"Episodes {'of the evaluation' if is_evaluation else 'logged'} at step {step}"
        page = html_page(self._transcripts, title, run, INDEX, self._episode_rewards)
        (folder / page_name(step, is_evaluation)).write_text(page, encoding="utf-8")
        if self._args.completions_total_limit is not None:
            remove_old_completions(folder, step, self._args.completions_total_limit)
        write_index(folder, run)


def share_of_zeros(values: torch.Tensor) -> float:
    """Share of values that are 0, up to rounding."""
    return torch.isclose(values, torch.zeros_like(values)).float().mean().item()


def _to_float(value: torch.Tensor) -> float | None:
    return None if value.isnan() else value.item()


def _mean(advantage: Advantage) -> float | None:
    if isinstance(advantage, Sequence):
        return sum(advantage) / len(advantage) if advantage else 0.0
    return advantage


def _has_lists(observation: str | Messages) -> bool:
    """`True` if contents are lists, of parts or of what a tool returned, which tables do not take."""
    return not isinstance(observation, str) and any(isinstance(item.get("content"), list) for item in observation)
