"""Figures on pages are those of the data that a benchmark has written."""

import importlib
import json
import re
import statistics
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "docs" / "reports"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("peers")


def test_the_cost_of_a_step_is_that_of_the_data(peers):
    found = json.loads((REPORTS / "data" / "peers.json").read_text())
    assert (REPORTS / "peers.md").read_text() == peers.page(found)
    assert list(found["sizes"]) == list(peers.SIZES)
    assert all(set(peers.CONTENDERS) == size["seconds"].keys() for size in found["sizes"].values())
    assert peers.summary(found) in (REPORTS / "comparison.md").read_text()
    cells = {
        key: [f"{statistics.median(peers.ratios(size, *peers.RATIOS[key])):.2f}" for size in found["sizes"].values()]
        for key in ("two agents / two TRL steps", "one agent / one TRL step")
    }
    text = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(r"a step of two agents takes ([\d., and]+) of the time of two `GRPOTrainer` steps", text)
    assert re.findall(r"0\.\d+", said[1]) == sorted(cells["two agents / two TRL steps"])
