# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer's part that measures: evaluation, metrics, tables and transcripts."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from ..agents import AgentSpec
from ..transcripts import Transcript, html_page
from .evaluation import EvalMetric, measure_answers, summarize
from .functional import nan_std
from .metrics import AGENT_FIGURES, StepMetrics, length_metrics
from .rollouts import Rollout


# Episodes that are printed and written as a page at a logging step, unless `num_completions_to_print` says otherwise.
MAX_TRANSCRIPTS = 16
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# Where a turn stands, in the completions table.
TABLE_COLUMNS = ("mode", "episode", "turn", "agent", "sees")


class TeamReporting(GRPOTrainer):
    """Overrides of `Trainer` and `GRPOTrainer` (checked against TRL 1.16) around evaluation and logging."""

    agents: list[AgentSpec]
    _mode: str
    _eval_metrics: list[EvalMetric]

    def _prepare_reports(self) -> None:
        # One row per turn, as many as the latest episodes had: no fixed length, unlike TRL's
        self._logs = {
            "images": deque(),
            "prompt": deque(),
            "completion": deque(),
            "rewards": defaultdict(deque),
            "advantages": deque(),
            "extra": defaultdict(deque),
        }
        self._transcripts: list[Transcript] = []
        self._table: dict[str, list[tuple]] = {"train": [], "eval": []}
        self._step_metrics = StepMetrics([agent.name for agent in self.agents])
        self._eval_records: list[dict[str, Any]] = []

    # ---- Evaluation ----

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Run the team on a batch: its loss, as TRL has it. The other figures are made in `evaluation_loop`."""
        rollout = self._roll_out(inputs)
        loss = self._evaluation_loss(rollout)
        self._log_user_metrics()
        self._log_turns(rollout, inputs)
        first = self.accelerator.process_index * len(inputs)
        records = [
            {
                "row": row,
                "answer": episode.answer.text,
                "reward": _known(rollout.rewards[first + index]),
                "rewards": {
                    name: _known(value)
                    for name, value in zip(
                        self.reward_func_names, rollout.rewards_per_func[first + index], strict=True
                    )
                },
                "turns": episode.turns,
            }
            for index, (row, episode) in enumerate(zip(inputs, rollout.episodes, strict=True))
        ]
        self._eval_records.extend(gather_object(records))
        return loss, None, None

    def evaluation_loop(self, dataloader, *args, metric_key_prefix: str = "eval", **kwargs):
        self._eval_records = []
        self._metrics["eval"].clear()
        self._clear_logs("eval")
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        records = self._eval_records
        with contextlib.suppress(TypeError):  # a stream has no length
            # Processes repeat rows at the end to get equally many; the repetitions are no part of the figures
            records = records[: len(dataloader.dataset) * self.num_generations_eval]
        if records:
            figures = summarize(records, list(self._specs))
            columns = {key: [record["row"].get(key) for record in records] for key in records[0]["row"]}
            columns["turns"] = [record["turns"] for record in records]
            answers = [record["answer"] for record in records]
            with self._runner.randomness.theirs():
                figures |= measure_answers(self._eval_metrics, answers, columns, self.args.eval_reference_column)
            known = {name: [value for value in its if value == value] for name, its in self._metrics["eval"].items()}
            figures |= {name: sum(values) / len(values) for name, values in known.items() if values}
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
            # TRL logs them as `eval_<name>` too, whatever the evaluation set is called
            self._metrics["eval"].clear()
            self._metrics["eval"].update({name: [value] for name, value in figures.items() if value == value})
        return output

    # ---- Metrics, tables, transcripts ----

    def _log_rollout(self, inputs, rollout: Rollout, std: torch.Tensor | None) -> None:
        """TRL's figures for the team, and each agent's."""
        metrics = self._metrics["train"]
        for index, name in enumerate(self.reward_func_names):
            scores = rollout.rewards_per_func[:, index]
            metrics[f"rewards/{name}/mean"].append(torch.nanmean(scores).item())
            metrics[f"rewards/{name}/std"].append(nan_std(scores).item())
        metrics["reward"].append(torch.nanmean(rollout.rewards).item())
        metrics["reward_std"].append(nan_std(rollout.rewards).item())
        if std is not None and self.num_generations > 1:
            metrics["frac_reward_zero_std"].append(torch.isclose(std, torch.zeros_like(std)).float().mean().item())
        metrics["frac_unscored"].append(rollout.rewards.isnan().float().mean().item())
        offset = self.accelerator.process_index * len(inputs)
        turns = gather_object(
            [
                (t.agent, len(t.prompt_ids), len(t.completion_ids), t.truncated, offset + e.index)
                for e in rollout.episodes
                for t in e.turns
            ]
        )
        extra = gather_object([dict(self._extra)])
        if any(extra):
            for figure in ("turns", "tokens"):
                metrics[f"branches/{figure}"].append(float(sum(one.get(figure, 0) for one in extra)))
        self.state.num_input_tokens_seen += sum(turn[1] + turn[2] for turn in turns)
        self.state.num_input_tokens_seen += sum(one.get("tokens", 0) for one in extra)
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        for agent in (None, *self._specs):
            its = [turn for turn in turns if agent in (None, turn[0])]
            prefix = "" if agent is None else f"agents/{agent}/"
            if its:
                for name, value in length_metrics([t[2] for t in its], [t[3] for t in its]).items():
                    if agent is None or name in AGENT_FIGURES:
                        metrics[f"{prefix}{name}"].append(value)
            if agent is not None:
                metrics[f"{prefix}turns"].append(len(its) / len(rollout.rewards))
                rewards = rollout.rewards[[turn[4] for turn in its]] if its else rollout.rewards[:0]
                metrics[f"{prefix}reward"].append(torch.nanmean(rewards).item())
        self._log_user_metrics()
        self._clear_logs("train")
        self._log_turns(rollout, inputs)

    def _log_user_metrics(self) -> None:
        """What reward functions passed to `log_metric`, averaged over processes."""
        own = {name: (sum(values), len(values)) for name, values in self._pending_metrics.items()}
        self._pending_metrics.clear()
        everywhere = gather_object([own])
        for name in sorted({name for one in everywhere for name in one}):
            totals = [one[name] for one in everywhere if name in one]
            value = sum(total for total, _ in totals) / sum(count for _, count in totals)
            self._metrics[self._mode][name].append(value)

    def _clear_logs(self, mode: str) -> None:
        self._table[mode].clear()
        self._transcripts.clear()

    def _take_extra_columns(self, expected: int) -> dict[str, list]:
        """What reward functions passed to `log_extra`: one value per episode of this process."""
        extra = {column: list(values) for column, values in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()
        for column, values in extra.items():
            if column in TABLE_COLUMNS:
                raise ValueError(f"`log_extra({column!r}, ...)` would overwrite a column of the completions table.")
            if len(values) != expected:
                raise ValueError(
                    f"`log_extra({column!r}, ...)` got {len(values)} values for {expected} completions. A reward "
                    "function has to log one value per completion, once per call."
                )
        return extra

    def _log_turns(self, rollout: Rollout, inputs) -> None:
        """One row per turn into the completions table, one transcript per episode."""
        extra = self._take_extra_columns(len(inputs))
        if not self.log_completions:
            return
        mode = self._mode
        first = self.accelerator.process_index * len(inputs)
        before = len(self._eval_records) if mode == "eval" else 0
        table, transcripts = [], []
        for episode in rollout.episodes:
            position = first + episode.index
            advantages = rollout.advantages[episode.index] if rollout.advantages is not None else None
            rewards = {
                name: _known(value)
                for name, value in zip(self.reward_func_names, rollout.rewards_per_func[position], strict=True)
            }
            step = self.state.global_step + (mode == "train")  # the one that they are trained in
            title = f"step {step}, episode {before + position}"
            if position < self._transcripts_wanted:
                tokens = [self._token_texts(turn.completion_ids) for turn in episode.turns]
                transcripts.append(Transcript.of(episode, rewards, title, advantages, tokens))
            for turn in episode.turns:
                advantage = advantages[turn.index] if advantages is not None else None
                if isinstance(advantage, Sequence):
                    advantage = sum(advantage) / len(advantage) if advantage else 0.0
                place = (mode, before + position, turn.index, turn.agent, str(list(turn.sees)))
                columns = dict(zip(TABLE_COLUMNS, place, strict=True))
                columns |= {column: values[episode.index] for column, values in extra.items()}
                table.append((turn.observation, turn.raw_text, rewards, advantage, columns))
        self._table[mode] += gather_object(table)
        self._transcripts += gather_object(transcripts)

    def _token_texts(self, ids: Sequence[int]) -> list[str]:
        """What each token says; bytes of a character that several tokens share are the first one's."""
        texts = self._tokenizer.batch_decode([[index] for index in ids])
        start = 0
        while start < len(texts):
            end = start + 1
            while _UNKNOWN in texts[start] and end < len(texts) and _UNKNOWN in texts[end]:
                end += 1
            texts[start:end] = [self._tokenizer.decode(ids[start:end]), *[""] * (end - start - 1)]
            start = end
        return texts

    @property
    def _transcripts_wanted(self) -> int:
        """How many of the latest episodes are kept for people to read."""
        return MAX_TRANSCRIPTS if self.num_completions_to_print is None else self.num_completions_to_print

    def _write_page(self) -> None:
        if not self._transcripts:
            return
        folder = Path(self.args.output_dir) / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        page = html_page(self._transcripts, f"Episodes logged at step {self.state.global_step}")
        (folder / f"transcripts_{self.state.global_step:05d}.html").write_text(page, encoding="utf-8")

    def _fill_completions_table(self) -> None:
        """The rows in the form that TRL writes: columns of equal length, whichever process or mode filled them."""
        rows = [*self._table["train"], *self._table["eval"]]
        for column in ("prompt", "completion", "advantages", "rewards", "extra"):
            self._logs[column].clear()
        names = list(dict.fromkeys(name for row in rows for name in row[4]))
        for prompt, completion, rewards, advantage, columns in rows:
            self._logs["prompt"].append(prompt)
            self._logs["completion"].append(completion)
            self._logs["advantages"].append(advantage)
            for name, value in rewards.items():
                self._logs["rewards"][name].append(value)
            for name in names:
                self._logs["extra"][name].append(columns.get(name))

    def _log_step_metrics(self) -> None:
        names = ["entropy"]
        names += ["kl"] if self.beta != 0.0 else []
        names += ["policy_loss"] if self._entropy_bonus_enabled else []
        names += ["aux_loss"] if self.aux_loss_enabled else []
        if self.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
            names += [f"clip_ratio/{figure}" for figure in ("low_mean", "high_mean", "region_mean")]
            names += ["clip_ratio/low_min", "clip_ratio/high_max"]
        names += ["cispo_clip_ratio"] if self.loss_type == "cispo" else []
        names += ["vespo/phi_seq_mean"] if self.loss_type == "vespo" else []
        for name, value in self._step_metrics.join(names, self._reduce).items():
            self._metrics[self._mode][name].append(value)
        is_step = self._mode == "train" and self.accelerator.sync_gradients
        if self._entropy_bonus_enabled and is_step and not self.use_adaptive_entropy:
            self._metrics["train"]["entropy_coef"].append(self.entropy_coef)
        self._log_value_losses()

    def _reduce(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
        if self.accelerator.num_processes == 1:
            return tensor
        device = self.accelerator.device
        dtype = torch.float32 if device.type == "mps" else torch.float64  # sums of squares need the digits
        everywhere = self.accelerator.gather(tensor.to(device, dtype).unsqueeze(0)).cpu()
        return everywhere.sum(dim=0) if how == "sum" else everywhere.max(dim=0).values

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        count = self.num_completions_to_print
        if self.log_completions and self.accelerator.is_main_process:
            for transcript in self._transcripts[: len(self._transcripts) if count is None else count]:
                print(transcript.as_text())
            self._write_page()
            self._transcripts.clear()  # the log at the end of training has none of its own
        self._fill_completions_table()
        self.num_completions_to_print = 0  # TRL's table of columns is not readable with several agents
        try:
            super().log(logs, start_time)
        finally:
            self.num_completions_to_print = count
        if not self.model.training:
            self._clear_logs("eval")  # written once


def _known(value: torch.Tensor) -> float | None:
    return None if value.isnan() else value.item()
