"""Rows that the chat template or the tokenizer cannot take: named and refused, or dropped and counted."""

from itertools import islice

import pytest
from datasets import Dataset, IterableDataset, load_from_disk
from support.models import build_tokenizer
from support.runs import (
    ANSWER,
    PROMPT,
    all_documents,
    build_trainer,
    documents_of,
    documents_of_rows,
    run_training,
    samples_of,
    stock,
)

from trl_packfix.cli import main
from trl_packfix.data.stream_reader import CHUNK

SILENT = [{"role": "user", "content": "x"}]
NO_CONTENT = [{"role": "user", "content": None}, *ANSWER]
GOOD = {"messages": PROMPT + ANSWER}
PAIR = {"prompt": PROMPT, "completion": ANSWER}

# What a good row is, what a bad one is, settings, and what the message says of the bad one. Rows of other forms without
# a text are in `samples/test_frozen.py`
FORMS = {
    "messages": (GOOD, {"messages": NO_CONTENT}, {}, r"`messages\[0\]` .* no `content`; (Undefined|Type)Error: "),
    "no messages": (GOOD, {"messages": []}, {}, "`messages` is an empty list; IndexError"),
    "tools": (GOOD | {"tools": "[]"}, GOOD | {"tools": "[{"}, {}, "Row 3: `tools` is a text that is not JSON; JSONDec"),
    "silent": (PAIR, PAIR | {"completion": SILENT}, {"assistant_only_loss": True}, "Row 3: no assistant tokens under"),
}
BAD = [3, 8]


def rows(name, bad=BAD, num=12):
    good, wrong, *_ = FORMS[name]
    return [wrong if i in bad else good | {"id": i} for i in range(num)]


@pytest.mark.slow
@pytest.mark.parametrize("name, packing", [*((name, True) for name in FORMS), ("messages", False)])
def test_bad_rows_are_named_or_dropped_and_the_others_are_those_of_trl(name, packing, tmp_path, caplog):
    *_, settings, reason = FORMS[name]
    data = Dataset.from_list(rows(name))
    named = (
        rf"(?s)2 of 12 rows of the {{}} dataset cannot be tokenised; the first are \[3, 8\]\. .*{reason}.*`bad_rows="
    )
    with pytest.raises(ValueError, match=named.format("train")) as raised:
        build_trainer(tmp_path, data, packing=packing, **settings)
    assert raised.value.__cause__ is None  # none of the lines of jinja2
    assert raised.value.__context__ is None
    good = data.select([i for i in range(12) if i not in BAD])
    with pytest.raises(ValueError, match=named.format("eval")):
        build_trainer(tmp_path, good, eval_dataset=data, packing=packing, **settings)

    trainer = build_trainer(tmp_path, data, eval_dataset=data, bad_rows="drop", packing=packing, **settings)
    for split in ("train", "eval"):
        dropped = f"2 of 12 rows of the {split} dataset cannot be tokenised and are dropped; the first are [3, 8]"
        assert dropped in caplog.text
    expected = stock(tmp_path, good, **settings).train_dataset
    assert len(expected) == 10
    assert all(expected["input_ids"])
    assert samples_of(trainer.eval_dataset) == samples_of(expected)
    if not packing:
        assert samples_of(trainer.train_dataset) == samples_of(expected)
        assert trainer.train_dataset["id"] == good["id"]
        return
    assert all_documents(trainer) == documents_of_rows(expected)
    ledger = trainer.packing_report.ledger
    assert (ledger.given.documents, ledger.kept.documents, ledger.dropped["bad_row"].documents) == (12, 10, 2)
    assert dict(trainer.packing_report.lines())["dropped, bad_row"] == "2 documents, 0 tokens"


@pytest.mark.parametrize("bad_rows", ["raise", "drop"])
def test_if_no_row_remains_the_first_is_named(bad_rows, tmp_path):
    message = r"3 of 3 rows of the train dataset .*\[0, 1, 2\]\. Row 0: `text` is of type int; AttributeError"
    with pytest.raises(ValueError, match=message):
        build_trainer(tmp_path, Dataset.from_dict({"text": [1, 2, 3]}), bad_rows=bad_rows)


def test_only_ten_rows_are_named_and_the_number_of_processes_makes_no_difference(tmp_path):
    data = Dataset.from_list(rows("messages", bad=range(20, 50), num=60))
    with pytest.raises(ValueError, match=rf"30 of 60 rows .* the first are \{list(range(20, 30))}\. Row 20: "):
        build_trainer(tmp_path, data, dataset_num_proc=2)
    documents = [all_documents(build_trainer(tmp_path, data, bad_rows="drop", dataset_num_proc=n)) for n in (None, 2)]
    assert documents[0] == documents[1]
    assert len(documents[0]) == 30


