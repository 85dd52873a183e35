"""Find documents that begin with the same tokens, and plan such families as one unit.

The tokens of all documents are sorted once (`sort_by_tokens`, called by `tokens.py`). Then a document has its
longest common beginning with the document before it, its *neighbour*. In a pack the rows of a common beginning are
computed once, for the first document that has it; a later document *shares* them and adds only its remaining rows, its
*run*:

    documents  A B C D, A B C E F      rows  A B C D | C E F      shared rows  0, 2

In attention, a run reads the *keys* of all tokens of its document, shared ones included. A row predicts one next token,
and one row of C could not predict both D and E. So each document above has its own row of C, and they share A and B.

With `share_prefixes="family"` this module also makes the *units*, the things that planning packs (`make_pieces`, called
by `sharing.py`). Neighbours that share at least half of the longer document are a *family*. A family that fits into a
pack is one unit; a larger one is cut into several. Every unit is called a *piece*. A piece has sum(length) -
sum(shared) rows. Attention is causal, so the shared rows of a document cost what a document of these rows costs, and a
piece costs sum(cost(length)) - sum(cost(shared)).

Documents with equal tokens are *copies*. If they were in one optimizer step, one update would count this document
several times. So families are made of first copies only, then further families of second copies only, and so on.

Letters: N documents, M of them sorted, P pieces. A *place* is an index into the sorted documents, the *number* of a
document its index before sorting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.epochs import EpochPlanner
from ...planning.arrays import END_TOKEN_KEY, BoolArray, Float64Array, Int64Array, offsets_of
from ...planning.best_fit import select_packs
from ...planning.costs import CostModel
from ...planning.parallel import SequenceParallel
from ...planning.token_order import TokenOrder
from ...planning.units import Units

MIN_SHARED = 16
"""Documents share no rows if they could share fewer than this: more keys would be read than rows are saved."""
KEYS_PER_CAPACITY = 8
"""Most keys that the runs of a piece read, as a multiple of the most rows of the piece.

Attention copies the keys that a run reads.
"""
TARGETS_PER_CAPACITY = 16
"""Most trained tokens of a piece (tokens that count in the loss), as a multiple of the most rows of the piece.

All trained tokens of a piece are in one optimizer step.
"""

FAMILY_ROOM_FACTOR = 8
"""A group of ranks is large enough for a piece if it could hold the first document of the piece this many times.

`room_of_families` gives a piece the room of the smallest such group.

