"""One list of strategies: what follows from each is read from its record, nowhere from its name."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import trl_packfix
from trl_packfix import SFTConfig, plan_packs
from trl_packfix.planning.strategies import STRATEGIES, Strategy

ROOT = Path(trl_packfix.__file__).parents[1]


def test_every_name_has_a_record_a_row_and_a_config(tmp_path):
    assert set(STRATEGIES) == set(get_args(Strategy))
    page = (ROOT / "docs" / "strategies.md").read_text()
    assert re.findall(r"^\| `(\w+)`(?: \(default\))? \|", page, re.MULTILINE)[1 : len(STRATEGIES) + 1] == [*STRATEGIES]
    for name, traits in STRATEGIES.items():
        config = SFTConfig(str(tmp_path), packing=True, packing_strategy=name, bf16=False, use_cpu=True)
        assert config.effective_overlong == traits.overlong


@pytest.mark.parametrize("name", STRATEGIES)
def test_plan_packs_makes_a_plan_or_names_what_to_do_instead(name):
    if STRATEGIES[name].instead is None:
        assert plan_packs([3, 4], 8, name).num_packs == 1
    else:
        with pytest.raises(ValueError, match=re.escape(STRATEGIES[name].instead)):
            plan_packs([3, 4], 8, name)


def test_no_module_decides_by_the_name_of_a_strategy():
    """Only the planners themselves choose between "stream" and "bfd", the two that they are."""
    found = {}
    for file in (ROOT / "trl_packfix").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            values = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            names = {each.value for each in values if isinstance(each, ast.Constant)} & set(STRATEGIES)
            if names and any("strategy" in ast.unparse(each) for each in values):
                found.setdefault(file.stem, set()).update(names)
    assert found == {"packs": {"bfd"}, "epochs": {"stream"}}
