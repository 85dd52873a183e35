"""Documents and their counts at each limit, from a reader of a few rows that are set by hand."""

from dataclasses import fields

import numpy as np
import pytest
from datasets import Dataset

from trl_packfix.data import documents as module
from trl_packfix.data.documents import DocumentCounts, Documents, Ledger, drop_untrained, make_documents
from trl_packfix.planning.token_order import TokenOrder


class Reader:
    """Rows of labels, each of which is trained where it is 1.

    Args:
        seq_lengths: the lengths of the documents of each row; None if each row is one document.
        image_stops: the token behind the last image of each row; None if rows have no images.
        cuts: the places where rows are split, by row, None for a row that cannot be split; None to split anywhere.
    """

    def __init__(self, rows, seq_lengths=None, bad=(), image_stops=None, cuts=None):
        self.rows = rows
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)
        self.packed = seq_lengths
        self.bad = bad
        if cuts is not None and image_stops is None:
            image_stops = [0] * len(rows)  # rows that may have images, and have none
        self.image_stops = None if image_stops is None else np.array(image_stops)
        self.cuts = cuts

    def __len__(self):
        return len(self.rows)

    def seq_lengths(self):
        if self.packed is None:
            return None
        return np.array([len(row) for row in self.packed]), np.array([n for row in self.packed for n in row])

    def count_trained(self, row, start, stop):
        """Count labels of 1 behind the first token of each document."""
        places = zip(row, start, stop, strict=True)
        return np.array([sum(self.rows[i][first + 1 : last]) for i, first, last in places], dtype=np.int64)

    def bad_rows(self):
        return np.isin(np.arange(len(self)), self.bad)

    def image_arrays(self, row, start, stop):
        return {}

    def find_cuts(self, row, max_length):
        if self.cuts is None:  # an image ends everywhere
            return [*range(0, len(self.rows[row]), max_length), len(self.rows[row])]
        return self.cuts[row]


def trained(length):
    return [1] * length


def spans_of(documents):
    return [*zip(documents.row.tolist(), documents.start.tolist(), documents.stop.tolist(), strict=True)]


# What is dropped


def test_documents_are_dropped_for_the_first_reason_that_holds():
    """Rows may be bad and empty; empty rows are untrained, and an untrained row may be too long."""
    reader = Reader([[], [], [1], [0] * 9, [1, 1], trained(9), [0] * 5 + trained(4)], bad=[0])
    documents = make_documents(reader, 4)
    ledger = documents.ledger
    assert ledger.given == DocumentCounts(7, 30, 0 + 1 + 8 + 4)
    assert ledger.dropped == {
        "bad_row": DocumentCounts(1, 0, 0),
        "empty": DocumentCounts(1, 0, 0),
        "untrained": DocumentCounts(1, 1, 0) + DocumentCounts(1, 9, 0) + DocumentCounts(1, 4, 0),
    }
    assert ledger.truncated == DocumentCounts(2, 10, 5 + 4)
    assert ledger.kept == DocumentCounts(2, 6, 1 + 3)
    assert spans_of(documents) == [(4, 0, 2), (5, 0, 4)]
    assert ledger.lost_trained_tokens == 9


def test_evaluation_keeps_documents_without_a_trained_token():
    documents = make_documents(Reader([[1], [0] * 9, []]), 4, keep_untrained=True)
    assert spans_of(documents) == [(0, 0, 1), (1, 0, 4)]
    assert [*documents.ledger.dropped] == ["empty"]


def test_no_document_is_an_error_unless_it_is_allowed():
    with pytest.raises(
        ValueError,
        match=r"The dataset has 2 rows and 2 documents, .* \(dropped: 2 untrained; `max_length=4`.*Check that `labels`",
    ):
        make_documents(Reader([[1], [1]]), 4)
    with pytest.raises(ValueError, match=r"The dataset has 0 rows and 0 documents, .* \(dropped: none"):
        make_documents(Reader([]), 4)
    assert len(make_documents(Reader([[1], [1]]), 4, may_be_empty=True)) == 0


