"""Pack documents in the order in which they arrive: a bounded buffer, oldest documents first, then an exact fill.

Lengths in tokens come from a table, in visiting order (`packs.plan_stream`), or from a stream (`Packing.pack_stream`).
Out go packs of positions; a *position* is the number of a document in order of arrival, from 0. A stream gets each pack
as a list as soon as it is closed. A table gets all packs as a pair of arrays: `members`, the positions pack after pack,
and `sizes`, the number of documents in each pack.

Arrived documents *wait* in a buffer until they are placed in a pack. One pack is open at a time; its *gap* is the
number of tokens that still fit. An *exact fill* is one or two waiting documents whose lengths sum to the gap.

`pack_in_windows` is the alternative for packs of few documents: best-fit decreasing in a large window.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from .arrays import Int64Array
from .best_fit import Packs, best_fit_decreasing, by_earliest, select_packs

MAX_PASSED_OVER = 32  # a search skips at most so many documents that are too long, which bounds the work for a pack
# An exact fill is searched once the gap is at most this many times the mean length of the waiting documents
FILL_FROM = 3
# A document is long with more than half a pack, else short. Short documents are scarce if the waiting ones have fewer
# tokens in sum than this many times the room beside the waiting long ones. `StreamPacker` explains what follows
ENOUGH_FILLERS = 2
# Largest number of placed documents that are remembered, so that the memory for an endless stream is bounded
MAX_REMEMBERED = 1 << 16


class WaitingDocuments:
    """The waiting documents by length, and the searches by which a pack is filled.

    `present[l]` is 1 where a document of l tokens waits, and `mirrored` is `present` in reverse. Two documents sum to a
    gap where a slice of `present` and a slice of `mirrored` are both 1, so one bitwise "and" finds all such pairs.
    `forward` is `present` as a numpy array of the same bytes, and `backward` is `mirrored`.

    Args:
        longest: most tokens of a document.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self.num_documents = 0
        self.num_tokens = 0
        self.positions: defaultdict[int, deque[int]] = defaultdict(deque)  # positions by length, oldest first
        self.present = bytearray(longest + 1)
        self.mirrored = bytearray(longest + 1)
        self.forward = np.frombuffer(self.present, dtype=np.uint8)
        self.backward = np.frombuffer(self.mirrored, dtype=np.uint8)

    def add(self, position: int, length: int) -> None:
        """Add a document that is younger than all waiting documents of its length."""
        self.num_documents += 1
        self.num_tokens += length
        self.positions[length].append(position)
        self.present[length] = 1
        self.mirrored[self.longest - length] = 1

    def pop_oldest(self, length: int) -> int:
        """Remove the oldest document of this length, which must be present, and return its position."""
        positions = self.positions[length]
        assert positions, "no document of this length waits"
        position = positions.popleft()
        self.num_documents -= 1
        self.num_tokens -= length
        if not positions:
            self.present[length] = 0
            self.mirrored[self.longest - length] = 0
        return position

    def longest_up_to(self, length: int) -> int:
        """Return the length of the longest waiting document with at most `length` tokens; -1 if all are longer."""
        return self.present.rfind(1, 0, min(length, self.longest) + 1)

    def exact_fill(self, gap: int, longest: int) -> tuple[int, ...]:
        """Return the length of one document, or the lengths of the most even pair, that sum to `gap`.

        Even pairs leave the shortest documents for packs that nothing else can fill.

        Args:
            gap: tokens to fill, at least 1.
            longest: only documents of at most this many tokens are searched.

        Returns:
            One or two lengths; () if neither a document nor a pair sums to `gap`.
        """
        if gap <= longest and self.present[gap]:
            return (gap,)
        # The longer document of a pair has `low` to `high` tokens.
        low = (gap + 1) // 2
        high = min(gap - 1, longest)
        if low > high:
            return ()
        # mirrored[mirrored_start + l] is present[gap - l]. `mirrored_start` may be below 0, but the slice begins at
        # mirrored_start + low = self.longest - (gap - low). This is 0 or more, as gap - low <= low <= self.longest.
        mirrored_start = self.longest - gap
        partners = self.backward[mirrored_start + low : mirrored_start + high + 1]
        has_pair = (self.forward[low : high + 1] & partners).tobytes()
        offset = has_pair.find(1)
        # A pair of equal lengths needs two documents of this length.
        if offset == 0 and 2 * low == gap and len(self.positions[low]) < 2:
            offset = has_pair.find(1, 1)
        return (low + offset, gap - low - offset) if offset >= 0 else ()

    def best_fill(self, gap: int) -> tuple[int, ...]:
        """Return the length of one document, or two different lengths, that fill most of `gap`; () if none fits."""
        single = self.longest_up_to(gap)
        if single < 0:
            return ()
        lengths = np.flatnonzero(self.forward[: single + 1])
        # The partner of each length is the longest one that fits beside it and is shorter; -1 if there is none.
        partner = np.searchsorted(lengths, gap - lengths, side="right") - 1
        partner = np.minimum(partner, np.arange(len(lengths)) - 1)
        total = np.where(partner >= 0, lengths + lengths[partner], 0)
        best = int(total.argmax())
        return (int(lengths[best]), int(lengths[partner[best]])) if total[best] > single else (single,)


