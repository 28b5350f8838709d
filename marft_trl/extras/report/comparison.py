# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Compare the arms of a report: accuracies and differences, as Markdown, CSV, a picture and a model card."""

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


@dataclass(frozen=True)
class ArmResult:
    """
    Results of an arm.

    Args:
        accuracy: accuracy over seeds and questions; `None` for a skipped arm.
        difference: accuracy of the trained team minus that of this arm, by question.
        tokens, seconds: generated tokens and seconds of training, means over seeds; `None` for arms without training.
        curves: for each seed, the mean reward of each logged step.
        rewards_differ: whether episodes of a logged batch earned different rewards, in any seed.
    """

    arm: Arm
    accuracy: Interval | None = None
    difference: Interval | None = None
    tokens: float | None = None
    seconds: float | None = None
    curves: Sequence[Any] = ()
    rewards_differ: bool = True


@dataclass(frozen=True)
class Comparison:
    """
    A report.

    Args:
        results: the arms, the trained team first.
        verdicts: conclusions, in plain sentences.
        questions_in_both: evaluation questions that are also training questions.
    """

    name: str
    results: Sequence[ArmResult]
    verdicts: Sequence[str]
    margin: float
    questions_in_both: int = 0

    def __getitem__(self, arm: str) -> ArmResult:
        return next(result for result in self.results if result.arm.name == arm)


def compare(
    experiment: Experiment, arms: Sequence[Arm], runs: Path, seeds: Sequence[int], margin: float
) -> Comparison:
    """Compare the runs of a report."""
    team = _scores(arms[0], runs, seeds)
    results = [ArmResult(arm) if arm.skip_reason else _result(arm, team, runs, seeds) for arm in arms]
    found = {result.arm.name: result for result in results}
    sentences = verdicts(found, [agent.name for agent in experiment.agents], margin)
    return Comparison(experiment.name, results, sentences, margin, experiment.questions_in_both())


def _folders(arm: Arm, runs: Path, seeds: Sequence[int]) -> list[Path]:
    return [runs / f"{arm.folder}-{seed}" for seed in seeds]


def _scores(arm: Arm, runs: Path, seeds: Sequence[int]):
    return scores(_folders(arm, runs, seeds), "avg", name=arm.evaluation)


def _result(arm: Arm, team, runs: Path, seeds: Sequence[int]) -> ArmResult:
    scores = _scores(arm, runs, seeds)
    places = zip(seeds, _folders(arm, runs, seeds), strict=True)
    done = [Cell(arm.run, seed, folder).result() for seed, folder in places]
    trains = not arm.of
    return ArmResult(
        arm,
        _within(interval(scores)),
        None if arm.name == "team" else paired_difference(team, scores),
        statistics.mean(entry["tokens"] for entry in done) if trains else None,
        statistics.mean(entry["seconds"] for entry in done) if trains else None,
        [item["curve"] for item in done] if trains else (),
        any(value.get("rewards_differ", True) for value in done),
    )


def _within(accuracy: Interval) -> Interval:
    """Clip an interval of accuracies: with few seeds, Student's t-distribution extends beyond 0 and 1."""
    return accuracy._replace(low=max(accuracy.low, 0.0), high=min(accuracy.high, 1.0))


def _compared(other: str) -> tuple[str, str, str]:
    return f"is better than {other}", f"is worse than {other}", f"is as good as {other}"


_TRAINED = "helps the team", "harms the team", "makes no difference that matters"
_ALONE = "one agent with as many generated tokens"
_SHARED, _OWN = "one with a shared adapter", "one with own adapters"
# Arm, subject of the sentence, and its predicates if the team is better, worse or equal
_QUESTIONS = (
    ("untrained", "Training", ("helps", "harms", "changes nothing that matters")),
    ("solo", "The team", _compared(_ALONE)),
    ("anonymous", "A team with names and roles", _compared("an anonymous one")),
    ("shared", "A team with own adapters", _compared(_SHARED)),
    ("own", "A team with a shared adapter", _compared(_OWN)),
)


def judged(difference: Interval, margin: float) -> str:
    """
    Classify a difference: `"same"` if its interval is within the margin, else `"better"` or `"worse"` if the interval
    does not contain 0, else `"open"`.
    """
    if -margin <= difference.low and difference.high <= margin:
        return "same"
    if difference.is_clear:
        return "better" if difference.low > 0 else "worse"
    return "open"


