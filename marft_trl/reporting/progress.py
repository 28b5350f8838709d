# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Terminal output of a run: one short line per log. Trackers and `log_history` get all metrics."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer_utils import has_length
from transformers.utils import is_rich_available


# Metrics of an agent that are in a log line, with their names in the line
_OF_AGENTS = {"reward": "reward", "return": "return", "kl": "kl", "completions/mean_length": "length"}
_FUNCTIONS = 3  # most reward functions, of the team or of an agent, that are in a log line
# If the relative difference of the agents' rewards is smaller, they come from the same episodes and differ only
# because agents have different numbers of turns
_SAME = 0.01
_SILENCE = 10.0  # seconds without a line after which an evaluation says how far it is


class LogLine:
    """Formats a log as one line: the step, the team's rewards and their change, seconds, and numbers of each agent."""

    def __init__(self, agents: Sequence[str]):
        self._agents = list(agents)
        self._last: dict[str, float] = {}  # rewards by the prefix of their metric

    def __call__(self, logs: Mapping[str, Any], step: int, max_steps: int) -> str | None:
        """Return the line, or `None` if the log has no reward and does not end the run."""
        place = f"step {step:>{len(str(max_steps))}}/{max_steps}"
        if "train_runtime" in logs:
            return f"{place}  done in {logs['train_runtime']:.0f} s"
        prefix = next((key.removesuffix("reward") for key in logs if _is_team_reward(key)), None)
        if prefix is None:
            return None
        parts = [place] if max_steps > 0 else []  # an evaluation may come before training
        parts += [prefix.removesuffix("_").replace("_", " ")] if prefix else []
        parts.append(self._reward(prefix, logs[f"{prefix}reward"]))
        of_team = _means(logs, f"{prefix}rewards/")
        parts += [f"{name} {value:.3f}" for name, value in of_team.items()] if 1 < len(of_team) <= _FUNCTIONS else []
        if prefix and _number(logs.get(f"{prefix}loss")) is not None:
            parts.append(f"loss {logs[f'{prefix}loss']:.4g}")
        if _number(logs.get("step_time")) is not None:
            parts.append(f"{logs['step_time']:.1f} s")
        rewards = [_number(logs.get(f"{prefix}agents/{name}/reward")) for name in self._agents]
        known = [reward for reward in rewards if reward is not None]
        parts += filter(None, (self._format_agent(prefix, name, logs, differ(known)) for name in self._agents))
        return "  ".join(parts)

    def _reward(self, prefix: str, value: Any) -> str:
        reward = _number(value)
        if reward is None:
            return "reward -"
        change = f" ({reward - self._last[prefix]:+.3f})" if prefix in self._last else ""
        self._last[prefix] = reward
        return f"reward {reward:.3f}{change}"

    def _format_agent(self, prefix: str, agent: str, logs: Mapping[str, Any], with_reward: bool) -> str:
        values = {name: _number(logs.get(f"{prefix}agents/{agent}/{metric}")) for metric, name in _OF_AGENTS.items()}
        if not with_reward or values["return"] is not None:  # the team's reward says nothing of a player
            values["reward"] = None
        formats = {"reward": "{:.3f}", "return": "{:.3f}", "kl": "{:.2g}", "length": "{:.0f}"}
        own = _means(logs, f"{prefix}agents/{agent}/rewards/")
        parts = [f"{name} {value:.3f}" for name, value in own.items()] if len(own) <= _FUNCTIONS else []
        parts += [f"{name} {formats[name].format(value)}" for name, value in values.items() if value is not None]
        rates = f"{prefix}agents/{agent}/win_rate/"
        opponents = [key for key in logs if key.startswith(rates) and "/" not in key[len(rates) :]]
        if len(opponents) == 1 and (wins := _number(logs[opponents[0]])) is not None:
            parts.append(f"wins {wins:.0%}")
        return f"{agent}: {', '.join(parts)}" if parts else ""


def differ(rewards: Sequence[float]) -> bool:
    """Whether rewards of agents differ by more than agents with different numbers of turns do."""
    return bool(rewards) and max(rewards) - min(rewards) > _SAME * max(map(abs, rewards))


