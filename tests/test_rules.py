"""`docs/rules.md` is made from the marks at the tests; each names a file. And planning stays free of heavy imports."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("rules", ROOT / "docs" / "rules.py")
rules = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(rules)


def test_the_page_of_rules_is_made_of_the_marks():
    assert (ROOT / "docs" / "rules.md").read_text() == rules.page(), "make rules"
    assert len(rules.rules()) > 250


def test_each_rule_has_a_file_and_every_wing_has_rules():
    assert [file for file, _ in rules.rules() if not (ROOT / file).is_file()] == []
    assert {rules.wing(file) for file, _ in rules.rules()} == {*rules.WINGS, "the rest"}


@pytest.mark.processes
def test_planning_needs_numpy_only():
    heavy = "('torch', 'trl', 'datasets', 'transformers')"
    code = f"import sys; from trl_packfix import plan_packs; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == "[]"
