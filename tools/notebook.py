"""Run examples/tour.ipynb from top to bottom and store it with its outputs: `python tools/notebook.py`."""

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "tour.ipynb"


def run(notebook: nbformat.NotebookNode, folder: str) -> None:
    """Replace the outputs of a notebook by those of a run in this folder.

    What goes to stderr is left out: warnings of libraries, which depend on what is installed.
    """
    paths = [str(NOTEBOOK.parent.parent), os.environ.get("PYTHONPATH", "")]  # the package, for all processes
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "DS_ACCELERATOR": "cpu"}
    resources = {"metadata": {"path": folder}}
    client = NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True, resources=resources)
    client.execute(env=env)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        run(notebook, folder)
    notebook.metadata.language_info = {"name": "python"}  # not the version of one machine
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK}: {NOTEBOOK.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
