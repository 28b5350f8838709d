"""Figures on pages equal the data that the benchmarks wrote."""

import argparse
import importlib
import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest


ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "docs" / "reports"


@pytest.fixture
def module(monkeypatch):
    for folder in ("", "learning", "speed", "servers"):
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / folder))
    return importlib.import_module


def test_tables_of_pages_are_those_of_the_data(module):
    figures = module("figures")
    texts = figures.blocks()
    for page, text in figures.pages(texts).items():
        assert page.read_text(encoding="utf-8") == text, page
    begun = re.findall(r"<!-- (?!end of|names of)(.*?) -->", "".join(page.read_text() for page in figures.PAGES))
    # Of `choose.py`, which `test_choices.py` compares
    tables_of_choices = {"presets", "rates", "sharing", "search", "tuned", "worth", "parts", "sizes"}
    assert sorted(begun) == sorted({*texts, *tables_of_choices})  # every table is on one page
    files = {file.stem for file in figures.DATA.glob("*.json")}
    assert files - {*figures.MADE_BY} == {"peers", "printed", *tables_of_choices}
    assert not files & figures.load("printed").keys()  # a table has one source


def test_a_repeated_run_that_differs_is_an_error(module):
    figures = module("figures")
    saved = {"made": {"processor": "another processor", "versions": {"torch": "2.0"}}}
    figures.compare(saved, [1, [0.25]], (1, (0.25,)))
    with pytest.raises(SystemExit, match="figures differ. Those of the file: another processor, torch 2.0"):
        figures.compare(saved, [1, [0.25]], (1, (0.2501,)))


@pytest.mark.parametrize("action", ["--page", "--check"])
def test_data_files_are_of_the_default_settings(module, monkeypatch, capsys, action):
    def parse(*arguments):
        parser = argparse.ArgumentParser()
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--jobs", type=int, default=2)
        monkeypatch.setattr("sys.argv", ["a benchmark", *arguments])
        return module("figures").parse(parser, repeats="a run")

    assert parse(action, "--jobs", "4").jobs == 4 and parse("--seeds", "1").seeds == 1
    with pytest.raises(SystemExit):
        parse(action, "--seeds", "1")
    assert "Leave out `--seeds`" in capsys.readouterr().err


def test_a_run_of_kuhn_poker_is_repeated_unless_the_same_one_is_there(module, monkeypatch, tmp_path):
    """A result with another model, length, device, processor or version of the example is not reused."""
    kuhn_poker = module("kuhn_poker")
    options = SimpleNamespace(output_dir=tmp_path, max_steps=5, device="cpu", model=None)
    policies, started = [{"a set": {"check": 0.75, "bet": 0.25}}], []

    def train(command, **kwargs):
        started.append(command)
        result = {"measured": [[0, 1.0, 0.5, 0.5]], "policies": policies}
        (tmp_path / "one-rae-0.json").write_text(json.dumps(result))
        return SimpleNamespace(returncode=0, stdout="step 0: exploitability 0.5\n")

    monkeypatch.setattr(kuhn_poker.subprocess, "run", train)
    for count, (base, changes) in enumerate(
        [("a", {}), ("b", {}), ("b", {"max_steps": 6}), ("b", {"device": "cuda"})], start=1
    ):
        vars(options).update(changes)
        for _ in range(2):
            result = kuhn_poker.run("one-rae", 0, base, options)
            assert len(started) == count
    assert kuhn_poker.rounded(result) == [[0, 1.0, 0.5, 0.5, [0.25]]]
    assert module("figures").load("kuhn")["columns"] == kuhn_poker.COLUMNS  # as `--check` compares
    monkeypatch.setattr(kuhn_poker.figures, "processor", lambda: "another")
    kuhn_poker.run("one-rae", 0, "b", options)
    monkeypatch.setattr(kuhn_poker, "EXAMPLE", Path(__file__))
    kuhn_poker.run("one-rae", 0, "b", options)
    assert len(started) == 6


def test_the_cost_of_a_step_is_that_of_the_data(module):
    peers = module("peers")
    data = json.loads((REPORTS / "data" / "peers.json").read_text())
    assert (REPORTS / "peers.md").read_text() == peers.page(data)
    assert list(data["sizes"]) == list(peers.SIZES)
    assert all(set(peers.CONTENDERS) == size["seconds"].keys() for size in data["sizes"].values())
    assert peers.summary(data) in (REPORTS / "comparison.md").read_text()
    ratio = peers.RATIOS["two agents / two TRL steps"]
    speedups = [1 / statistics.median(peers.ratios(size, *ratio)) for size in data["sizes"].values()]
    text = " ".join((ROOT / "README.md").read_text().split())
    sentence = re.search(
        r"a step of two agents is \[(\d+) to (\d+) times as fast\]\(\S+\) as two `GRPOTrainer` steps", text
    )
    assert [int(sentence[1]), int(sentence[2])] == [round(min(speedups)), round(max(speedups))]


# Decimals on pages that are not measurements: versions, settings, levels of significance
NOT_MEASURED = {
    "README.md": {"3.11"},
    "docs/guide/choose_an_algorithm.md": {"0.01"},
    "docs/guide/tools.md": {"2.5"},
    "docs/guide/train_your_application.md": {
        "0.02",
        # Versions of harnesses
        *("1.18", "0.171", "0.24", "2.1", "0.86", "2.4", "1.26", "2.68", "1.5", "0.7", "1.15", "0.14", "1.23", "2.13"),
        *("1.62", "3.4", "7.0", "2.14", "1.14"),
    },
    "docs/reports/comparison.md": {"2.58", "2026.8"},
}


def prose(text):
    """A page without its blocks of figures, code and addresses."""
    text = re.sub(r"<!-- (.*?) -->\n.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    return re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|\barXiv[: ]\d+\.\d+|\b2\d{3}\.\d{5}", "", text, flags=re.DOTALL)


def test_figures_in_sentences_are_measured(module):
    """A decimal in a sentence of README, guide and reports is in a table of data, or in a sentence of the data."""
    figures = module("figures")
    tables = [*figures.blocks().values(), *((REPORTS / page).read_text() for page in ("peers.md", "choices.md"))]
    sentences = figures.load("printed")["sentences"]
    for page in figures.PAGES:
        name, text = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
        if name.startswith("docs/reference") or name == "docs/reports/choices.md":
            continue
        page_sentences = [sentence["text"] for sentence in sentences if sentence["page"] == name]
        assert all(sentence in " ".join(text.split()) for sentence in page_sentences), name
        decimals = set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", prose(text)))
        measured = set(re.findall(r"\d+\.\d+", "\n".join([*tables, *page_sentences])))
        assert decimals <= measured | NOT_MEASURED.get(name, set()), name
