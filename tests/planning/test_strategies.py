"""One list of strategies: what follows from each is read from its record, nowhere from its name."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from support.runs import trainer

import trl_packfix
from trl_packfix import PackPlan, SFTConfig, packed_dataloader, plan_packs
from trl_packfix.cli import main
from trl_packfix.planning.strategies import STRATEGIES, StrategyTraits

ROOT = Path(trl_packfix.__file__).parents[1]


def test_every_name_has_a_record_a_row_and_a_config(tmp_path):
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
    found = {}
    for file in (ROOT / "trl_packfix").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            values = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            names = {each.value for each in values if isinstance(each, ast.Constant)} & set(STRATEGIES)
            if names and any("strategy" in ast.unparse(each) for each in values):
                found.setdefault(file.stem, set()).update(names)
    assert found == {}


def pairs(lengths, capacity, order, rng):
    """Two documents to a pack, as they come."""
    assert lengths.max() <= capacity / 2 and sorted(order) == list(range(len(lengths)))
    offsets = np.append(np.arange(0, len(order), 2), len(order))
    return PackPlan(order, offsets, lengths, capacity)


@pytest.fixture
def registered(monkeypatch):
    """A strategy as CONTRIBUTING says: one record."""
    monkeypatch.setitem(STRATEGIES, "pairs", StrategyTraits(plan=pairs))
    return Dataset.from_dict({"input_ids": [[5, 6, 7, i] for i in range(10, 34)]})


def test_one_record_makes_a_strategy(registered, tmp_path, capsys):
    plan = plan_packs([4] * 24, 64, "pairs", seed=1)
    assert np.diff(plan.offsets).tolist() == [2] * 12
    assert not np.array_equal(plan.order, plan_packs([4] * 24, 64, "pairs", seed=1, epoch=1).order)
    packs = [batch["input_ids"][0].tolist() for batch in packed_dataloader(registered, 32, 2, "pairs")]
    assert [len(pack) for pack in packs] == [8] * 12
    assert sorted(pack[i] for pack in packs for i in (3, 7)) == list(range(10, 34))
    in_order = [
        batch["input_ids"][0, 3::4].tolist() for batch in packed_dataloader(registered, 32, 2, "pairs", shuffle=False)
    ]
    assert in_order == [[i, i + 1] for i in range(10, 34, 2)]
    run = trainer(tmp_path, registered, packing_strategy="pairs", num_train_epochs=1)
    run.train()
    assert run.state.max_steps == 12 == run.packing_report.num_packs and run.packing_report.strategy == "pairs"
    assert [entry["documents_per_step"] for entry in run.state.log_history if "documents_per_step" in entry] == [2] * 12
    registered.save_to_disk(tmp_path / "rows")
    capsys.readouterr()
    command = [
        "plan",
        str(tmp_path / "rows"),
        "--max-length",
        "32",
        "--batch-size",
        "2",
        "--strategy",
        "pairs",
        "--json",
    ]
    assert main(command) in (0, None)
    assert "pairs" in json.dumps(json.loads(capsys.readouterr().out))


def test_an_unknown_strategy_and_a_record_without_a_function_raise(registered, tmp_path):
    with pytest.raises(ValueError, match="strategy='nothing' was given. No such packing strategy exists"):
        plan_packs([4], 8, "nothing")
    with pytest.raises(ValueError, match="`strategy='nothing'` was given. There is no such choice"):
        packed_dataloader(registered, 32, 2, "nothing")
    with pytest.raises(ValueError, match="`packing_strategy='nothing'` was given. There is no such choice"):
        trainer(tmp_path, registered, packing_strategy="nothing")
    with pytest.raises(AssertionError, match="planned in one way"):
        StrategyTraits()
