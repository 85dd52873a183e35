"""Balance one optimizer step: its documents in packs whose modelled cost is even over the ranks.

The documents of the step are given and do not change; only which of them share a pack does. A step has G micro-batches
on every rank. Ranks wait for each other after each of them ("micro": ZeRO-2, ZeRO-3, FSDP) or only after the last one
("step": DDP, ZeRO-1).

Full packs differ only in the cost of attention, which is mostly that of long documents. These are dealt first, by their
*excess*: their cost above that of short documents with as many tokens. The short ones fill the remaining room. A full
step has no token to spare, so at last two slots divide their shortest documents anew.

Letters: S = G * W slots; slot i is micro-batch i // W of rank i % W.
"""

import heapq

import numpy as np

from .arrays import Float64Array, Int64Array
from .exact_fill import WaitingDocuments
from .units import Bins, Units

FEW_UNITS = 4  # units per slot; below this they are not dealt again, since they hardly ever fit another way
GOOD_ENOUGH_RATIO = 1.002  # times the mean: packs with less waiting than this stay as they are
SHORT_DIVISOR = 32  # documents of at most capacity / 32 tokens are short. They fill the room beside the long ones,
FILLING_SHARE = 1 / 4  # and at least this share of the tokens does, or full slots would hold long documents only
SPARE_DIVISOR = 32  # the last capacity / 32 of a slot is for the shortest documents, which go where there is most room
NUM_DIVIDED_TOGETHER = (
    4,
    6,
    8,
    12,
    16,
    24,
)  # shortest documents of each of two slots that are divided anew; the fewest that work
NUM_PARTNERS = 16  # slots with most room that are tried for a slot above its capacity


def balance_packs(packs: list[Int64Array], units: Units, bins: Bins) -> list[Int64Array]:
    """The units of `packs` in S packs with the least modelled waiting time, in slot order.

    If dealing the units again does not help, the packs, at most S and none above the capacity, are returned in the best
    order: units that fill their packs exactly cannot always be dealt another way, least of all a few long ones.

    >>> from .costs import CostModel
    >>> packs = [np.array([0, 1]), np.array([4]), np.array([2, 3]), np.array([5])]
    >>> units = Units(np.array([60, 40, 50, 50, 100, 100]), CostModel(per_token=1.0, per_pair=1.0))
    >>> bins = Bins(capacity=100, accumulation=2, world_size=2)
    >>> [pack.tolist() for pack in balanced(packs, units, bins)]  # the two dearest packs share a micro-step
    [[4], [5], [0, 1], [2, 3]]
    """
    slots = bins.num_slots
    accumulation = bins.accumulation
    world_size = bins.world_size
    packs = packs + [np.zeros(0, np.int64)] * (slots - len(packs))
    if world_size == 1:
        return packs
    by_rank = bins.synchronisation == "step" and accumulation > 1

    def modelled_time(costs: Float64Array) -> float:
        costs = costs.reshape(accumulation, world_size)
        return float(costs.sum(axis=0).max() if by_rank else costs.max(axis=1).sum())

    of_units = units.costs(bins.degree)
    pack_costs = np.array([of_units[pack].sum() for pack in packs])
    placed = np.arange(slots)
    waiting = modelled_time(pack_costs)
    order = np.argsort(-pack_costs, kind="stable")  # each micro-step gets neighbours, which is the best order
    if by_rank:
        of_ranks = least_loaded(np.ones_like(order), pack_costs[order], world_size, capacity=accumulation)
        assert of_ranks is not None  # a place for each pack
        order = order[np.transpose(of_ranks).ravel()]
    if (better := modelled_time(pack_costs[order])) < waiting:
        placed = order
        waiting = better
    members = np.concatenate(packs)
    cost = of_units[members]
    if waiting <= GOOD_ENOUGH_RATIO * cost.sum() / world_size or len(members) < FEW_UNITS * slots:
        return [packs[i] for i in placed]
    sizes = {"capacity": bins.capacity, "world_size": world_size, "num_slots": slots}
    dealt = deal_documents(units.rows[members], cost, by_rank=by_rank, **sizes)
    if dealt is not None and all(len(pack) for pack in dealt):
        costs = np.array([cost[pack].sum() for pack in dealt])
        order = np.arange(slots) if by_rank else np.argsort(-costs, kind="stable")
        if modelled_time(costs[order]) < waiting:
            return [members[dealt[i]] for i in order]
    return [packs[i] for i in placed]


