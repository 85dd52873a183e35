"""Which documents share a pack: document lengths in, packs out.

Integers and numpy only; no token is read, and nothing here knows of torch or datasets. A plan is a pure function of
(lengths, capacity, strategy, seed, epoch).

    lengths  [5, 3, 4, 2]   capacity 7   ->   order [0, 3, 2, 1], offsets [0, 2, 4]:   packs {5, 2} and {4, 3}

Two plans are made here. `stream` packs documents in the order in which they are visited, up to a bounded buffer. `bfd`
is best-fit decreasing over all documents at once. With a random generator, both return their packs in random order:
planners close packs of short and of long documents at different times, and a table would be trained in that order.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .arrays import Int64Array
from .best_fit import best_fit_decreasing, by_earliest, select_packs
from .exact_fill import carry_over, fill_exactly

NUM_SHOWN = 10  # offenders that an error message names
LONGEST = 2**26  # tokens of a document: plans are made on histograms of lengths, here of 0.5 GiB
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

    >>> plan = plan_bfd([5, 3, 4, 2], capacity=7, rng=None)
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
        """No plan of these documents needs fewer packs: the bound L2 of Martello and Toth (1990).

        Not always attainable: 0.4 x capacity each, two documents fill a pack, and the bound counts 2.5 to a pack.
        Computed on the histogram, at the first access. Source: https://doi.org/10.1016/0166-218X(90)90094-S
        """
        capacity = self.capacity
        counts = np.bincount(self.lengths, minlength=1)
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


def plan_bfd(lengths: npt.ArrayLike, capacity: int, rng: np.random.Generator | None) -> PackPlan:
    """Best-fit decreasing over all documents: longest first, each into the fullest pack that has room for it.

    With `rng`, documents of equal length are exchanged at random and packs come in random order, else in the order of
    their earliest document. Inside a pack, longer documents come first.

    The cost grows with distinct lengths; documents only cost a counting sort. Source: Johnson (1974),
    https://doi.org/10.1137/0203025; for language models, arXiv 2404.10830.

    >>> plan_bfd([2, 5, 3, 4], capacity=7, rng=None).order.tolist()
    [1, 0, 3, 2]
    """
    lengths = checked_lengths(lengths, capacity)
    members, sizes = best_fit_decreasing(lengths, capacity, rng)
    if rng is None:
        members, sizes = by_earliest(members, sizes)
    return _make_plan(members, sizes, lengths, capacity=capacity)


def plan_stream(
    lengths: npt.ArrayLike,
    order: Int64Array,
    capacity: int,
    *,
    rng: np.random.Generator | None = None,
    buffer_size: int = 1000,
) -> PackPlan:
    """Plan packs by `StreamPacker` for documents that are visited in the order given, a permutation of range(N).

    With `rng` packs come in random order, else as they are closed. They are closed while no document waits for more
    than `buffer_size` packs, because each pack takes the oldest document of the buffer. But short documents close a
    pack more often than long ones, so the packs that are closed last hold long ones.

    Below four documents per pack, the first 16 buffers are packed both ways, and if best-fit decreasing needs fewer
    packs there, the whole order is packed so (`carry_over`).

    >>> plan_stream([4, 5, 3, 2], order=np.arange(4), capacity=7).order.tolist()
    [0, 2, 1, 3]
    """
    lengths = checked_lengths(lengths, capacity)
    arriving = lengths[order]
    packs = None
    if capacity * len(arriving) < FEW_PER_PACK * int(arriving.sum()):
        window = LOOK_AHEAD * buffer_size
        pilot = arriving[:window]
        packs = fill_exactly(pilot, capacity, buffer_size)
        decreasing = carry_over(pilot, capacity, window)
        if len(decreasing[1]) < len(packs[1]):
            packs = decreasing if len(pilot) == len(arriving) else carry_over(arriving, capacity, window)
        elif len(pilot) < len(arriving):
            packs = None
    members, sizes = packs or fill_exactly(arriving, capacity, buffer_size)
    if rng is not None:
        members, sizes = select_packs(members, sizes, rng.permutation(len(sizes)))
    return _make_plan(order[members], sizes, lengths, capacity=capacity)


def plan_blocks(
    block: np.ndarray, lengths: np.ndarray, batch_size: int, *, capacity: int, rng: np.random.Generator | None
) -> PackPlan:
    """`wrapped`: packs of `batch_size` blocks of consecutive tokens, in table order or as `rng` draws them."""
    members, (_, sizes) = np.arange(len(block)), np.unique(block, return_counts=True)
    if rng is not None:
        members, sizes = select_packs(members, sizes, rng.permutation(len(sizes)))
    sizes = np.add.reduceat(sizes, np.arange(0, len(sizes), batch_size))
    return _make_plan(members, sizes, lengths, capacity=capacity)


def shuffle_packs(plan: PackPlan, rng: np.random.Generator) -> PackPlan:
    members, sizes = select_packs(plan.order, np.diff(plan.offsets), rng.permutation(plan.num_packs))
    return _make_plan(members, sizes, plan.lengths, capacity=plan.capacity)


def _make_plan(members: Int64Array, sizes: Int64Array, lengths: Int64Array, *, capacity: int) -> PackPlan:
    return PackPlan(members, np.concatenate([[0], np.cumsum(sizes)]), lengths, int(capacity))


def is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def checked_lengths(lengths: npt.ArrayLike, capacity: int) -> Int64Array:
    """Lengths as int64, shape (N,), after the refusals that every plan shares."""
    if not is_integer(capacity) or capacity < 1:
        raise ValueError(
            f"capacity={capacity!r} was given. A pack must hold a whole number of tokens, at least one. Set it to the "
            "tokens of one micro-batch, per_device_train_batch_size * max_length."
        )
    try:
        array = np.asarray(lengths)
        what = f"an array of shape {array.shape} and dtype {array.dtype}"
    except ValueError:  # numpy makes no array of rows of different lengths
        array = None
        what = "nested sequences"
    if array is None or array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(
            f"lengths: {what} was given. Planning needs one whole number of tokens per document. Set lengths to a "
            "one-dimensional array of integers, such as [len(ids) for ids in dataset['input_ids']]."
        )
    for bad, why, what_to_set in (
        (array < 1, "A document without tokens cannot be placed", "Drop empty documents first"),
        (
            array > capacity,
            f"No pack of capacity={capacity} holds it whole",
            f"Truncate, split or drop documents to {capacity} tokens, or raise capacity",
        ),
        (
            array > LONGEST,
            f"Planning takes memory for every length up to the longest, and serves documents of up to {LONGEST} tokens",
            f"Truncate, split or drop documents to {LONGEST} tokens or less",
        ),
    ):
        where = np.flatnonzero(bad)
        if len(where):
            shown = ", ".join(f"document {i} has {array[i]} tokens" for i in where[:NUM_SHOWN])
            more = ", ..." if len(where) > NUM_SHOWN else ""
            raise ValueError(f"lengths: {shown}{more} ({len(where)} of {len(array)} documents). {why}. {what_to_set}.")
    return array.astype(np.int64, copy=False)
