"""Packs in visiting order: a bounded buffer, oldest documents first, each pack closed by an exact fill.

A *position* is the place of a document in visiting order.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from .arrays import Int64Array
from .best_fit import Packs, best_fit_decreasing, by_earliest, select_packs

MAX_PASSED_OVER = 32  # documents too long for the gap that a search skips: bounds the work per pack
FILL_FROM = 3  # an exact fill is searched for gaps of at most this many mean documents; see `StreamPacker`
ENOUGH_FILLERS = 2  # short documents are scarce below this many times the room beside long ones; see `StreamPacker`
MAX_REMEMBERED = 1 << 16  # placed positions in memory: bounds the memory of an endless stream


class WaitingDocuments:
    """Waiting documents by length, with the searches that closing a pack needs.

    `present[l]` is 1 where a document of l tokens waits, and `mirrored` is the same back to front: the pairs that sum
    to a gap are then the ones in the bitwise "and" of two slices.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self.num_documents = self.num_tokens = 0
        self.waiting: list[deque[int] | None] = [None] * (longest + 1)  # positions by length, oldest first
        self.present = bytearray(longest + 1)
        self.mirrored = bytearray(longest + 1)
        self.forward = np.frombuffer(self.present, dtype=np.uint8)
        self.backward = np.frombuffer(self.mirrored, dtype=np.uint8)

    def add(self, position: int, length: int) -> None:
        self.num_documents += 1
        self.num_tokens += length
        waiting = self.waiting[length]
        if waiting is None:
            waiting = self.waiting[length] = deque()
        waiting.append(position)
        self.present[length] = self.mirrored[self.longest - length] = 1

    def take(self, length: int) -> int:
        """Remove the oldest document of this length."""
        waiting = self.waiting[length]
        assert waiting  # the caller has seen it present
        position = waiting.popleft()
        self.num_documents -= 1
        self.num_tokens -= length
        if not waiting:
            self.present[length] = self.mirrored[self.longest - length] = 0
        return position

    def longest_up_to(self, length: int) -> int:
        """The longest waiting document with at most `length` tokens; -1 if all are longer."""
        return self.present.rfind(1, 0, min(length, self.longest) + 1)

    def exact_fill(self, gap: int, longest: int) -> tuple[int, ...]:
        """Lengths of one document, or of the most even pair, that sum to `gap`; () where there are none.

        Even pairs leave the shortest documents for the packs that can be closed with nothing else.
        """
        if gap <= longest and self.present[gap]:
            return (gap,)
        low = (gap + 1) // 2  # the longer one of the pair
        high = min(gap - 1, longest)
        if low > high:
            return ()
        start = self.longest - gap  # mirrored[start + l] is present[gap - l]
        both = (self.forward[low : high + 1] & self.backward[start + low : start + high + 1]).tobytes()
        offset = both.find(1)
        if offset == 0 and 2 * low == gap and len(self.waiting[low] or ()) < 2:
            offset = both.find(1, 1)
        return (low + offset, gap - low - offset) if offset >= 0 else ()

    def best_fill(self, gap: int) -> tuple[int, ...]:
        """Lengths of the one document, or the two of different lengths, that leave least of `gap`; () if none fits."""
        single = self.longest_up_to(gap)
        if single < 0:
            return ()
        lengths = np.flatnonzero(self.forward[: single + 1])
        partner = np.searchsorted(lengths, gap - lengths, side="right") - 1
        partner = np.minimum(partner, np.arange(len(lengths)) - 1)
        total = np.where(partner >= 0, lengths + lengths[partner], 0)
        best = int(total.argmax())
        return (int(lengths[best]), int(lengths[partner[best]])) if total[best] > single else (single,)


def fill_exactly(arriving: Int64Array, capacity: int, buffer_size: int) -> Packs:
    """The packs of a `StreamPacker` for lengths that are all known."""
    return _as_arrays(StreamPacker(arriving.tolist(), capacity, buffer_size, longest=int(arriving.max(initial=1))))


