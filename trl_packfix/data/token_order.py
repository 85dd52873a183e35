"""Sort the documents of a table by their tokens, for common prefixes. Images are compared by content."""

import numpy as np

from ..planning.arrays import Int64Array
from ..planning.families import TokenOrder, sort_by_tokens
from .documents import Documents
from .image_rows import ImageRows
from .reader import TokenReader


def token_order(reader: TokenReader | ImageRows, documents: Documents, chosen: Int64Array | None = None) -> TokenOrder:
    """The documents, or the `chosen` ones by number, sorted by their tokens, read up to the first difference of two.

    A document with labels that are neither its tokens nor -100 shares nothing: a shared row has one next token. Such
    documents come last, with nothing in common.
    """
    row, start, stop = documents.row, documents.start, documents.stop
    chosen = np.arange(len(documents)) if chosen is None else chosen
    tokens = reader.compared if isinstance(reader, ImageRows) else reader
    may_share = tokens.labels_are_tokens(row[chosen], start[chosen], stop[chosen])
    numbers, others = chosen[may_share], chosen[~may_share]

    def read(places: np.ndarray, first: int, width: int) -> np.ndarray:
        wanted = numbers[places]
        return tokens.read_block(row[wanted], start[wanted] + first, stop[wanted], width=width)

    by_tokens = sort_by_tokens(documents.lengths[numbers], read)
    order, common = numbers[by_tokens.order], by_tokens.common
    if isinstance(reader, ImageRows):
        size = documents.lengths[order]
        before = np.concatenate([[0], size[:-1]])[: len(size)]
        is_same = (common == size) & (common == before)  # nothing of such a document is laid into a pack
        common = np.where(is_same, common, reader.outside_images(row[order], start[order], common))
    return TokenOrder(np.concatenate([order, others]), np.concatenate([common, np.zeros_like(others)]))
