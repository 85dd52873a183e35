"""A number of the report is one entry: the tables and the legend of `plan`, and the loggers, take it from there."""

from types import SimpleNamespace

import pytest
from datasets import Dataset
from support.runs import build_trainer

from trl_packfix.cli import forecast
from trl_packfix.reporting import columns, lines, report
from trl_packfix.reporting.columns import Column

MEANING = "mean number of documents in a pack"
PER_PACK = Column(
    "docs/pack", lambda report: report.num_packs and report.num_documents / report.num_packs, ".2f", "per", MEANING
)
NAMES = [
    column.heading for column in (*columns.KEY_COLUMNS, *columns.COLUMNS, *forecast.FORECAST_COLUMNS) if column.heading
]


def say_more(report):
    yield "documents in a pack", f"{PER_PACK.value(report):.2f}"


def test_a_column_is_one_entry_and_a_line_another(tmp_path, monkeypatch, output_of):
    (tmp_path / "lengths.txt").write_text("8 8 8 8 8 8")
    words = ["plan", str(tmp_path / "lengths.txt"), "--max-length", "16", "--batch-size", "2"]
    for module in (report, forecast):  # both read one tuple; a real entry is written into it
        assert module.COLUMNS is columns.COLUMNS
        monkeypatch.setattr(module, "COLUMNS", (*columns.COLUMNS, PER_PACK))
    out = output_of(*words, "--strategy", "bfd")
    heading, row = (line.split() for line in out.splitlines() if line.split()[:1] in (["max_length"], ["16"]))
    assert row[heading.index("docs/pack")] == "3.00"  # 6 documents of 8 tokens in packs of 32: 4 and 2
    assert "docs/pack: mean number of documents in a pack" in out
    assert "docs/pack" not in output_of(*words, "--strategy", "minibatch")
    monkeypatch.setattr(report, "LINES", (*lines.LINES, say_more))
    trainer = build_trainer(tmp_path, Dataset.from_dict({"input_ids": [[5] * 8] * 6}), max_length=16)
    trainer.get_train_dataloader()
    assert report.metrics(trainer.packing_report)["packing/per"] == 3
    assert dict(trainer.packing_report.lines())["documents in a pack"] == "3.00"


def test_only_a_section_that_is_missing_has_no_value():
    report_made = SimpleNamespace(images=None)
    assert Column("", "images.per_pack").value(report_made) is None
    with pytest.raises(AttributeError, match="imagse"):
        Column("", "imagse.per_pack").value(report_made)


@pytest.mark.parametrize("names", [NAMES, [column.metric for column in columns.COLUMNS if column.metric]])
def test_names_are_given_once(names):
    assert len(names) > 15
    assert len(set(names)) == len(names)
