"""`docs/rules.md` tells the truth: the files exist, the tests exist, and planning stays free of heavy imports."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| `([^`]+)` \|$", (ROOT / "docs/rules.md").read_text(), re.MULTILINE)


def test_the_table_is_read():
    assert len(ROWS) >= 15


@pytest.mark.parametrize("rule, file, test", ROWS, ids=[row[0] for row in ROWS])
def test_rule_has_its_file_and_its_test(rule, file, test):
    assert (ROOT / file).is_file()
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text()
    assert re.search(rf"^def {name}\(" if name else r"^def test_", text, re.MULTILINE), f"no test {name} in {path}"


@pytest.mark.processes
def test_planning_needs_numpy_only():
    heavy = "('torch', 'trl', 'datasets', 'transformers')"
    code = f"import sys; from trl_packfix import plan_packs; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == "[]"
