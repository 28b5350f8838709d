"""The notebooks run from the first to the last cell, and show what their cells print."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_and_links_of_a_notebook(notebook):
    text = notebook.read_text()
    assert not re.search(r"/(work|tmp|home|root)/|stderr", text) and len(text) < 100_000
    for cell in json.loads(text)["cells"]:
        assert "print(" not in "".join(cell["source"]) or cell["cell_type"] == "markdown" or cell["outputs"]
        for target in "".join(cell["source"]).split("](")[1:] if cell["cell_type"] == "markdown" else ():
            assert (notebook.parent / target.partition(")")[0]).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path):
    pytest.importorskip("nbmake")
    shutil.copy(notebook, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--nbmake"]
    command += ["--nbmake-timeout=280", f"--rootdir={tmp_path}", str(tmp_path / notebook.name)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:]
