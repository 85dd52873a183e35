"""Which documents begin with the same tokens, and how many rows a pack saves by computing such a beginning once.

Documents are sorted by their tokens. Then a document shares its longest common beginning with the one before it, and
lays only the rest, its *run*, into the pack:

    documents  A B C D, A B C E F      rows  A B C D | C E F      shared  0, 2

A position is shared if its own token and the next are the same, so every row has one next token. The beginning of the
second document therefore ends one token early, and C has two rows.

Documents next to each other that share at least half of the longer one are a *family*. With `share_prefixes="family"` a
family is planned as one, or in several *pieces* if it does not fit into a pack. The rows of a piece are sum(length) -
sum(shared). Its cost is sum(cost(length)) - sum(cost(shared)), because that of a document is a sum over its positions.

Documents of the same tokens are *copies*. Together they would be one update with a multiple of the weight. So the
second copies make families of their own, the third ones too, and so on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .arrays import END_TOKEN_KEY, BoolArray, Float64Array, Int64Array
from .costs import CostModel
from .units import Units

SharePrefixes = Literal["off", "pack", "family"]

MIN_SHARED = 16
"""Rows that two documents must share at least: below, more keys are looked up than rows are saved."""
KEYS_PER_CAPACITY = 8
"""Times the room of a piece: most keys that its runs look up, which its rows do not bound."""
TARGETS_PER_CAPACITY = 16
"""Times the room of a piece: most trained tokens of it. Rows do not bound them, and all of them are in one step."""

NUM_KEY_TOKENS = 2**22  # tokens that are compared at a time, 16 MiB, if each document may have the fewest
BLOCK_OF_PACK = 2**13  # the same among the documents of a pack
WIDTHS = 16, 2**16  # fewest and most tokens of a document in a block


def share_order(
    documents: Sequence[npt.NDArray[np.integer]], min_shared: int = MIN_SHARED
) -> tuple[list[int], list[int]]:
    """The documents sorted by their tokens, and the rows that each shares with the one before it, both (N,).

    >>> share_order([np.array([7, 9]), np.array([7, 8, 9, 5]), np.array([7, 8, 9, 4, 3])], min_shared=1)
    ([2, 1, 0], [0, 2, 0])
    """
    lengths = np.array([len(tokens) for tokens in documents], dtype=np.int64)

    def read(chosen: Int64Array, first: int, width: int) -> npt.NDArray[np.uint32]:
        block = np.full((len(chosen), width), END_TOKEN_KEY, dtype=">u4")
        for row, i in zip(block, chosen.tolist(), strict=True):
            tokens = documents[i][first : first + width]
            row[: len(tokens)] = tokens
        return block

    found = sort_by_tokens(lengths, read, BLOCK_OF_PACK)
    return found.order.tolist(), shared_by_neighbours(found.common, lengths[found.order], min_shared).tolist()


def shared_by_neighbours(common: Int64Array, lengths: Int64Array, min_shared: int = MIN_SHARED) -> Int64Array:
    """Rows that documents share with the one before, shape (N,), see `TokenOrder`: all if they are the same."""
    before = np.concatenate([[0], lengths[:-1]])[: len(lengths)]
    shared = np.where((common == lengths) & (common == before), common, np.maximum(common - 1, 0))
    return np.where(shared >= min_shared, shared, 0)


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Documents sorted by their tokens; documents of the same tokens by their number.

    A document comes *after* those that begin with all of it. Behind them, what is left of it is one row, its last
    token, which predicts nothing.
    """

    order: Int64Array  # shape (M,)
    common: Int64Array  # tokens with which each begins as the one before it does, shape (M,); 0 for the first

    def within(self, groups: Int64Array) -> "TokenOrder":
        """The documents of each group sorted by their tokens, group after group.

        The first of a group has nothing in common with the last of the group before. No token is read: the common
        tokens of two documents are the fewest of the neighbours between them. `groups` are by the number of a document;
        one of group -1 is left out.

        >>> sorted_ = TokenOrder(np.array([1, 0, 2, 3]), np.array([0, 9, 4, 7]))
        >>> two = sorted_.within(np.array([5, 2, 5, 2]))
        >>> two.order.tolist(), two.common.tolist()
        ([1, 3, 0, 2], [0, 4, 0, 4])
        """
        group = groups[self.order]
        places = np.argsort(group, kind="stable")
        places = places[np.searchsorted(group[places], 0) :]
        group = group[places]
        common = np.zeros(len(places), dtype=np.int64)
        inside = np.flatnonzero(group[1:] == group[:-1]) + 1
        first = places[inside - 1] + 1
        stop = places[inside] + 1
        # The minimum of a range is that of two which cover it, of 1, 2, 4, ... values
        minima = self.common
        level = np.frexp(stop - first)[1] - 1
        for i in range(int(level.max(initial=-1)) + 1):
            here = level == i
            size = 1 << i
            common[inside[here]] = np.minimum(minima[first[here]], minima[stop[here] - size])
            minima = np.minimum(minima[:-size], minima[size:])
        return TokenOrder(self.order[places], common)


