"""Which documents share a pack: document lengths in, packs out.

Integers and numpy only; no token is read, and nothing here knows of torch or datasets. A plan is a pure function of
(lengths, capacity, strategy, seed, epoch).

    lengths  [5, 3, 4, 2]   capacity 7   ->   order [0, 3, 2, 1], offsets [0, 2, 4]:   packs {5, 2} and {4, 3}

Two plans are made here. `stream` keeps the order in which documents are visited, up to a bounded buffer. `bfd` is
best-fit decreasing over all documents at once. In the code below a *position* is a document's place in visiting order.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Packs = tuple[Int64Array, Int64Array]  # members pack after pack, and how many each pack has

STRATEGIES = ("stream", "bfd")
NEEDS_MORE_THAN_LENGTHS = {
    "bfd_split": "split the documents at max_length first and plan the pieces with strategy='bfd', or use the trainer",
    "wrapped": "use the trainer or packed_dataloader with packing_strategy='wrapped'",
    "minibatch": "use the trainer or packed_dataloader with packing_strategy='minibatch'",
}
NUM_SHOWN = 10  # offenders that an error message names
MAX_PASSED_OVER = 32  # documents too long for the gap that `stream` looks past: bounds its work per pack
FEW_PER_PACK = 4  # below this, 1000 documents seldom hold an exact fill: there `stream` may look further ahead
LOOK_AHEAD = 16  # and by how many buffers


@dataclass(frozen=True, eq=False)
class PackPlan:
    """N documents in P packs.

    Attributes:
        order: document indices, pack after pack, int64, shape (N,).
        offsets: pack i is `order[offsets[i]:offsets[i + 1]]`, int64, shape (P + 1,).
        lengths: tokens of each document, shape (N,).
        capacity: most tokens a pack may hold.

    >>> plan = plan_packs([5, 3, 4, 2], capacity=7, strategy="bfd")
    >>> plan.num_packs, plan.efficiency, plan.lower_bound
    (2, 1.0, 2)
    """

    order: Int64Array
    offsets: Int64Array
    lengths: Int64Array
    capacity: int

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1

    @property
    def efficiency(self) -> float:
        """Tokens / (packs x capacity); 1.0 for a plan of zero packs, which wastes nothing."""
        return int(self.lengths.sum()) / (self.num_packs * self.capacity) if self.num_packs else 1.0

    @cached_property
    def lower_bound(self) -> int:
        """Fewest packs that any plan of these documents could need: the bound L2 of Martello and Toth (1990).

        Not always attainable: 0.4 x capacity each, documents go two to a pack, and the bound asks for 2.5.
        Computed on the histogram when first asked for. Source: https://doi.org/10.1016/0166-218X(90)90094-S
        """
        capacity, counts = self.capacity, np.bincount(self.lengths, minlength=1)
        documents = np.concatenate([[0], np.cumsum(counts)])  # [w] counts the documents shorter than w
        tokens = np.concatenate([[0], np.cumsum(counts * np.arange(len(counts)))])
        end = len(counts)
        half = min(capacity // 2 + 1, end)  # lengths from here on: one per pack at most
        # For a threshold k, no document of k tokens or more fits beside one longer than capacity - k. So the long
        # ones up to capacity - k are the only packs with room for those in [k, capacity / 2]. Only lengths that occur
        # can be the best k.
        k = np.concatenate([[0], np.flatnonzero(counts[:half])])
        shared = np.minimum(capacity - k + 1, end)
        room = (documents[shared] - documents[half]) * capacity - (tokens[shared] - tokens[half])
        overflow = tokens[half] - tokens[k] - room
        return int(documents[-1] - documents[half] + np.maximum(-(-overflow // capacity), 0).max())


def plan_packs(
    lengths: npt.ArrayLike, capacity: int, strategy: str = "stream", seed: int = 0, epoch: int = 0
) -> PackPlan:
    """Packs for one epoch: every document in exactly one pack, no pack over `capacity`.

    Args:
        lengths: tokens of each document, integers from 1 to `capacity`, shape (N,).
        capacity: most tokens a pack may hold.
        strategy: `stream` visits documents in a random order and keeps to it (see `plan_stream`); `bfd` packs
            the whole set at once (see `plan_bfd`).
        seed, epoch: non-negative integers; another epoch gives another plan.

    Raises:
        ValueError: for lengths that are not one-dimensional integers or do not fit, and for unknown strategies.

    >>> plan = plan_packs([300, 200, 500], capacity=512)
    >>> sorted(sorted(pack.tolist()) for pack in np.split(plan.order, plan.offsets[1:-1]))
    [[0, 1], [2]]
    """
    if strategy in NEEDS_MORE_THAN_LENGTHS:
        raise ValueError(
            f"strategy={strategy!r} was given to plan_packs. It cannot be planned from lengths alone: "
            f"{NEEDS_MORE_THAN_LENGTHS[strategy]}."
        )
    if strategy not in STRATEGIES:
        raise ValueError(
            f"strategy={strategy!r} was given. No such packing strategy exists. Set one of "
            f"{', '.join(map(repr, STRATEGIES))} here, or also {', '.join(map(repr, NEEDS_MORE_THAN_LENGTHS))} in the "
            "trainer."
        )
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not _is_integer(value) or value < 0:
            raise ValueError(
                f"{name}={value!r} was given. The random order is drawn from non-negative integers. Set {name} to 0 "
                "or more."
            )
    lengths = _checked(lengths, capacity)
    rng = np.random.default_rng([seed, epoch])
    if strategy == "bfd":
        return plan_bfd(lengths, capacity, rng)
    return plan_stream(lengths, rng.permutation(len(lengths)), capacity)


def plan_bfd(lengths: npt.ArrayLike, capacity: int, rng: np.random.Generator | None) -> PackPlan:
    """Best-fit decreasing over all documents: longest first, each into the fullest pack that has room for it.

    With `rng`, documents of equal length are exchanged at random and packs come in random order. Without, the plan is
    deterministic and packs come in the order of their earliest document. Inside a pack, longer documents come first.

    The work is done on the histogram of lengths, so its cost grows with distinct lengths; documents only cost a
    counting sort. Source: Johnson (1974), https://doi.org/10.1137/0203025; for language models, arXiv 2404.10830.

    >>> plan_bfd([2, 5, 3, 4], capacity=7, rng=None).order.tolist()
    [1, 0, 3, 2]
    """
    lengths = _checked(lengths, capacity)
    members, sizes = _best_fit_decreasing(lengths, capacity, rng)
    if rng is None:
        members, sizes = _by_earliest(members, sizes)
    return _plan(members, sizes, lengths, capacity)


def plan_stream(lengths: npt.ArrayLike, order: npt.ArrayLike, capacity: int, buffer_size: int = 1000) -> PackPlan:
    """Packs in the visiting order given: oldest documents first, each pack closed by an exact fill.

    A buffer holds the next `buffer_size` documents of `order`, one arriving for each that is placed. A pack starts with
    the oldest of them and goes on with the oldest that fit, until one or two documents of the buffer fill the gap
    exactly. Where none do, the best fill is taken. Because each pack takes the oldest document, none waits for more
    than `buffer_size` packs. The documents of the last buffer are packed as tightly as three heuristics can.

    Below four documents per pack, the first 16 buffers are packed both ways, and if best-fit decreasing needs fewer
    packs there, the whole order is packed so: in a window of 16 buffers, the fullest half is emitted, the rest carried
    over, and a document more than two windows behind the last one to arrive is emitted at once.

    Args:
        order: the documents in visiting order, a permutation of range(N); `np.arange(N)` for sequential training.
        buffer_size: documents; at least 1.

    >>> plan_stream([4, 5, 3, 2], order=[0, 1, 2, 3], capacity=7).order.tolist()
    [0, 2, 1, 3]
    """
    lengths = _checked(lengths, capacity)
    order = np.asarray(order, dtype=np.int64 if np.size(order) == 0 else None)
    if not _is_permutation(order, len(lengths)):
        raise ValueError(
            f"order of shape {order.shape} was given for {len(lengths)} lengths. It must name every document once. Set "
            f"it to a permutation of range({len(lengths)})."
        )
    if not _is_integer(buffer_size) or buffer_size < 1:
        raise ValueError(
            f"buffer_size={buffer_size!r} was given. The buffer must hold at least the document that is placed next. "
            "Set it to 1 or more; 1000 is the default."
        )
    arriving = lengths[order]
    packs = None
    if capacity * len(arriving) < FEW_PER_PACK * int(arriving.sum()):
        window = LOOK_AHEAD * buffer_size
        pilot = arriving[:window]
        packs = _fill_exactly(pilot, capacity, buffer_size)
        decreasing = _carry_over(pilot, capacity, window)
        if len(decreasing[1]) < len(packs[1]):
            packs = decreasing if len(pilot) == len(arriving) else _carry_over(arriving, capacity, window)
        elif len(pilot) < len(arriving):
            packs = None
    members, sizes = packs or _fill_exactly(arriving, capacity, buffer_size)
    return _plan(order[members], sizes, lengths, capacity)


# --- best-fit decreasing ----------------------------------------------------------------------------------------------


def _best_fit_decreasing(lengths: Int64Array, capacity: int, rng: np.random.Generator | None = None) -> Packs:
    """Packs in the order in which best-fit decreasing opens them, or with `rng` as random as `plan_bfd` says."""
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
    first_pack, num_packs, each, filled = _pour(np.bincount(lengths), capacity).T
    # Row by row, `each` documents go to each of `num_packs` packs from `first_pack` on, behind the `filled` ones.
    documents = num_packs * each
    index = np.arange(len(lengths)) - np.repeat(np.cumsum(documents) - documents, documents)
    each = np.repeat(each, documents)
    pack = index // each
    index -= pack * each  # place among the row's documents in this pack
    del each
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


def _pour(counts: Int64Array, capacity: int) -> Int64Array:
    """Best-fit decreasing on a histogram: rows (first_pack, num_packs, each, filled), longest documents first.

    Packs with the same documents are one run of consecutive numbers, so a run of packs takes all it can of one length
    at once. Best fit makes this exact: after a document, the tightest pack is still the tightest for the next of the
    same length until it has no more room. Runs with equal space are served first come, first served.
    """
    runs: dict[int, deque[tuple[int, int, int]]] = {}  # space -> runs (first_pack, num_packs, filled)
    spaces: list[int] = []  # keys of `runs`, ascending
    rows: list[tuple[int, int, int, int]] = []
    opened = 0

    def put(first: int, num: int, each: int, filled: int, space: int) -> None:
        rows.append((first, num, each, filled))
        if space in runs:
            runs[space].append((first, num, filled + each))
        elif space:
            runs[space] = deque([(first, num, filled + each)])
            insort(spaces, space)

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            tightest = bisect_left(spaces, length)
            if tightest == len(spaces):  # open as many packs as the rest needs
                space, num, filled = capacity, -(-left // (capacity // length)), 0
                first, opened = opened, opened + num
            else:
                space = spaces[tightest]
                first, num, filled = runs[space].popleft()
                if not runs[space]:
                    del runs[space], spaces[tightest]
            most = space // length  # documents of this length that one of these packs takes
            full = min(num, left // most)
            if full:
                put(first, full, most, filled, space - most * length)
                left -= full * most
            if full < num:
                if left:
                    put(first + full, 1, left, filled, space - left * length)
                    full, left = full + 1, 0
                if full < num:  # untouched packs stay ahead of later ones with the same space
                    if space not in runs:
                        runs[space] = deque()
                        insort(spaces, space)
                    runs[space].appendleft((first + full, num - full, filled))
    return np.array(rows, dtype=np.int64)


# --- stream -----------------------------------------------------------------------------------------------------------


class _Buffer:
    """Waiting documents by length, with the searches that closing a pack needs.

    `present[l]` is 1 where a document of l tokens waits, and `mirrored` is the same back to front: the pairs that sum
    to a gap are then the ones in the bitwise "and" of two slices.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self.waiting: list[deque[int] | None] = [None] * (longest + 1)  # positions by length, oldest first
        self.present = bytearray(longest + 1)
        self.mirrored = bytearray(longest + 1)
        self.forward = np.frombuffer(self.present, dtype=np.uint8)
        self.backward = np.frombuffer(self.mirrored, dtype=np.uint8)

    def add(self, position: int, length: int) -> None:
        waiting = self.waiting[length]
        if waiting:
            waiting.append(position)
            return
        if waiting is None:
            self.waiting[length] = deque((position,))
        else:
            waiting.append(position)
        self.present[length] = self.mirrored[self.longest - length] = 1

    def take(self, length: int) -> int:
        """Remove the oldest document of this length."""
        waiting = self.waiting[length]
        position = waiting.popleft()
        if not waiting:
            self.present[length] = self.mirrored[self.longest - length] = 0
        return position

    def longest_up_to(self, length: int) -> int:
        """-1 where there is none."""
        return self.present.rfind(1, 0, min(length, self.longest) + 1)

    def exact_fill(self, gap: int, longest: int) -> tuple[int, ...]:
        """Lengths of one document, or of the most even pair, that sum to `gap`; () where there are none.

        Even pairs leave the shortest documents for the packs that can be closed with nothing else.
        """
        if gap <= longest and self.present[gap]:
            return (gap,)
        low, high = (gap + 1) // 2, min(gap - 1, longest)  # the longer one of the pair
        if low > high:
            return ()
        start = self.longest - gap  # mirrored[start + l] is present[gap - l]
        both = (self.forward[low : high + 1] & self.backward[start + low : start + high + 1]).tobytes()
        found = both.find(1)
        if found == 0 and 2 * low == gap and len(self.waiting[low]) < 2:
            found = both.find(1, 1)
        return (low + found, gap - low - found) if found >= 0 else ()

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


