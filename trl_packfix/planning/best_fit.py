"""Best-fit decreasing on the histogram of lengths, and functions on packs as two arrays.

*Best-fit decreasing* takes documents longest first and puts each into the fullest pack that has room for it, or opens a
new pack. It is used for whole tables (`packs.plan_bfd`), for buffers and windows (`exact_fill.py`) and for ranks that
share packs (`degrees.py`). Lengths and capacities are in tokens. The *space* of a pack is the number of tokens that
still fit.

Packs are a pair of arrays, (members, sizes): `members` has the documents by number, pack after pack, shape (N,), and
`sizes` the number of documents in each of P packs, shape (P,).
"""

from bisect import bisect_left, insort
from collections import deque

import numpy as np

from .arrays import Int64Array, index_in_group

Packs = tuple[Int64Array, Int64Array]
EqualPacks = tuple[int, int, int]
"""Packs with consecutive numbers that hold the same lengths: (first pack, number of packs, documents in each)."""


def best_fit_decreasing(lengths: Int64Array, capacity: int, rng: np.random.Generator | None = None) -> Packs:
    """Pack documents by best-fit decreasing.

    Args:
        lengths: tokens of each document, at least 1, shape (N,), N > 0.
        capacity: most tokens of a pack, at least the longest length.
        rng: draws the order of the packs, and exchanges documents of equal length. Without it, packs are in the order
            in which they are opened.

    >>> best_fit_decreasing(np.array([2, 5, 3, 4]), capacity=7)
    (array([1, 0, 3, 2]), array([2, 2]))
    """
    longest = int(lengths.max())
    # 1. Sort the documents, longest first. numpy sorts 16-bit keys by counting, in linear time.
    key = (longest - lengths).astype(np.uint16 if longest < 2**16 else np.int64)
    if rng is None:
        by_length = np.argsort(key, kind="stable")
    else:
        shuffled = rng.permutation(len(lengths))
        by_length = shuffled[np.argsort(key[shuffled], kind="stable")]
    # 2. Pack lengths. Each *assignment* sends `per_pack` documents to each of `num_packs` packs from `first_pack` on,
    # behind the `filled` documents that these packs have already. Documents are used up one assignment after the other.
    first_pack, num_packs, per_pack, filled = best_fit_of_histogram(np.bincount(lengths), capacity).T
    # 3. Compute the pack of each document. `index` is first the number of the document in its assignment, and
    # then in its pack among the documents of this assignment. It is changed in place, because it is a large array.
    num_assigned = num_packs * per_pack
    index = index_in_group(num_assigned)
    per_pack = np.repeat(per_pack, num_assigned)
    pack = index // per_pack
    index -= pack * per_pack
    del per_pack  # large arrays are freed early
    pack += np.repeat(first_pack, num_assigned)
    if rng is not None:
        pack = rng.permutation(int((first_pack + num_packs).max()))[pack]
    # 4. Turn `index` into the index in `members`: behind the earlier documents of the pack, and behind earlier packs.
    # Put the documents there.
    sizes = np.bincount(pack)
    index += np.repeat(filled, num_assigned)
    index += (np.cumsum(sizes) - sizes)[pack]
    del pack
    members = np.empty_like(by_length)
    members[index] = by_length
    return members, sizes


def best_fit_of_histogram(counts: Int64Array, capacity: int) -> Int64Array:
    """Pack a histogram of lengths by best-fit decreasing.

    Packs with documents of equal lengths have consecutive numbers, and are filled together: all of them take as many
    documents of the next length as they can. The result is the same as with one document at a time, because a pack that
    has just got a document stays the fullest one, so it also gets the next documents of this length, until it has no
    more room. Of packs with equal space, the ones that got this space first are filled first.

    Worked example, lengths 5 5 3 2 2 in packs of 7: the two fives open a pack each; the three fits into neither (2
    tokens of space) and opens a third pack; of the twos, one goes behind each five.

    Args:
        counts: number of documents of each length, from length 0 on, which no document has.
        capacity: most tokens of a pack.

    Returns:
        Rows (first_pack, num_packs, per_pack, filled), longest documents first. Each row is an assignment: `per_pack`
        documents of one length go to each of `num_packs` packs from `first_pack` on, behind the `filled` documents that
        these packs have already.

    >>> best_fit_of_histogram(np.bincount([5, 5, 3, 2, 2]), 7).tolist()
    [[0, 2, 1, 0], [2, 1, 1, 0], [0, 2, 1, 1]]
    """
    assignments: list[tuple[int, int, int, int]] = []
    packs_by_space: dict[int, deque[EqualPacks]] = {}  # by the space of each pack
    spaces: list[int] = []  # keys of `packs_by_space`, ascending
    num_opened = 0

    def packs_with(space: int) -> deque[EqualPacks]:
        """Return the packs with this space, to which the caller adds some."""
        if space not in packs_by_space:
            packs_by_space[space] = deque()
            insort(spaces, space)
        return packs_by_space[space]

    for length in np.flatnonzero(counts)[::-1].tolist():
        num_remaining = int(counts[length])
        while num_remaining:
            # 1. Choose the fullest packs with room for this length, or open as many packs as all documents need.
            tightest = bisect_left(spaces, length)
            if tightest < len(spaces):
                space = spaces[tightest]
                first, num, filled = packs_by_space[space].popleft()  # `filled`: documents in each of them now
                if not packs_by_space[space]:
                    del packs_by_space[space], spaces[tightest]
            else:
                space = capacity
                first = num_opened
                num = -(-num_remaining // (capacity // length))
                filled = 0
                num_opened += num
            # 2. Fill as many packs as possible, each with the most documents that fit. If documents are left then, but
            # too few to fill another one of these packs, they go into the next one.
            most_per_pack = space // length
            num_full = min(num, num_remaining // most_per_pack)
            in_last = num_remaining - num_full * most_per_pack if num_full < num else 0
            for first_pack, num_packs, per_pack in ((first, num_full, most_per_pack), (first + num_full, 1, in_last)):
                if num_packs and per_pack:
                    assignments.append((first_pack, num_packs, per_pack, filled))
                    if space > per_pack * length:
                        packs_with(space - per_pack * length).append((first_pack, num_packs, filled + per_pack))
            num_used = num_full + (in_last > 0)
            num_remaining -= num_full * most_per_pack + in_last
            # 3. Put packs that got no document back to the front: they got this space before all others that have it.
            if num_used < num:
                packs_with(space).appendleft((first + num_used, num - num_used, filled))
    return np.array(assignments, dtype=np.int64)


def select_packs(members: Int64Array, sizes: Int64Array, packs: Int64Array) -> Packs:
    """Return the packs with the numbers `packs`, in this order."""
    starts = (np.cumsum(sizes) - sizes)[packs]  # index in `members` of the first document of each selected pack
    sizes = sizes[packs]
    index = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    index += np.arange(len(index))
    return members[index], sizes


def by_earliest(members: Int64Array, sizes: Int64Array) -> Packs:
    """Return the packs, of which there is at least one, in the order of the smallest document number in each."""
    earliest = np.minimum.reduceat(members, np.cumsum(sizes) - sizes)
    return select_packs(members, sizes, np.argsort(earliest))