def sort_by_tokens(
    lengths: Int64Array, read: Callable[[Int64Array, int, int], npt.NDArray[np.uint32]], block: int = NUM_KEY_TOKENS
) -> TokenOrder:
    """Sort documents of so many tokens by these, and find the common tokens of neighbours on the way.

    All documents are compared by a few tokens, then those that are still the same by the next, and so on. So no token
    is read beyond the first difference and its block. `read`: (documents, first, width) -> their tokens from `first`
    on, shape (n, width), big-endian, with `END` behind the end of a document.
    """
    order = np.arange(len(lengths))
    common = np.zeros(len(lengths), dtype=np.int64)
    places = np.arange(len(lengths))  # in `order`, of documents that are not yet distinct, group after group
    group = np.zeros(len(lengths), dtype=np.int64)
    first = 0
    while len(places) > 1:
        width = min(max(block // len(places), WIDTHS[0]), WIDTHS[1])
        keys = np.empty((len(places), 1 + width), dtype=">u4")
        keys[:, 0] = group
        keys[:, 1:] = read(order[places], first, width)
        differ = _differ_from_previous(keys)
        mixed = np.zeros(int(group[-1]) + 1, dtype=bool)
        mixed[group[1:][differ & (group[1:] == group[:-1])]] = True
        moved = np.flatnonzero(mixed[group])
        if len(moved):
            moved_keys = keys[moved]
            by_key = moved_keys.view(f"V{moved_keys.shape[1] * 4}")[:, 0].argsort(kind="stable")
            order[places[moved]] = order[places[moved[by_key]]]
            keys[moved] = moved_keys[by_key]
            differ = _differ_from_previous(keys)
        parted = np.flatnonzero(differ & (group[1:] == group[:-1])) + 1
        common[places[parted]] = first + (keys[parted, 1:] != keys[parted - 1, 1:]).argmax(axis=1)
        first += width
        # Documents that are the same to their end are done; so is a group of one.
        is_first = np.concatenate([[True], differ])
        has_next = np.concatenate([~is_first[1:], [False]])
        ended = lengths[order[places]] < first  # so their ends were compared
        same = np.flatnonzero(ended & ~is_first)
        common[places[same]] = lengths[order[places[same]]]
        going_on = (has_next | ~is_first) & ~ended
        group = np.cumsum(is_first)[going_on]
        places = places[going_on]
        group = np.cumsum(np.concatenate([[0], np.diff(group) != 0])) if len(group) else group
    return TokenOrder(order, common)


def _differ_from_previous(keys: npt.NDArray[np.uint32]) -> BoolArray:
    """Whether each row but the first differs from the one before, shape (n - 1,)."""
    native = keys.view(np.uint32)  # the order of bytes does not matter, and numpy compares its own faster
    return (native[1:] != native[:-1]).any(axis=1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pieces(Units):
    """N documents in P pieces, the units. A pack may have fewer rows than its pieces: two of them may begin alike."""

    order: Int64Array  # documents, pieces by their smallest one, within each sorted by their tokens, shape (N,)
    offsets: Int64Array  # piece i is `order[offsets[i]:offsets[i + 1]]`, shape (P + 1,)
    lengths: Int64Array  # tokens of the documents in `order`, shape (N,)
    shared: Int64Array  # rows that each shares with the one before it, shape (N,)
    family: Int64Array  # of each document, by its number, shape (N,); pieces of one family were cut from each other
    original: Int64Array  # for a piece of copies, the one with the first of its first one, else itself, shape (P,)
    distance: Float64Array  # where it is visited behind its original, as a share of the epoch, shape (P,)

    @property
    def num_families(self) -> int:
        return len(np.unique(self.family[self.order]))

    def _language_costs(self, cost_model: CostModel) -> Float64Array:
        """What is new in each document costs what it costs behind the rows that the document shares."""
        return np.add.reduceat(cost_model(self.lengths) - cost_model(self.shared), self.offsets[:-1])

    @property
    def _piece(self) -> Int64Array:
        """Number of the piece of each document in `order`, shape (N,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def of(self, documents: Int64Array, offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
        number = np.empty(len(self.family), dtype=np.int64)
        number[self.order] = self._piece
        piece = number[documents]
        begins = np.concatenate([[True], piece[1:] != piece[:-1]])[: len(piece)]
        return piece[begins], np.concatenate([[0], np.cumsum(begins)])[offsets]

    def visited(self, order: Int64Array) -> Int64Array:
        """A random order, changed so that pieces of the same documents are far apart and share no pack; shape (P,)."""
        place = np.empty(len(self))
        place[order] = np.arange(len(self)) / max(len(self), 1)
        return np.argsort((place[self.original] + self.distance) % 1, kind="stable")

    def documents(
        self, units: Int64Array, offsets: Int64Array, rng: np.random.Generator | None
    ) -> tuple[Int64Array, Int64Array]:
        order = self.order[np.lexsort((self.order, self._piece))]
        if rng is not None:
            order = order[np.lexsort((rng.random(len(order)), self._piece))]
        sizes = np.diff(self.offsets)[units]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        at = np.arange(ends[-1]) + np.repeat(self.offsets[units] - ends[:-1], sizes)
        return order[at], ends[offsets]


def make_pieces(
    tokens: TokenOrder,
    lengths: Int64Array,
    trained: Int64Array,
    *,
    cost_model: CostModel,
    room: int | Int64Array,
    splits_copies: bool = True,
    image_costs: Callable[[Int64Array, Int64Array], Float64Array] = lambda documents, shared: np.zeros(len(documents)),
) -> Pieces:
    """Families of documents, all or some of them, cut where one would have too many rows, keys or targets.

    Args:
        lengths, trained: tokens and trained tokens of each document by its number.
        room: most rows of a piece, one number or by the number of its first document, shape (N,); at least its tokens.
        splits_copies: False brings documents of the same tokens together, where the steps are fixed anyway.
        image_costs: (documents, rows that each shares) -> FLOPs of their other images in the vision tower.

    >>> tokens = TokenOrder(np.array([0, 2, 1]), np.array([0, 31, 20]))  # 0 and 2 share 30 rows of 40
    >>> lengths, costs = np.array([40, 60, 40]), CostModel(per_token=1.0, per_pair=0.0)
    >>> pieces = make_pieces(tokens, lengths, lengths - 1, cost_model=costs, room=100)
    >>> [piece.tolist() for piece in np.split(pieces.order, pieces.offsets[1:-1])], pieces.rows.tolist()
    ([[0, 2], [1]], [50, 60])
    """
    copy, first_copy = _count_copies(tokens, lengths)
    if splits_copies and copy.any():
        tokens = tokens.within(copy)
    size = lengths[tokens.order]
    shared = shared_by_neighbours(tokens.common, size)
    # Half of the longer one: all conversations with one system prompt share half of the shortest
    begins = 2 * shared < np.maximum(size, np.concatenate([[0], size[:-1]])[: len(size)])
    family = np.empty(len(lengths), dtype=np.int64)
    family[tokens.order] = np.cumsum(begins) - 1
    shared[begins] = 0
    room_of = np.broadcast_to(room, len(lengths))[tokens.order]
    begins[_cut_families(size, shared, trained[tokens.order], begins=begins, room=room_of)] = True
    shared[begins] = 0
    starts = np.flatnonzero(begins)
    # numbered by their smallest document
    by_first = np.argsort(np.minimum.reduceat(tokens.order, starts), kind="stable")
    number = np.argsort(by_first)[np.cumsum(begins) - 1]
    places = np.argsort(number, kind="stable")
    sizes = np.diff(np.append(starts, len(size)))[by_first]
    piece = np.zeros(len(lengths), dtype=np.int64)
    first = tokens.order[starts][by_first]
    piece[tokens.order] = number
    return Pieces(
        np.add.reduceat(size - shared, starts)[by_first],
        cost_model,
        np.add.reduceat(image_costs(tokens.order, shared), starts)[by_first],
        targets=np.add.reduceat(trained[tokens.order], starts)[by_first],
        order=tokens.order[places],
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        lengths=size[places],
        shared=shared[places],
        family=family,
        original=piece[first_copy[first]],
        distance=copy[first] / np.bincount(first_copy)[first_copy[first]],
    )


def _count_copies(tokens: TokenOrder, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
    """How many documents before each one have the same tokens, and the first of them, both by number, shape (N,)."""
    size = lengths[tokens.order]
    is_copy = np.zeros(len(size), dtype=bool)
    is_copy[1:] = (size[1:] == size[:-1]) & (tokens.common[1:] == size[1:])
    place = np.arange(len(size))
    first = np.maximum.accumulate(np.where(is_copy, 0, place))
    copy = np.zeros(len(lengths), dtype=np.int64)
    first_copy = np.arange(len(lengths))
    copy[tokens.order] = place - first
    first_copy[tokens.order] = tokens.order[first]
    return copy, first_copy


def _cut_families(
    lengths: Int64Array, shared: Int64Array, trained: Int64Array, *, begins: BoolArray, room: Int64Array
) -> list[int]:
    """Places at which families are cut: parts have few enough rows (`room`, by their first document), keys, targets."""
    own = lengths - shared
    looks_up = np.where(own > 1, lengths, 0)  # a document of which at most its last row is left has no run
    limits = (
        (own, room, shared),  # the first of a part has all its rows, and a run
        (looks_up, KEYS_PER_CAPACITY * room, lengths - looks_up),
        (trained, TARGETS_PER_CAPACITY * room, 0),
    )
    ends = np.full(len(lengths), len(lengths))  # of the longest part that begins with each document
    for values, most, more in limits:
        total = np.concatenate([[0], np.cumsum(values)])
        ends = np.minimum(ends, np.searchsorted(total, most - more + total[:-1], side="right") - 1)
    ends = np.maximum(ends, np.arange(len(lengths)) + 1)
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], len(lengths))
    is_cut = ends[starts] < stops
    cuts = []
    for at, stop in zip(starts[is_cut].tolist(), stops[is_cut].tolist(), strict=True):
        while (at := int(ends[at])) < stop:
            cuts.append(at)
    return cuts
