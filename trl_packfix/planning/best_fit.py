"""Best-fit decreasing on the histogram of lengths, and packs as two arrays.

Packs are (members, sizes): the documents, pack after pack, and how many each pack has.
"""

from bisect import bisect_left, insort
from collections import deque

import numpy as np

from .arrays import Int64Array

Packs = tuple[Int64Array, Int64Array]
Run = tuple[int, int, int]  # see `pour`


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
    first_pack, num_packs, per_pack, filled = pour(np.bincount(lengths), capacity).T
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


def pour(counts: Int64Array, capacity: int) -> Int64Array:
    """Best-fit decreasing on a histogram: rows (first_pack, num_packs, per_pack, filled), longest documents first.

    Packs with the same documents are one run of consecutive numbers, so a run of packs takes all it can of one length
    at once. Best fit makes this exact: after a document, the tightest pack is still the tightest for the next of the
    same length until it has no more room. Of runs with equal space, the oldest is filled first.

    Worked example, lengths 5 5 3 2 2 in packs of 7: both fives open a pack each; the three fits into neither (2 tokens
    of space) and opens a third; of the twos, one goes behind each five.

    >>> pour(np.bincount([5, 5, 3, 2, 2]), 7).tolist()
    [[0, 2, 1, 0], [2, 1, 1, 0], [0, 2, 1, 1]]
    """
    spaces = _Spaces()
    rows: list[tuple[int, int, int, int]] = []
    opened = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            space, run = spaces.pop_tightest(length)
            if run is None:  # open as many packs as the rest needs
                space, num = capacity, -(-left // (capacity // length))
                run, opened = (opened, num, 0), opened + num
            first, num, filled = run
            most = space // length  # documents of this length that one of these packs takes
            full = min(num, left // most)
            rest = left - full * most if full < num else 0  # documents of one more pack
            for first_pack, num_packs, per_pack in ((first, full, most), (first + full, 1, rest)):
                if num_packs and per_pack:
                    rows.append((first_pack, num_packs, per_pack, filled))
                    if space > per_pack * length:
                        spaces.add(space - per_pack * length, (first_pack, num_packs, filled + per_pack))
            used, left = full + (rest > 0), left - full * most - rest
            if used < num:  # untouched packs stay ahead of later ones with the same space
                spaces.add(space, (first + used, num - used, filled), is_oldest=True)
    return np.array(rows, dtype=np.int64)


class _Spaces:
    """Runs of packs, (first_pack, num_packs, filled), by the free tokens of each of its packs, the oldest run first."""

    def __init__(self) -> None:
        self._runs: dict[int, deque[Run]] = {}
        self._spaces: list[int] = []  # keys of `_runs`, ascending

    def add(self, space: int, run: Run, *, is_oldest: bool = False) -> None:
        if space not in self._runs:
            self._runs[space] = deque()
            insort(self._spaces, space)
        self._runs[space].appendleft(run) if is_oldest else self._runs[space].append(run)

    def pop_tightest(self, length: int) -> tuple[int, Run | None]:
        """Take the oldest run of the fullest packs with room for `length` tokens, with their space.

        (0, None) if no pack has room.
        """
        tightest = bisect_left(self._spaces, length)
        if tightest == len(self._spaces):
            return 0, None
        space = self._spaces[tightest]
        run = self._runs[space].popleft()
        if not self._runs[space]:
            del self._runs[space], self._spaces[tightest]
        return space, run


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
