"""Documents sorted by their tokens, from readers whose rows are set by hand."""

import numpy as np

from trl_packfix.data.documents import Documents, Ledger
from trl_packfix.data.reader import TokenReader
from trl_packfix.features.prefixes.tokens import token_order


class Tokens(TokenReader):
    """A reader whose documents are sorted. Rows with other labels than tokens may not share."""

    def __init__(self, rows, other_labels=()):
        self.rows = rows
        self.other_labels = other_labels

    def labels_are_tokens(self, row, start, stop):
        return ~np.isin(row, self.other_labels)

    def read_first_tokens(self, row, start, stop, width):
        block = np.full((len(row), width), -1)
        for i, (number, first, last) in enumerate(zip(row, start, stop, strict=True)):
            values = self.rows[number][first : min(first + width, last)]
            block[i, : len(values)] = values
        return block


class Images(Tokens):
    """Rows with images, whose common beginnings end where `ends` says."""

    def __init__(self, rows, ends):
        super().__init__(rows)
        self.ends = ends

    def shorten_common_beginnings(self, row, start, common):
        return np.minimum(common, self.ends)


def sorted_by_tokens(reader, starts=None, *selection):
    """Return the order of documents that end with their rows, and the common tokens of neighbours."""
    stop_token = np.array([len(row) for row in reader.rows])
    first_token = np.array(starts or [0] * len(stop_token))
    tokens = token_order(
        reader, Documents(np.arange(len(stop_token)), first_token, stop_token, stop_token, Ledger()), *selection
    )
    return tokens.order.tolist(), tokens.common.tolist()


ROWS = [[5, 6, 7], [5, 6], [9, 5, 6, 8], [5, 6, 7], [1, 2]]
STARTS = [0, 0, 1, 0, 0]


def test_documents_are_sorted_by_their_tokens():
    assert sorted_by_tokens(Tokens(ROWS), STARTS) == ([4, 0, 3, 2, 1], [0, 0, 3, 2, 2])
    assert sorted_by_tokens(Tokens(ROWS, other_labels=[0, 4]), STARTS) == ([3, 2, 1, 0, 4], [0, 2, 2, 0, 0])
    assert sorted_by_tokens(Tokens(ROWS), STARTS, np.array([2, 1])) == ([2, 1], [0, 2])


def test_long_common_beginnings_are_read_to_their_end():
    rows = [[1] * 900 + [2], [1] * 901, [1] * 700 + [2] * 300]
    assert sorted_by_tokens(Tokens(rows)) == ([1, 0, 2], [0, 900, 700])


def test_a_common_beginning_ends_before_an_image_but_not_between_copies():
    assert sorted_by_tokens(Images(ROWS, ends=1), STARTS) == ([4, 0, 3, 2, 1], [0, 0, 3, 1, 1])
    assert sorted_by_tokens(Images(ROWS, ends=1), STARTS, np.array([], dtype=np.int64)) == ([], [])
    assert sorted_by_tokens(Images([[5], [5], [5, 5]], ends=0)) == ([2, 0, 1], [0, 0, 1])