def pack_with_buffer(arriving: Int64Array, capacity: int, buffer_size: int) -> Packs:
    """Pack documents whose lengths are all known, by `StreamPacker`.

    Args:
        arriving: tokens of each document in order of arrival, shape (N,).
        capacity: most tokens of a pack.
        buffer_size: most documents that wait.

    Returns:
        (members, sizes): the positions pack after pack, shape (N,), and the number of documents in each pack.
    """
    return _as_arrays(StreamPacker(arriving.tolist(), capacity, buffer_size, longest=int(arriving.max(initial=1))))


def _as_arrays(packs: Iterable[list[int]]) -> Packs:
    """Return packs of positions as (members, sizes)."""
    packs = list(packs)
    members = np.fromiter(chain.from_iterable(packs), dtype=np.int64)
    return members, np.fromiter(map(len, packs), dtype=np.int64, count=len(packs))


def _pack_last_buffer(lengths: Int64Array, capacity: int) -> Packs:
    """Pack the documents that wait when no more arrive. Of three heuristics, the one with the fewest packs wins.

    The heuristics are `StreamPacker` with the oldest documents first, `StreamPacker` with the longest documents first,
    and best-fit decreasing.

    Args:
        lengths: tokens of each waiting document, oldest first, shape (N,).
        capacity: most tokens of a pack.

    Returns:
        (members, sizes), with indices into `lengths`. The packs come in the order of the oldest document in each.
    """

    def pack_until_empty(arriving: Int64Array) -> Packs:
        longest = int(arriving.max())
        return _as_arrays(StreamPacker(arriving.tolist(), capacity, len(arriving), longest).packs(until_empty=True))

    decreasing = np.argsort(-lengths, kind="stable")
    members, sizes = pack_until_empty(lengths[decreasing])
    candidates = [pack_until_empty(lengths), (decreasing[members], sizes), best_fit_decreasing(lengths, capacity)]
    members, sizes = min(candidates, key=lambda packs: len(packs[1]))
    return by_earliest(members, sizes)


