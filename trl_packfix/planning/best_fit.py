"""Best-fit decreasing on the histogram of lengths, and packs as two arrays.

Packs are (members, sizes): the documents, pack after pack, and how many each pack has.
"""

from bisect import bisect_left, insort
from collections import deque

import numpy as np

from .arrays import Int64Array

Packs = tuple[Int64Array, Int64Array]
EqualPacks = tuple[
    int, int, int
]  # of packs in `best_fit_of_histogram`: the first, how many, and the documents that each of them has


def best_fit_decreasing(lengths: Int64Array, capacity: int, rng: np.random.Generator | None = None) -> Packs:
    """Packs in the order in which best-fit decreasing opens them; with `rng` in a random one, see `plan_bfd`.

    >>> best_fit_decreasing(np.array([2, 5, 3, 4]), capacity=7)
    (array([1, 0, 3, 2]), array([2, 2]))
    """
    if len(lengths) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    longest = int(lengths.max())
    # numpy sorts 16-bit keys by counting, in linear time
    key = (longest - lengths).astype(np.uint16 if longest < 2**16 else np.int64)
    if rng is None:
        by_length = np.argsort(key, kind="stable")
    else:
        shuffled = rng.permutation(len(lengths))
        by_length = shuffled[np.argsort(key[shuffled], kind="stable")]
    first_pack, num_packs, per_pack, filled = best_fit_of_histogram(np.bincount(lengths), capacity).T
    # Row by row, `per_pack` documents go to each of `num_packs` packs from `first_pack` on, behind the `filled` ones.
    documents = num_packs * per_pack
    index = np.arange(len(lengths)) - np.repeat(np.cumsum(documents) - documents, documents)
    per_pack = np.repeat(per_pack, documents)
    pack = index // per_pack
    index -= pack * per_pack  # place among the row's documents in this pack
    del per_pack
    pack += np.repeat(first_pack, documents)
    if rng is not None:
        pack = rng.permutation(int((first_pack + num_packs).max()))[pack]
    sizes = np.bincount(pack)
    index += np.repeat(filled, documents)
    index += (np.cumsum(sizes) - sizes)[pack]
    del pack
    members = np.empty_like(by_length)
    members[index] = by_length
    return members, sizes


def best_fit_of_histogram(counts: Int64Array, capacity: int) -> Int64Array:
    """Best-fit decreasing on a histogram: rows (first_pack, num_packs, per_pack, filled), longest documents first.

    Packs with the same documents are one run of consecutive numbers, so a run of packs takes all it can of one length
    at once. Best fit makes this exact: after a document, the tightest pack is still the tightest for the next of the
    same length until it has no more room. Of runs with equal space, the oldest is filled first.

    Worked example, lengths 5 5 3 2 2 in packs of 7: both fives open a pack each; the three fits into neither (2 tokens
    of space) and opens a third; of the twos, one goes behind each five.

    >>> best_fit_of_histogram(np.bincount([5, 5, 3, 2, 2]), 7).tolist()
    [[0, 2, 1, 0], [2, 1, 1, 0], [0, 2, 1, 1]]
    """
    rows: list[tuple[int, int, int, int]] = []
    runs: dict[int, deque[EqualPacks]] = {}  # by the free tokens of each of their packs, the oldest run first
    spaces: list[int] = []  # keys of `runs`, ascending
    opened = 0

    def runs_with(space: int) -> deque[EqualPacks]:
        if space not in runs:
            runs[space] = deque()
            insort(spaces, space)
        return runs[space]

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            tightest = bisect_left(spaces, length)
            if tightest < len(spaces):
                space = spaces[tightest]
                first, num, filled = runs[space].popleft()
                if not runs[space]:
                    del runs[space], spaces[tightest]
            else:  # open as many packs as the rest needs
                space = capacity
                first = opened
                num = -(-left // (capacity // length))
                filled = 0
                opened += num
            most = space // length  # documents of this length that one of these packs takes
            full = min(num, left // most)
            rest = left - full * most if full < num else 0  # documents of one more pack
            for first_pack, num_packs, per_pack in ((first, full, most), (first + full, 1, rest)):
                if num_packs and per_pack:
                    rows.append((first_pack, num_packs, per_pack, filled))
                    if space > per_pack * length:
                        runs_with(space - per_pack * length).append((first_pack, num_packs, filled + per_pack))
            used = full + (rest > 0)
            left = left - full * most - rest
            if used < num:  # untouched packs stay ahead of later ones with the same space
                runs_with(space).appendleft((first + used, num - used, filled))
    return np.array(rows, dtype=np.int64)


def select_packs(members: Int64Array, sizes: Int64Array, packs: Int64Array) -> Packs:
    """The packs with these numbers, in this order."""
    starts = (np.cumsum(sizes) - sizes)[packs]
    sizes = sizes[packs]
    index = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    index += np.arange(len(index))
    return members[index], sizes


def by_earliest(members: Int64Array, sizes: Int64Array) -> Packs:
    """The same packs in the order of the earliest document in each."""
    if len(sizes) == 0:
        return members, sizes
    earliest = np.minimum.reduceat(members, np.cumsum(sizes) - sizes)
    return select_packs(members, sizes, np.argsort(earliest))
