"""
Run the notebooks, and keep what their cells show: `make notebooks`, after a change of what they print.

Progress bars and standard error are left out, so that no path of a machine is kept.
"""

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def kept(outputs):
    shown = [one for one in outputs if one.get("name") != "stderr"]
    bars = [one for one in shown if "<progress" in str(one.get("data", {}).get("text/html", ""))]
    return [one for one in shown if one not in bars]


def main():
    os.environ["OMP_NUM_THREADS"] = "1"
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, 4)
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = kept(cell.outputs)
        nbformat.write(notebook, path)
        print(path.name, sum(len(cell.get("outputs", ())) for cell in notebook.cells), "outputs")


if __name__ == "__main__":
    main()
