"""`docs/rules.md` tells the truth: the files exist, the tests exist, and planning stays free of heavy imports."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINES = [line for line in (ROOT / "docs/rules.md").read_text().splitlines() if line.startswith("|")]
ROW = re.compile(r"\| ([^|]+) \| `([^`|]+)` \| ((?:`[^`|]+`(?:, )?)+) \|")
PARSED = {line: ROW.fullmatch(line) for line in LINES}
ROWS = [
    (rule, file, test)
    for rule, file, tests in (row.groups() for row in PARSED.values() if row)
    for test in re.findall(r"`([^`]+)`", tests)
]


def test_every_row_of_the_table_is_read():
    assert [line for line, row in PARSED.items() if row is None] == ["| rule | file | test |", "|---|---|---|"]
    assert len(set(LINES)) == len(LINES) > 200


@pytest.mark.parametrize("rule, file, test", ROWS, ids=[f"{rule} ({test})" for rule, _, test in ROWS])
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