def verdicts(found: dict[str, ArmResult], agents: Sequence[str], margin: float) -> list[str]:
    """Put the differences into plain sentences."""
    sentences = [_sentence(found, arm, margin, subject, words) for arm, subject, words in _QUESTIONS]
    sentences += [
        _sentence(found, item.arm.name, margin, "The team", _compared(item.arm.name))
        for item in found.values()
        if item.arm.is_variant
    ]
    sentences.append(_too_few_tokens(found))
    for agent in agents:
        questions = (
            ("emptied", f"What {agent} says", ("is useful", "is harmful", "is useless")),
            ("without", f"A team with {agent}", _compared("one without")),
            ("frozen", f"Training {agent}", _TRAINED),
        )
        sentences += [
            _sentence(found, f"{kind}:{agent}", margin, subject, words) for kind, subject, words in questions
        ]
    return [value for value in sentences if value is not None]


def _too_few_tokens(found: dict[str, ArmResult]) -> str | None:
    """Describe a single agent that stopped before its budget, at its last step or because of a callback."""
    team, alone = found.get("team"), found.get("solo")
    if team is None or alone is None or not alone.tokens or not team.tokens or alone.tokens >= team.tokens:
        return None
    return (
        f"The single agent generated {alone.tokens:,.0f} tokens in training and the team {team.tokens:,.0f}, so they "
        "did not have the same budget."
    )


def _sentence(
    found: dict[str, ArmResult], arm: str, margin: float, subject: str, words: tuple[str, str, str]
) -> str | None:
    if arm not in found or found[arm].difference is None:
        return None
    difference = found[arm].difference
    assert difference is not None  # noqa: S101 - checked above
    kind = judged(difference, margin)
    figures = f"{shown(difference, signed=True)} points"
    seeds = "" if difference.seeds > 1 else ", one seed, so this only applies to this run"
    if kind == "open":
        return f"{subject}: there is not enough evidence to say whether it {words[0]} ({figures}{seeds})."
    idle = _learned_nothing(found[arm])
    return f"{subject} {words[('better', 'worse', 'same').index(kind)]} ({figures}{seeds}).{idle}"


def _learned_nothing(result: ArmResult) -> str:
    """Describe an arm that could not learn, because its reward was the same in every episode."""
    rewards = {reward for curve in result.curves for _, reward in curve}
    if len(rewards) != 1 or result.rewards_differ:
        return ""
    return (
        f" But {result.arm.what.partition(',')[0]} got a reward of {rewards.pop():g} in every episode, so training "
        "could not change it. For a fair comparison, choose a task that it sometimes solves (easier questions, a "
        "longer turn, another `solo` of the `Experiment`)."
    )


def shown(value: Interval, signed: bool = False) -> str:
    """Format an interval in percent."""
    form = "{:+.1f}" if signed else "{:.1f}"
    mean, low, high = (form.format(100 * item) for item in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]"


_TITLE = "## Is the team worth it?"
_COLUMNS = (
    *("arm", "seeds", "questions", "accuracy", "low", "high", "difference", "difference_low", "difference_high"),
    *("tokens", "seconds", "left_out"),
)


def write_pages(comparison: Comparison, folder: Path) -> None:
    """Write `report.md`, `report.csv` and, where matplotlib is installed, `report.png`; and the cards of the teams."""
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
        print('Skipped report.png, which needs matplotlib (`pip install "marft-trl[plots]"`).')
    else:
        save_picture([comparison], folder / "report.png")


