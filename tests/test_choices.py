"""The tables of measured choices have the figures of the data, and compute them correctly."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "learning"))
choose = importlib.import_module("choose")

SHORT = {"team": "evaluator", "family": "chain_sum", "max_steps": 1, "held_out": 8}


@pytest.mark.parametrize("grid", list(choose.GRIDS))
@pytest.mark.slow
def test_tables_of_the_page_are_those_of_the_data(grid):
    file = choose.DATA / f"{grid}.json"
    page = choose.PAGE.read_text(encoding="utf-8")
    if not file.exists():
        assert f"<!-- {grid} -->" not in page
        return
    data = json.loads(file.read_text(encoding="utf-8"))
    assert choose.figures.pasted(page, grid, choose.page_of(grid, data)) == page and f"<!-- {grid} -->" in page
    for setting, arms in data.items():
        seeds = {name: [run["seed"] for run in runs] for name, runs in arms.items()}
        assert setting in map(choose.label, choose.GRIDS[grid][1])
        assert {*map(tuple, seeds.values())} == {tuple(choose.GRIDS[grid][2])}
        (options,) = (options for options in choose.GRIDS[grid][1] if choose.label(options) == setting)
        assert list(arms) == choose.arms_of(grid, choose.GRIDS[grid][0](**options))


def run(seed, *right, **fields):
    figures = {"tokens": 100, "steps": 4, "seconds": 8.0, "rewards": [0.1, 0.9, 0.5]}
    return {"seed": seed, "right": right, **figures, **fields}


def test_differences_are_those_of_pairs():
    """By hand: the team has 2 of 4 right, the one agent 1 of 4, and the most frequent of three answers 3 of 4."""
    arms = {
        "team": [run(0, 1.0, 0.0), run(1, 1.0, 0.0)],
        "solo": [run(0, 1.0, 0.0, **{"maj@3": (1.0, 0.5)}), run(1, 0.0, 0.0, **{"maj@3": (1.0, 0.5)})],
    }
    lines = choose.table("worth", {"a setting": arms}).splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| a setting", "team"], ["| a setting", "solo"], ["| a setting", "solo, most frequent of 3"],
    ]  # fmt: skip
    accuracies = [float(line.split(" | ")[2].split()[0]) for line in lines]
    differences = [float(line.split(" | ")[3].split()[0]) for line in lines[1:]]
    assert accuracies == [50.0, 25.0, 75.0] and differences == [25.0, -25.0]
    assert choose.table("rates", {"a setting": arms}).splitlines()[3].split(" | ")[3].startswith("-25.0")
    assert choose.pooled({"a": arms, "b": arms}).splitlines()[-1].startswith("| solo | -25.0 [")
    assert choose.pooled({"a": arms, "b": arms}).endswith("| 4 |")
    tiny = {"team": arms["team"], "one adapter": arms["solo"], "own, rate of one adapter": arms["solo"]}
    wide = {name: [run(k, 1.0, 0.0, 1.0) for k in (0, 1)] for name in ("team", "one adapter")}
    teams = dict(zip([*choose.DUOS, "voting", "evaluator"], [tiny, tiny, wide, wide], strict=True))
    pooled = choose.page_of("tuned", teams).partition("\n\n")[2]  # two models have different questions
    assert pooled.count("| one adapter | -25.0 [") == pooled.count("| one adapter | +0.0 [") == 1
    assert "minus the first, evaluator and voting" in pooled and "own, rate" not in pooled
    elsewhere = {"solo": [run(0, 1.0, made="A"), run(1, 1.0, made="A")]}
    assert choose.processors({"a": arms, "b": elsewhere, "c": elsewhere}) == (
        "Processors: not recorded (`a`); A (`b`, `c`)."
    )
    assert choose.processors({"a": arms}) == "Processor: not recorded."


def test_a_rate_is_compared_with_the_best_of_the_same_rank():
    """By hand: with rank 8, 1e-4 has 1 of 4 right and 1e-3 has 2; with rank 32, 1e-4 has 3 and 1e-3 has 1."""
    half, quarter, most = [(1.0, 0.0), (1.0, 0.0)], [(1.0, 0.0), (0.0, 0.0)], [(1.0, 1.0), (1.0, 0.0)]
    scores = {"team": half, "r=8, 1e-4": quarter, "r=32, 1e-3": quarter, "r=32, 1e-4": most}
    arms = {name: [run(seed, *right) for seed, right in enumerate(runs)] for name, runs in scores.items()}
    of_8, of_32 = choose.against_best({"a setting": arms}).splitlines()[2:]
    assert of_8.startswith("| a setting | r=8 | 1e-3 | 1e-4: -25.0 [")
    assert of_32.startswith("| a setting | r=32 | 1e-4 | 1e-3: -50.0 [")


def test_differences_between_other_arms_than_the_first():
    """By hand: 3 of 4 right minus 1 of 4."""
    three, one = ([run(seed, *right) for seed in (0, 1)] for right in ((1.0, 0.5), (0.5, 0.0)))
    first, second = "large first, small second", "small first, large second"
    arms = {first: three, second: one, f"{first}, equal compute": one, f"{second}, equal compute": three}
    of_tokens, of_compute = choose.orders({"a": arms}).splitlines()[2:]
    assert of_tokens.startswith("| a | tokens | +50.0 [") and of_compute.startswith("| a | compute | -50.0 [")


def test_turns_are_compared_over_all_settings():
    """By hand: of 4 + 6 answers to two questions, 2 + 3, 3 + 3, 1 + 3 and 4 + 6 are right."""
    rights = {
        "team": (1.0, 0.0),
        "one adapter, both turns": (1.0, 0.5),
        "solo": (0.5, 0.0),
        "solo, told all": (1.0, 1.0),
    }
    arms = {name: [run(seed, *right) for seed in (0, 1)] for name, right in rights.items()}
    others = {
        "team": (1.0, 0.0),
        "one adapter, both turns": (1.0, 0.0),
        "solo": (0.0, 1.0),
        "solo, told all": (1.0, 1.0),
    }
    more = {name: [run(seed, *right) for seed in (0, 1, 2)] for name, right in others.items()}
    lines = choose.of_turns({"a": arms, "b": more}).splitlines()[2:]
    assert [re.sub(r" \[.*\]", "", line) for line in lines] == [
        "| team, own adapters | one adapter, both turns | -10.0 | 5 |",
        "| team, own adapters | solo | +10.0 | 5 |",
        "| team, own adapters | solo, told all | -50.0 | 5 |",
        "| one adapter, both turns | solo | +20.0 | 5 |",
    ]


def test_each_kind_of_adapters_has_the_rate_with_the_highest_reward_at_the_end():
    """By hand: the mean of the last five batches of two runs, without those before."""
    ends = {"own, 3e-4": 0.5, "team": 0.25, "own, 3e-3": 0.125, "shared, 3e-4": 0.5, "shared, 1e-3": 1.0}
    arms = {
        name: [run(5, 1.0, rewards=[2.0, *[2 * end] * 5]), run(6, 1.0, rewards=[9.0] + [0.0] * 5)]
        for name, end in {**ends, "shared, 3e-3": 0.0}.items()
    }
    assert choose.rewards_of_rates({"voting": arms}).splitlines()[2:] == [
        "| voting | own | 0.500 | 0.250 | 0.125 | 3e-4 |", "| voting | shared | 0.500 | 1.000 | 0.000 | 1e-3 |",
    ]  # fmt: skip


@pytest.mark.slow
def test_grids_run_in_the_precision_of_their_page():
    """That of `examples/real.py` may change, and would change every row."""
    others = ("sizes", "tuned")  # of tiny models; with the experiments of `search`
    for make, settings, _ in [grid for name, grid in choose.GRIDS.items() if name not in others]:
        experiment = make(**settings[-1])
        for variant in (experiment, *(change(experiment) for change in experiment.variants.values())):
            assert variant.args.bf16 and variant.args.model_init_kwargs == {"dtype": "bfloat16"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_products_of_bfloat16_are_those_of_pytorch():
    """Up to the order of the sums, so that a few are rounded to a neighbor. In a process of its own."""
    code = """