def _as_arrays(packs: Iterable[list[int]]) -> Packs:
    packs = list(packs)
    members = np.fromiter(chain.from_iterable(packs), dtype=np.int64)
    return members, np.fromiter(map(len, packs), dtype=np.int64, count=len(packs))


def _pack_rest(lengths: Int64Array, capacity: int) -> Packs:
    """The fewest packs of three heuristics, for when nothing more arrives; the pack of the oldest document first."""

    def until_empty(arriving: Int64Array) -> Packs:
        longest = int(arriving.max())
        return _as_arrays(StreamPacker(arriving.tolist(), capacity, len(arriving), longest).packs(until_empty=True))

    decreasing = np.argsort(-lengths, kind="stable")
    members, sizes = until_empty(lengths[decreasing])
    candidates = [until_empty(lengths), (decreasing[members], sizes), best_fit_decreasing(lengths, capacity)]
    return by_earliest(*min(candidates, key=lambda packs: len(packs[1])))


@dataclass(eq=False)
class StreamPacker:
    """Packs of positions in arrival order, each as soon as it is closed: oldest documents first, then an exact fill.

    An exact fill is searched only once the gap is at most FILL_FROM mean documents. Larger gaps mostly have one, made
    of two long documents, so that long documents would be trained first and short ones last.

    A document of more than half a pack needs shorter ones beside it. Where these are scarce, an exact fill would use
    two of them at once, and later packs would stay half empty: each gap then takes the longest document that fits.

    Documents are read from `arriving` whenever one is placed and there is room; at its end, `_pack_rest` packs the last
    buffer. The next packs depend only on the waiting documents, in their order, and on those that arrive: given both
    again, a packer continues with the same packs. Memory is bounded by the buffer.

    Worked example, capacity 7, a buffer of 4 (documents by length, the oldest first):

        waiting      oldest  gap  exact fill  pack     arrives
        4 5 3 2      4       3    3           4 + 3    6, 1
        5 2 6 1      5       2    2           5 + 2    7, end
        6 1 7        (nothing more arrives: `_pack_rest` packs these as 6 + 1 and 7)

    >>> list(StreamPacker([4, 5, 3, 2, 6, 1, 7], capacity=7, buffer_size=4, longest=7))
    [[0, 2], [1, 3], [4, 5], [6]]
    """

    arriving: Iterable[int]  # tokens of each document
    capacity: int
    buffer_size: int  # most documents that wait
    longest: int  # most tokens of a document, at most `capacity`
    bytes_of: Callable[[int], int] | None = None  # memory of the document at a position
    most_bytes: float = np.inf  # if the waiting documents have so many, no other arrives

    def __post_init__(self) -> None:
        self.next_lengths = iter(self.arriving)
        self.ended = False
        self.buffer = WaitingDocuments(self.longest)
        self.lengths: list[int] = []  # of the positions from `first` on
        self.taken = bytearray()  # of the same
        self.first = self.num_bytes = 0
        self.spare = 0  # tokens of short documents that wait, less `ENOUGH_FILLERS` times the room beside the long ones
        self.members: list[int] = []  # of the pack that is open

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.packs()
        waiting = np.flatnonzero(np.frombuffer(self.taken, np.uint8) == 0)
        if len(waiting):
            members, sizes = _pack_rest(np.array(self.lengths)[waiting], self.capacity)
            for pack in np.split(waiting[members] + self.first, np.cumsum(sizes)[:-1]):
                yield pack.tolist()

    def packs(self, until_empty: bool = False) -> Iterator[list[int]]:
        """Packs until nothing more arrives, or until no document waits."""
        self._fill_buffer()
        oldest = 0
        while self.buffer.num_documents and (until_empty or not self.ended):
            oldest = self.taken.find(0, oldest)
            if oldest >= MAX_REMEMBERED:  # all before it are in packs
                del self.lengths[:oldest], self.taken[:oldest]
                self.first = self.first + oldest
                oldest = 0
            self._close_pack(oldest)
            yield self.members

    def _fill_buffer(self) -> None:
        """Documents arrive, as many as there is room and memory for."""
        buffer = self.buffer
        while buffer.num_documents < self.buffer_size and self.num_bytes < self.most_bytes and not self.ended:
            length = next(self.next_lengths, 0)
            if not length:
                self.ended = True
                return
            position = self.first + len(self.taken)
            buffer.add(position, length)
            self.lengths.append(length)
            self.taken.append(0)
            self.spare += length if 2 * length <= self.capacity else ENOUGH_FILLERS * (length - self.capacity)
            if self.bytes_of is not None:
                self.num_bytes += self.bytes_of(position)

    def _place(self, length: int) -> int:
        """Move the oldest document of this length into the pack; others arrive."""
        position = self.buffer.take(length)
        self.taken[position - self.first] = 1
        self.members.append(position)
        self.spare -= length if 2 * length <= self.capacity else ENOUGH_FILLERS * (length - self.capacity)
        if self.bytes_of is not None:
            self.num_bytes -= self.bytes_of(position)
        self._fill_buffer()
        return length

    def _close_pack(self, place: int) -> None:
        """Fill a new pack from this place in `lengths` on, that of the oldest document."""
        self.members = []
        buffer = self.buffer
        gap = self.capacity
        if self.spare < 0:
            length = self.lengths[place]
            while length > 0:
                gap -= self._place(length)
                length = buffer.longest_up_to(gap)
            return
        fill: tuple[int, ...] = ()
        longest = buffer.longest_up_to(gap)  # the search for fills stops there
        fill_from = min(2 * longest, FILL_FROM * buffer.num_tokens / buffer.num_documents)
        while place >= 0 and gap and not fill:
            # It is the oldest of its length: an older one would have fitted and been placed.
            gap -= self._place(self.lengths[place])
            if gap <= fill_from:
                fill = buffer.exact_fill(gap, longest) if gap else ()
            if gap and not fill:
                place = self._next_that_fits(place + 1, gap)
        while gap and (fill := fill or buffer.best_fill(gap)):
            for length in fill:
                gap -= self._place(length)
            fill = ()

    def _next_that_fits(self, start: int, gap: int) -> int:
        """Place of the oldest waiting document from `start` on with at most `gap` tokens, or -1; skips a few."""
        place = self.taken.find(0, start)
        for _ in range(MAX_PASSED_OVER):
            if place < 0 or self.lengths[place] <= gap:
                return place
            place = self.taken.find(0, place + 1)
        return -1