def as_markdown(comparison: Comparison) -> str:
    """Return the verdicts and the table of arms as Markdown."""
    accuracy = next(value.accuracy for value in comparison.results if value.accuracy is not None)
    lines = [f"# {comparison.name}", "", *(f"- {verdict}" for verdict in comparison.verdicts), ""]
    lines += [
        f"Accuracy in percent on {accuracy.questions} questions, mean of {accuracy.seeds} "
        f"seed{'s' * (accuracy.seeds > 1)} with its 95 % interval over questions"
        f"{' and seeds' * (accuracy.seeds > 1)}. Differences are the trained team minus the arm on the same "
        f"questions; below {100 * comparison.margin:g} points they are too small to matter. One in twenty such "
        "sentences is wrong by chance.",
        "",
        "| arm | accuracy | team minus arm | generated tokens | seconds |",
        "|---|---|---|---|---|",
    ]
    lines += [_line(result) for result in comparison.results if result.accuracy is not None]
    if comparison.questions_in_both:
        count = comparison.questions_in_both
        lines += ["", f"{count} of the {accuracy.questions} questions are also training questions."]
    left_out = [item for item in comparison.results if item.arm.skip_reason]
    if left_out:
        arms = "; ".join(f"{entry.arm.what} ({entry.arm.skip_reason})" for entry in left_out)
        lines += ["", f"Left out: {arms}."]
    return "\n".join(lines) + "\n"


def _line(result: ArmResult) -> str:
    assert result.accuracy is not None  # noqa: S101 - only arms that ran have lines
    cells = [
        result.arm.what,
        shown(result.accuracy),
        shown(result.difference, signed=True) if result.difference is not None else "",
        f"{result.tokens:,.0f}" if result.tokens is not None else "",
        f"{result.seconds:,.0f}" if result.seconds is not None else "",
    ]
    return f"| {' | '.join(cells)} |"


def as_csv(comparison: Comparison) -> str:
    """Return a CSV table with a row for each arm, with accuracies and differences in percent."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    for result in comparison.results:
        accuracy, difference = result.accuracy, result.difference
        counts = [accuracy.seeds, accuracy.questions] if accuracy else ["", ""]
        table.writerow(
            [
                result.arm.name,
                *counts,
                *_percent(accuracy),
                *_percent(difference),
                *("" if value is None else value for value in (result.tokens, result.seconds, result.arm.skip_reason)),
            ]
        )
    return text.getvalue()


def _percent(interval: Interval | None) -> list[float | str]:
    return [100 * value for value in interval[:3]] if interval else [""] * 3


def save_picture(comparisons: Sequence[Comparison], file: Path) -> None:
    """Plot accuracies with intervals, and training rewards, in a row for each comparison. Needs matplotlib."""
    from matplotlib.figure import Figure

    longest = max(len(comparison.results) for comparison in comparisons)
    figure = Figure(figsize=(11, (1.5 + 0.4 * longest) * len(comparisons)), layout="constrained")
    rows = figure.subplots(len(comparisons), 2, squeeze=False, width_ratios=(2, 3))
    for comparison, (bars, curves) in zip(comparisons, rows, strict=True):
        results = [result for result in comparison.results if result.accuracy is not None]
        colors = {value.arm.name: f"C{number}" for number, value in enumerate(item for item in results if item.curves)}
        _draw_accuracies(bars, results, colors)
        _draw_curves(curves, results, colors)
        if len(comparisons) > 1:
            bars.set_title(comparison.name, fontsize="medium")
    figure.savefig(file, dpi=120)


def _draw_accuracies(axes: Any, results: Sequence[ArmResult], colors: Mapping[str, str]) -> None:
    for place, item in enumerate(reversed(results)):
        mean, low, high = (100 * value for value in (item.accuracy or (0.0, 0.0, 0.0))[:3])
        error, color = [[max(mean - low, 0)], [max(high - mean, 0)]], colors.get(item.arm.name, "0.4")
        axes.errorbar(mean, place, xerr=error, fmt="o", color=color, capsize=3)
    axes.set_yticks(range(len(results)), [textwrap.fill(result.arm.what, 32) for result in reversed(results)])
    axes.set(xlabel="accuracy in percent, 95 % interval", xlim=(-2, 102), ylim=(-0.5, len(results) - 0.5))
    axes.grid(axis="x", alpha=0.3)


def _draw_curves(axes: Any, results: Sequence[ArmResult], colors: Mapping[str, str]) -> None:
    for result in results:
        for curve in result.curves:
            steps, rewards = zip(*curve, strict=True) if curve else ((), ())
            # Markers, because a run with a single logged step has no line
            axes.plot(
                steps, rewards, color=colors[result.arm.name], alpha=0.7, marker="o" if len(steps) < 10 else None
            )
    axes.set(xlabel="step", ylabel="reward of a training batch")