def least_loaded(
    rows: Int64Array, costs: Int64Array | Float64Array, num: int, *, capacity: int
) -> list[Int64Array] | None:
    """Each unit to the pack with the least cost that has room (Graham 1969); None if one has no room anywhere.

    Units are given longest first, and are their places in `rows` and `costs`.
    """
    if rows.sum() > num * capacity:
        return None
    slots = _Slots(rows, costs, capacity=capacity, num_slots=num, spare=0)
    slots.deal_to_groups(list(range(len(rows))), [[slot] for slot in range(num)])
    return [np.array(units, dtype=np.int64) for units in slots.documents] if min(slots.room, default=0) >= 0 else None


def even_targets(packs: list[Int64Array], units: Units, num: int, *, capacity: int) -> list[Int64Array]:
    """Deal the units of `packs` again, to packs with numbers of trained tokens that are as even as is found.

    Where the loss is a mean over each micro-batch, a token of a pack with few trained tokens counts more. Returns at
    least `num` packs, of at most `capacity` rows each: the given ones if no other way to fit them is more even.

    >>> from .costs import CostModel
    >>> units = Units(np.array([6, 4, 2]), CostModel(per_token=1.0, per_pair=0.0), targets=np.array([6, 4, 2]))
    >>> [pack.tolist() for pack in even_targets([np.array([0, 1]), np.array([2])], units, 2, capacity=10)]
    [[0], [1, 2]]
    """
    assert units.targets is not None, "the trained tokens of units are not known"
    members = np.concatenate(packs)
    longest_first = members[np.argsort(-units.rows[members], kind="stable")]
    rows = units.rows[longest_first]
    targets = units.targets[longest_first]
    candidates = [packs + [members[:0]] * (num - len(packs))]
    attempts = [
        least_loaded(rows, targets, num, capacity=capacity),
        deal_documents(rows, targets.astype(float), capacity=capacity, world_size=num, num_slots=num, by_rank=False),
    ]
    candidates += [[longest_first[places] for places in attempt] for attempt in attempts if attempt is not None]

    def spread(candidate: list[Int64Array]) -> int:
        sums = [int(units.targets[pack].sum()) for pack in candidate]  # type: ignore[index]  # asserted above
        return max(sums) - min(sums)

    return min(candidates, key=spread)