import torch
import choose_grids

x, y, b = (torch.randn(3, 40, 40).bfloat16() for _ in range(3))
products = [
    lambda: x[0] @ y[0].t(), lambda: torch.addmm(b[0], x[0], y[0], beta=0.5, alpha=2), lambda: x @ y,
    lambda: torch.baddbmm(b, x, y, beta=0.5, alpha=2), lambda: x[0].double() @ y[0].double(),
]  # fmt: skip
before = [product() for product in products]
library = choose_grids.multiply_in_float32()
for own, pytorch in zip((product() for product in products), before, strict=True):
    assert own.dtype == pytorch.dtype and own.shape == pytorch.shape
    torch.testing.assert_close(own, pytorch, rtol=2**-7, atol=2**-7)
    assert (own == pytorch).float().mean() > 0.95
try:
    x[0] @ y[0].float()
except RuntimeError:
    print("refused")
"""
    folder = str(ROOT / "benchmarks" / "learning")
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert run.stdout == "refused\n", run.stderr


def test_tables_go_between_their_comments():
    page = "a\n<!-- rates -->\nold\n<!-- end of rates -->\nb\n"
    assert choose.figures.pasted(page, "rates", "new") == "a\n<!-- rates -->\nnew\n<!-- end of rates -->\nb\n"
    assert choose.figures.pasted(page, "worth", "new") == page
    empty = "<!-- rates -->\n<!-- end of rates -->\nb\n"
    assert choose.figures.pasted(empty, "rates", "new") == "<!-- rates -->\nnew\n<!-- end of rates -->\nb\n"


def test_a_repeated_run_that_differs_is_an_error(tmp_path, monkeypatch, capsys):
    (setting, *_) = choose.load_outcomes("worth")
    recorded = choose.load_outcomes("worth")[setting]["team"][0]
    grid = (lambda **setting: None, *choose.GRIDS["worth"][1:])  # the real function trains a model
    monkeypatch.setitem(choose.GRIDS, "worth", grid)
    monkeypatch.setattr(choose, "run_cell", lambda experiment, place: None)
    monkeypatch.setattr(choose, "outcome", lambda place: {**recorded, "tokens": recorded["tokens"] + 1})
    with pytest.raises(SystemExit, match="differs in tokens"):
        choose.check("worth", setting, "team", recorded["seed"], tmp_path)
    out = capsys.readouterr().out
    assert all(f"{key}: the same" in out for key in ("right", "start", "steps", "rewards"))
    assert "seconds" not in out and "made" not in out  # which may differ


@pytest.mark.slow
def test_a_run_that_is_repeated_is_the_same(tmp_path, monkeypatch, capsys):
    """A grid of one setting and one seed, from its runs to its table; one of its runs once more."""
    monkeypatch.setitem(choose.GRIDS, "sharing", (choose.GRIDS["sharing"][0], [SHORT], [0]))
    monkeypatch.setattr(choose, "DATA", tmp_path / "data")
    data = choose.run("sharing", tmp_path / "runs", workers=2)
    assert not choose.DATA.exists()  # a data file is written with `--page` alone
    choose.write(choose.DATA / "sharing.json", data)
    (setting, arms), *others = data.items()
    assert not others and set(arms) == {"team", "shared", "shared, equal weights"}
    for (run_record,) in arms.values():
        assert run_record["steps"] == 1 and run_record["tokens"] > 0 and len(run_record["right"]) == 8
    lines = choose.page_of("sharing", choose.load_outcomes("sharing")).splitlines()
    processor = choose.made_with().partition(", torch")[0]
    assert len(lines) == 2 + len(arms) + 2 and lines[-1] == f"Processor: {processor}."
    choose.check("sharing", setting, "shared", 0, tmp_path / "again")
    repeated = re.findall(r"^(\w+): the same$", capsys.readouterr().out, re.MULTILINE)
    assert repeated == ["right", "tokens", "steps", "rewards"]  # the team's run alone has a start


CHOOSE = ROOT / "docs" / "guide" / "choose_an_algorithm.md"
FIGURE = re.compile(r"[+-]?\d+\.\d \[[+-]?\d+\.\d, [+-]?\d+\.\d\]")


def test_every_line_of_choose_names_a_source():
    """A line of advice links to a section and has only figures of that section, whose intervals do not contain 0."""
    text, page = CHOOSE.read_text(encoding="utf-8"), choose.PAGE.read_text(encoding="utf-8")
    sections = dict(section_of(part) for part in page.split("\n## ")[1:])
    lines = text.partition("| if | then | evidence |\n|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert lines
    for line in lines:
        (anchor,) = set(re.findall(r"choices\.md#([\w-]+)", line))
        figures = FIGURE.findall(line)
        assert figures and set(figures) <= set(FIGURE.findall(sections[anchor])), line
        for figure in figures:
            low, high = map(float, re.findall(r"[+-]?\d+\.\d", figure.split("[")[1]))
            assert low * high > 0, figure
    figures = FIGURE.findall(text)
    assert figures and set(figures) <= set(FIGURE.findall(page))


def section_of(part):
    """The anchor of a section, and its text."""
    title, _, text = part.partition("\n")
    return re.sub(r"[^\w]+", "-", title.strip("?").lower()), text