def _is_team_reward(key: str) -> bool:
    return key == "reward" or (key.startswith("eval_") and key.endswith("_reward") and "/" not in key)


def _means(logs: Mapping[str, Any], prefix: str) -> dict[str, float]:
    names = [key[len(prefix) : -len("/mean")] for key in logs if key.startswith(prefix) and key.endswith("/mean")]
    known = {name: _number(logs[f"{prefix}{name}/mean"]) for name in names}
    return {name: value for name, value in known.items() if value is not None}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


class EvaluationLines:
    """Lines that say how far an evaluation is, for output that has no bars."""

    def __init__(self) -> None:
        self._done, self._last = 0, -math.inf

    def step(self, batches: Any) -> None:
        self._done += 1
        if time.monotonic() - self._last >= _SILENCE:
            of_all = f"/{len(batches)}" if has_length(batches) else ""
            self.say(f"evaluation  batch {self._done}{of_all}")

    def end(self) -> None:
        self._done = 0

    def say(self, line: str) -> None:
        self._last = time.monotonic()
        say(line)


class TeamProgressCallback(ProgressCallback):
    """The progress bar of transformers, in a terminal. It prints one line per log instead of all metrics."""

    def __init__(self, agents: Sequence[str] = ()):
        super().__init__()
        self._line, self._lines = LogLine(agents), EvaluationLines()
        self._has_bars = sys.stderr.isatty()  # in a file, every movement of a bar would be a line of its own

    def on_train_begin(self, args, state, control, **kwargs):
        if self._has_bars:
            super().on_train_begin(args, state, control, **kwargs)
        _say_going_on(state)

    def on_step_end(self, args, state, control, **kwargs):
        if self._has_bars:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if self._has_bars:
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)
        elif state.is_world_process_zero:
            self._lines.step(eval_dataloader)

    def on_evaluate(self, args, state, control, **kwargs):
        super().on_evaluate(args, state, control, **kwargs)
        self._lines.end()

    def on_train_end(self, args, state, control, **kwargs):
        if self._has_bars:
            super().on_train_end(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        line = self._line(logs or {}, state.global_step, state.max_steps)
        if not state.is_world_process_zero or line is None:
            return
        if self.training_bar is not None:
            self.training_bar.write(line)
        else:
            self._lines.say(line)


class TeamPrinterCallback(PrinterCallback):
    def __init__(self, agents: Sequence[str] = ()):
        self._line, self._lines = LogLine(agents), EvaluationLines()

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if state.is_local_process_zero:
            self._lines.step(eval_dataloader)

    def on_evaluate(self, args, state, control, **kwargs):
        self._lines.end()

    def on_train_begin(self, args, state, control, **kwargs):
        _say_going_on(state)

    def on_log(self, args, state, control, logs=None, **kwargs):
        line = self._line(logs or {}, state.global_step, state.max_steps)
        if state.is_local_process_zero and line is not None:
            self._lines.say(line)


def say(line: str) -> None:
    """Print a line. It is coloured if `rich` is installed and the output is a terminal."""
    if is_rich_available():
        from rich.console import Console

        Console(soft_wrap=True, markup=False, emoji=False).print(line)
    else:
        print(line)


def _say_going_on(state) -> None:
    if state.is_world_process_zero and state.global_step:
        left = state.max_steps - state.global_step
        say(f"Resuming after step {state.global_step}/{state.max_steps}" + ("" if left > 0 else ": nothing to train"))


def team_callbacks(trainer: Trainer, agents: Sequence[str]) -> None:
    """Replace the callbacks by which transformers prints every metric by those of the team. Other callbacks stay."""
    replacements: dict[type, Callable] = {ProgressCallback: TeamProgressCallback, PrinterCallback: TeamPrinterCallback}
    for kind in {type(callback) for callback in trainer.callback_handler.callbacks} & replacements.keys():
        trainer.remove_callback(kind)
        trainer.add_callback(replacements[kind](agents))


def announce(agents: Sequence[str], accelerator: Accelerator) -> None:
    """Print which agents are trained on how many processes. Launchers may start fewer processes than requested."""
    count = accelerator.num_processes
    say(f"Training {', '.join(agents)} on {count} process{'es' if count > 1 else ''} ({accelerator.device.type})")
