# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A report as Markdown, CSV and a picture, and in the model card of the team."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..metrics import Interval
from ..system.files import write_atomically
from .comparison import ArmResult, Comparison, shown


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
        print('No picture: it needs matplotlib (`pip install "marft-trl[plots]"`).')
    else:
        save_picture([comparison], folder / "report.png")


def as_markdown(comparison: Comparison) -> str:
    """Verdicts and the table of arms."""
    accuracy = next(one.accuracy for one in comparison.results if one.accuracy is not None)
    lines = [f"# {comparison.name}", "", *(f"- {one}" for one in comparison.verdicts), ""]
    lines += [
        f"Accuracy in percent on {accuracy.questions} questions, mean of {accuracy.seeds} "
        f"seed{'s' * (accuracy.seeds > 1)} with its 95 % interval over questions"
        f"{' and seeds' * (accuracy.seeds > 1)}. Differences are those of the trained team to an arm on the same "
        f"questions; below {100 * comparison.margin:g} points they are too small to matter. Of twenty such "
        "sentences, one is wrong by chance.",
        "",
        "| arm | accuracy | team minus arm | generated tokens | seconds |",
        "|---|---|---|---|---|",
    ]
    lines += [_line(one) for one in comparison.results if one.accuracy is not None]
    if comparison.questions_in_both:
        count = comparison.questions_in_both
        lines += ["", f"{count} of the {accuracy.questions} questions are also training questions."]
    left_out = [one for one in comparison.results if one.arm.why_not]
    if left_out:
        lines += ["", "Left out: " + "; ".join(f"{one.arm.what} ({one.arm.why_not})" for one in left_out) + "."]
    return "\n".join(lines) + "\n"


def _line(one: ArmResult) -> str:
    assert one.accuracy is not None  # noqa: S101 - lines are of arms that have run
    cells = [
        one.arm.what,
        shown(one.accuracy),
        shown(one.difference, signed=True) if one.difference is not None else "",
        f"{one.tokens:,.0f}" if one.tokens is not None else "",
        f"{one.seconds:,.0f}" if one.seconds is not None else "",
    ]
    return f"| {' | '.join(cells)} |"


def as_csv(comparison: Comparison) -> str:
    """One row for each arm, accuracies and differences in percent, as on the page."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    for one in comparison.results:
        accuracy, difference = one.accuracy, one.difference
        counts = [accuracy.seeds, accuracy.questions] if accuracy else ["", ""]
        table.writerow(
            [
                one.arm.name,
                *counts,
                *_percent(accuracy),
                *_percent(difference),
                *("" if value is None else value for value in (one.tokens, one.seconds, one.arm.why_not)),
            ]
        )
    return text.getvalue()


def _percent(interval: Interval | None) -> list[float | str]:
    return [100 * value for value in interval[:3]] if interval else [""] * 3


def save_picture(comparisons: Sequence[Comparison], file: Path) -> None:
    """Accuracies with their intervals, and the rewards of training; a row for each comparison. Needs matplotlib."""
    from matplotlib.figure import Figure

    longest = max(len(comparison.results) for comparison in comparisons)
    figure = Figure(figsize=(11, (1.5 + 0.4 * longest) * len(comparisons)), layout="constrained")
    rows = figure.subplots(len(comparisons), 2, squeeze=False, width_ratios=(2, 3))
    for comparison, (bars, curves) in zip(comparisons, rows, strict=True):
        results = [one for one in comparison.results if one.accuracy is not None]
        colors = {one.arm.name: f"C{number}" for number, one in enumerate(one for one in results if one.curves)}
        _draw_accuracies(bars, results, colors)
        _draw_curves(curves, results, colors)
        if len(comparisons) > 1:
            bars.set_title(comparison.name, fontsize="medium")
    figure.savefig(file, dpi=120)


def _draw_accuracies(axes: Any, results: Sequence[ArmResult], colors: Mapping[str, str]) -> None:
    for place, one in enumerate(reversed(results)):
        mean, low, high = (100 * value for value in (one.accuracy or (0.0, 0.0, 0.0))[:3])
        error, color = [[max(mean - low, 0)], [max(high - mean, 0)]], colors.get(one.arm.name, "0.4")
        axes.errorbar(mean, place, xerr=error, fmt="o", color=color, capsize=3)
    axes.set_yticks(range(len(results)), [textwrap.fill(one.arm.what, 32) for one in reversed(results)])
    axes.set(xlabel="accuracy in percent, 95 % interval", xlim=(-2, 102), ylim=(-0.5, len(results) - 0.5))
    axes.grid(axis="x", alpha=0.3)


def _draw_curves(axes: Any, results: Sequence[ArmResult], colors: Mapping[str, str]) -> None:
    for one in results:
        for curve in one.curves:
            steps, rewards = zip(*curve, strict=True) if curve else ((), ())
            # A run with one logged step has a point and no line
            axes.plot(steps, rewards, color=colors[one.arm.name], alpha=0.7, marker="o" if len(steps) < 10 else None)
    axes.set(xlabel="step", ylabel="reward of a training batch")
