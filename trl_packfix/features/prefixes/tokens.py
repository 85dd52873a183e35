"""Sort the documents of a table by their tokens, to find documents that begin alike.

With `share_prefixes="family"` such documents are planned as one unit: `PrefixSharing.sort_tokens` (`sharing.py`) calls
`token_order`, and the order is cached with the documents. `savings.py` sorts some documents to estimate what sharing
would save. A document with images has a token for the content of each image.
"""

import numpy as np

from ...data.documents import Documents
from ...data.reader import RowReader
from ...planning.arrays import Int64Array
from ...planning.token_order import TokenOrder
from .families import find_copies, sort_by_tokens


def token_order(reader: RowReader, documents: Documents, selection: Int64Array | None = None) -> TokenOrder:
    """Sort documents by their tokens, to find documents that begin alike. Images are compared by content.

    Documents share only tokens that are also their labels, or are not trained. A document in which a trained label
    differs from its token shares nothing: it comes last, with 0 common tokens.

    Args:
        reader: reads the rows of the table. It reads little more of a document than its tokens up to the first one
            that differs from its neighbour in sorted order.
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
    tokens = reader.comparison_reader  # of a table with images it has a number for the content of each image
    # A document may share its tokens if each of them is its label, or is not trained.
    may_share = tokens.labels_are_tokens(row[selection], start[selection], stop[selection])
    indices_to_sort = selection[may_share]
    last_indices = selection[~may_share]

    def read_tokens(places: np.ndarray, first: int, width: int) -> np.ndarray:
        """Read `width` tokens, from token `first` on, of the documents at n places of `indices_to_sort`.

        Returns:
            The tokens, shape (n, width), with `END_TOKEN_KEY` behind the end of a document.
        """
        indices = indices_to_sort[places]
        return tokens.read_first_tokens(row[indices], start[indices] + first, stop[indices], width=width)

    by_tokens = sort_by_tokens(documents.lengths[indices_to_sort], read_tokens)
    order = indices_to_sort[by_tokens.order]
    common = by_tokens.common
    # A common beginning must not end inside an image: the vision tower computes an image as a whole, and the pack would
    # hold only a part of it for the second document. Of two equal documents the second one computes nothing, so the
    # common beginning is the whole document, also if it ends inside an image.
    is_copy = find_copies(common, documents.lengths[order])
    # `shorten_common_beginnings` moves an end inside an image to the first token of the image
    common_of_others = reader.shorten_common_beginnings(row[order], start[order], common)
    common = np.where(is_copy, common, common_of_others)
    return TokenOrder(
        order=np.concatenate([order, last_indices]), common=np.concatenate([common, np.zeros_like(last_indices)])
    )