With 4, or without a limit, an epoch takes up to 10 % longer.
"""

NUM_KEY_TOKENS = 2**22  # tokens of all documents of a table that are compared at a time: 16 MiB
NUM_KEY_TOKENS_OF_PACK = 2**13  # tokens of all documents of one pack that are compared at a time
MIN_KEY_WIDTH = 16  # fewest tokens of one document that are compared at a time
MAX_KEY_WIDTH = 2**16  # most tokens of one document that are compared at a time


def share_order(
    documents: Sequence[npt.NDArray[np.integer]], min_shared: int = MIN_SHARED
) -> tuple[list[int], list[int]]:
    """Sort the documents of a pack by their tokens, and find how many rows they share.

    Args:
        documents: tokens of each document.
        min_shared: documents that could share fewer rows share none.

    Returns:
        The indices of the documents in sorted order, and the number of rows that each of them shares with its
        neighbour; both of length N.

    >>> share_order([np.array([7, 9]), np.array([7, 8, 9, 5]), np.array([7, 8, 9, 4, 3])], min_shared=1)
    ([2, 1, 0], [0, 2, 0])
    """
    lengths = np.array([len(tokens) for tokens in documents], dtype=np.int64)

    def read_tokens(indices: Int64Array, first: int, width: int) -> npt.NDArray[np.uint32]:
        block = np.full((len(indices), width), END_TOKEN_KEY, dtype=">u4")  # larger than every token
        for row, index in zip(block, indices.tolist(), strict=True):
            tokens = documents[index][first : first + width]
            row[: len(tokens)] = tokens
        return block

    by_tokens = sort_by_tokens(lengths, read_tokens, NUM_KEY_TOKENS_OF_PACK)
    shared = shared_by_neighbours(by_tokens.common, lengths[by_tokens.order], min_shared)
    return by_tokens.order.tolist(), shared.tolist()


def shared_by_neighbours(common: Int64Array, lengths: Int64Array, min_shared: int = MIN_SHARED) -> Int64Array:
    """Return the number of rows that each sorted document shares with its neighbour, shape (M,).

    A common beginning has one shared row less than tokens; copies share all rows.

    Args:
        common: common tokens of each document and its neighbour, shape (M,), see `TokenOrder`.
        lengths: tokens of each document, in the same order, shape (M,).
        min_shared: documents that could share fewer rows share none.
    """
    shared = np.where(find_copies(common, lengths), common, np.maximum(common - 1, 0))
    return np.where(shared >= min_shared, shared, 0)


def find_copies(common: Int64Array, lengths: Int64Array) -> BoolArray:
    """Return for each sorted document whether its neighbour has the same tokens, shape (M,).

    The arguments are those of `shared_by_neighbours`.
    """
    is_copy = common == lengths
    is_copy[:1] = False  # it has no neighbour
    is_copy[1:] &= lengths[1:] == lengths[:-1]
    return is_copy


def sort_by_tokens(
    lengths: Int64Array,
    read_tokens: Callable[[Int64Array, int, int], npt.NDArray[np.uint32]],
    num_key_tokens: int = NUM_KEY_TOKENS,
) -> TokenOrder:
    """Sort documents by their tokens, and count the common tokens of neighbours on the way.

    All documents are compared by their first tokens, then the documents that are equal so far by the next tokens, and
    so on. So hardly more tokens are read than up to the first difference.

    Args:
        lengths: tokens of each document, shape (N,).
        read_tokens: (documents, first, width) -> tokens `first` to `first + width` of these documents, shape
            (n, width), big-endian, with `END_TOKEN_KEY` behind the end of a document.
        num_key_tokens: about how many tokens of all documents are read at a time.
    """
    order = np.arange(len(lengths))
    common = np.zeros(len(lengths), dtype=np.int64)
    # Documents that are equal so far are a *group*, at first all of them. `places` are those of all documents that are
    # in a group with another document, and `group[i]` is the number of the group at `places[i]`.
    places = np.arange(len(lengths))
    group = np.zeros(len(lengths), dtype=np.int64)
    first = 0
    while len(places) > 1:
        # 1. Read the next tokens. The key of a document is its group and these tokens.
        width = min(max(num_key_tokens // len(places), MIN_KEY_WIDTH), MAX_KEY_WIDTH)
        keys = np.empty((len(places), 1 + width), dtype=">u4")
        keys[:, 0] = group
        keys[:, 1:] = read_tokens(order[places], first, width)
        # 2. Sort the groups in which not all keys are equal. A view makes each key one value that is compared as bytes,
        # which for big-endian numbers is the order of the tokens.
        differs = _differs_from_previous(keys)
        is_same_group = group[1:] == group[:-1]  # whether each key but the first is in the group of the key before it
        is_mixed = np.zeros(int(group[-1]) + 1, dtype=bool)
        is_mixed[group[1:][differs & is_same_group]] = True
        moved = np.flatnonzero(is_mixed[group])
        if len(moved):
            moved_keys = keys[moved]
            by_key = moved_keys.view(f"V{moved_keys.shape[1] * 4}")[:, 0].argsort(kind="stable")
            order[places[moved]] = order[places[moved[by_key]]]
            keys[moved] = moved_keys[by_key]
            differs = _differs_from_previous(keys)
        # 3. Neighbours of a group that now differ have the tokens before their first difference in common. `argmax`
        # finds the first difference, which is the `END_TOKEN_KEY` if one of them ends.
        parted = np.flatnonzero(differs & is_same_group) + 1
        common[places[parted]] = first + (keys[parted, 1:] != keys[parted - 1, 1:]).argmax(axis=1)
        first += width
        # 4. A document has ended if an `END_TOKEN_KEY` behind it was compared, so if it has fewer tokens than `first`.
        # Documents that have ended and are still equal are copies, with all tokens in common.
        is_first = np.concatenate([[True], differs])
        has_next = np.concatenate([~is_first[1:], [False]])
        has_ended = lengths[order[places]] < first
        copies = np.flatnonzero(has_ended & ~is_first)
        common[places[copies]] = lengths[order[places[copies]]]
        # 5. Continue with the documents that have not ended and are equal to another one. Number their groups from 0.
        has_equal = has_next | ~is_first
        continues = has_equal & ~has_ended
        places = places[continues]
        group = np.cumsum(is_first)[continues]
        group = np.cumsum(np.concatenate([[0], np.diff(group) != 0])) if len(group) else group
    return TokenOrder(order=order, common=common)


def _differs_from_previous(keys: npt.NDArray[np.uint32]) -> BoolArray:
    """Return for each row but the first whether it differs from the row before it, shape (n - 1,)."""
    # The order of bytes does not matter here, and numpy compares numbers in the native order faster.
    native = keys.view(np.uint32)
    return (native[1:] != native[:-1]).any(axis=1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pieces(Units):
    """N documents in P pieces, which are the units. Pieces are numbered by the smallest number of their documents.

    A pack may have fewer rows than the sum of its pieces, because the collator also shares rows between pieces.
    """

    # Numbers of the documents, piece after piece, inside a piece sorted by their tokens, shape (N,). If only M
    # documents were sorted, `order`, `lengths` and `shared` have shape (M,), and `family` is undefined for the others
    order: Int64Array
    offsets: Int64Array  # piece i is `order[offsets[i]:offsets[i + 1]]`, shape (P + 1,)
    lengths: Int64Array  # tokens of the documents in `order`, shape (N,)
    shared: Int64Array  # rows that each document in `order` shares with the one before it in its piece, shape (N,)
    family: Int64Array  # number of the family of each document, by the number of the document, shape (N,)
    # The next two arrays, shape (P,), keep copies of documents apart in the epoch. `original` is the piece that has the
    # first copy of a piece's first document; it may be the piece itself. `distance` says how much later than this
    # original a piece comes, as a share of the epoch: 0, 1/3 and 2/3 for the pieces of three copies.
    original: Int64Array
    distance: Float64Array

    @property
    def num_families(self) -> int:
        """The number of families, a family of one document included."""
        return len(np.unique(self.family[self.order]))

    def _language_costs(self, cost_model: CostModel) -> Float64Array:
        """Return the FLOPs of each piece in the language model, shape (P,), for `Units.costs`."""
        # The run of a document costs what the whole document costs, less the rows that it shares.
        return np.add.reduceat(cost_model(self.lengths) - cost_model(self.shared), self.offsets[:-1])

    @property
    def _piece_numbers(self) -> Int64Array:
        """The number of the piece of each document in `order`, shape (N,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def from_documents(self, documents: Int64Array, offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Replace the documents of slots by their pieces, the inverse of `to_documents`.

        A *slot* is the place of one pack in a schedule. Arguments and result are those of `Units`: slot i has the
        documents from `offsets[i]` up to `offsets[i + 1]`, and the pieces between the same two of the returned offsets.
        """
        piece_of_documents = np.empty(len(self.family), dtype=np.int64)
        piece_of_documents[self.order] = self._piece_numbers
        piece = piece_of_documents[documents]
        # The documents of a piece follow each other. The slice is for no documents at all
        is_first = np.concatenate([[True], piece[1:] != piece[:-1]])[: len(piece)]
        return piece[is_first], offsets_of(is_first)[offsets]

    def sort_by_step(
        self, order: Int64Array, step_of_documents: Int64Array, num_steps: int
    ) -> tuple[Int64Array, Int64Array]:
        """Sort the pieces by the optimizer step that their documents must keep.

        Args:
            order: not used here. In `Units` it is the order of the documents.
            step_of_documents: the step of each document, by its number, shape (N,); -1 for a document without a step.
            num_steps: the number of steps.

        Returns:
            The numbers of the pieces, shape (P,), and where the pieces of each step begin in them, shape
            (num_steps + 1,).
        """
        # All documents of a piece have the same step, so the step of its first document is the step of the piece.
        step_of_pieces = step_of_documents[self.order[self.offsets[:-1]]]
        pieces = np.argsort(step_of_pieces, kind="stable")
        return pieces, np.searchsorted(step_of_pieces[pieces], np.arange(num_steps + 1))

    def visiting_order(self, order: Int64Array) -> Int64Array:
        """Change a random order so that copies of documents are far apart in the epoch, shape (P,)."""
        time = np.empty(len(self))  # when the random order visits each piece, from 0 to 1
        time[order] = np.arange(len(self)) / max(len(self), 1)
        return np.argsort((time[self.original] + self.distance) % 1, kind="stable")

    def to_documents(
        self, units: Int64Array, offsets: Int64Array, rng: np.random.Generator | None
    ) -> tuple[Int64Array, Int64Array]:
        """Replace the pieces of slots by their documents, in random order inside a piece if there is an `rng`.

        Slot i has the pieces from `offsets[i]` up to `offsets[i + 1]`, and the documents between the same two of the
        returned offsets.
        """
        # Sort the documents inside each piece by number, the order without `rng`, and then shuffle them.
        order = self.order[np.lexsort((self.order, self._piece_numbers))]
        if rng is not None:
            order = order[np.lexsort((rng.random(len(order)), self._piece_numbers))]
        documents, sizes = select_packs(order, np.diff(self.offsets), units)  # of the pieces with these numbers
        return documents, offsets_of(sizes)[offsets]


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
    """Make families of the sorted documents, and cut a family where a piece would be too large.

    A piece is too large if it has too many rows (`room`), if its runs read too many keys (`KEYS_PER_CAPACITY`), or if
    it has too many trained tokens (`TARGETS_PER_CAPACITY`).

    Args:
        tokens: all documents, or some of them, sorted.
        lengths: tokens of each document, by its number, shape (N,).
        trained: trained tokens of each document, by its number, shape (N,).
        room: most rows of a piece: one number, or for each document the most rows of a piece that begins with it, shape
            (N,). Not less than the length of a document.
        splits_copies: False puts copies into one family. This is for a strategy that has chosen the documents of each
            step already ("minibatch").
        image_costs: (documents, rows that each shares) -> FLOPs in the vision tower of the images behind these rows.

    >>> tokens = TokenOrder(order=np.array([0, 2, 1]), common=np.array([0, 31, 20]))
    >>> lengths, costs = np.array([40, 60, 40]), CostModel(per_token=1.0, per_pair=0.0)
    >>> pieces = make_pieces(tokens, lengths, lengths - 1, cost_model=costs, room=100)
    >>> [piece.tolist() for piece in np.split(pieces.order, pieces.offsets[1:-1])]  # 0 and 2 share 30 rows of 40
    [[0, 2], [1]]
    >>> pieces.rows.tolist()
    [50, 60]
    """
    # 1. Take copies apart: the first copies are sorted by themselves, then the second ones, and so on.
    copy_number, first_copy = _number_copies(tokens, lengths)
    if splits_copies and copy_number.any():
        tokens = tokens.within(copy_number)  # all first copies, then all second ones, with `common` counted within each
    # 2. A family begins where neighbours share less than half of the longer one. Half of the shorter one would not do:
    # all conversations with one system prompt share half of the shortest conversation.
    size = lengths[tokens.order]
    shared = shared_by_neighbours(tokens.common, size)
    sizes_before = np.concatenate([[0], size[:-1]])[: len(size)]
    is_first = 2 * shared < np.maximum(size, sizes_before)  # whether a document is the first one of its family
    family = np.empty(len(lengths), dtype=np.int64)
    family[tokens.order] = np.cumsum(is_first) - 1
    shared[is_first] = 0
    # 3. A piece begins with a family, and where a family is cut.
    max_rows = np.broadcast_to(room, len(lengths))[tokens.order]
    cuts = _cut_families(size, shared, trained[tokens.order], is_first=is_first, max_rows=max_rows)
    is_first[cuts] = True  # from here on, whether a document is the first one of its piece
    shared[is_first] = 0
    # 4. Number the pieces by the smallest number of their documents.
    starts = np.flatnonzero(is_first)
    by_smallest = np.argsort(np.minimum.reduceat(tokens.order, starts), kind="stable")
    new_numbers = np.argsort(by_smallest)  # the inverse permutation
    piece_numbers = new_numbers[np.cumsum(is_first) - 1]
    places = np.argsort(piece_numbers, kind="stable")
    piece_of_documents = np.zeros(len(lengths), dtype=np.int64)
    piece_of_documents[tokens.order] = piece_numbers
    # 5. Find the pieces with the first copies, and divide the epoch evenly between the copies of a document. The first
    # document of a piece decides for the whole piece.
    first_documents = tokens.order[starts][by_smallest]
    originals = first_copy[first_documents]  # documents
    num_copies = np.bincount(first_copy)[originals]
    return Pieces(
        rows=np.add.reduceat(size - shared, starts)[by_smallest],
        cost_model=cost_model,
        image_costs=np.add.reduceat(image_costs(tokens.order, shared), starts)[by_smallest],
        targets=np.add.reduceat(trained[tokens.order], starts)[by_smallest],
        order=tokens.order[places],
        offsets=offsets_of(np.bincount(piece_numbers)),
        lengths=size[places],
        shared=shared[places],
        family=family,
        original=piece_of_documents[originals],
        distance=copy_number[first_documents] / num_copies,
    )


def _number_copies(tokens: TokenOrder, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Number the copies of each document from 0, in sorted order. A document without a copy has number 0.

    Returns:
        The number of each document among its copies, and the document that is the first copy; both indexed by the
        number of the document, shape (N,).
    """
    is_copy = find_copies(tokens.common, lengths[tokens.order])
    place = np.arange(len(is_copy))
    first_place = np.maximum.accumulate(np.where(is_copy, 0, place))
    copy_number = np.zeros(len(lengths), dtype=np.int64)
    first_copy = np.arange(len(lengths))
    copy_number[tokens.order] = place - first_place
    first_copy[tokens.order] = tokens.order[first_place]
    return copy_number, first_copy


def _cut_families(
    lengths: Int64Array, shared: Int64Array, trained: Int64Array, *, is_first: BoolArray, max_rows: Int64Array
) -> list[int]:
    """Return the places at which families are cut into pieces, so that no piece has too many rows, keys or targets.

    All arguments have shape (M,), in sorted order.

    Args:
        lengths: tokens of each document.
        shared: rows that each document shares with its neighbour.
        trained: trained tokens of each document.
        is_first: whether a document is the first one of its family.
        max_rows: most rows of a piece that begins with a document.
    """

    def find_stops(values: Int64Array, max_sum: Int64Array, extra_of_first: Int64Array | int) -> Int64Array:
        """Return for each place the end of the longest piece that begins there and has a sum of at most `max_sum`.

        The sum of a piece has the values of its documents, and `extra_of_first` of its first document.
        """
        total = offsets_of(values)
        return np.searchsorted(total, total[:-1] + max_sum - extra_of_first, side="right") - 1

    own_rows = lengths - shared
    # The collator gives a document no run if at most its last token is not shared, because this token predicts nothing
    keys = np.where(own_rows > 1, lengths, 0)
    # The first document of a piece shares no rows, so it adds all of its rows and keys. A piece is never empty.
    stops_of_one_document = np.arange(len(lengths)) + 1
    stops = np.minimum.reduce(
        [
            find_stops(own_rows, max_rows, extra_of_first=shared),
            find_stops(keys, KEYS_PER_CAPACITY * max_rows, extra_of_first=lengths - keys),
            find_stops(trained, TARGETS_PER_CAPACITY * max_rows, extra_of_first=0),
        ]
    ).clip(min=stops_of_one_document)
    family_starts = np.flatnonzero(is_first)
    family_stops = np.append(family_starts[1:], len(lengths))
    is_cut = stops[family_starts] < family_stops
    cuts = []
    for start, family_stop in zip(family_starts[is_cut].tolist(), family_stops[is_cut].tolist(), strict=True):
        place = int(stops[start])
        while place < family_stop:
            cuts.append(place)
            place = int(stops[place])
    return cuts


def room_of_families(lengths: Int64Array, parallel: SequenceParallel) -> Int64Array:
    """Return for each document the most rows of a piece that begins with it, shape (N,).

    With sequence parallelism, a *group* of ranks shares a pack. A piece gets room as if it were packed for the smallest
    group that holds its first document `FAMILY_ROOM_FACTOR` times. In a smaller group, few documents would use the
    shared rows of a piece; in a larger one, ranks exchange more. No piece gets a larger group than the longest document
    needs, which is `parallel.smallest` ranks. A group is filled only to the share `parallel.fill` of its tokens.

    Args:
        lengths: tokens of each document, shape (N,).
        parallel: how ranks share packs. Without sequence parallelism, each group is one rank.

    >>> parallel = SequenceParallel(tokens_per_rank=100, smallest=4, degrees=(1, 2, 4), fill=0.95)
    >>> room_of_families(np.array([10, 20, 130, 390]), parallel).tolist()
    [95, 190, 380, 390]
    """
    # Most tokens of groups of 1, 2, 4, ..., `parallel.smallest` ranks
    group_tokens = parallel.tokens_per_rank * 2 ** np.arange(parallel.smallest.bit_length())
    wanted = np.minimum(FAMILY_ROOM_FACTOR * lengths, group_tokens[-1])
    room = group_tokens[np.searchsorted(group_tokens, wanted)]
    return np.maximum((parallel.fill * room).astype(np.int64), lengths)


def make_family_pieces(planner: EpochPlanner, tokens: TokenOrder, splits_copies: bool = True) -> Pieces:
    """Make families of a planner's documents, and cut them into pieces that fit into a pack.

    Args:
        planner: the planner, with the lengths and trained tokens of its documents, and the settings.
        tokens: the documents sorted by their tokens, so that a family is a sequence of neighbours.
        splits_copies: see `make_pieces`.
    """
    documents = planner.documents
    packing = planner.packing
    return make_pieces(
        tokens,
        documents.lengths,
        documents.trained,
        cost_model=packing.cost_model,
        room=room_of_families(documents.lengths, packing.parallel),
        splits_copies=splits_copies,
        image_costs=planner.image_costs_behind,  # FLOPs of the images that lie behind the shared tokens
    )