@dataclass(eq=False)
class StreamPacker:
    """An iterable of packs of positions, each yielded as soon as it is closed. Iterate over it once.

    A pack begins with the oldest waiting document, takes the next oldest ones that fit, and is closed by an exact fill.

    An exact fill is searched only once the gap is at most `FILL_FROM` times the mean length of the waiting documents.
    Most larger gaps have an exact fill of two long documents. If it were used, long documents would be trained first,
    and short ones last.

    A document of more than half a pack needs shorter ones beside it. Where short documents are scarce, an exact fill
    would use two of them at once, and later packs would stay half empty. In that case each gap takes the longest
    document that fits.

    Whenever a document is placed, others are read from `arriving` as far as the buffer has room. When `arriving` ends,
    `_pack_last_buffer` packs the documents that still wait. The next packs depend only on the waiting documents, in
    their order, and on the documents that arrive: a new packer that is given both continues with the same packs. Memory
    is bounded by the buffer.

    Worked example, capacity 7, a buffer of 4 (documents by length, the oldest first). Short documents are scarce here,
    so the filler of each gap is the longest document that fits:

        waiting      oldest  gap  filler  pack     arrives
        4 5 3 2      4       3    3       4 + 3    6, 1
        5 2 6 1      5       2    2       5 + 2    7, end
        6 1 7        (nothing more arrives: `_pack_last_buffer` packs these as 6 + 1 and 7)

    >>> list(StreamPacker([4, 5, 3, 2, 6, 1, 7], capacity=7, buffer_size=4, longest=7))
    [[0, 2], [1, 3], [4, 5], [6]]
    """

    arriving: Iterable[int]  # tokens of each document, at least 1
    capacity: int  # most tokens of a pack
    buffer_size: int  # most documents that wait
    longest: int  # most tokens of a document, at most `capacity`
    bytes_of: Callable[[int], int] | None = None  # position of a document -> bytes of memory while it waits
    most_bytes: float = np.inf  # no document is read while the waiting ones take so many bytes

    def __post_init__(self) -> None:
        self.next_lengths = iter(self.arriving)
        self.ended = False
        self.buffer = WaitingDocuments(self.longest)
        # `lengths` and `is_placed` hold the documents from position `first_position` on, at the same indices.
        self.lengths: list[int] = []
        self.is_placed = bytearray()
        self.first_position = 0
        self.num_bytes = 0  # bytes of the waiting documents
        # Below 0, short documents are scarce. A waiting document of at most half a pack counts with its tokens, because
        # it can fill the room beside a longer one. For a longer one, `ENOUGH_FILLERS` times the room beside it is
        # subtracted.
        self.filler_surplus = 0
        self.members: list[int] = []  # positions in the open pack

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.packs()
        waiting = np.flatnonzero(np.frombuffer(self.is_placed, np.uint8) == 0)
        if len(waiting):
            members, sizes = _pack_last_buffer(np.array(self.lengths)[waiting], self.capacity)
            for pack in np.split(waiting[members] + self.first_position, np.cumsum(sizes)[:-1]):
                yield pack.tolist()

    def packs(self, until_empty: bool = False) -> Iterator[list[int]]:
        """Yield packs until no more documents arrive or, with `until_empty`, until none waits."""
        self._fill_buffer()
        oldest = 0
        while self.buffer.num_documents and (until_empty or not self.ended):
            oldest = self.is_placed.find(0, oldest)
            if oldest >= MAX_REMEMBERED:  # all documents before the oldest waiting one are in packs: forget them
                del self.lengths[:oldest], self.is_placed[:oldest]
                self.first_position += oldest
                oldest = 0
            self._fill_pack(oldest)
            yield self.members

    def _fill_buffer(self) -> None:
        """Read documents while the buffer has room for them."""
        buffer = self.buffer
        while buffer.num_documents < self.buffer_size and self.num_bytes < self.most_bytes and not self.ended:
            length = next(self.next_lengths, 0)
            if length == 0:  # no document is left
                self.ended = True
                return
            position = self.first_position + len(self.is_placed)
            buffer.add(position, length)
            self.lengths.append(length)
            self.is_placed.append(0)
            self.filler_surplus += length if 2 * length <= self.capacity else ENOUGH_FILLERS * (length - self.capacity)
            if self.bytes_of is not None:
                self.num_bytes += self.bytes_of(position)

    def _place(self, length: int) -> int:
        """Move the oldest document of this length into the open pack, read further ones, and return the length."""
        position = self.buffer.pop_oldest(length)
        self.is_placed[position - self.first_position] = 1
        self.members.append(position)
        self.filler_surplus -= length if 2 * length <= self.capacity else ENOUGH_FILLERS * (length - self.capacity)
        if self.bytes_of is not None:
            self.num_bytes -= self.bytes_of(position)
        self._fill_buffer()
        return length

    def _fill_pack(self, index: int) -> None:
        """Fill a new pack, `members`, until nothing more fits.

        Args:
            index: index in `lengths` of the oldest waiting document.
        """
        self.members = []
        buffer = self.buffer
        gap = self.capacity
        if self.filler_surplus < 0:
            # Short documents are scarce: take the oldest document, then the longest ones that fit.
            length = self.lengths[index]
            while length > 0:  # -1 if nothing more fits
                gap -= self._place(length)
                length = buffer.longest_up_to(gap)
            return
        fill: tuple[int, ...] = ()
        longest = buffer.longest_up_to(gap)  # no document of an exact fill is longer
        mean_length = buffer.num_tokens / buffer.num_documents
        max_gap = min(2 * longest, FILL_FROM * mean_length)  # two documents fill at most twice the longest
        # First the oldest documents that fit, until an exact fill is found.
        while index >= 0 and gap and not fill:
            # `_place` takes the oldest document of this length, which is the one at `index`: the search for `index`
            # has looked at all older ones, and skipped only those that are longer than the gap.
            gap -= self._place(self.lengths[index])
            if gap <= max_gap:
                fill = buffer.exact_fill(gap, longest) if gap else ()
            if gap and not fill:
                index = self._next_that_fits(index + 1, gap)
        # Then the exact fill or, without one, the fills that leave the smallest gap, one after the other.
        while gap:
            fill = fill or buffer.best_fill(gap)
            if not fill:
                return
            for length in fill:
                gap -= self._place(length)
            fill = ()

    def _next_that_fits(self, first_index: int, gap: int) -> int:
        """Return the index, from `first_index` on, of the oldest waiting document with at most `gap` tokens.

        Returns -1 if no document follows, or if more than `MAX_PASSED_OVER` documents would have to be skipped.
        """
        index = self.is_placed.find(0, first_index)
        for _ in range(MAX_PASSED_OVER):
            if index < 0 or self.lengths[index] <= gap:
                return index
            index = self.is_placed.find(0, index + 1)
        return -1


