# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Compare the arms of a report, and write the comparison as Markdown, CSV, a plot and a section of the model cards."""

from __future__ import annotations

import csv
import io
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...reporting.evaluation import scores
from ...reporting.metrics import Interval, interval, paired_difference
from ...system.files import write_atomically
from .arms import Arm
from .cells import Cell
from .experiment import Experiment


# Accuracy below which training has nothing to reinforce
_ALMOST_NEVER = 0.02


@dataclass(frozen=True)
class ArmResult:
    """Results of an arm over all seeds."""

    arm: Arm
    accuracy: Interval | None = None  # `None` for a skipped arm
    difference: Interval | None = None  # trained team minus this arm, paired by question
    tokens: float | None = None  # mean over seeds; `None` for an arm without training
    seconds: float | None = None  # of training, like `tokens`
    curves: Sequence[Any] = ()  # for each seed, pairs of a step and the mean reward of its batch
    rewards_differ: bool = True  # whether any logged batch had episodes with different rewards


@dataclass(frozen=True)
class Comparison:
    """Results and conclusions of a report, the trained team first."""

    name: str
    results: Sequence[ArmResult]
    verdicts: Sequence[str]
    margin: float  # smallest difference in accuracy that matters
    questions_in_both: int = 0  # evaluation questions that are also training questions

    def __getitem__(self, arm: str) -> ArmResult:
        return next(result for result in self.results if result.arm.name == arm)


def compare(
    experiment: Experiment, arms: Sequence[Arm], runs: Path, seeds: Sequence[int], margin: float
) -> Comparison:
    team_scores = scores(_folders(arms[0], runs, seeds), "avg", name=arms[0].evaluation)
    results = [ArmResult(arm) if arm.skip_reason else _compare_arm(arm, team_scores, runs, seeds) for arm in arms]
    by_name = {result.arm.name: result for result in results}
    sentences = make_verdicts(by_name, [agent.name for agent in experiment.agents], margin)
    return Comparison(experiment.name, results, sentences, margin, experiment.questions_in_both())


def _folders(arm: Arm, runs: Path, seeds: Sequence[int]) -> list[Path]:
    return [runs / f"{arm.folder}-{seed}" for seed in seeds]


def _compare_arm(arm: Arm, team_scores, runs: Path, seeds: Sequence[int]) -> ArmResult:
    folders = _folders(arm, runs, seeds)
    arm_scores = scores(folders, "avg", name=arm.evaluation)
    cells = [Cell(arm.run, seed, folder).result() for seed, folder in zip(seeds, folders, strict=True)]
    is_trained, accuracy = not arm.of, interval(arm_scores)
    return ArmResult(
        arm,
        accuracy._replace(low=max(accuracy.low, 0.0), high=min(accuracy.high, 1.0)),  # t-intervals may exceed them
        None if arm.name == "team" else paired_difference(team_scores, arm_scores),
        statistics.mean(cell["tokens"] for cell in cells) if is_trained else None,
        statistics.mean(cell["seconds"] for cell in cells) if is_trained else None,
        [cell["curve"] for cell in cells] if is_trained else (),
        any(cell.get("rewards_differ", True) for cell in cells),
    )


def _predicates(other: str) -> tuple[str, str, str]:
    return f"is better than {other}", f"is worse than {other}", f"is as good as {other}"


# Arm, subject of the sentence, and its predicates if the team is better than, worse than or as good as the arm
_SENTENCES = (
    ("untrained", "Training", ("helps", "harms", "has no relevant effect")),
    ("solo", "The team", _predicates("one agent with as many generated tokens")),
    ("anonymous", "A team with names and roles", _predicates("an anonymous team")),
    ("shared", "A team with separate adapters", _predicates("a team with a shared adapter")),
    ("own", "A team with a shared adapter", _predicates("a team with separate adapters")),
)


def classify(difference: Interval, margin: float) -> str:
    """Return `same` if the interval is within the margin, else `better` or `worse` if it excludes 0, else `open`."""
    if -margin <= difference.low and difference.high <= margin:
        return "same"
    if difference.is_clear:
        return "better" if difference.low > 0 else "worse"
    return "open"


def make_verdicts(results: dict[str, ArmResult], agents: Sequence[str], margin: float) -> list[str]:
    variants = [(name, "The team", _predicates(name)) for name, result in results.items() if result.arm.is_variant]
    sentences = [_describe_unreached_threshold(results)]
    sentences += [_make_sentence(results, margin, *about) for about in (*_SENTENCES, *variants)]
    sentences.append(_describe_smaller_budget(results))
    for agent in agents:
        about_agent = (
            (f"emptied:{agent}", f"What {agent} says", ("is useful", "is harmful", "is useless")),
            (f"without:{agent}", f"A team with {agent}", _predicates("a team without this agent")),
            (f"frozen:{agent}", f"Training {agent}", ("helps the team", "harms the team", "has no relevant effect")),
        )
        sentences += [_make_sentence(results, margin, *about) for about in about_agent]
    return [sentence for sentence in sentences if sentence is not None]


