"""Documents of one optimizer step, dealt to its slots so that ranks finish together.

Full packs of equal tokens differ in their attention alone. So the long documents, which have most of it, are dealt
first, by the quadratic part of their cost; the short ones fill what is left; and exchanges of one or two documents
settle the last tokens, for a step of full packs has no token to spare.

Letters: S slots, W ranks; slot i is micro-batch i // W of rank i % W.
"""

import heapq
from functools import cache

import numpy as np
import numpy.typing as npt

from .costs import Float64Array

Int64Array = npt.NDArray[np.int64]

SHORT = 32  # documents of at most capacity / 32 tokens fill what the long ones leave
RESERVE = 8  # of capacity / 8 in every slot, so that a few short ones stand in each and can be exchanged
CONSIDERED, PAIRED = 64, 16  # documents of a slot that an exchange looks at, of one and of two documents
PARTNERS = 16  # slots that an exchange of pairs asks
FAILURES = 4  # one in so many slots may find no exchange, until the step is left as it was


class Deal:
    """Documents of one step on their way to slots. Documents are positions, 0 to N - 1."""

    def __init__(
        self, lengths: Int64Array, cost: Float64Array, per_token: float, capacity: int, world_size: int, num_slots: int
    ):
        self.lengths = lengths
        self.quadratic = cost - per_token * lengths
        self.per_token = per_token
        self.capacity = capacity
        self.world_size = world_size
        self.num_slots = num_slots
        self.reserve = capacity // RESERVE
        self.longest_first = np.argsort(-lengths, kind="stable")
        self.slots: list[list[int]] = [[] for _ in range(num_slots)]
        self.room = np.full(num_slots, capacity, dtype=np.int64)  # tokens
        self.load = np.zeros(num_slots)  # the quadratic part of the cost

    def packs(self, by_rank: bool) -> list[Int64Array] | None:
        """Positions of the documents of each slot; None where the documents do not settle within the capacity."""
        num_long = int((self.lengths * SHORT > self.capacity).sum())
        long, short = self.longest_first[:num_long], self.longest_first[num_long:]
        first = 0
        if not by_rank:
            long, first = self._fill_micro_steps(long)
        self._level(long, first, by_rank)
        groups = np.arange(self.num_slots).reshape(-1, self.world_size)
        if by_rank:
            groups = groups.T
        else:
            groups = np.argsort(-self._cost_when_full(), kind="stable").reshape(groups.shape)
        self._pour(short, self._lacking(int(self.lengths[short].sum()), groups, by_rank))
        if not self._settle():
            return None
        self._occupy()
        return [np.array(slot, dtype=np.int64) for slot in self.slots]

    # Long documents, by the quadratic part of their cost

    def _put(self, document: int, slot: int) -> None:
        self.slots[slot].append(document)
        self.room[slot] -= self.lengths[document]
        self.load[slot] += self.quadratic[document]

    def _fill_micro_steps(self, long: Int64Array) -> tuple[Int64Array, int]:
        """While a document has more than an even share, one micro-step takes it and all it can beside it.

        The other ranks wait for that document anyway, so what they do meanwhile costs nothing.
        """
        first = 0
        while len(long) and first < self.num_slots - self.world_size:
            limit = self.quadratic[long[0]]
            if limit * (self.num_slots - first) <= self.quadratic[long].sum():
                break
            slots = slice(first, first + self.world_size)
            room, load = self.room[slots], self.load[slots]  # views
            left = []
            most = self.capacity + self.reserve  # that any slot can take
            for document in long.tolist():
                length = self.lengths[document]
                if length + self.reserve > most:
                    left.append(document)
                    continue
                fits = (room >= length + self.reserve) | (room == self.capacity)
                fits &= load + self.quadratic[document] <= limit
                slot = int(np.where(fits, load, np.inf).argmin())
                if fits[slot]:
                    self._put(document, first + slot)
                    most = room.max()
                    if most == self.capacity:
                        most += self.reserve
                else:
                    left.append(document)
            long = np.array(left, dtype=np.int64)
            first += self.world_size
        return long, first

    def _level(self, long: Int64Array, first: int, by_rank: bool) -> None:
        """Each document, longest first, to the slot or rank from `first` on with the least load that has room."""
        slots = range(first, self.num_slots)
        teams = [list(slots[i :: self.world_size]) for i in range(self.world_size)] if by_rank else [[i] for i in slots]
        heap = [(0.0, i) for i in range(len(teams))]
        too_full: list[tuple[int, float, int]] = []  # most room first: documents get shorter, so they come back
        room = self.room.tolist()
        lengths, quadratic = self.lengths.tolist(), self.quadratic.tolist()
        for document in long.tolist():
            wanted = lengths[document] + self.reserve
            while too_full and -too_full[0][0] >= wanted:
                heapq.heappush(heap, heapq.heappop(too_full)[1:])
            while heap:
                load, i = heap[0]
                slot = max(teams[i], key=room.__getitem__)
                if room[slot] >= wanted or room[slot] == self.capacity:
                    heapq.heapreplace(heap, (load + quadratic[document], i))
                    break
                heapq.heappush(too_full, (-room[slot], *heapq.heappop(heap)))
            else:
                slot = max(range(self.num_slots), key=room.__getitem__)  # an exchange may still make room
            room[slot] -= lengths[document]
            self._put(document, slot)

    # Short documents, by tokens

    def _cost_when_full(self) -> Float64Array:
        return self.load + self.per_token * np.maximum(self.capacity, self.capacity - self.room)

    def _lacking(self, tokens: int, groups: Int64Array, by_rank: bool) -> Float64Array:
        """Tokens that each slot should still get, `tokens` in all, so that groups end as early as they can, shape (S,).

        `groups`, shape (groups, members), are the micro-steps, whose longest slot counts, or the ranks' slots.
        """
        held = self.load + self.per_token * (self.capacity - self.room)
        room = np.maximum(self.room, 0)
        held, room = held[groups], room[groups]
        if by_rank:  # one group whose members are the ranks
            share, held, room = room / np.maximum(room.sum(1, keepdims=True), 1), held.sum(1)[None], room.sum(1)[None]
        full = -np.sort(-(held + self.per_token * room), axis=1)
        least = held.max(axis=1)

        def given(level: Float64Array) -> Float64Array:
            return np.clip((level[:, None] - held) / self.per_token, 0, room)

        # A token more raises the end of its micro-step by less where more slots can still take one: those go first.
        steps = [least, *(np.maximum(least, full[:, i]) for i in range(full.shape[1] - 1, -1, -1))]
        enough = next((i for i, level in enumerate(steps) if given(level).sum() >= tokens), len(steps) - 1)
        low, high = steps[max(enough - 1, 0)] if enough else held.min() + 0 * least, steps[enough]
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if given(middle).sum() >= tokens else (middle, high)
        lacking = np.zeros(self.num_slots)
        lacking[groups] = given(high)[0][:, None] * share if by_rank else given(high)
        return lacking

    def _pour(self, short: Int64Array, lacking: Float64Array) -> None:
        """Each document, longest first, to the slot that lacks most."""
        heap = [(-tokens, slot) for slot, tokens in enumerate(lacking.tolist())]
        heapq.heapify(heap)
        slots, replace = self.slots, heapq.heapreplace
        for document, length in zip(short.tolist(), self.lengths[short].tolist(), strict=True):
            lack, slot = heap[0]
            slots[slot].append(document)
            replace(heap, (lack + length, slot))
        self.room = np.array([self.capacity - self.lengths[slot].sum() for slot in slots], dtype=np.int64)

    # The last tokens

    def _settle(self) -> bool:
        """Exchange documents until no slot is above the capacity; False where that is not found."""
        self.slot_of = np.empty(len(self.lengths), dtype=np.int64)
        for slot, documents in enumerate(self.slots):
            self.slot_of[documents] = slot
        self.shortest_first = self.longest_first[::-1]
        self.ascending = self.lengths[self.shortest_first]
        attempts = self.num_slots // FAILURES + 16
        stuck: set[int] = set()
        while self.room.min() < 0:
            over = (i for i in np.argsort(self.room).tolist() if i not in stuck and self.room[i] < 0)
            slot = next(over, -1)
            if slot < 0 or not attempts:
                return False
            if self._exchange_one(slot) or self._exchange_pairs(slot):
                stuck.clear()
            else:
                stuck.add(slot)
                attempts -= 1
        return True

    def _exchange_one(self, slot: int) -> bool:
        """A document for one that is shorter by no more than its slot has room for, or for nothing."""
        need, most = -int(self.room[slot]), int(self.room.max())
        if most <= 0:
            return False
        mine = np.array(self.slots[slot][-CONSIDERED:])
        lengths = self.lengths[mine]
        first, last = np.searchsorted(self.ascending, lengths - most), np.searchsorted(self.ascending, lengths)
        sizes = last - first
        index = np.repeat(np.arange(len(mine)), sizes)
        candidates = np.arange(len(index)) + np.repeat(first - np.cumsum(sizes) + sizes, sizes)
        gain = lengths[index] - self.ascending[candidates]
        partner = self.slot_of[self.shortest_first[candidates]]
        gain[gain > self.room[partner]] = 0
        if gain.any():
            i = _best(gain, need)
            self._move(int(self.shortest_first[candidates[i]]), slot)
            self._move(int(mine[index[i]]), int(partner[i]))
            return True
        if len(mine) > 1 and lengths.min() <= most:
            self._move(int(mine[lengths.argmin()]), int(self.room.argmax()))
            return True
        return False

    def _exchange_pairs(self, slot: int) -> bool:
        """One or two documents for one or two of another slot."""
        need = -int(self.room[slot])
        mine, sums = self._pairs(slot)
        for partner in np.argsort(-self.room)[:PARTNERS].tolist():
            most = int(self.room[partner])
            if most <= 0:
                return False
            theirs, their_sums = self._pairs(partner)
            gain = sums[:, None] - their_sums[None, :]
            gain[(gain < 0) | (gain > most)] = 0
            if gain.any():
                i, j = divmod(_best(gain, need), len(their_sums))
                for document in set(theirs[:, j].tolist()):
                    self._move(document, slot)
                for document in set(mine[:, i].tolist()):
                    self._move(document, partner)
                return True
        return False

    def _pairs(self, slot: int) -> tuple[Int64Array, Int64Array]:
        """Pairs of documents of a slot, a pair of the same meaning one, shape (2, pairs), and their tokens."""
        documents = np.array(self.slots[slot][-PAIRED:], dtype=np.int64)
        one, two = _triangle(len(documents))
        tokens = self.lengths[documents]
        return documents[[one, two]], tokens[one] + np.where(one == two, 0, tokens[two])

    def _move(self, document: int, slot: int) -> None:
        source = self.slot_of[document]
        self.slots[source].remove(document)
        self.slots[slot].append(document)
        self.room[source] += self.lengths[document]
        self.room[slot] -= self.lengths[document]
        self.slot_of[document] = slot

    def _occupy(self) -> None:
        """No slot stays empty while another has two documents."""
        for slot in [i for i, documents in enumerate(self.slots) if not documents]:
            donor = max(self.slots, key=len)
            if len(donor) > 1:
                self._move(min(donor, key=self.lengths.__getitem__), slot)


@cache
def _triangle(num: int) -> tuple[Int64Array, Int64Array]:
    return np.triu_indices(num)


def _best(gain: Int64Array, need: int) -> int:
    """Flat index of the least gain that is enough, else of the largest."""
    enough = gain >= need
    return int(np.where(enough, gain, np.iinfo(np.int64).max).argmin() if enough.any() else gain.argmax())