def pack_in_windows(arriving: Int64Array, capacity: int, window: int) -> Packs:
    """Pack windows of waiting documents by best-fit decreasing, emit the fullest packs, and carry the others over.

    Each round packs all waiting documents, at most `window`. The fullest packs, with about half of the documents, are
    emitted. The documents of the other packs wait for the next round. A pack with a document that arrived more than two
    windows ago is emitted in any case. The last round emits all packs.

    Args:
        arriving: tokens of each document in order of arrival, shape (N,).
        capacity: most tokens of a pack.
        window: most documents that wait.

    Returns:
        (members, sizes): the positions pack after pack, shape (N,), and the number of documents in each pack.

    >>> members, sizes = pack_in_windows(np.array([4, 5, 3, 2]), capacity=7, window=2)
    >>> [pack.tolist() for pack in np.split(members, np.cumsum(sizes)[:-1])]
    [[1], [0, 2], [3]]
    """
    emitted: list[Packs] = []
    waiting = np.zeros(0, np.int64)
    num_arrived = 0
    while num_arrived < len(arriving) or len(waiting):
        num_new = min(window - len(waiting), len(arriving) - num_arrived)
        waiting = np.concatenate([waiting, np.arange(num_arrived, num_arrived + num_new)])
        num_arrived += num_new
        members, sizes = best_fit_decreasing(arriving[waiting], capacity)
        members, sizes = by_earliest(waiting[members], sizes)  # packs in the order of their oldest documents
        starts = np.cumsum(sizes) - sizes
        tokens = np.add.reduceat(arriving[members], starts)
        # A pack is due if its oldest document has waited for two windows, or if no more documents arrive.
        is_due = np.minimum.reduceat(members, starts) < num_arrived - 2 * window
        if num_arrived == len(arriving):
            is_due[:] = True
        # Packs that are due come first, then the fullest ones. Emit so many that they have half a window of documents,
        # and at least all that are due.
        ranked = np.lexsort((-tokens, ~is_due))
        num_packs_of_half = int(np.searchsorted(np.cumsum(sizes[ranked]), window / 2)) + 1
        is_emitted = np.zeros(len(sizes), dtype=bool)
        is_emitted[ranked[: max(num_packs_of_half, int(is_due.sum()))]] = True
        waiting = np.sort(select_packs(members, sizes, np.flatnonzero(~is_emitted))[0])
        members, sizes = select_packs(members, sizes, np.flatnonzero(is_emitted))
        emitted.append((members, sizes))
    return np.concatenate([members for members, _ in emitted]), np.concatenate([sizes for _, sizes in emitted])