def test_rows_of_unpacked_training_are_counted_with_those_before(monkeypatch):
    messages = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *numbers: messages.append(text % numbers))
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5]], "labels": [[1, 2], [3], [-100, 5]]})
    assert drop_untrained(rows, 5, 8)["input_ids"][:] == [[1, 2], [4, 5]]
    assert messages == ["3 of 5 documents have no trained token and are dropped from training."]
    trained_rows = rows.select([0, 2])
    assert drop_untrained(trained_rows, 2, 8) is trained_rows
    assert len(messages) == 1
    refused = r"The dataset has 4 rows and 4 documents, .* \(dropped: 4 untrained; `max_length=8`"
    with pytest.raises(ValueError, match=refused):
        drop_untrained(rows.select([1]), 4, 8)


# Rows of several documents


def test_documents_of_a_row_follow_each_other():
    reader = Reader([trained(5), trained(4), trained(3)], seq_lengths=[[2, 3], [4], [1, 2]])
    documents = make_documents(reader, None)
    assert spans_of(documents) == [(0, 0, 2), (0, 2, 5), (1, 0, 4), (2, 1, 3)]
    assert documents.trained.tolist() == [1, 2, 3, 1]


@pytest.mark.parametrize(
    "seq_lengths, row, counted",
    [
        ([[2, 3], [4], [2, 2], [9]], r"2 is \[2, 2\] and the row has 3", "2 rows, below 1: 0 lengths"),
        ([[5, 0], [4, 0], [3], [3]], r"0 is \[5, 0\] and the row has 5", "0 rows, below 1: 2 lengths"),
        ([[5], [5, -1], [0, 3], [3]], r"1 is \[5, -1\] and the row has 4", "0 rows, below 1: 2 lengths"),
        ([[5], [4], [3, 0], [9]], r"3 is \[9\] and the row has 3", "1 row, below 1: 1 length"),
    ],
)
def test_lengths_that_are_no_documents_of_their_row_are_refused(seq_lengths, row, counted):
    message = rf"`seq_lengths` of row {row} tokens \(do not add up: {counted}\).*must be positive and add up.*Correct"
    with pytest.raises(ValueError, match=message):
        make_documents(Reader([trained(5), trained(4), trained(3), trained(3)], seq_lengths=seq_lengths), None)


# Documents above the longest


@pytest.mark.parametrize(
    "truncation_mode, spans",
    [("keep_start", [(0, 0, 4), (1, 0, 4), (2, 0, 4)]), ("keep_end", [(0, 0, 4), (1, 1, 5), (2, 5, 9)])],
)
def test_a_document_of_one_token_more_is_truncated(truncation_mode, spans):
    documents = make_documents(Reader([trained(4), trained(5), trained(9)]), 4, truncation_mode=truncation_mode)
    assert spans_of(documents) == spans
    assert documents.ledger.truncated == DocumentCounts(2, 1 + 5, 1 + 5)
    assert documents.trained.tolist() == [3, 3, 3]


def test_a_document_of_one_token_more_is_split():
    """Later fragments do not train their first token. A fragment of one token is dropped."""
    documents = make_documents(Reader([trained(4), trained(5), trained(8), trained(10)]), 4, "split")
    assert spans_of(documents) == [(0, 0, 4), (1, 0, 4), (2, 0, 4), (2, 4, 8), (3, 0, 4), (3, 4, 8), (3, 8, 10)]
    ledger = documents.ledger
    assert ledger.split == DocumentCounts(3, 0, 1 + 1 + 2)
    assert ledger.fragments == 2 + 2 + 3
    assert ledger.dropped == {"untrained": DocumentCounts(1, 1, 0)}
    assert documents.trained.tolist() == [3, 3, 3, 3, 3, 3, 1]


