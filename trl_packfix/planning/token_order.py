"""Documents sorted by their tokens, so that documents that begin alike are neighbours. numpy only.

The order is made, and cached with the documents, for a feature that packs documents that begin alike together
(`features/prefixes`). Letters: M documents are sorted.
"""

from dataclasses import dataclass

import numpy as np

from .arrays import Int64Array


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Documents sorted by their tokens, and documents with equal tokens by their number.

    A *row* of a pack is a token that the model computes. It predicts the next token.

    A document comes *after* the longer documents that begin with all of its tokens. So in a pack that has the rows of
    such a longer document, it needs at most one row of its own, for its last token: this token has no next token, so
    its row cannot be the row of the longer document, which has one.
    """

    order: Int64Array  # numbers of the documents, shape (M,)
    # Number of tokens in the common beginning of each document and the document before it, shape (M,); the first has 0
    common: Int64Array

    def within(self, groups: Int64Array) -> "TokenOrder":
        """Return the documents of each group sorted by their tokens, group after group.

        No token is read. Documents a and c, in the order a b c, have min(common[b], common[c]) tokens in common, and so
        on for more documents between them. The first document of a group gets 0 common tokens.

        Args:
            groups: number of the group of each document, indexed by document number; documents of group -1 are omitted.

        >>> tokens = TokenOrder(np.array([1, 0, 2, 3]), np.array([0, 9, 4, 7]))
        >>> two_groups = tokens.within(np.array([5, 2, 5, 2]))
        >>> two_groups.order.tolist(), two_groups.common.tolist()
        ([1, 3, 0, 2], [0, 4, 0, 4])
        """
        # First sort by group, which keeps the order inside each group. Places are indices into `self.order`.
        group = groups[self.order]
        places = np.argsort(group, kind="stable")
        places = places[np.searchsorted(group[places], 0) :]
        group = group[places]
        # Then find the minimum of `self.common` between `first`, the place after a document of a group, and `stop`, the
        # place after the next document of the group.
        common = np.zeros(len(places), dtype=np.int64)
        has_neighbour = np.flatnonzero(group[1:] == group[:-1]) + 1
        first = places[has_neighbour - 1] + 1
        stop = places[has_neighbour] + 1
        # The minimum of a range is the minimum of two ranges of `size` values that cover it, one at each end. `size` is
        # 2 ** level, the largest power of two that is at most the length of the range. At each level, `minima[i]` is
        # the minimum of the `size` values from place i on.
        minima = self.common
        levels = np.frexp(stop - first)[1] - 1  # the logarithm to base 2, rounded down
        for level in range(int(levels.max(initial=-1)) + 1):
            at_level = levels == level
            size = 1 << level
            common[has_neighbour[at_level]] = np.minimum(minima[first[at_level]], minima[stop[at_level] - size])
            minima = np.minimum(minima[:-size], minima[size:])
        return TokenOrder(self.order[places], common)
