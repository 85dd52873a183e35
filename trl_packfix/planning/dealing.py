"""Deal the documents of one optimizer step to its slots so that ranks finish together.

Full packs with equally many tokens differ only in the cost of attention, which is mostly that of long documents. These
are dealt first, by their *excess*: their cost above that of short documents with as many tokens. The short ones fill
the remaining room. Exchanges (`exchanges.py`) settle the last tokens, since a step of full packs has none to spare.

Letters: S slots, W ranks; slot i is micro-batch i // W of rank i % W.
"""

import heapq
import itertools
from collections.abc import Iterable

import numpy as np

from .arrays import Float64Array, Int64Array
from .exchanges import Slots

SHORT = 32  # documents of at most capacity / 32 tokens count as short and fill the room beside the long ones,
FILLING = 1 / 4  # and at least this share of the tokens does, or full slots would hold long documents only
LEVELLED, FILLED = 16, 64  # capacity / n that long documents leave free in slots of equal cost, in slots to be filled
TOO_DEAR = 1e-3  # of the mean cost: the others wait for a rank that is further above it
SPARED = 4  # every fourth of the shortest documents stays with the other ranks, for their last tokens


class Deal:
    """The documents of one step while they are dealt to slots. Documents are positions, 0 to N - 1.

    Args:
        lengths, cost: tokens and modelled cost of each document, shape (N,).
        per_token: cost of a token of a short document.
        capacity: most tokens of a slot.
    """

    def __init__(
        self,
        lengths: Int64Array,
        cost: Float64Array,
        per_token: float,
        *,
        capacity: int,
        world_size: int,
        num_slots: int,
    ):
        self.lengths = lengths
        self.cost = cost
        self.per_token = per_token
        self.capacity = capacity
        self.world_size = world_size
        self.num_slots = num_slots
        # By cost and not by length: a short document with large images costs as much as a long one.
        dearest_first = np.argsort(-cost, kind="stable")
        tokens = np.cumsum(lengths[dearest_first])
        num_long = min((lengths * SHORT > capacity).sum(), np.searchsorted(tokens, tokens[-1] * (1 - FILLING)))
        self.long: list[int] = dearest_first[:num_long].tolist()
        self.short = dearest_first[num_long:]
        excess = cost - cost[self.short].sum() / max(lengths[self.short].sum(), 1) * lengths
        self.excess: list[float] = np.maximum(excess, 0).tolist()
        self.slots = Slots(lengths, cost, excess, capacity=capacity, num_slots=num_slots)
        self.load = [0.0] * num_slots  # excess of the long documents

    def packs(self, by_rank: bool) -> list[Int64Array] | None:
        """Positions of the documents of each slot; None if no exchange brings all slots within the capacity."""
        ranks = [list(range(i, self.num_slots, self.world_size)) for i in range(self.world_size)]
        first = 0 if by_rank else self._fill_micro_steps()
        self._level(ranks if by_rank else [[slot] for slot in range(first, self.num_slots)])
        self._close()
        lacking = self._lacking(ranks if by_rank else None)
        if by_rank:
            self._pour_cheapest(ranks, lacking)
        self._pour(self.short, lacking, range(self.num_slots))
        if not self.slots.settle():
            return None
        if by_rank:
            self.slots.even_out(ranks)
        else:
            bounds = [*range(0, first + 1, self.world_size), self.num_slots]
            for start, stop in itertools.pairwise(bounds):
                self.slots.even_out([[slot] for slot in range(start, stop)])
        self._occupy()
        return [np.array(documents, dtype=np.int64) for documents in self.slots.documents]

    # Long documents, by their excess

    def _put(self, document: int, slot: int) -> None:
        self.slots.put(document, slot)
        self.load[slot] += self.excess[document]

    def _fill_micro_steps(self) -> int:
        """While the longest document has more than an even share of the excess, give it a micro-step and fill that.

        The other ranks wait for that document anyway, so long documents beside it cost no time: each goes where it
        leaves the least room, as long as no slot has more excess than the longest. Returns the number of slots taken.

        Worked example: 2 ranks, 2 micro-steps, slots of 100 tokens, cost n + n * n. The document of 100 has more excess
        than a slot's share of the sum. It takes slot 0; one of 60 fits beside it, into slot 1; the other one does not.

        >>> lengths = np.array([100, 60, 60, 40, 10, 10, 10, 10])
        >>> deal = Deal(lengths, lengths + lengths**2.0, 1.0, capacity=100, world_size=2, num_slots=4)
        >>> deal._fill_micro_steps(), deal.slots.documents, deal.long
        (2, [[0], [1], [], []], [2])
        """
        first, excess = 0, self.excess
        while self.long and first < self.num_slots - self.world_size:
            limit = excess[self.long[0]]
            if limit * (self.num_slots - first) <= sum([excess[document] for document in self.long]):
                break
            left: list[int] = []
            room, load = np.full(self.world_size, self.capacity), np.zeros(self.world_size)
            most, spare = self.capacity, limit
            for document in self.long:
                wanted = min(self.slots.lengths[document] + self.capacity // FILLED, self.capacity)
                if wanted > most or excess[document] > spare:
                    left.append(document)
                    continue
                fits = (room >= wanted) & (load <= limit - excess[document])
                i = int(np.where(fits, room, self.capacity + 1).argmin())
                if fits[i]:
                    room[i] -= self.slots.lengths[document]
                    load[i] += excess[document]
                    most, spare = int(room.max()), limit - float(load.min())
                    self._put(document, first + i)
                else:
                    left.append(document)
            self.long = left
            first += self.world_size
        return first

    def _level(self, groups: list[list[int]]) -> None:
        """Each document, dearest first, to the group with the least load that has room."""
        room = self.slots.room
        heap = [(0.0, i) for i in range(len(groups))]
        too_full: list[
            tuple[int, float, int]
        ] = []  # most room first: most later documents are shorter, so they come back
        for document in self.long:
            wanted = min(self.slots.lengths[document] + self.capacity // LEVELLED, self.capacity)
            while too_full and -too_full[0][0] >= wanted:
                heapq.heappush(heap, heapq.heappop(too_full)[1:])
            while heap:
                load, i = heap[0]
                slot = max(groups[i], key=room.__getitem__)
                if room[slot] >= wanted:
                    heapq.heapreplace(heap, (load + self.excess[document], i))
                    break
                heapq.heappush(too_full, (-room[slot], *heapq.heappop(heap)))
            else:
                slot = max(range(self.num_slots), key=room.__getitem__)  # an exchange may still make room
            self._put(document, slot)

    # Short documents, by tokens

    def _close(self) -> None:
        """Fill slots with little room exactly, by one or two documents, while there are many to choose from."""
        room = self.slots.room
        by_length: dict[int, list[int]] = {}
        for document in self.short.tolist():
            by_length.setdefault(self.slots.lengths[document], []).append(document)
        longest = max(by_length, default=0)
        tight = sorted((slot for slot in range(self.num_slots) if 0 < room[slot] <= longest), key=room.__getitem__)
        if sum([room[slot] for slot in tight]) <= sum(room) - self.lengths[self.short].sum():
            return  # tokens are to spare
        there = np.zeros(longest + 1, dtype=bool)
        there[list(by_length)] = True
        taken: list[int] = []
        for slot in tight:
            total = room[slot]
            fill = [total] if there[total] else []
            if not fill:
                shorter = np.flatnonzero(there[1 : (total + 1) // 2] & there[total - 1 : total // 2 : -1]) + 1
                fill = [int(length) for length in shorter[len(shorter) // 2 :][:1]]
                fill += [total - length for length in fill]
            for length in fill:
                taken.append(by_length[length].pop())
                there[length] = bool(by_length[length])
                self._put(taken[-1], slot)
        self.short = self.short[~np.isin(self.short, taken)]

    def _lacking(self, ranks: list[list[int]] | None) -> Float64Array:
        """Tokens that each slot should still get, so that micro-steps end as early as possible, shape (S,).

        With `ranks`, the slots of each rank, only the end of the step counts. The levels up to which groups are filled
        are found by bisection, like the surface of water poured into vessels that are filled to different heights.

        Worked example, continued from `_fill_micro_steps`: 80 tokens are left for slots with room for 0, 40, 100 and
        100. In the first micro-step the other rank waits for slot 0 anyway, so slot 1 is filled up with 40. The second
        micro-step is still empty, and 20 to each slot ends it first.

        >>> lengths = np.array([100, 60, 60, 40, 10, 10, 10, 10])
        >>> deal = Deal(lengths, lengths + lengths**2.0, 1.0, capacity=100, world_size=2, num_slots=4)
        >>> _ = deal._fill_micro_steps()
        >>> deal._lacking(None).round(3).tolist()
        [0.0, 40.0, 20.0, 20.0]
        """
        room = np.maximum(self.slots.room, 0)
        tokens = int(self.lengths[self.short].sum())
        if tokens >= room.sum():
            return room.astype(np.float64)
        held = np.array([self.cost[documents].sum() for documents in self.slots.documents])
        if ranks:  # one group whose members are the ranks
            groups = np.array(ranks)
            share, held, room = room[groups], held[groups].sum(1)[None], room[groups].sum(1)[None]
            share = share / np.maximum(share.sum(1, keepdims=True), 1)
        else:  # micro-steps, whose longest slot counts
            groups = np.argsort(-held - self.per_token * room, kind="stable").reshape(-1, self.world_size)
            held, room = held[groups], room[groups]
        full = -np.sort(-(held + self.per_token * room), axis=1)
        least = held.max(axis=1)

        def poured(level: Float64Array) -> Float64Array:
            return np.clip((level[:, None] - held) / self.per_token, 0, room)

        # One more token delays a micro-step less where more of its slots have room: those micro-steps are filled first.
        steps = [least, *(np.maximum(least, full[:, i]) for i in range(full.shape[1] - 1, -1, -1))]
        enough = next((i for i, level in enumerate(steps) if poured(level).sum() >= tokens), len(steps) - 1)
        low, high = steps[max(enough - 1, 0)] if enough else held.min() + 0 * least, steps[enough]
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if poured(middle).sum() >= tokens else (middle, high)
        lacking = np.zeros(self.num_slots)
        lacking[groups] = poured(high)[0][:, None] * share if ranks else poured(high)
        return lacking

    def _pour_cheapest(self, ranks: list[list[int]], lacking: Float64Array) -> None:
        """Give the shortest documents, whose tokens cost least, to the ranks that the others wait for."""
        load = np.array(self.load)[ranks].sum(axis=1)
        dear = np.flatnonzero(load > load.mean() + TOO_DEAR * self.cost.sum() / self.world_size)
        slots = [slot for rank in dear.tolist() for slot in ranks[rank]]
        shortest_first = self.short[::-1]
        candidates = np.flatnonzero(np.arange(len(shortest_first)) % SPARED)
        tokens = np.cumsum(self.lengths[shortest_first[candidates]])
        chosen = shortest_first[candidates[: np.searchsorted(tokens, lacking[slots].sum())]]
        self._pour(chosen[::-1], lacking, slots)
        self.short = self.short[~np.isin(self.short, chosen)]

    def _pour(self, short: Int64Array, lacking: Float64Array, slots: Iterable[int]) -> None:
        """Each document, dearest first, to the slot that lacks most tokens."""
        heap = [(-lacking[slot], slot) for slot in slots]
        heapq.heapify(heap)
        for document, length in zip(short.tolist(), self.lengths[short].tolist(), strict=True):
            lack, slot = heap[0]
            self.slots.put(document, slot)
            heapq.heapreplace(heap, (lack + length, slot))
        for lack, slot in heap:
            lacking[slot] = -lack

    def _occupy(self) -> None:
        """Leave no slot empty while another has two documents."""
        documents = self.slots.documents
        for slot in [i for i in range(self.num_slots) if not documents[i]]:
            donor = max(range(self.num_slots), key=lambda i: len(documents[i]))
            if len(documents[donor]) > 1:
                shortest = min(documents[donor], key=self.slots.lengths.__getitem__)
                documents[donor].remove(shortest)
                self.slots.room[donor] += self.slots.lengths[shortest]
                self.slots.put(shortest, slot)
