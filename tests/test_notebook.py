"""examples/tour.ipynb runs from top to bottom in a Jupyter kernel, and is stored with the outputs of such a run."""

import json
import runpy

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.processes

NOTEBOOK = ROOT / "examples" / "tour.ipynb"
VALUES = """import json
values = {"before": before, "after": after, "losses": list(losses.values())}
print(json.dumps(values | {"leaks": len(leaking.leaks), "isolated": leaking.isolated}))"""


def outputs(notebook):
    """Return (kind, content) of each output, by cell: what is printed, or the types of what is shown."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[output.get("name") or tuple(sorted(output["data"])) for output in cell["outputs"]] for cell in cells]


@pytest.mark.sweep
def test_the_tour_learns_and_shows(tmp_path):
    """Add a cell that prints the values of some of the tour's variables."""
    pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    ran = nbformat.read(NOTEBOOK, as_version=4)
    ran.cells.append(nbformat.v4.new_code_cell(VALUES))
    runpy.run_path(str(ROOT / "tools" / "notebook.py"))["run"](ran, str(tmp_path))
    values = json.loads(ran.cells.pop().outputs[0].text)
    assert values["after"] < values["before"] - 0.5
    assert values["leaks"]
    assert not values["isolated"]
    losses = values["losses"]
    assert len(losses) == 4
    assert max(losses) - min(losses) < 1e-5
    assert losses[0] == pytest.approx(values["after"], abs=1e-5)
    stored = json.loads(NOTEBOOK.read_text())
    assert outputs(ran) == outputs(stored), "stored with other outputs than it has: run `python tools/notebook.py`"
