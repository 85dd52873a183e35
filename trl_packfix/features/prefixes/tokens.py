"""Sort the documents of a table by their tokens, images included, for the units of planning and for estimates.

`PrefixSharing.sort_tokens` (`sharing.py`) calls `token_order` for `share_prefixes="family"`; the order is cached with
the documents. `savings.py` sorts some documents to estimate what sharing would save.
"""

import numpy as np

from ...data.documents import Documents
from ...data.reader import RowReader, TokenReader
from ...planning.arrays import Int64Array
from ...planning.token_order import TokenOrder
from .families import sort_by_tokens


def token_order(reader: RowReader, documents: Documents, selection: Int64Array | None = None) -> TokenOrder:
    """Sort documents by their tokens, to find documents that begin alike. Images are compared by content.

    A document with a label that is neither its token nor -100 cannot share a beginning, because a shared token has one
    next token. Such documents come last, with 0 common tokens.

    Args:
        reader: the table. Of each document only the tokens up to the first difference from its neighbours are read.
        documents: N documents of the table.
        selection: indices of the documents to sort, shape (M,), or None for all documents.

    Returns:
        The sorted document indices, and the number of tokens that each document has in common with the document before
        it, both of shape (M,).
    """
    row = documents.row
    start = documents.start
    stop = documents.stop
    if selection is None:
        selection = np.arange(len(documents))
    images = None
    if isinstance(reader, TokenReader):
        tokens = reader
    else:
        from ...data.image_rows import ImageRows  # here, because it imports TRL, which takes seconds

        assert isinstance(reader, ImageRows)
        images = reader
        tokens = images.comparison_reader
    may_share = tokens.labels_are_tokens(row[selection], start[selection], stop[selection])
    sorted_numbers = selection[may_share]
    last_numbers = selection[~may_share]

    def read_tokens(places: np.ndarray, first: int, width: int) -> np.ndarray:
        numbers = sorted_numbers[places]
        return tokens.read_block(row[numbers], start[numbers] + first, stop[numbers], width=width)

    by_tokens = sort_by_tokens(documents.lengths[sorted_numbers], read_tokens)
    order = sorted_numbers[by_tokens.order]
    common = by_tokens.common
    if images is not None:
        # A common beginning must not end inside an image. It may do so between two equal documents, because no token of
        # the second document is put into the pack.
        lengths = documents.lengths[order]
        lengths_before = np.concatenate([[0], lengths[:-1]])[: len(lengths)]
        is_copy = (common == lengths) & (common == lengths_before)
        common = np.where(is_copy, common, images.end_common_before_images(row[order], start[order], common))
    return TokenOrder(np.concatenate([order, last_numbers]), np.concatenate([common, np.zeros_like(last_numbers)]))
