"""examples/tour.ipynb runs from top to bottom, as plain Python in one namespace."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

NOTEBOOK = Path(__file__).parent.parent / "examples" / "tour.ipynb"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The notebook's variables after its last cell."""
    patch, variables = pytest.MonkeyPatch(), {"__name__": "tour"}
    patch.chdir(tmp_path_factory.mktemp("tour"))
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), variables)
    yield variables
    patch.undo()


def test_the_tour_learns_and_shows(ran):
    assert ran["after"] < ran["before"] - 0.5
    assert ran["leaking"].leaks and not ran["leaking"].isolated
    assert Path("tour/packs.png").stat().st_size > 10_000
    losses = list(ran["losses"].values())
    assert len(losses) == 4 and max(losses) - min(losses) < 1e-5 and losses[0] == pytest.approx(ran["after"], abs=1e-5)


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert sum(cell["cell_type"] == "code" for cell in cells) >= 8
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
