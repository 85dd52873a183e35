"""Which documents begin with the same tokens, and how many rows a pack saves by computing such a beginning once.

Documents are sorted by their tokens. Then a document shares its longest common beginning with the one before it, and
lays only the rest, its *run*, into the pack:

    documents  A B C D, A B C E F      rows  A B C D | C E F      shared  0, 2

A position is shared if its own token and the next are the same, so every row has one next token. The beginning of the
second document therefore ends one token early, and C has two rows.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

MIN_SHARED = 16
"""Rows that two documents must share at least: below, more keys are looked up than rows are saved."""


def sort_key(tokens: npt.NDArray[np.integer]) -> bytes:
    """Sorts documents by their tokens; a document comes *after* those that begin with all of it.

    Behind them, what is left of it is one row, its last token, which predicts nothing.

    >>> sort_key(np.array([7, 8, 9])) < sort_key(np.array([7, 8])) < sort_key(np.array([7, 9]))
    True
    """
    return np.ascontiguousarray(tokens, dtype=">u4").tobytes() + b"\xff\xff\xff\xff"


def common_tokens(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> int:
    """Tokens with which both documents begin.

    >>> common_tokens(np.array([7, 8, 9]), np.array([7, 8, 5, 6]))
    2
    """
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    first = int(differ.argmax()) if shorter else 0
    return first if shorter and differ[first] else shorter


def shared_rows(common: int, length: int, length_before: int, min_shared: int = MIN_SHARED) -> int:
    """Rows that a document shares with the one before it, from their common tokens: all if they are the same."""
    shared = common if common == length == length_before else max(common - 1, 0)
    return shared if shared >= min_shared else 0


def share_order(
    documents: Sequence[npt.NDArray[np.integer]], min_shared: int = MIN_SHARED
) -> tuple[list[int], list[int]]:
    """The documents sorted by their tokens, and the rows that each shares with the one before it, both (N,).

    >>> share_order([np.array([7, 9]), np.array([7, 8, 9, 5]), np.array([7, 8, 9, 4, 3])], min_shared=1)
    ([2, 1, 0], [0, 2, 0])
    """
    order = sorted(range(len(documents)), key=[sort_key(tokens) for tokens in documents].__getitem__)
    shared = [0]
    for before, own in pairwise(order):
        a, b = documents[before], documents[own]
        shared.append(shared_rows(common_tokens(a, b), len(b), len(a), min_shared))
    return order, shared