def _fill_exactly(arriving: Int64Array, capacity: int, buffer_size: int) -> Packs:
    """Packs of positions in visiting order: oldest first, closed by an exact fill; the last buffer by `_pack_rest`."""
    if len(arriving) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    members, sizes, rest = _close_packs(arriving, capacity, buffer_size, until_empty=False)
    if len(rest) == 0:
        return members, sizes
    last, last_sizes = _pack_rest(arriving[rest], capacity)
    return np.concatenate([members, rest[last]]), np.concatenate([sizes, last_sizes])


def _pack_rest(lengths: Int64Array, capacity: int) -> Packs:
    """The fewest packs of three heuristics, for when nothing more arrives; the pack of the oldest document first."""
    decreasing = np.argsort(-lengths, kind="stable")
    arrival = _close_packs(lengths, capacity, len(lengths), until_empty=True)[:2]
    members, sizes, _ = _close_packs(lengths[decreasing], capacity, len(lengths), until_empty=True)
    candidates = [arrival, (decreasing[members], sizes), _best_fit_decreasing(lengths, capacity)]
    return _by_earliest(*min(candidates, key=lambda packs: len(packs[1])))


def _close_packs(
    arriving: Int64Array, capacity: int, buffer_size: int, until_empty: bool
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Members and sizes of packs, and the positions left when the last document has arrived (none if `until_empty`)."""
    lengths = arriving.tolist()
    buffer = _Buffer(max(lengths))
    taken = bytearray(len(lengths))
    members: list[int] = []
    ends = [0]
    oldest = 0
    arrived = min(buffer_size, len(lengths))
    for position in range(arrived):
        buffer.add(position, lengths[position])

    def place(length: int) -> None:
        """Move the oldest document of this length into the pack; the next one arrives in its stead."""
        nonlocal arrived
        position = buffer.take(length)
        taken[position] = 1
        members.append(position)
        if arrived < len(lengths):
            buffer.add(arrived, lengths[arrived])
            arrived += 1

    while True:
        oldest = taken.find(0, oldest, arrived)
        if oldest < 0 or (arrived == len(lengths) and not until_empty):
            break
        gap, position, fill = capacity, oldest, ()
        longest = buffer.longest_up_to(capacity)  # of those waiting now; the search for fills stops there
        while position >= 0:
            # It is the oldest of its length: an older one would have fitted and been placed.
            length = lengths[position]
            place(length)
            gap -= length
            if gap <= 2 * longest:
                fill = buffer.exact_fill(gap, longest) if gap else ()
                if fill or not gap:
                    break
            position = _next_that_fits(lengths, taken, position + 1, arrived, gap)
        while gap and (fill := fill or buffer.best_fill(gap)):
            for length in fill:
                place(length)
                gap -= length
            fill = ()
        ends.append(len(members))
    left = np.flatnonzero(np.frombuffer(taken, dtype=np.uint8) == 0)
    return np.array(members, dtype=np.int64), np.diff(np.array(ends, dtype=np.int64)), left


def _next_that_fits(lengths: list[int], taken: bytearray, start: int, arrived: int, gap: int) -> int:
    """Position of the oldest waiting document from `start` on with at most `gap` tokens, or -1; looks past a few."""
    position = taken.find(0, start, arrived)
    for _ in range(MAX_PASSED_OVER):
        if position < 0 or lengths[position] <= gap:
            return position
        position = taken.find(0, position + 1, arrived)
    return -1


def _carry_over(arriving: Int64Array, capacity: int, window: int) -> Packs:
    """Best-fit decreasing in a window of waiting positions; the fullest half is emitted, the rest waits on."""
    emitted: list[Packs] = []
    waiting = np.zeros(0, np.int64)
    arrived = 0
    while arrived < len(arriving) or len(waiting):
        more = min(window - len(waiting), len(arriving) - arrived)
        waiting = np.concatenate([waiting, np.arange(arrived, arrived + more)])
        arrived += more
        members, sizes = _best_fit_decreasing(arriving[waiting], capacity)
        members, sizes = _by_earliest(waiting[members], sizes)
        if arrived < len(arriving):
            starts = np.cumsum(sizes) - sizes
            tokens = np.add.reduceat(arriving[members], starts)
            due = np.minimum.reduceat(members, starts) < arrived - 2 * window
            fullest = np.lexsort((-tokens, ~due))
            half = int(np.searchsorted(np.cumsum(sizes[fullest]), window / 2)) + 1
            chosen = np.zeros(len(sizes), dtype=bool)
            chosen[fullest[: max(half, int(due.sum()))]] = True
            waiting = np.sort(_select(members, sizes, np.flatnonzero(~chosen))[0])
            members, sizes = _select(members, sizes, np.flatnonzero(chosen))
        else:
            waiting = waiting[:0]
        emitted.append((members, sizes))
    return np.concatenate([members for members, _ in emitted]), np.concatenate([sizes for _, sizes in emitted])


# --- packs ------------------------------------------------------------------------------------------------------------


def _select(members: Int64Array, sizes: Int64Array, packs: Int64Array) -> Packs:
    """The packs with these numbers, in this order."""
    starts = (np.cumsum(sizes) - sizes)[packs]
    sizes = sizes[packs]
    index = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    index += np.arange(len(index))
    return members[index], sizes


def _by_earliest(members: Int64Array, sizes: Int64Array) -> Packs:
    """The same packs in the order of the earliest document in each."""
    if len(sizes) == 0:
        return members, sizes
    earliest = np.minimum.reduceat(members, np.cumsum(sizes) - sizes)
    return _select(members, sizes, np.argsort(earliest))


def _plan(members: Int64Array, sizes: Int64Array, lengths: Int64Array, capacity: int) -> PackPlan:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return PackPlan(members, offsets, lengths, int(capacity))


# --- input ------------------------------------------------------------------------------------------------------------


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_permutation(order: np.ndarray, num_documents: int) -> bool:
    if order.shape != (num_documents,) or order.dtype.kind not in "iu":
        return False
    if num_documents == 0:
        return True
    if int(order.min()) < 0 or int(order.max()) >= num_documents:
        return False
    return bool((np.bincount(order.astype(np.int64), minlength=num_documents) == 1).all())


def _checked(lengths: npt.ArrayLike, capacity: int) -> Int64Array:
    """Lengths as int64, shape (N,), after the refusals that every plan shares."""
    if not _is_integer(capacity) or capacity < 1:
        raise ValueError(
            f"capacity={capacity!r} was given. A pack must hold a whole number of tokens, at least one. Set it to the "
            "tokens of one micro-batch, per_device_train_batch_size * max_length."
        )
    try:
        given = np.asarray(lengths)
        what = f"an array of shape {given.shape} and dtype {given.dtype}"
    except ValueError:  # numpy makes no array of rows of different lengths
        given, what = None, "nested sequences"
    if given is None or given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise ValueError(
            f"lengths: {what} was given. Planning needs one whole number of tokens per document. Set lengths to a "
            "one-dimensional array of integers, such as [len(ids) for ids in dataset['input_ids']]."
        )
    for bad, why, what_to_set in (
        (given < 1, "A document without tokens cannot be placed", "Drop empty documents first"),
        (
            given > capacity,
            f"No pack of capacity={capacity} holds it whole",
            f"Truncate, split or drop documents to {capacity} tokens, or raise capacity",
        ),
    ):
        where = np.flatnonzero(bad)
        if len(where):
            shown = ", ".join(f"document {i} has {given[i]} tokens" for i in where[:NUM_SHOWN])
            more = ", ..." if len(where) > NUM_SHOWN else ""
            raise ValueError(f"lengths: {shown}{more} ({len(where)} of {len(given)} documents). {why}. {what_to_set}.")
    return given.astype(np.int64, copy=False)