def test_rows_are_tokenised_in_one_map_and_a_second_start_tokenises_nothing(tmp_path, monkeypatch):
    """Find the tokens again at a second start, also with "drop"."""
    maps = []
    run_map = Dataset.map

    def counted(self, *args, **kwargs):
        maps.append(kwargs.get("desc"))
        return run_map(self, *args, **kwargs)

    monkeypatch.setattr(Dataset, "map", counted)
    Dataset.from_list(rows("messages", bad=[])).save_to_disk(tmp_path / "good")
    build_trainer(tmp_path, load_from_disk(tmp_path / "good"))
    descriptions = ["Reading what the rows give", "Tokenizing train dataset"]
    assert maps == descriptions
    Dataset.from_list(rows("messages")).save_to_disk(tmp_path / "bad")
    times = []
    ledgers = []
    for _ in range(2):
        trainer = build_trainer(tmp_path, load_from_disk(tmp_path / "bad"), bad_rows="drop")
        ledgers.append(trainer.data.source.documents.ledger)
        times.append({file: file.stat().st_mtime_ns for file in (tmp_path / "bad").glob("cache-*")})
    assert times[0] == times[1]
    assert len(times[0]) > 1
    assert ledgers[0] == ledgers[1]
    assert maps[2:] == descriptions * 2


# Streams


def stream(num=300, bad=(3, 200)):
    return IterableDataset.from_generator(lambda: iter(rows("messages", bad, num)))


@pytest.mark.slow
def test_a_bad_row_of_a_stream_is_named_when_it_is_read(tmp_path):
    trainer = build_trainer(tmp_path, stream(bad=(200,)), max_steps=2)
    with pytest.raises(ValueError, match=r"Row 200 of the train stream cannot be tokenised: `messages\[0\]` \(user\)"):
        trainer.train()
    assert CHUNK < 200, "training reads beyond the first chunk"
    with pytest.raises(ValueError, match="Row 0 of the train stream"):
        build_trainer(tmp_path, stream(bad=(0,)), max_steps=2)
    with pytest.raises(ValueError, match="Row 3 of the eval stream"):
        build_trainer(tmp_path, stream(bad=()), max_steps=1, eval_dataset=stream(12)).evaluate()
    with pytest.raises(ValueError, match=r"1000 of 1000 rows of the train dataset cannot be tokenised"):
        build_trainer(tmp_path, stream(2000, bad=range(2000)), max_steps=1, bad_rows="drop")
    unpacked = build_trainer(tmp_path, stream(), packing=False, max_steps=4)
    with pytest.raises(ValueError, match="Row 3 of the train stream"):
        unpacked.train()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [(), (0, *range(3, 40, 3))], ids=len)
def test_bad_rows_of_a_stream_are_dropped_and_counted(bad, tmp_path):
    settings = {"max_steps": 4, "per_device_train_batch_size": 8, "max_length": 128, "save_steps": 2}

    documents = Dataset.from_list(rows("messages", bad, 40))
    trainer = build_trainer(tmp_path, documents.to_iterable_dataset(), bad_rows="drop", **settings)
    good = documents.select([i for i in range(40) if i not in bad])
    expected = build_trainer(tmp_path / "good", good.to_iterable_dataset(), **settings)
    batches_seen = [
        [documents_of(batch) for batch in islice(any_trainer.get_train_dataloader(), 6)]
        for any_trainer in (trainer, expected)
    ]
    assert batches_seen[0] == batches_seen[1]
    trainer.train()
    ledger = trainer.packing_report.ledger
    passes = ledger.given.documents // 40
    assert passes >= 1
    assert ledger.given.documents == passes * 40
    dropped = ledger.dropped["bad_row"].documents if bad else 0
    assert dropped == passes * len(bad) == ledger.given.documents - ledger.kept.documents
    resumed = run_training(
        tmp_path / "resumed",
        documents.to_iterable_dataset(),
        bad_rows="drop",
        **settings,
        checkpoint=tmp_path / "checkpoint-2",
    )
    assert resumed.packing_report.ledger == ledger


# The command line


@pytest.mark.parametrize("command", ["plan", "show", "prepare"])
def test_commands_name_bad_rows_or_leave_them_out(command, tmp_path, capsys, printed):
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    Dataset.from_list(rows("messages")).to_json(tmp_path / "bad.jsonl")
    words = [command, str(tmp_path / "bad.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]
    words += ["--output", str(tmp_path / "table")] if command == "prepare" else ["--max-length", "64"]
    assert main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"trl-packfix {command}: 2 of 12 rows of the train dataset cannot be tokenised; the first")
    output = printed(*words, "--bad-rows", "drop")
    if command == "prepare":
        assert (output["bad_rows_dropped"], output["documents_without_a_trained_token"]) == (2, 0)
        table = load_from_disk(tmp_path / "table")
        assert table.column_names == ["input_ids", "labels"]
        assert len(table) == 10
        assert all(table["input_ids"])
    elif command == "plan":
        ledger = output["plans"][0]["ledger"]
        assert (ledger["dropped"]["bad_row"]["documents"], ledger["given"]["documents"]) == (2, 12)
    else:  # rows have the numbers that they have in the file
        assert {document["row"] for pack in output for document in pack["documents"]} == set(range(12)) - set(BAD)