def carry_over(arriving: Int64Array, capacity: int, window: int) -> Packs:
    """Best-fit decreasing in a window of waiting positions: the fullest half is emitted, the rest keeps waiting.

    A document more than two windows behind the last one to arrive is emitted at once.

    >>> members, sizes = carry_over(np.array([4, 5, 3, 2]), capacity=7, window=2)
    >>> [pack.tolist() for pack in np.split(members, np.cumsum(sizes)[:-1])]
    [[1], [0, 2], [3]]
    """
    emitted: list[Packs] = []
    waiting = np.zeros(0, np.int64)
    arrived = 0
    while arrived < len(arriving) or len(waiting):
        more = min(window - len(waiting), len(arriving) - arrived)
        waiting = np.concatenate([waiting, np.arange(arrived, arrived + more)])
        arrived += more
        members, sizes = best_fit_decreasing(arriving[waiting], capacity)
        members, sizes = by_earliest(waiting[members], sizes)
        if arrived < len(arriving):
            starts = np.cumsum(sizes) - sizes
            tokens = np.add.reduceat(arriving[members], starts)
            due = np.minimum.reduceat(members, starts) < arrived - 2 * window
            fullest = np.lexsort((-tokens, ~due))
            half = int(np.searchsorted(np.cumsum(sizes[fullest]), window / 2)) + 1
            chosen = np.zeros(len(sizes), dtype=bool)
            chosen[fullest[: max(half, int(due.sum()))]] = True
            waiting = np.sort(select_packs(members, sizes, np.flatnonzero(~chosen))[0])
            members, sizes = select_packs(members, sizes, np.flatnonzero(chosen))
        else:
            waiting = waiting[:0]
        emitted.append((members, sizes))
    return np.concatenate([members for members, _ in emitted]), np.concatenate([sizes for _, sizes in emitted])
