"""Spans: what becomes of every token, for every policy, against a plain Python reading of the same rules."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packfix.data.documents import DocumentCounts, Ledger, drop_untrained, make_documents
from trl_packfix.data.reader import TokenReader


def table(lengths, untrained=lambda row, position: False):
    """Return rows of distinct tokens, so that a span is recognised by its content."""
    tokens = np.arange(sum(lengths)) + 10
    rows = np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []
    labels = [
        [-100 if untrained(row, position) else int(token) for position, token in enumerate(ids)]
        for row, ids in enumerate(rows)
    ]
    return Dataset.from_dict({"input_ids": [ids.tolist() for ids in rows], "labels": labels})


def read(dataset, documents):
    reader = TokenReader(dataset)
    return [reader.read(*span) for span in zip(documents.row, documents.start, documents.stop, strict=True)]


def contents(dataset, **kwargs):
    documents = make_documents(TokenReader(dataset), **kwargs)
    return [document["input_ids"].tolist() for document in read(dataset, documents)], documents


@pytest.mark.parametrize(
    "lengths, given, kept",
    [
        ([5, 2], {"max_length": 3}, [[10, 11, 12], [15, 16]]),
        ([5, 2], {"max_length": 3, "truncation_mode": "keep_end"}, [[12, 13, 14], [15, 16]]),
        ([5, 2], {"max_length": 2, "overlong": "split"}, [[10, 11], [12, 13], [15, 16]]),  # [14] alone has no target
        ([2, 3], {"max_length": 3, "overlong": "drop"}, [[10, 11], [12, 13, 14]]),
        ([3, 4, 5], {"max_length": 5, "cuts_blocks": True}, [[10, 11, 12], [13, 14], [15, 16], [17, 18, 19], [20, 21]]),
    ],
)
def test_documents_by_hand(lengths, given, kept):
    documents_found, documents = contents(table(lengths), **given)
    assert documents_found == kept
    if "cuts_blocks" in given:
        assert documents.block.tolist() == [0, 0, 1, 1, 2]


def test_a_document_that_ends_with_a_block_is_not_cut():
    documents = contents(table([5, 3, 2]), max_length=5, cuts_blocks=True)[1]
    assert documents.lengths.tolist() == [5, 3, 2]
    assert documents.block.tolist() == [0, 1, 1]
    assert documents.ledger.split == DocumentCounts()
    assert documents.ledger.dropped == {}


def test_a_document_of_one_token_more_than_the_block_is_cut():
    documents = contents(table([3, 3]), max_length=5, cuts_blocks=True)[1]
    assert documents.lengths.tolist() == [3, 2]
    assert documents.ledger.fragments == 2
    assert documents.ledger.dropped == {"untrained": DocumentCounts(1, 1, 0)}


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
def test_each_token_is_counted_under_what_became_of_it(overlong):
    """Rows: whole, without a token, never trained, too long, and as long as may be."""
    data = table([3, 0, 9, 7, 4], untrained=lambda row, position: row == 2)
    ledger = contents(data, max_length=4, overlong=overlong)[1].ledger
    assert ledger.given == DocumentCounts(5, 23, 2 + 6 + 3)
    dropped = {"empty": DocumentCounts(1, 0, 0), "untrained": DocumentCounts(1, 9, 0)}
    changed = {
        "truncate": {"truncated": DocumentCounts(1, 3, 3), "kept": DocumentCounts(3, 11, 8)},
        "split": {"split": DocumentCounts(1, 0, 1), "fragments": 2, "kept": DocumentCounts(4, 14, 10)},
        "drop": {"dropped": {**dropped, "overlong": DocumentCounts(1, 7, 6)}, "kept": DocumentCounts(2, 7, 5)},
    }[overlong]
    assert ledger == Ledger(**{"given": ledger.given, "dropped": dropped} | changed)
    assert ledger.lost_trained_tokens == 11 - ledger.kept.trained_tokens


def test_ledgers_of_parts_add_up_and_are_saved():
    first = Ledger(
        DocumentCounts(9, 90, 80),
        DocumentCounts(5, 50, 40),
        DocumentCounts(1, 2, 3),
        DocumentCounts(4, 0, 6),
        8,
        {"empty": DocumentCounts(1, 0, 0)},
    )
    other = Ledger(
        DocumentCounts(1, 2, 1),
        kept=DocumentCounts(1, 2, 1),
        dropped={"empty": DocumentCounts(2, 0, 0), "bad_row": DocumentCounts(1, 7, 6)},
    )
    both = first + other
    assert both == Ledger(
        DocumentCounts(10, 92, 81),
        DocumentCounts(6, 52, 41),
        DocumentCounts(1, 2, 3),
        DocumentCounts(4, 0, 6),
        8,
        {"bad_row": DocumentCounts(1, 7, 6), "empty": DocumentCounts(3, 0, 0)},
    )
    assert both.to_dict()["lost_trained_tokens"] == 40
    assert Ledger.from_dict(json.loads(json.dumps(both.to_dict()))) == both


def test_rows_that_unpacked_training_leaves_out_are_counted_with_those_before(caplog):
    data = table([3, 4, 5, 6], untrained=lambda row, position: row == 2)
    assert drop_untrained(data, num_rows=7, max_length=8)["input_ids"] == [data["input_ids"][i] for i in (0, 1, 3)]
    assert "4 of 7 documents have no trained token" in caplog.text
    caplog.clear()
    assert len(drop_untrained(table([3, 4]), num_rows=2, max_length=8)) == 2
    assert not caplog.text
    with pytest.raises(ValueError, match="The dataset has 7 rows and 7 documents, and no document remains") as error:
        drop_untrained(table([3], untrained=lambda row, position: True), num_rows=7, max_length=8)
    assert "(dropped: 7 untrained; `max_length=8`)" in str(error.value)


def test_long_documents_are_dropped_and_counted():
    kept, documents = contents(table([5, 2, 7]), max_length=4, overlong="drop")
    assert kept == [[15, 16]]
    assert documents.ledger.dropped["overlong"].tokens == 12


def test_documents_without_a_trained_token_are_dropped_and_counted_and_kept_for_evaluation():
    data = table([3, 3, 1], untrained=lambda row, position: row == 1)
    kept, documents = contents(data, max_length=8)
    assert kept == [[10, 11, 12]]
    assert documents.ledger.dropped["untrained"].documents == 2
    assert len(contents(data, max_length=8, keep_untrained=True)[0]) == 3


def test_packed_rows_stay_the_documents_that_they_are():
    data = Dataset.from_dict({"input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]], "seq_lengths": [[2, 3], [2], [3]]})
    assert contents(data, max_length=8)[0] == [[1, 2], [3, 4, 5], [6, 7], [8, 9, 10]]


ROWS = [[1, 2, 3, 4, 5], [6, 7]]
MASK = [[1, 0, 1, 1, 1], [0, 1]]
THREE = [[1] * 5, [2] * 2, [3] * 7]
LONG = r"2 of 3 documents are longer than `max_length=4`; the first are in rows 0 \(5 .*, 2 \(7 .*Raise `max_length`"
ADD_UP = r"`seq_lengths` of row 0 is \[.* and the row has 5 tokens.*must be positive and add up.*Correct"
REFUSED = [
    ({"input_ids": THREE}, {"max_length": 4, "overlong": "raise"}, LONG),
    *(({"seq_lengths": [lengths, [2]]}, {}, ADD_UP) for lengths in ([2, 2], [5, 0], [6, -1])),
    (
        {"labels": [[-100] * 5, [-100] * 2]},
        {},
        r"2 rows and 2 documents, and no document remains .*2 untrained.*two tokens.*Check that `labels`",
    ),
    (
        {"labels": [ROWS[0], [6]]},
        {},
        "1 row has labels of another length.* row 1 with 2 `input_ids` and 1 `labels`.*exactly one label.*-100",
    ),
    ({"completion_mask": [[1], [0, 1]]}, {}, "a mask of another length .* 5 `input_ids` and 1 `completion_mask`"),
    ({"completion_mask": MASK, "assistant_masks": MASK}, {}, "only one mask can be read"),
]


@pytest.mark.parametrize("columns, settings, said", REFUSED)
def test_rows_are_refused_with_their_numbers(columns, settings, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        contents(Dataset.from_dict({"input_ids": ROWS} | columns), **{"max_length": 8} | settings)


def test_labels_are_made_from_a_mask_where_there_are_none():
    columns = {"input_ids": [[1, 2, 3], [4, 5]], "completion_mask": [[1, 0, 1], [0, 1]]}
    for mask in (columns, columns | {"completion_mask": [[True, False, True], [False, True]]}):
        reader = TokenReader(Dataset.from_dict(mask))
        assert [reader.read(i, 0, n)["labels"].tolist() for i, n in ((0, 3), (1, 2))] == [[1, -100, 3], [-100, 5]]
        assert make_documents(reader, 8).trained.tolist() == [1, 1]


def test_views_share_memory_with_the_dataset():
    data = table([4, 4, 4]).select(range(1, 3))
    one_size = data.cast(Features({name: List(Value("int64"), length=4) for name in data.column_names}))
    for reader in (TokenReader(data), TokenReader(one_size)):
        tokens = reader.read(1, 0, 4)["input_ids"]
        assert np.shares_memory(tokens, reader.read(1, 2, 4)["input_ids"])
        assert not tokens.flags.writeable
        assert tokens.tolist() == data[1]["input_ids"]
        assert reader.lengths.tolist() == [4, 4]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data,
        lambda data: data.shuffle(seed=3),
        lambda data: data.select(range(2, 7)),
        lambda data: data.select([5, 1, 1, 0]),
        lambda data: data.select(range(2, 9)).shuffle(seed=1),
        lambda data: concatenate_datasets([data.select(range(3)), data.shuffle(seed=0)]),
        lambda data: data.with_format("torch"),
    ],
)
def test_reader_sees_the_rows_that_the_dataset_shows(change):
    data = change(table([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], untrained=lambda row, position: position % 3 == 2))
    for reader in (TokenReader(data), pickle.loads(pickle.dumps(TokenReader(data)))):
        rows = data.with_format(None)
        tokens = [reader.read(i, 0, n)["input_ids"].tolist() for i, n in enumerate(reader.lengths)]
        assert tokens == rows["input_ids"][:]
        index = np.arange(len(data))
        zero = np.zeros(len(data), np.int64)
        expected = [sum(label != -100 for label in labels[1:]) for labels in rows["labels"]]
        assert reader.count_trained(index, zero, reader.lengths).tolist() == expected


rows_of_labels = st.lists(st.lists(st.booleans(), min_size=0, max_size=23), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(
    rows=rows_of_labels,
    max_length=st.integers(2, 9),
    policy=st.sampled_from(["truncate", "keep_end", "split", "drop", "wrapped"]),
)
def test_every_token_is_kept_once_in_order_or_counted(rows, max_length, policy):
    data = table([len(row) for row in rows], untrained=lambda row, position: not rows[row][position])
    try:
        documents = make_documents(
            TokenReader(data),
            max_length,
            overlong="truncate" if policy in ("keep_end", "wrapped") else policy,
            truncation_mode="keep_end" if policy == "keep_end" else "keep_start",
            cuts_blocks=policy == "wrapped",
        )
    except ValueError as error:
        assert "no document remains" in str(error)
        return
    spans = read(data, documents)
    tokens = [int(token) for span in spans for token in span["input_ids"]]
    assert tokens == sorted(set(tokens)), "a token twice, or out of order"
    assert documents.lengths.max() <= max_length
    trained = [sum(int(label) != -100 for label in span["labels"][1:]) for span in spans]
    assert documents.trained.tolist() == trained
    assert min(trained) > 0
    ledger = documents.ledger
    dropped = ledger.dropped.values()
    assert ledger.kept.tokens == len(tokens)
    assert ledger.kept.trained_tokens == sum(trained)
    assert ledger.given.tokens == ledger.kept.tokens + ledger.truncated.tokens + sum(c.tokens for c in dropped)
    assert ledger.given.trained_tokens == (
        ledger.kept.trained_tokens
        + ledger.truncated.trained_tokens
        + ledger.split.trained_tokens
        + sum(c.trained_tokens for c in dropped)
    )
    fragments = ledger.fragments - ledger.split.documents
    assert ledger.given.documents + fragments == ledger.kept.documents + sum(c.documents for c in dropped)


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_map_batches_do_not_move_a_boundary(batch_size):
    """TRL's `wrapped` lost two thirds of a dataset at the edges of `map` batches; here nothing depends on them."""
    lengths = np.random.default_rng(0).integers(1, 40, 300).tolist()
    data = table(lengths).map(lambda batch: batch, batched=True, batch_size=batch_size, writer_batch_size=batch_size)
    assert data.data.column(0).num_chunks == (1 if batch_size == 1000 else -(-300 // batch_size))
    for wrapped in (False, True):
        kept, _ = contents(data, max_length=16, overlong="split", cuts_blocks=wrapped, keep_untrained=True)
        assert [token for document in kept for token in document] == list(range(10, 10 + sum(lengths)))


def test_each_choice_of_documents_has_its_own_name_for_cached_plans():
    """After a restart on other ranks the plan of the rest of an epoch is not that of all documents."""
    file = Path("folder/cache-packfix-spans-0123.arrays")
    documents = replace(make_documents(TokenReader(table([3, 4, 5])), 8), file=file)
    choices = [np.array(chosen) for chosen in ([True, True, False], [True, False, True], [True, True, True])]
    files = [documents.select(chosen).file for chosen in choices]
    assert len({file, *files}) == 4
    assert {file.parent for file in files} == {file.parent}
    assert documents.select(choices[0].copy()).file == files[0]
