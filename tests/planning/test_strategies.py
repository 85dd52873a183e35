"""One list of strategies: what follows from each is read from its record, nowhere from its name."""

import ast
import doctest
import re

import numpy as np
import pytest
from datasets import Dataset
from support.paths import ROOT
from support.planners import make_epochs
from support.runs import build_trainer
from test_scheduling import KINDS, documents_of, problems, rows_of

from trl_packfix import PackPlan, SFTConfig, packed_dataloader, plan_packs
from trl_packfix.planning.strategies import STRATEGIES, StrategyTraits


def test_every_name_has_a_record_a_row_and_a_config(tmp_path):
    page = (ROOT / "docs" / "packing.md").read_text()
    assert re.findall(r"^\| `(\w+)`(?: \(default\))? \|", page, re.MULTILINE)[1 : len(STRATEGIES) + 1] == [*STRATEGIES]
    for name, traits in STRATEGIES.items():
        config = SFTConfig(str(tmp_path), packing=True, packing_strategy=name, bf16=False, use_cpu=True)
        assert config.effective_overlong == traits.overlong


@pytest.mark.parametrize("name", STRATEGIES)
def test_plan_packs_makes_a_plan_or_names_what_to_do_instead(name):
    if STRATEGIES[name].alternative is None:
        assert plan_packs([3, 4], 8, name).num_packs == 1
    else:
        with pytest.raises(ValueError, match=re.escape(STRATEGIES[name].alternative)):
            plan_packs([3, 4], 8, name)


def test_no_module_decides_by_the_name_of_a_strategy():
    names_of_module = {}
    for file in (ROOT / "trl_packfix").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            values = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            names = {value.value for value in values if isinstance(value, ast.Constant)} & set(STRATEGIES)
            if names and any("strategy" in ast.unparse(value) for value in values):
                names_of_module.setdefault(file.stem, set()).update(names)
    assert names_of_module == {}


@pytest.fixture
def next_fit(monkeypatch):
    """Adds the strategy of CONTRIBUTING as it says: the function and one record, from its own lines."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    added = [block for block in blocks if "next_fit" in block]
    assert len(added) == 2, "one block with the function, one with the record"
    monkeypatch.setitem(STRATEGIES, "next_fit", None)  # is taken out again
    names = {"np": np, "PackPlan": PackPlan, "StrategyTraits": StrategyTraits, "STRATEGIES": STRATEGIES}
    for block in added:
        exec(block, names)
    return names["plan_next_fit"]


def test_the_example_of_contributing_is_what_it_says(next_fit):
    runner = doctest.DocTestRunner()
    (example,) = doctest.DocTestFinder().find(next_fit, "plan_next_fit", globs={"np": np, "plan_next_fit": next_fit})
    runner.run(example)
    assert runner.summarize() == (0, 1)


def test_one_record_makes_a_strategy(next_fit, tmp_path, output_of):
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7, i] for i in range(10, 34)]})  # two of them fit a pack
    plan = plan_packs([4] * 24, 8, "next_fit", seed=1)
    assert np.diff(plan.offsets).tolist() == [2] * 12
    assert not np.array_equal(plan.order, plan_packs([4] * 24, 8, "next_fit", seed=1, epoch=1).order)
    packs = [batch["input_ids"][0].tolist() for batch in packed_dataloader(rows, 4, 2, strategy="next_fit")]
    assert [len(pack) for pack in packs] == [8] * 12
    assert sorted(pack[i] for pack in packs for i in (3, 7)) == list(range(10, 34))
    in_order = packed_dataloader(rows, 4, 2, strategy="next_fit", shuffle=False)
    assert [batch["input_ids"][0, 3::4].tolist() for batch in in_order] == [[i, i + 1] for i in range(10, 34, 2)]
    size = {"max_length": 4, "per_device_train_batch_size": 2}
    trainer = build_trainer(tmp_path, rows, packing_strategy="next_fit", num_train_epochs=1, **size)
    trainer.train()
    assert trainer.state.max_steps == 12 == trainer.packing_report.num_packs
    assert trainer.packing_report.strategy == "next_fit"
    logged = [entry["documents_per_step"] for entry in trainer.state.log_history if "documents_per_step" in entry]
    assert logged == [2] * 13, "of each step, and in the last line of the whole training"
    rows.save_to_disk(tmp_path / "rows")
    words = ["--max-length", 4, "--batch-size", 2, "--strategy", "next_fit"]
    assert "next_fit" in output_of("plan", tmp_path / "rows", *words)


@pytest.mark.parametrize("kind, tokens_per_rank", [(kind, room) for kind in KINDS for room in (None, 16)])
def test_the_new_strategy_packs_families_and_for_groups_of_ranks(next_fit, kind, tokens_per_rank):
    """Nothing but its record says that it exists."""
    documents = documents_of(rows_of(60, 0), kind, strategy="next_fit")
    how = {"share_prefixes": "family" if kind == "families" else "off", "tokens_per_rank": tokens_per_rank}
    ranks = [make_epochs(documents, "next_fit", 1, 64, 2, 4, **how) for _ in range(4)]
    assert problems(ranks, 0) == problems(ranks, 1) == set()
