"""Plan which documents share a pack: lengths of documents in, packs out. Integers and numpy only.

    lengths  [5, 3, 4, 2]   capacity 7   ->   order [0, 3, 2, 1], offsets [0, 2, 4]:   packs {5, 2} and {4, 3}

A *document* is one training example; its length is its number of tokens. A *pack* is a set of documents that pass
through the model together, and its *capacity* is the largest number of tokens that it may hold. `Packing.plan` calls
the planner of the strategy that is set (`strategies.py`), and `schedule.py` deals the packs to optimizer steps. No
token is read. A plan is a pure function of (lengths, capacity, strategy, seed, epoch).

There are three planners. `plan_stream` packs documents in the order in which they are visited, with a bounded buffer.
`plan_bfd` is best-fit decreasing over all documents at once. `plan_blocks` joins blocks of consecutive tokens. With a
random generator, all of them return their packs in random order. Otherwise a model would be trained on packs of long
documents at one time, and on packs of short documents at another time, because planners close them in that order.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .arrays import Int64Array, offsets_of
from .best_fit import best_fit_decreasing, by_earliest, select_packs
from .exact_fill import pack_in_windows, pack_with_buffer

MAX_DOCUMENTS_NAMED = 10  # in an error message
MAX_DOCUMENT_LENGTH = 2**26  # tokens; plans are made on histograms of lengths, which take 0.5 GiB for this length
# With fewer documents per pack on average, a buffer of 1000 seldom has documents that fill a pack exactly, and
# `plan_stream` also tries another way
FEW_PER_PACK = 4
LOOK_AHEAD = 16  # number of buffers in the window of `plan_stream` for packs of few documents


@dataclass(frozen=True, eq=False)
class PackPlan:
    """A plan: N documents in P packs.

    Attributes:
        order: document numbers, pack after pack, int64, shape (N,).
        offsets: pack i is `order[offsets[i]:offsets[i + 1]]`, int64, shape (P + 1,).
        lengths: tokens of each document, shape (N,).
        capacity: most tokens a pack may hold.

    >>> plan = plan_bfd([5, 3, 4, 2], capacity=7)
    >>> plan.num_packs, plan.efficiency, plan.lower_bound
    (2, 1.0, 2)
    """

    order: Int64Array
    offsets: Int64Array
    lengths: Int64Array
    capacity: int

    @property
    def num_packs(self) -> int:
        """P, the number of packs."""
        return len(self.offsets) - 1

    @property
    def efficiency(self) -> float:
        """Tokens / (packs x capacity); 1.0 for a plan of zero packs, which wastes nothing."""
        return int(self.lengths.sum()) / (self.num_packs * self.capacity) if self.num_packs else 1.0

    @cached_property
    def lower_bound(self) -> int:
        """The number of packs that any plan needs at least, by the bound L2 of Martello and Toth (1990).

        Not every set of documents fits into so many packs. For example, five documents of 4 tokens and a capacity of 10
        have the bound 5 x 4 / 10 = 2, but two packs hold only two of them each. Source:
        https://doi.org/10.1016/0166-218X(90)90094-S
        """
        capacity = self.capacity
        counts = np.bincount(self.lengths, minlength=1)
        # At index w of the two arrays: the number of documents with fewer than w tokens, and their tokens together
        documents = offsets_of(counts)
        tokens = offsets_of(counts * np.arange(len(counts)))
        end = len(counts)
        half = min(capacity // 2 + 1, end)  # a document of at least so many tokens is *long*
        # Every long document needs a pack of its own. Choose a threshold, and call documents from the threshold up to
        # half the capacity *medium*. Beside a long document of more than capacity - threshold tokens, no medium
        # document fits. So all medium ones must fit beside the other long ones. The tokens for which there is no room,
        # the *overflow*, need further packs. For example, capacity 10, lengths 9 6 4 4 and threshold 4: no 4 fits
        # beside the 9, and the 6 has room for 4 tokens, so 4 of 8 medium tokens overflow, and the bound is 2 + 1 packs.
        # Every threshold gives a bound. Only 0 and lengths that occur can give the best one, so these are tried.
        threshold = np.concatenate([[0], np.flatnonzero(counts[:half])])
        first_without_room = np.minimum(capacity - threshold + 1, end)  # long documents from this length on
        num_with_room = documents[first_without_room] - documents[half]
        room = num_with_room * capacity - (tokens[first_without_room] - tokens[half])
        overflow = tokens[half] - tokens[threshold] - room
        num_long = documents[-1] - documents[half]
        return int(num_long + np.maximum(-(-overflow // capacity), 0).max())


def plan_bfd(
    lengths: npt.ArrayLike, capacity: int, *, order: Int64Array | None = None, rng: np.random.Generator | None = None
) -> PackPlan:
    """Plan by best-fit decreasing: documents longest first, each into the fullest pack that has room for it.

    Inside a pack, longer documents come first. The time grows with the number of distinct lengths; the number of
    documents only adds a counting sort. Source: Johnson (1974), https://doi.org/10.1137/0203025; for language models,
    arXiv 2404.10830.

    Args:
        lengths: tokens of each document, shape (N,).
        capacity: most tokens a pack may hold.
        order: the order in which documents are visited, which other strategies need. It changes nothing here.
        rng: draws the order of the packs, and exchanges documents of equal length. Without it, packs are in the order
            of the smallest document number in each.

    >>> plan_bfd([2, 5, 3, 4], capacity=7).order.tolist()
    [1, 0, 3, 2]
    """
    lengths = validate_lengths(lengths, capacity)
    if not len(lengths):  # no packs
        return _make_plan(lengths, lengths, lengths, capacity=capacity)
    members, sizes = best_fit_decreasing(lengths, capacity, rng)
    if rng is None:
        members, sizes = by_earliest(members, sizes)  # packs in the order of the smallest document number in each
    return _make_plan(members, sizes, lengths, capacity=capacity)


def plan_stream(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    order: Int64Array,
    rng: np.random.Generator | None = None,
    buffer_size: int = 1000,
) -> PackPlan:
    """Plan packs in the order in which documents are visited, with a bounded buffer (`pack_with_buffer`).

    Each pack takes the oldest document of the buffer, so no document waits for more than `buffer_size` packs. But the
    documents that then fill the pack exactly are more often short than long, so the last packs to be closed hold long
    ones.

    If a pack holds fewer than four documents on average, the first 16 buffers are packed by `pack_with_buffer` and by
    `pack_in_windows` (best-fit decreasing in a window). If `pack_in_windows` needs fewer packs, it packs all documents.

    Args:
        lengths: tokens of each document, shape (N,).
        capacity: most tokens a pack may hold.
        order: document numbers in the order in which they are visited, a permutation, shape (N,).
        rng: draws the order of the packs. Without it, packs are in the order in which they are closed.
        buffer_size: most documents that wait for a pack.

    >>> plan_stream([4, 5, 3, 2], capacity=7, order=np.arange(4)).order.tolist()
    [0, 2, 1, 3]
    """
    lengths = validate_lengths(lengths, capacity)
    arriving = lengths[order]
    packs = None
    if capacity * len(arriving) < FEW_PER_PACK * int(arriving.sum()):
        # Try both ways on the first documents, and take the way that needs fewer packs
        window = LOOK_AHEAD * buffer_size
        first_documents = arriving[:window]
        buffer_packs = pack_with_buffer(first_documents, capacity, buffer_size)
        window_packs = pack_in_windows(first_documents, capacity, window)
        _, buffer_sizes = buffer_packs
        _, window_sizes = window_packs
        uses_windows = len(window_sizes) < len(buffer_sizes)
        if len(first_documents) == len(arriving):  # these are all documents
            packs = window_packs if uses_windows else buffer_packs
        elif uses_windows:
            packs = pack_in_windows(arriving, capacity, window)
    members, sizes = packs or pack_with_buffer(arriving, capacity, buffer_size)
    if rng is not None:  # put the packs in random order
        members, sizes = select_packs(members, sizes, rng.permutation(len(sizes)))
    return _make_plan(order[members], sizes, lengths, capacity=capacity)


def plan_blocks(
    block: np.ndarray, lengths: np.ndarray, batch_size: int, *, capacity: int, rng: np.random.Generator | None
) -> PackPlan:
    """Plan packs of `batch_size` blocks each, for the strategy `wrapped`.

    Args:
        block: the block of each document, ascending, shape (N,). A block is `max_length` consecutive tokens of the
            concatenated table.
        lengths: tokens of each document, shape (N,).
        batch_size: number of blocks in a pack.
        capacity: most tokens a pack may hold.
        rng: draws the order of the blocks. Without it, they are in the order of the table.
    """
    members = np.arange(len(block))
    _, block_sizes = np.unique(block, return_counts=True)  # number of documents in each block
    if rng is not None:  # put the blocks in random order
        members, block_sizes = select_packs(members, block_sizes, rng.permutation(len(block_sizes)))
    # Then each pack gets the next `batch_size` blocks
    pack_sizes = np.add.reduceat(block_sizes, np.arange(0, len(block_sizes), batch_size))
    return _make_plan(members, pack_sizes, lengths, capacity=capacity)


def shuffle_packs(plan: PackPlan, rng: np.random.Generator) -> PackPlan:
    """Return the plan with its packs in random order."""
    members, sizes = select_packs(plan.order, np.diff(plan.offsets), rng.permutation(plan.num_packs))
    return _make_plan(members, sizes, plan.lengths, capacity=plan.capacity)


def _make_plan(members: Int64Array, sizes: Int64Array, lengths: Int64Array, *, capacity: int) -> PackPlan:
    """Make a plan of packs: `members` has the documents pack after pack, `sizes` their number in each pack."""
    return PackPlan(members, offsets_of(sizes), lengths, int(capacity))


def is_integer(value: object) -> bool:
    """Return whether a value is an integer of Python or numpy, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def validate_lengths(lengths: npt.ArrayLike, capacity: int) -> Int64Array:
    """Return the lengths as int64, shape (N,), if every one of them fits into a pack.

    Raises:
        ValueError: the capacity is not a positive integer, or the lengths are not one-dimensional integers from 1 to
            the capacity and `MAX_DOCUMENT_LENGTH`.
    """
    if not is_integer(capacity) or capacity < 1:
        raise ValueError(
            f"capacity={capacity!r} was given. A pack must hold a whole number of tokens, at least one. Set it to the "
            "tokens of one micro-batch, per_device_train_batch_size * max_length."
        )
    try:
        array = np.asarray(lengths)
        description = f"an array of shape {array.shape} and dtype {array.dtype}"
    except ValueError:  # numpy cannot make an array of rows of different lengths
        array = None
        description = "nested sequences"
    if array is None or array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(
            f"lengths: {description} was given. Planning needs one whole number of tokens per document. Set lengths to "
            "a one-dimensional array of integers, such as [len(ids) for ids in dataset['input_ids']]."
        )
    checks = (
        (array < 1, "A document without tokens cannot be placed", "Drop empty documents first"),
        (
            array > capacity,
            f"No pack of capacity={capacity} holds it whole",
            f"Truncate, split or drop documents to {capacity} tokens, or raise capacity",
        ),
        (
            array > MAX_DOCUMENT_LENGTH,
            "Planning takes memory for every length up to the longest, and serves documents of up to "
            f"{MAX_DOCUMENT_LENGTH} tokens",
            f"Truncate, split or drop documents to {MAX_DOCUMENT_LENGTH} tokens or less",
        ),
    )
    for is_bad, reason, what_to_set in checks:
        bad = np.flatnonzero(is_bad)
        if len(bad):
            named = ", ".join(f"document {i} has {array[i]} tokens" for i in bad[:MAX_DOCUMENTS_NAMED])
            more = ", ..." if len(bad) > MAX_DOCUMENTS_NAMED else ""
            raise ValueError(f"lengths: {named}{more} ({len(bad)} of {len(array)} documents). {reason}. {what_to_set}.")
    return array.astype(np.int64, copy=False)
