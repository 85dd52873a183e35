"""Exchanges of documents between two slots, until no slot is above its capacity and ranks cost the same.

A full step has no token to spare, so an exchange must balance to the token. The shortest documents of two slots are
pooled; subset sums say which of them fill the first slot, and the second gets the rest. All sums of 48 documents are
the bits of one integer, made by 48 shifts: Bellman's recursion on words (Pisinger 2003,
https://doi.org/10.1016/S0305-0548(02)00131-7).
"""

import heapq

import numpy as np

from .arrays import Float64Array, Int64Array

TOGETHER = (6, 12, 24)  # shortest documents that each of two slots adds to the pool; the smallest pool that works
PARTNERS = 16  # slots with room that are tried for a slot above its capacity
LOOKED_AT = 32  # first documents of a slot among which one is exchanged for its cost
CHEAPEST, PAIRS = 4, 4  # groups that are tried for the dearest one, and pairs of documents with each
EVEN = 1.0005  # times the mean: groups up to this cost stay as they are,
WORTHWHILE = 1e-4  # of the mean: exchanges that save less are not made


class Slots:
    """Documents of one step in their slots. Documents are positions, 0 to N - 1.

    Attributes:
        documents: of each slot, about longest first.
        room: tokens that each slot can still take; negative above the capacity.
    """

    def __init__(
        self, lengths: Int64Array, cost: Float64Array, excess: Float64Array, *, capacity: int, num_slots: int
    ) -> None:
        """`excess` is what a document costs more than short ones of as many tokens."""
        self.lengths: list[int] = lengths.tolist()
        self.cost: list[float] = cost.tolist()
        self.excess = excess
        self.documents: list[list[int]] = [[] for _ in range(num_slots)]
        self.room = [capacity] * num_slots

    def put(self, document: int, slot: int) -> None:
        self.documents[slot].append(document)
        self.room[slot] -= self.lengths[document]

    def settle(self) -> bool:
        """Exchange documents until no slot is above the capacity; False if no such exchanges are found.

        Worked example, slots of 8 tokens: {6, 3} is one above, {5, 2} one below. Pooled they make 8 + 8.

        >>> slots = Slots(np.array([6, 5, 3, 2]), np.zeros(4), np.zeros(4), capacity=8, num_slots=2)
        >>> for document, slot in ((0, 0), (2, 0), (1, 1), (3, 1)):
        ...     slots.put(document, slot)
        >>> slots.settle(), slots.documents
        (True, [[1, 2], [0, 3]])
        """
        over: list[tuple[int, int]] = []
        under: list[tuple[int, int]] = []
        for slot in range(len(self.room)):
            self._queue(slot, over, under)
        attempts = len(self.room)
        while over:
            slot = heapq.heappop(over)[1]
            partner, tried = self._relieve(slot, under)
            if partner is None:
                attempts -= 1
                if attempts <= 0:
                    return False
                other = (slot + attempts) % len(self.room)
                if self.room[other] == 0 and self._divide(slot, other, full=True):
                    partner = other  # it has the surplus now, and may be luckier
            for entry in tried:
                heapq.heappush(under, entry)
            self._queue(slot, over, under)
            if partner is not None:
                self._queue(partner, over, under)
        return True

    def _queue(self, slot: int, over: list[tuple[int, int]], under: list[tuple[int, int]]) -> None:
        """Put a slot into the heap of those above the capacity, fullest first, or of those with room, most first."""
        if self.room[slot] < 0:
            heapq.heappush(over, (self.room[slot], slot))
        elif self.room[slot] > 0:
            heapq.heappush(under, (-self.room[slot], slot))

    def _relieve(self, slot: int, under: list[tuple[int, int]]) -> tuple[int | None, list[tuple[int, int]]]:
        """The first slot with room that takes the surplus of this one, and the entries of those that could not."""
        tried: list[tuple[int, int]] = []
        while under and len(tried) < PARTNERS:
            entry = heapq.heappop(under)
            if self._divide(slot, entry[1]):
                return entry[1], tried
            tried.append(entry)
        return None, tried

    def even_out(self, groups: list[list[int]]) -> None:
        """Exchange until groups of slots cost the same, or no exchange with the cheapest groups helps the dearest."""
        costs = np.array([sum(self._cost(slot) for slot in group) for group in groups])
        enough, least = costs.mean() * EVEN, costs.mean() * WORTHWHILE
        for _ in range(2 * len(groups) + LOOKED_AT):
            dear = int(costs.argmax())
            if costs[dear] <= enough:
                return
            for cheap in np.argsort(costs, kind="stable")[:CHEAPEST].tolist():
                if self._exchange(groups[dear], groups[cheap], costs[dear] - costs[cheap], least=least):
                    for group in (dear, cheap):
                        costs[group] = sum(self._cost(slot) for slot in groups[group])
                    break
            else:
                return

    def _cost(self, slot: int) -> float:
        return sum([self.cost[document] for document in self.documents[slot]])

    def _exchange(self, dear: list[int], cheap: list[int], distance: float, *, least: float) -> bool:
        """Exchange one document for one so that the costs meet in the middle, and short ones to even out the tokens."""
        mine, theirs = (
            [(document, slot) for slot in group for document in self.documents[slot][:LOOKED_AT]]
            for group in (dear, cheap)
        )
        if not mine or not theirs or distance <= 0:
            return False
        saved = self.excess[[d for d, _ in mine]][:, None] - self.excess[[d for d, _ in theirs]]
        off = np.abs(saved - distance / 2).ravel()
        # Not argpartition: which of equal ones it takes differs between processors, and all ranks must do the same.
        best = np.flatnonzero(off <= np.partition(off, min(PAIRS, len(off)) - 1)[min(PAIRS, len(off)) - 1])
        for pair in best[np.argsort(off[best], kind="stable")][:PAIRS].tolist():
            if saved.flat[pair] < least:
                continue
            (document, slot), (other, partner) = mine[pair // len(theirs)], theirs[pair % len(theirs)]
            before = [(i, self.documents[i], self.room[i], self._cost(i)) for i in (slot, partner)]
            self._swap(document, slot, other, partner=partner)
            over, under = (slot, partner) if self.room[slot] < 0 else (partner, slot)
            fits = self.room[over] >= 0 or (self._divide(over, under, fixed=1) and self.room[over] >= 0)
            paid = self._cost(partner) - before[1][3]
            if fits and before[0][3] - self._cost(slot) > 0 and paid < distance:
                return True
            for i, documents, room, _ in before:
                self.documents[i], self.room[i] = documents, room
        return False

    def _swap(self, document: int, slot: int, other: int, *, partner: int) -> None:
        """Both documents come first in their new slots."""
        for i, out, into in ((slot, document, other), (partner, other, document)):
            self.documents[i] = [into, *(d for d in self.documents[i] if d != out)]
            self.room[i] += self.lengths[out] - self.lengths[into]

    def _divide(self, slot: int, partner: int, fixed: int = 0, *, full: bool = False) -> bool:
        """Divide short documents of both anew so that less is above the capacity; False if no division does that.

        `slot`, which is above its capacity, keeps as much as fits. If `partner` has too little room, it is filled.

        Args:
            fixed: first documents of each slot that do not move.
            full: `partner` takes the surplus, whatever its room.
        """
        lengths = self.lengths
        for most in TOGETHER:
            mine = self.documents[slot][fixed:][-most:]
            pool = mine + self.documents[partner][fixed:][-most:]
            held = sum([lengths[d] for d in mine])
            high = held + self.room[slot]  # tokens of the pool that `slot` may keep
            low = high if full else held - self.room[partner]
            enough = low <= high
            if not enough:
                high = held - 1
            low = max(low, 0)
            if low > high:
                continue
            sums = [1]
            for document in pool:
                sums.append(sums[-1] | sums[-1] << lengths[document])
            reachable = sums[-1] >> low & (1 << high - low + 1) - 1
            if reachable:
                tokens = low + (reachable.bit_length() if enough else (reachable & -reachable).bit_length()) - 1
                self._divided(slot, partner, fixed, most=most, pool=pool, sums=sums, tokens=tokens)
                return True
        return False

    def _divided(
        self, slot: int, partner: int, fixed: int, *, most: int, pool: list[int], sums: list[int], tokens: int
    ) -> None:
        """Give `slot` documents of `pool` with this many tokens, preferring its own, and `partner` the rest."""
        kept: tuple[list[int], list[int]] = ([], [])
        for document, reached in zip(reversed(pool), reversed(sums[:-1]), strict=True):
            without = reached >> tokens & 1
            kept[without].append(document)
            tokens -= 0 if without else self.lengths[document]
        for i, documents in zip((slot, partner), kept, strict=True):
            stays = max(len(self.documents[i]) - most, min(fixed, len(self.documents[i])))
            self.room[i] += sum([self.lengths[d] for d in self.documents[i][stays:]])
            documents.sort(key=self.lengths.__getitem__, reverse=True)
            self.documents[i] = self.documents[i][:stays] + documents
            self.room[i] -= sum([self.lengths[d] for d in documents])
