"""Documents sorted by their tokens, from readers whose rows are set by hand."""

import numpy as np

from trl_packfix.data.documents import Documents, Ledger
from trl_packfix.data.reader import TokenReader
from trl_packfix.features.prefixes.tokens import token_order


class Tokens(TokenReader):
    """A reader whose documents are sorted. Documents that may not share are in `alone`."""

    def __init__(self, rows, alone=()):
        self.rows = rows
        self.alone = alone

    def labels_are_tokens(self, row, start, stop):
        return ~np.isin(row, self.alone)

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


ROWS = [[5, 6, 7], [5, 6], [9, 5, 6, 8], [5, 6, 7], [1, 2]]


def documents_at(start=(0, 0, 1, 0, 0)):
    stop = np.array([len(row) for row in ROWS])
    return Documents(np.arange(5), np.array(start), stop, stop, Ledger())


def test_documents_are_sorted_by_their_tokens():
    token_order_found = token_order(Tokens(ROWS), documents_at())
    assert token_order_found.order.tolist() == [4, 0, 3, 2, 1]
    assert token_order_found.common.tolist() == [0, 0, 3, 2, 2]
    token_order_found = token_order(Tokens(ROWS, alone=[0, 4]), documents_at())
    assert token_order_found.order.tolist() == [3, 2, 1, 0, 4]
    assert token_order_found.common.tolist() == [0, 2, 2, 0, 0]
    token_order_found = token_order(Tokens(ROWS), documents_at(), np.array([2, 1]))
    assert token_order_found.order.tolist() == [2, 1]
    assert token_order_found.common.tolist() == [0, 2]


def test_long_common_beginnings_are_read_to_their_end():
    rows = [[1] * 900 + [2], [1] * 901, [1] * 700 + [2] * 300]
    lengths = np.array([901, 901, 1000])
    documents = Documents(np.arange(3), np.zeros(3, int), lengths, lengths, Ledger())
    token_order_found = token_order(Tokens(rows), documents)
    assert token_order_found.order.tolist() == [1, 0, 2]
    assert token_order_found.common.tolist() == [0, 900, 700]


def test_a_common_beginning_ends_before_an_image_but_not_between_copies():
    token_order_found = token_order(Images(ROWS, ends=1), documents_at())
    assert token_order_found.order.tolist() == [4, 0, 3, 2, 1]
    assert token_order_found.common.tolist() == [0, 0, 3, 1, 1]
    token_order_found = token_order(Images(ROWS, ends=1), documents_at(), np.array([], dtype=np.int64))
    assert len(token_order_found.order) == 0
    token_order_found = token_order(
        Images([[5], [5], [5, 5]], ends=0),
        Documents(*(np.arange(3), np.zeros(3, int), *(np.array([1, 1, 2]),) * 2), Ledger()),
    )
    assert token_order_found.common.tolist() == [0, 0, 1]