def test_a_document_of_one_token_more_is_dropped_or_refused():
    reader = Reader([trained(4), trained(5), trained(3), trained(9)])
    documents = make_documents(reader, 4, "drop")
    assert documents.row.tolist() == [0, 2]
    assert documents.ledger.dropped == {"overlong": DocumentCounts(2, 14, 12)}
    message = r"2 of 4 documents .* in rows 1 \(5 tokens\), 3 \(9 tokens\)\..*Raise `max_length`"
    with pytest.raises(ValueError, match=message):
        make_documents(reader, 4, "raise")
    assert len(make_documents(reader, 9, "raise")) == 4


def test_a_row_is_split_at_the_places_of_its_reader():
    cuts = {1: [0, 3, 5], 2: None, 3: [0, 2, 6, 9]}
    reader = Reader([trained(4), trained(5), trained(9), trained(9)], cuts={0: None} | cuts)
    documents = make_documents(reader, 4, "split")
    assert spans_of(documents) == [(0, 0, 4), (1, 0, 3), (1, 3, 5), (3, 0, 2), (3, 2, 6), (3, 6, 9)]
    ledger = documents.ledger
    assert ledger.dropped == {"overlong": DocumentCounts(1, 9, 8)}
    assert ledger.split == DocumentCounts(2, 0, 1 + 2)
    assert ledger.fragments == 5


def test_an_image_that_ends_behind_the_longest_is_not_cut():
    reader = Reader([trained(9), trained(9), trained(3)], image_stops=[4, 5, 0])
    documents = make_documents(reader, 4)
    assert spans_of(documents) == [(0, 0, 4), (2, 0, 3)]
    assert documents.ledger.dropped == {"overlong": DocumentCounts(1, 9, 8)}
    # Evaluation needs all rows
    with pytest.raises(ValueError, match=r"1 of 3 documents .* in rows 1 \(images up to token 5\)"):
        make_documents(reader, 4, keep_untrained=True)
    assert make_documents(reader, 5, keep_untrained=True).lengths.tolist() == [5, 5, 3]
    # Only truncation asks where images are
    assert make_documents(reader, 4, "split").ledger.fragments == 6
    assert make_documents(reader, 4, "drop").row.tolist() == [2]


def test_a_concatenation_is_cut_into_blocks():
    documents = make_documents(
        Reader([trained(3), trained(6), trained(3), trained(4), trained(9)]), 4, cuts_blocks=True
    )
    assert spans_of(documents) == [
        *((0, 0, 3), (1, 1, 5), (2, 0, 3), (3, 0, 4)),
        *((4, 0, 4), (4, 4, 8)),
    ]
    assert documents.block.tolist() == [0, 1, 2, 3, 4, 5]
    assert documents.ledger.split == DocumentCounts(2, 0, 2 + 2)
    assert documents.ledger.fragments == 6
    assert documents.ledger.dropped == {"untrained": DocumentCounts(3, 3, 0)}


def test_counts_begin_with_0():
    assert DocumentCounts() == DocumentCounts(0, 0, 0)
    assert Ledger() == Ledger(*(DocumentCounts(0, 0, 0) for _ in range(4)), fragments=0, dropped={})


def test_all_arrays_that_documents_have_are_saved():
    """`planning/test_epochs.py` compares those that are read with those that were saved."""
    others = {"ledger", "token_order", "fingerprint", "file"}
    assert {*module.DOCUMENT_ARRAYS} == {field.name for field in fields(Documents)} - others
    documents = Documents(*(np.arange(2),) * 4, Ledger())
    assert documents.to_arrays().keys() == {"row", "start", "stop", "trained", "lengths", "ledger", "fingerprint"}
    again = Documents.from_arrays(documents.to_arrays())
    assert again.token_order is None
    assert again.image_start is None


def test_a_selection_is_saved_with_the_order_of_its_documents():
    tokens = TokenOrder(np.array([3, 0, 2, 1]), np.array([0, 5, 3, 4]))
    documents = Documents(*(np.arange(4),) * 4, Ledger(), token_order=tokens)
    selection = documents.select(np.array([False, True, True, True]))
    saved_order = Documents.from_arrays(selection.to_arrays()).token_order
    assert (saved_order.order.tolist(), saved_order.common.tolist()) == ([2, 1, 0], [0, 3, 4])
