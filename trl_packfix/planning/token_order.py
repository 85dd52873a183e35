"""Documents sorted by their tokens, so that documents that begin alike are neighbours. numpy only.

`Documents` (`data/documents.py`) have such an order where units of planning are made of documents that begin alike. A
*neighbour* of a document is the document before it in the order. Letters: M documents are sorted.
"""

from dataclasses import dataclass

import numpy as np

from .arrays import Int64Array


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Documents sorted by their tokens, and copies by their number.

    A document comes *after* the longer documents that begin with all of its tokens. It then adds one row to them: its
    last token, which predicts nothing.
    """

    order: Int64Array  # numbers of the documents, shape (M,)
    common: Int64Array  # tokens in the common beginning of each document and its neighbour, shape (M,); the first has 0

    def within(self, groups: Int64Array) -> "TokenOrder":
        """Return the documents of each group sorted by their tokens, group after group.

        The first document of a group has nothing in common with the last one of the group before. No token is read: two
        documents have as many common tokens as the neighbours between them have at least.

        Args:
            groups: number of the group of each document, by its number; documents of group -1 are omitted.

        >>> tokens = TokenOrder(np.array([1, 0, 2, 3]), np.array([0, 9, 4, 7]))
        >>> two_groups = tokens.within(np.array([5, 2, 5, 2]))
        >>> two_groups.order.tolist(), two_groups.common.tolist()
        ([1, 3, 0, 2], [0, 4, 0, 4])
        """
        # First sort by group, which leaves the order inside each group. Places are indices into `self.order`.
        group = groups[self.order]
        places = np.argsort(group, kind="stable")
        places = places[np.searchsorted(group[places], 0) :]
        group = group[places]
        # Then find the minimum of `self.common` behind the place of one document up to the place of the next.
        common = np.zeros(len(places), dtype=np.int64)
        has_neighbour = np.flatnonzero(group[1:] == group[:-1]) + 1
        first = places[has_neighbour - 1] + 1
        stop = places[has_neighbour] + 1
        # The minimum of a range is the minimum over two ranges that cover it, each of `size` values, a power of two.
        minima = self.common
        level = np.frexp(stop - first)[1] - 1
        for i in range(int(level.max(initial=-1)) + 1):
            at_level = level == i
            size = 1 << i
            common[has_neighbour[at_level]] = np.minimum(minima[first[at_level]], minima[stop[at_level] - size])
            minima = np.minimum(minima[:-size], minima[size:])
        return TokenOrder(self.order[places], common)
