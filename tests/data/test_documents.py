"""Documents of a real table: every token is kept once or counted, for every policy, and read as the table shows it.

`test_documents_by_hand.py` has the limits of each policy.
"""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packfix.data.documents import DocumentCounts, Ledger, make_documents
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


def test_ledgers_of_parts_add_up_and_are_saved():
    counts = DocumentCounts
    first = Ledger(
        counts(9, 90, 80), counts(5, 50, 40), counts(1, 2, 3), counts(4, 0, 6), 8, {"empty": counts(1, 0, 0)}
    )
    second = Ledger(counts(1, 2, 1), counts(1, 2, 1), dropped={"empty": counts(2, 0, 0), "bad_row": counts(1, 7, 6)})
    dropped = {"bad_row": counts(1, 7, 6), "empty": counts(3, 0, 0)}
    total = first + second
    assert total == Ledger(counts(10, 92, 81), counts(6, 52, 41), counts(1, 2, 3), counts(4, 0, 6), 8, dropped)
    assert total.to_dict()["lost_trained_tokens"] == 40
    assert Ledger.from_dict(json.loads(json.dumps(total.to_dict()))) == total


ROWS = [[1, 2, 3, 4, 5], [6, 7]]
MASK = [[1, 0, 1, 1, 1], [0, 1]]


@pytest.mark.parametrize(
    "columns, message",
    [
        (
            {"labels": [ROWS[0], [6]]},
            "1 row has labels of another length.* row 1 with 2 `input_ids` and 1 `labels`.*exactly one label.*-100",
        ),
        ({"completion_mask": [[1], [0, 1]]}, "a mask of another length .* 5 `input_ids` and 1 `completion_mask`"),
        ({"completion_mask": MASK, "assistant_masks": MASK}, "only one mask can be read"),
    ],
)
def test_rows_without_one_label_per_token_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        make_documents(TokenReader(Dataset.from_dict({"input_ids": ROWS} | columns)), 8)


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


GAPS = Dataset.from_dict(
    {"input_ids": [[1, 2], None, [3, None, 4], [5, 6, 7], []], "labels": [[1, 2], [], [1, 2, 3], [5, 6, 7], []]}
)


@pytest.mark.parametrize(
    "rows, lengths",
    [(GAPS.filter(lambda row: None not in (row["input_ids"] or [None])), [2, 3]), (GAPS.select([3, 0]), [3, 2])],
)
def test_rows_with_gaps_may_be_left_out(rows, lengths):
    assert rows.data.num_rows == 5, "the table has only the selected rows"
    reader = TokenReader(rows)
    assert reader.lengths.tolist() == lengths
    read_rows = [reader.read(i, 0, length)["input_ids"].tolist() for i, length in enumerate(lengths)]
    assert read_rows == rows["input_ids"][:]


@pytest.mark.parametrize(
    "selected, counted", [([0, 1, 1], "2 missing rows and 0 .* in 3"), ([2, 3], "0 .* and 1 .* in 2")]
)
def test_gaps_are_counted_in_the_selected_rows(selected, counted):
    with pytest.raises(ValueError, match=f"Column `input_ids` holds {counted} rows.*Remove these"):
        TokenReader(GAPS.select(selected))


@settings(max_examples=150, deadline=None)
@given(
    rows=rows_of_labels,
    max_length=st.integers(2, 9),
    settings_of_policy=st.sampled_from(
        [
            {},
            {"truncation_mode": "keep_end"},
            {"overlong": "split"},
            {"overlong": "drop"},
            {"cuts_blocks": True},
        ]
    ),
)
def test_every_token_is_kept_once_in_order_or_counted(rows, max_length, settings_of_policy):
    data = table([len(row) for row in rows], untrained=lambda row, position: not rows[row][position])
    documents = make_documents(TokenReader(data), max_length, **settings_of_policy, may_be_empty=True)
    spans = read(data, documents)
    tokens = [int(token) for span in spans for token in span["input_ids"]]
    assert tokens == sorted(set(tokens)), "a token twice, or out of order"
    assert documents.lengths.max(initial=0) <= max_length
    trained = [sum(int(label) != -100 for label in span["labels"][1:]) for span in spans]
    assert documents.trained.tolist() == trained
    assert min(trained, default=1) > 0
    ledger = documents.ledger
    dropped = ledger.dropped.values()
    assert ledger.kept.tokens == len(tokens)
    assert ledger.kept.trained_tokens == sum(trained)
    assert ledger.given.tokens == sum(count.tokens for count in (ledger.kept, ledger.truncated, *dropped))
    counts = (ledger.kept, ledger.truncated, ledger.split, *dropped)
    assert ledger.given.trained_tokens == sum(count.trained_tokens for count in counts)
    fragments = ledger.fragments - ledger.split.documents
    assert ledger.given.documents + fragments == ledger.kept.documents + sum(c.documents for c in dropped)


def test_each_choice_of_documents_has_its_own_name_for_cached_plans():
    """After a restart on other ranks the plan of the rest of an epoch is not that of all documents."""
    file = Path("folder/cache-packfix-spans-0123.arrays")
    documents = replace(make_documents(TokenReader(table([3, 4, 5])), 8), file=file)
    choices = [np.array(is_chosen) for is_chosen in ([True, True, False], [True, False, True], [True, True, True])]
    files = [documents.select(choice).file for choice in choices]
    assert len({file, *files}) == 4
    assert {file.parent for file in files} == {file.parent}
    assert documents.select(choices[0].copy()).file == files[0]
