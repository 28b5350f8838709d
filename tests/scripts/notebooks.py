"""
Run the notebooks and store their outputs: `make notebooks`, after a change of what they print.

Progress bars and standard error are dropped, so that no local path is stored.
"""

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def without_progress_bars(outputs):
    visible = [output for output in outputs if output.get("name") != "stderr"]
    bars = [output for output in visible if "<progress" in str(output.get("data", {}).get("text/html", ""))]
    return [output for output in visible if output not in bars]


def main():
    os.environ["OMP_NUM_THREADS"] = "1"
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, 4)
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = without_progress_bars(cell.outputs)
        nbformat.write(notebook, path)
        print(path.name, sum(len(cell.get("outputs", ())) for cell in notebook.cells), "outputs")


if __name__ == "__main__":
    main()