def _describe_unreached_threshold(results: dict[str, ArmResult]) -> str | None:
    """Warn if rewards are above 0, but no evaluation episode counts as right."""
    accuracies = [result.accuracy.mean for result in results.values() if result.accuracy is not None]
    rewards = [reward for result in results.values() for curve in result.curves for _, reward in curve]
    if not accuracies or max(accuracies) > 0 or max(rewards, default=0.0) <= 0:
        return None
    return (
        "NO EPISODE COUNTS AS RIGHT, although rewards are above 0: no evaluation reward reaches `eval_right_at`. "
        "If the reward has bonuses or penalties, add the plain score as a reward function with weight 0, and select "
        "it with `eval_right_by` and `eval_k=[1]`."
    )


def _describe_smaller_budget(results: dict[str, ArmResult]) -> str | None:
    """Describe a single agent that generated fewer tokens than the team, because its training ended early."""
    team, solo = results.get("team"), results.get("solo")
    if team is None or solo is None or not solo.tokens or not team.tokens or solo.tokens >= team.tokens:
        return None
    return (
        f"The single agent generated {solo.tokens:,.0f} tokens in training and the team {team.tokens:,.0f}, so they "
        "did not have the same budget."
    )


def _make_sentence(
    results: dict[str, ArmResult], margin: float, arm: str, subject: str, predicates: tuple[str, str, str]
) -> str | None:
    difference = results[arm].difference if arm in results else None
    if difference is None:
        return None
    kind = classify(difference, margin)
    numbers = f"{shown(difference, signed=True)} points"
    if difference.seeds <= 1:
        numbers += ", one seed, so this only applies to this run"
    if kind == "open":
        return f"{subject}: there is not enough evidence to say whether it {predicates[0]} ({numbers})."
    predicate = predicates[("better", "worse", "same").index(kind)]
    return f"{subject} {predicate} ({numbers}).{_describe_constant_reward(results[arm])}"


def _describe_constant_reward(result: ArmResult) -> str:
    """Describe an arm that learned nothing: its reward was the same in every episode, or it was almost never right."""
    rewards = {reward for curve in result.curves for _, reward in curve}
    if len(rewards) == 1 and not result.rewards_differ:
        why = f"got a reward of {rewards.pop():g} in every episode, so training could not change it"
    elif rewards and result.accuracy is not None and result.accuracy.mean < _ALMOST_NEVER:
        why = f"was right in only {100 * result.accuracy.mean:.1f} % of the episodes, so training hardly changed it"
    else:
        return ""
    return (
        f" But {result.arm.what.partition(',')[0]} {why}. For a fair comparison, choose a task that it sometimes "
        "solves (easier questions, a longer turn, another `solo` of the `Experiment`)."
    )


def shown(value: Interval, signed: bool = False) -> str:
    """Format an interval in percent."""
    template = "{:+.1f}" if signed else "{:.1f}"
    mean, low, high = (template.format(100 * number) for number in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]"


_TITLE = "## Is the team worth it?"
_COLUMNS = (
    *("arm", "seeds", "questions", "accuracy", "low", "high", "difference", "difference_low", "difference_high"),
    *("tokens", "seconds", "left_out"),
)


def write_report(comparison: Comparison, folder: Path) -> None:
    """Write `report.md`, `report.csv`, `report.png` (if matplotlib is installed), and sections of the model cards."""
    folder.mkdir(parents=True, exist_ok=True)
    page = as_markdown(comparison)
    write_atomically(folder / "report.md", page)
    write_atomically(folder / "report.csv", as_csv(comparison))
    for card in folder.glob("runs/team-*/README.md"):
        text = card.read_text(encoding="utf-8").partition(_TITLE)[0].rstrip()
        write_atomically(card, f"{text}\n\n{_TITLE}\n\n{page.partition(chr(10))[2].strip()}\n")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("Skipped report.png, which needs matplotlib (`pip install matplotlib`).")
    else:
        save_picture([comparison], folder / "report.png")