def deal_documents(
    lengths: Int64Array, cost: Float64Array, *, capacity: int, world_size: int, num_slots: int, by_rank: bool
) -> list[Int64Array] | None:
    """Positions of the documents in each slot, of N documents; None if they are not made to fit.

    While the dearest document has more than an even share of the excess, the other ranks wait for it in its micro-step,
    where long documents cost no time: as many are dealt to this micro-step as have no more excess in any of its slots.
    With `by_rank` ranks wait only after the last micro-step, so the slots of a rank are one group.

    >>> lengths = np.array([100, 60, 60, 40, 10, 10, 10, 10])
    >>> packs = deal(lengths, lengths + lengths**2.0, capacity=100, world_size=2, num_slots=4, by_rank=False)
    >>> [lengths[pack].tolist() for pack in packs]  # two micro-steps of two ranks
    [[100], [60, 40], [60], [10, 10, 10, 10]]
    """
    # By cost and not by length: a short document with large images costs as much as a long one.
    dearest_first = np.argsort(-cost, kind="stable")
    tokens = np.cumsum(lengths[dearest_first])
    num_long = min(
        (lengths * SHORT_DIVISOR > capacity).sum(), np.searchsorted(tokens, tokens[-1] * (1 - FILLING_SHARE))
    )
    long = dearest_first[:num_long].tolist()
    short = dearest_first[num_long:].tolist()
    # In a full slot a document stands in the place of short ones; where there is room, all that it costs is excess.
    has_room = tokens[-1] < (1 - 1 / SPARE_DIVISOR) * num_slots * capacity
    excess = cost - (0 if has_room else cost[short].sum() / max(lengths[short].sum(), 1)) * lengths
    excess[long] = np.maximum(excess[long], 0)
    slots = _Slots(lengths, excess, capacity=capacity, num_slots=num_slots, spare=capacity // SPARE_DIVISOR)
    num_groups = world_size if by_rank else num_slots
    groups = rest = [list(range(i, num_slots, num_groups)) for i in range(num_groups)]
    while not by_rank and len(rest) > world_size and long and excess[long[0]] * len(rest) > excess[long].sum():
        long = slots.deal_to_groups(long, rest[:world_size], limit=excess[long[0]])
        rest = rest[world_size:]
    slots.deal_to_groups(long, rest)
    short = slots.fill_slots_exactly(short)
    if has_room and not by_rank:  # what ends with the dearest slot of a micro-step costs no time
        load = np.array([excess[documents].sum() for documents in slots.documents])
        for part in np.argsort(-load, kind="stable").reshape(-1, world_size).tolist():
            short = slots.deal_to_groups(short, [[slot] for slot in part], limit=load[part[0]])
    slots.deal_to_groups(short, groups)
    return [np.array(documents, dtype=np.int64) for documents in slots.documents] if slots.exchange_excess() else None


class _Slots:
    """The documents of each slot, about longest first, and the tokens that it can still take."""

    def __init__(
        self, lengths: Int64Array, excess: Int64Array | Float64Array, *, capacity: int, num_slots: int, spare: int
    ):
        self.lengths, self.excess = lengths.tolist(), excess.tolist()
        self.capacity, self.spare, self.room = capacity, spare, [capacity] * num_slots
        self.documents: list[list[int]] = [[] for _ in range(num_slots)]

    def put_document(self, document: int, slot: int) -> None:
        self.documents[slot].append(document)
        self.room[slot] -= self.lengths[document]

    def deal_to_groups(self, documents: list[int], groups: list[list[int]], limit: float = np.inf) -> list[int]:
        """Each to the group with the least excess that has room, else with most room; returns those above `limit`."""
        others: list[int] = []
        heap = [(sum([self.excess[d] for slot in group for d in self.documents[slot]]), group) for group in groups]
        full: list[tuple[int, float, list[int]]] = []  # most room first: documents get shorter, so groups come back
        heapq.heapify(heap)
        for document in documents:
            wanted = min(self.lengths[document] + self.spare, self.capacity)
            while full and -full[0][0] >= wanted:
                heapq.heappush(heap, heapq.heappop(full)[1:])
            while heap and max([self.room[slot] for slot in heap[0][1]]) < wanted:
                load, group = heapq.heappop(heap)
                heapq.heappush(full, (-max([self.room[slot] for slot in group]), load, group))
            load, group = heap[0] if heap else full[0][1:]
            load += self.excess[document]
            if load > limit or (limit < np.inf and not heap):
                others.append(document)
                continue
            heapq.heappop(heap) if heap else heapq.heappop(full)
            self.put_document(document, max(group, key=self.room.__getitem__))
            heapq.heappush(heap, (load, group))
        return others

    def fill_slots_exactly(self, short: list[int]) -> list[int]:
        """Fill slots with little room exactly, by one or two documents; returns the others."""
        longest = max([self.lengths[document] for document in short], default=0)
        buffer = WaitingDocuments(longest)
        others = dict.fromkeys(short)
        for document in short:
            buffer.add(document, self.lengths[document])
        for slot in [slot for slot, room in enumerate(self.room) if 0 < room <= 2 * longest]:
            for length in buffer.exact_fill(self.room[slot], longest):
                document = buffer.pop_oldest(length)
                others.pop(document)
                self.put_document(document, slot)
        return list(others)

    def exchange_excess(self) -> bool:
        """Exchange documents until no slot is above the capacity; False if no such exchanges are found."""
        under = [(-room, slot) for slot, room in enumerate(self.room) if room > 0]
        heapq.heapify(under)
        for slot in sorted(range(len(self.room)), key=self.room.__getitem__):
            while self.room[slot] < 0:
                tried: list[int] = []
                while not tried or not self.divide_pair(slot, tried[-1]):
                    if not under or len(tried) == NUM_PARTNERS:
                        return False
                    tried.append(heapq.heappop(under)[1])
                for changed in [i for i in (*tried, slot) if self.room[i] > 0]:
                    heapq.heappush(under, (-self.room[changed], changed))
        return True

    def divide_pair(self, slot: int, partner: int) -> bool:
        """Divide short documents of both anew so that `slot` has less above its capacity, and `partner` nothing."""
        # All sums are the bits of one integer: Pisinger 2003, https://doi.org/10.1016/S0305-0548(02)00131-7
        for most in NUM_DIVIDED_TOGETHER:
            pools = [self.documents[i][-most:] for i in (slot, partner)]
            mine, theirs = ([self.lengths[d] for d in pool] for pool in pools)
            low = sum(mine) - self.room[partner]  # tokens that `slot` may keep
            high = sum(mine) + self.room[slot]
            low, high = max(low, 0), high if low <= high else sum(mine) - 1
            sums = [1]
            for length in mine + theirs:
                sums.append(sums[-1] | sums[-1] << length)
            if reachable := sums[-1] >> low & (1 << max(high - low + 1, 0)) - 1:
                break
        else:
            return False
        tokens = low + (reachable & -reachable).bit_length() - 1
        for i in (slot, partner):
            self.room[i] += sum([self.lengths[d] for d in self.documents[i][-most:]])
            del self.documents[i][-most:]
        for document, before in zip(reversed(pools[0] + pools[1]), reversed(sums[:-1]), strict=True):
            without = before >> tokens & 1
            self.put_document(document, partner if without else slot)
            tokens -= 0 if without else self.lengths[document]
        for i in (slot, partner):
            self.documents[i].sort(key=self.lengths.__getitem__, reverse=True)
        return True
