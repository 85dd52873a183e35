"""Exchanges between two slots of a step: until no slot is above its capacity, and until ranks cost the same.

A full step has no token to spare, so documents that leave a slot are paid for to the token. Two slots lay their
shortest documents together, and subset sums say which of them fill the first slot; the rest is the second's. All sums
of 48 documents are the bits of one integer, made by 48 shifts: Bellman's recursion on words (Pisinger 2003,
https://doi.org/10.1016/S0305-0548(02)00131-7).
"""

import heapq

import numpy as np

from .arrays import Float64Array, Int64Array

TOGETHER = (6, 12, 24)  # shortest documents that each of two slots lays down: as few as will do
PARTNERS = 16  # slots with room that one above its capacity asks
LOOKED_AT = 32  # first documents of a slot, one of which may be exchanged for its cost
CHEAPEST, PAIRS = 4, 4  # groups that the dearest one asks, pairs of documents that it tries with each
EVEN = 1.0005  # of the mean: groups that cost no more are left alone,
WORTHWHILE = 1e-4  # and an exchange that promises to save less is not made


class Slots:
    """Documents of one step in their slots. Documents are positions, 0 to N - 1.

    Attributes:
        documents: of each slot, about longest first.
        room: tokens that each slot can still take; negative above the capacity.
    """

    def __init__(
        self, lengths: Int64Array, cost: Float64Array, excess: Float64Array, capacity: int, num_slots: int
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
        """Exchange until no slot is above the capacity; False where that is not found."""
        over = [(room, slot) for slot, room in enumerate(self.room) if room < 0]
        under = [(-room, slot) for slot, room in enumerate(self.room) if room > 0]
        heapq.heapify(over)
        heapq.heapify(under)
        attempts = len(self.room)
        while over:
            changed = [heapq.heappop(over)[1]]
            asked: list[tuple[int, int]] = []
            while under and len(asked) < PARTNERS and len(changed) == 1:
                asked.append(heapq.heappop(under))
                if self._divide(changed[0], asked[-1][1]):
                    changed.append(asked.pop()[1])
            if len(changed) == 1:
                attempts -= 1
                other = (changed[0] + attempts) % len(self.room)
                if attempts <= 0:
                    return False
                if self.room[other] == 0 and self._divide(changed[0], other, full=True):
                    changed.append(other)  # it has the surplus now, and may be luckier
            for entry in asked:
                heapq.heappush(under, entry)
            for slot in changed:
                if self.room[slot] < 0:
                    heapq.heappush(over, (self.room[slot], slot))
                elif self.room[slot] > 0:
                    heapq.heappush(under, (-self.room[slot], slot))
        return True

    def even_out(self, groups: list[list[int]]) -> None:
        """Exchange until groups of slots cost the same, or none of the cheapest can help the dearest."""
        costs = np.array([sum(self._cost(slot) for slot in group) for group in groups])
        enough, least = costs.mean() * EVEN, costs.mean() * WORTHWHILE
        for _ in range(2 * len(groups) + LOOKED_AT):
            dear = int(costs.argmax())
            if costs[dear] <= enough:
                return
            for cheap in np.argsort(costs, kind="stable")[:CHEAPEST].tolist():
                if self._exchange(groups[dear], groups[cheap], costs[dear] - costs[cheap], least):
                    for group in (dear, cheap):
                        costs[group] = sum(self._cost(slot) for slot in groups[group])
                    break
            else:
                return

    def _cost(self, slot: int) -> float:
        return sum([self.cost[document] for document in self.documents[slot]])

    def _exchange(self, dear: list[int], cheap: list[int], distance: float, least: float) -> bool:
        """A document for a document, so that the costs meet in the middle, and short ones so that the tokens do."""
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
            self._swap(document, slot, other, partner)
            over, under = (slot, partner) if self.room[slot] < 0 else (partner, slot)
            fits = self.room[over] >= 0 or (self._divide(over, under, fixed=1) and self.room[over] >= 0)
            paid = self._cost(partner) - before[1][3]
            if fits and before[0][3] - self._cost(slot) > 0 and paid < distance:
                return True
            for i, documents, room, _ in before:
                self.documents[i], self.room[i] = documents, room
        return False

    def _swap(self, document: int, slot: int, other: int, partner: int) -> None:
        """Both documents come first in their new slots."""
        for i, out, into in ((slot, document, other), (partner, other, document)):
            self.documents[i] = [into, *(d for d in self.documents[i] if d != out)]
            self.room[i] += self.lengths[out] - self.lengths[into]

    def _divide(self, slot: int, partner: int, fixed: int = 0, full: bool = False) -> bool:
        """Divide short documents of both anew, so that less is above the capacity; False where no division does that.

        `slot`, which is above it, keeps as much as it can. Where `partner` has not enough room, that one is filled.

        Args:
            fixed: first documents of each slot that stay.
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
            found = sums[-1] >> low & (1 << high - low + 1) - 1
            if found:
                tokens = low + (found.bit_length() if enough else (found & -found).bit_length()) - 1
                self._divided(slot, partner, fixed, most, pool, sums, tokens)
                return True
        return False

    def _divided(
        self, slot: int, partner: int, fixed: int, most: int, pool: list[int], sums: list[int], tokens: int
    ) -> None:
        """`slot` gets documents of `pool` with so many tokens, its own rather than others, `partner` the rest."""
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