def as_markdown(comparison: Comparison) -> str:
    accuracy = next(result.accuracy for result in comparison.results if result.accuracy is not None)
    lines = [f"# {comparison.name}", "", *(f"- {verdict}" for verdict in comparison.verdicts), ""]
    lines += [
        f"Accuracy in percent on {accuracy.questions} questions, mean of {accuracy.seeds} "
        f"seed{'s' * (accuracy.seeds > 1)} with its 95 % interval over questions"
        f"{' and seeds' * (accuracy.seeds > 1)}. Differences are the trained team minus the arm on the same "
        f"questions; below {100 * comparison.margin:g} points they are too small to matter. About one in "
        "twenty of these conclusions is wrong by chance.",
        "",
        "| arm | accuracy | team minus arm | generated tokens | seconds |",
        "|---|---|---|---|---|",
    ]
    lines += [_table_row(result) for result in comparison.results if result.accuracy is not None]
    if comparison.questions_in_both:
        count = comparison.questions_in_both
        lines += ["", f"{count} of the {accuracy.questions} questions are also training questions."]
    if skipped := [result.arm for result in comparison.results if result.arm.skip_reason]:
        arms = "; ".join(f"{arm.what} ({arm.skip_reason})" for arm in skipped)
        lines += ["", f"Skipped: {arms}."]
    return "\n".join(lines) + "\n"


def _table_row(result: ArmResult) -> str:
    assert result.accuracy is not None  # noqa: S101 - only arms that ran have rows
    cells = [
        result.arm.what,
        shown(result.accuracy),
        shown(result.difference, signed=True) if result.difference is not None else "",
        f"{result.tokens:,.0f}" if result.tokens is not None else "",
        f"{result.seconds:,.0f}" if result.seconds is not None else "",
    ]
    return f"| {' | '.join(cells)} |"


def as_csv(comparison: Comparison) -> str:
    """Return a CSV table with one row per arm, and accuracies and differences in percent."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    for result in comparison.results:
        accuracy, difference = result.accuracy, result.difference
        counts = [accuracy.seeds, accuracy.questions] if accuracy else ["", ""]
        cost = ["" if value is None else value for value in (result.tokens, result.seconds, result.arm.skip_reason)]
        table.writerow([result.arm.name, *counts, *_as_percent(accuracy), *_as_percent(difference), *cost])
    return text.getvalue()


def _as_percent(interval: Interval | None) -> list[float | str]:
    return [100 * value for value in interval[:3]] if interval else [""] * 3


def save_picture(comparisons: Sequence[Comparison], file: Path) -> None:
    """Plot accuracies with intervals and training rewards, one row per comparison. Requires matplotlib."""
    from matplotlib.figure import Figure

    max_arms = max(len(comparison.results) for comparison in comparisons)
    figure = Figure(figsize=(11, (1.5 + 0.4 * max_arms) * len(comparisons)), layout="constrained")
    rows = figure.subplots(len(comparisons), 2, squeeze=False, width_ratios=(2, 3))
    for comparison, (accuracy_axes, curve_axes) in zip(comparisons, rows, strict=True):
        results = [result for result in comparison.results if result.accuracy is not None]
        names = [result.arm.name for result in results if result.curves]
        colors = {name: f"C{number}" for number, name in enumerate(names)}
        _draw_accuracies(accuracy_axes, results, colors)
        _draw_curves(curve_axes, results, colors)
        if len(comparisons) > 1:
            accuracy_axes.set_title(comparison.name, fontsize="medium")
    figure.savefig(file, dpi=120)


def _draw_accuracies(axes: Any, results: Sequence[ArmResult], colors: Mapping[str, str]) -> None:
    for y, result in enumerate(reversed(results)):
        mean, low, high = (100 * value for value in (result.accuracy or (0.0, 0.0, 0.0))[:3])
        error, color = [[max(mean - low, 0)], [max(high - mean, 0)]], colors.get(result.arm.name, "0.4")
        axes.errorbar(mean, y, xerr=error, fmt="o", color=color, capsize=3)
    axes.set_yticks(range(len(results)), [textwrap.fill(result.arm.what, 32) for result in reversed(results)])
    axes.set(xlabel="accuracy in percent, 95 % interval", xlim=(-2, 102), ylim=(-0.5, len(results) - 0.5))
    axes.grid(axis="x", alpha=0.3)


def _draw_curves(axes: Any, results: Sequence[ArmResult], colors: Mapping[str, str]) -> None:
    for result in results:
        for curve in result.curves:
            steps, rewards = zip(*curve, strict=True) if curve else ((), ())
            marker = "o" if len(steps) < 10 else None  # a curve of a single step has no line
            axes.plot(steps, rewards, color=colors[result.arm.name], alpha=0.7, marker=marker)
    axes.set(xlabel="step", ylabel="reward of a training batch")
