"""Balance one optimizer step: deal its units to slots so that the ranks wait for each other as little as possible.

`schedule.py` and `degrees.py` call this module with the packs of one step, and put the balanced packs into the
schedule. The step keeps its units; only which of them share a pack changes. A *slot* is the place of one pack: one of
the G micro-batches of the step on one of the W ranks. A *micro-step* is the micro-batches that all ranks compute at
the same time. Ranks wait for each other after each micro-step (synchronisation "micro": ZeRO-2, ZeRO-3, FSDP) or only
after the last one ("step": DDP, ZeRO-1).

A *unit* is what planning packs: a document, or a family of documents that begin alike. It has a *row* for each of its
tokens; a token that documents of a family share has one row. Full packs differ only in the cost of attention,
and most of this cost comes from long units. Long units are dealt first, by their *excess*: their cost above the cost of
short units with as many rows. The short units fill the remaining room. A full step has no row to spare, so a slot may
end up above its capacity. Finally the shortest units of such a slot and of a slot with room are divided between the two
anew, until no slot is above its capacity.

Where several ranks share a pack (`bins.degree`, their number), W counts groups of such ranks, and a "rank" below is a
group.

Letters: S = G * W slots; slot i is micro-batch i // W of rank i % W.
"""

import heapq

import numpy as np

from .arrays import Float64Array, Int64Array
from .exact_fill import WaitingDocuments
from .units import Bins, Units

FEW_UNITS = 4  # a step with fewer units per slot is not dealt anew, since they hardly ever fit another way
GOOD_ENOUGH_RATIO = 1.002  # packs that take at most this many times the mean cost of a rank stay as they are
# The most costly units are called *long* and are dealt first. The others are *short*, and fill the remaining room. The
# number of long units is the number of units with more than capacity / SHORT_DIVISOR rows. It is lower if the short
# units would otherwise have less than FILLING_SHARE of all rows.
SHORT_DIVISOR = 32
FILLING_SHARE = 1 / 4
# A unit goes to a slot in which capacity / SPARE_DIVISOR rows stay free. Only the last units, which find no such slot,
# use this room, and go to the slot with most of it.
SPARE_DIVISOR = 32
NUM_DIVIDED_TOGETHER = (4, 6, 8, 12, 16, 24)  # how many shortest units of each slot are divided anew: tried in turn
NUM_PARTNERS = 16  # slots with most room that are tried for a slot above its capacity


def balance_packs(packs: list[Int64Array], units: Units, bins: Bins) -> list[Int64Array]:
    """Deal the units of `packs` to the S slots with the least modelled time that is found.

    The order of the packs is balanced first. If ranks still wait, the units are dealt anew. Where this does not help,
    the packs stay as they are: units that fill their packs exactly cannot always be dealt another way.

    Args:
        packs: indices of the units in each pack; at most S packs, none above the capacity.
        units: all units, also of other steps.
        bins: the slots of the step.

    Returns:
        S packs in the order of slots.

    >>> from .costs import CostModel
    >>> packs = [np.array([0, 1]), np.array([4]), np.array([2, 3]), np.array([5])]
    >>> units = Units(np.array([60, 40, 50, 50, 100, 100]), CostModel(per_token=1.0, per_pair=1.0))
    >>> bins = Bins(capacity=100, accumulation=2, world_size=2)
    >>> [pack.tolist() for pack in balance_packs(packs, units, bins)]  # the two most costly packs share a micro-step
    [[4], [5], [0, 1], [2, 3]]
    """
    num_slots = bins.num_slots
    accumulation = bins.accumulation
    world_size = bins.world_size
    packs = packs + [np.zeros(0, np.int64)] * (num_slots - len(packs))
    if world_size == 1:
        return packs
    # Whether ranks wait only after several micro-steps, so that the costs of a rank add up before it waits
    by_rank = bins.synchronisation == "step" and accumulation > 1

    def modelled_time(slot_costs: Float64Array) -> float:
        """Return the modelled time of the step, from the cost of each slot."""
        slot_costs = slot_costs.reshape(accumulation, world_size)
        return float(slot_costs.sum(axis=0).max() if by_rank else slot_costs.max(axis=1).sum())

    unit_costs = units.costs(bins.degree)  # FLOPs of each unit, on all ranks of a group together
    pack_costs = np.array([unit_costs[pack].sum() for pack in packs])
    # 1. Order the packs. With the most costly ones first, the packs of a micro-step have similar costs, which is the
    # best order for "micro". For "step", packs are dealt to ranks, and slot i gets pack i // W of rank i % W.
    best_order = np.arange(num_slots)
    best_time = modelled_time(pack_costs)
    order = np.argsort(-pack_costs, kind="stable")
    if by_rank:
        # `least_loaded` deals units to packs. Here it deals G * W packs to W ranks. Each has room for G, and gets G.
        packs_of_ranks = least_loaded(
            rows=np.ones_like(order), costs=pack_costs[order], num_packs=world_size, capacity=accumulation
        )
        order = order[np.transpose(packs_of_ranks).ravel()]  # (W, G) -> (G, W), the order of slots
    time = modelled_time(pack_costs[order])
    if time < best_time:
        best_order = order
        best_time = time
    # 2. If this is not good enough, deal all units anew.
    members = np.concatenate(packs)
    costs = unit_costs[members]
    is_good_enough = best_time <= GOOD_ENOUGH_RATIO * costs.sum() / world_size
    if is_good_enough or len(members) < FEW_UNITS * num_slots:
        return [packs[i] for i in best_order]
    dealt = deal_units(
        units.rows[members],
        costs,
        capacity=bins.capacity,
        world_size=world_size,
        num_slots=num_slots,
        by_rank=by_rank,
    )
    dealt_costs = np.array([costs[pack].sum() for pack in dealt])
    order = np.arange(num_slots) if by_rank else np.argsort(-dealt_costs, kind="stable")
    is_faster = modelled_time(dealt_costs[order]) < best_time
    # In a slot without units a rank would compute a dummy document
    has_no_empty_slot = all(map(len, dealt))
    if is_faster and has_no_empty_slot:
        dealt_packs = [members[dealt[i]] for i in order]
        if bins.fits(dealt_packs, units):  # no pack is above the capacity
            return dealt_packs
    return [packs[i] for i in best_order]


def least_loaded(
    rows: Int64Array, costs: Int64Array | Float64Array, num_packs: int, *, capacity: int
) -> list[Int64Array]:
    """Put each unit, in the given order, into the pack of least cost that has room (list scheduling, Graham 1969).

    Args:
        rows: rows of each unit, longest first or all equal, shape (U,).
        costs: cost of each unit, shape (U,).
        num_packs: number of packs.
        capacity: most rows of a pack.

    Returns:
        The indices of the units in each pack. A unit that fits into no pack is in the one with most room, which is then
        above the capacity (`Bins.fits`).
    """
    slots = _Slots(rows, costs, capacity=capacity, num_slots=num_packs, spare=0)
    slots.deal_to_groups(list(range(len(rows))), [[slot] for slot in range(num_packs)])
    return slots.packs()


def even_targets(packs: list[Int64Array], units: Units, num_packs: int, *, bins: Bins) -> list[Int64Array]:
    """Deal the units of `packs` anew so that all packs have about the same number of trained tokens.

    Where the loss is a mean over each micro-batch, a trained token counts more in a pack with few trained tokens.

    Args:
        packs: indices of the units in each pack, none above the capacity.
        units: all units, also of other steps, with `targets`.
        num_packs: number of packs to make.
        bins: the slots of the packs.

    Returns:
        At least `num_packs` packs. They are `packs`, with empty packs behind, if no better way to deal is found.

    >>> from .costs import CostModel
    >>> units = Units(np.array([6, 4, 2]), CostModel(per_token=1.0, per_pair=0.0), targets=np.array([6, 4, 2]))
    >>> packs = [np.array([0, 1]), np.array([2])]
    >>> [pack.tolist() for pack in even_targets(packs, units, num_packs=2, bins=Bins(capacity=10))]
    [[0], [1, 2]]
    """
    # `targets`: the number of trained tokens of each unit
    assert units.targets is not None, "the trained tokens of units are not known"
    members = np.concatenate(packs)
    longest_first = members[np.argsort(-units.rows[members], kind="stable")]
    rows = units.rows[longest_first]
    targets = units.targets[longest_first]
    candidates = [packs + [members[:0]] * (num_packs - len(packs))]
    # Two ways to deal the units anew, in which trained tokens take the place of costs
    dealt_anew = [
        least_loaded(rows, costs=targets, num_packs=num_packs, capacity=bins.capacity),
        deal_units(
            rows,
            targets.astype(float),
            capacity=bins.capacity,
            world_size=num_packs,
            num_slots=num_packs,
            by_rank=False,
        ),
    ]
    for dealt in dealt_anew:
        dealt_packs = [longest_first[indices] for indices in dealt]
        if bins.fits(dealt_packs, units):
            candidates.append(dealt_packs)

    def spread(candidate: list[Int64Array]) -> int:
        """Return the trained tokens of the pack with most minus those of the pack with fewest."""
        sums = [int(units.targets[pack].sum()) for pack in candidate]  # type: ignore[index]  # asserted above
        return max(sums) - min(sums)

    return min(candidates, key=spread)


def deal_units(
    rows: Int64Array, cost: Float64Array, *, capacity: int, world_size: int, num_slots: int, by_rank: bool
) -> list[Int64Array]:
    """Deal units to the slots of a step by cost.

    A micro-step takes as long as its most costly slot. If one unit has more than an even share of all excess, the ranks
    with the other slots of its micro-step have to wait for it. So these slots get further long units, which take no
    time as long as the excess of each slot is not above that of this unit. For example, the slot beside a unit of
    excess 9 gets two units of excess 4. All other units go where there is least excess.

    A *group* is the slots whose costs add up between two waits: one slot or, with `by_rank`, all slots of a rank.

    Args:
        rows: rows of each unit, shape (U,).
        cost: cost of each unit, shape (U,).
        capacity: most rows of a slot.
        world_size: W, the number of ranks.
        num_slots: S, the number of slots of the step, a multiple of W.
        by_rank: whether ranks wait for each other only after the last micro-step.

    Returns:
        The indices of the units in each slot. If no way is found in which they fit, a slot is above the capacity.

    >>> rows = np.array([100, 60, 60, 40, 10, 10, 10, 10])
    >>> cost = rows + rows**2.0
    >>> packs = deal_units(rows, cost, capacity=100, world_size=2, num_slots=4, by_rank=False)
    >>> [rows[pack].tolist() for pack in packs]  # two micro-steps of two ranks; the first waits for the 100
    [[100], [60, 40], [60], [10, 10, 10, 10]]
    """
    # 1. Divide the units into long and short ones, by cost and not by rows: a short document with large images costs
    # as much as a long one.
    costly_first = np.argsort(-cost, kind="stable")
    total_rows = np.cumsum(rows[costly_first])  # rows of each unit and of all more costly ones
    num_long = min(
        (rows * SHORT_DIVISOR > capacity).sum(), np.searchsorted(total_rows, total_rows[-1] * (1 - FILLING_SHARE))
    )
    long = costly_first[:num_long].tolist()
    short = costly_first[num_long:].tolist()
    # 2. Compute the excess. In a full step a long unit takes the place of short ones, so only what it costs more is
    # excess. Where there is room, its whole cost is excess.
    has_room = total_rows[-1] < (1 - 1 / SPARE_DIVISOR) * num_slots * capacity
    short_cost_per_row = 0 if has_room else cost[short].sum() / max(rows[short].sum(), 1)
    excess = cost - short_cost_per_row * rows
    excess[long] = np.maximum(excess[long], 0)
    # 3. Deal the long units, first to micro-steps that wait for one very long unit.
    slots = _Slots(rows, excess, capacity=capacity, num_slots=num_slots, spare=capacity // SPARE_DIVISOR)
    num_groups = world_size if by_rank else num_slots
    groups = [list(range(i, num_slots, num_groups)) for i in range(num_groups)]
    open_groups = groups
    while not by_rank and len(open_groups) > world_size and long:
        # `long[0]` is the most costly unit that is not dealt. Stop once it has at most an even share of the excess
        if excess[long[0]] * len(open_groups) <= excess[long].sum():
            break
        slots_of_micro_step = open_groups[:world_size]  # without `by_rank`, each group is one slot
        long = slots.deal_to_groups(long, slots_of_micro_step, limit=excess[long[0]])
        open_groups = open_groups[world_size:]
    slots.deal_to_groups(long, open_groups)
    # 4. Deal the short units: first where one or two of them fill a slot, then to slots that end before the most costly
    # slot of their micro-step, where short units take no time, and then evenly.
    short = slots.fill_slots_exactly(short)
    if has_room and not by_rank:
        loads = np.array([excess[units].sum() for units in slots.units])  # the excess of each slot
        # The caller will order the packs, the most costly first, so slots of similar load become one micro-step.
        for micro_step in np.argsort(-loads, kind="stable").reshape(-1, world_size).tolist():
            short = slots.deal_to_groups(short, [[slot] for slot in micro_step], limit=loads[micro_step[0]])
    slots.deal_to_groups(short, groups)
    # 5. Relieve slots above their capacity.
    slots.relieve_slots()
    return slots.packs()


class _Slots:
    """The units of each slot, and the room that each slot still has.

    `units` has the indices of the units in each slot, in the order in which they were dealt, so the shortest are at the
    end or near to it. `room` is the number of rows that still fit, below 0 for a slot above its capacity.

    Args:
        rows: rows of each unit, shape (U,).
        costs: cost of each unit by which slots are balanced, such as its excess, shape (U,).
        capacity: most rows of a slot.
        num_slots: number of slots.
        spare: rows of room that must be left in a slot when a unit is dealt to it, except for a unit with more than
            `capacity - spare` rows.
    """

    def __init__(
        self, rows: Int64Array, costs: Int64Array | Float64Array, *, capacity: int, num_slots: int, spare: int
    ):
        self.rows = rows.tolist()
        self.costs = costs.tolist()
        self.capacity = capacity
        self.spare = spare
        self.room = [capacity] * num_slots
        self.units: list[list[int]] = [[] for _ in range(num_slots)]

    def packs(self) -> list[Int64Array]:
        """Return the indices of the units in each slot."""
        return [np.array(units, dtype=np.int64) for units in self.units]

    def put_unit(self, unit: int, slot: int) -> None:
        """Put a unit into a slot, which may have no room for it."""
        self.units[slot].append(unit)
        self.room[slot] -= self.rows[unit]

    def deal_to_groups(self, units: list[int], groups: list[list[int]], limit: float = np.inf) -> list[int]:
        """Deal each unit to the group of slots with the least cost that has room.

        Without `limit`, a unit that fits nowhere goes to the group with most room, so a slot may end above its
        capacity.

        Args:
            units: units in the order in which they are dealt, which is by rows or by cost.
            groups: the slots of each group.
            limit: most cost of a group.

        Returns:
            The units that are not dealt, because a group would have more cost than `limit`, or because there is a limit
            and no group has room.
        """
        not_dealt: list[int] = []
        # Each group is in one of two heaps: in `heap`, least load first, or in `full`, most room first.
        # `heap` has (load, group); the load of a group is the cost of its units.
        heap = [(sum([self.costs[unit] for slot in group for unit in self.units[slot]]), group) for group in groups]
        heapq.heapify(heap)
        # `full` has (-room, load, group): groups without room for an earlier unit. They come back for shorter ones.
        full: list[tuple[int, float, list[int]]] = []
        for unit in units:
            wanted_room = min(self.rows[unit] + self.spare, self.capacity)
            while full and -full[0][0] >= wanted_room:
                heapq.heappush(heap, heapq.heappop(full)[1:])
            while heap and max([self.room[slot] for slot in heap[0][1]]) < wanted_room:
                load, group = heapq.heappop(heap)
                heapq.heappush(full, (-max([self.room[slot] for slot in group]), load, group))
            if not heap and limit == np.inf:  # no group has room, so take the one with most
                heapq.heappush(heap, heapq.heappop(full)[1:])
            if not heap or heap[0][0] + self.costs[unit] > limit:
                not_dealt.append(unit)
                continue
            load, group = heap[0]
            heapq.heapreplace(heap, (load + self.costs[unit], group))
            self.put_unit(unit, max(group, key=self.room.__getitem__))
        return not_dealt

    def fill_slots_exactly(self, short: list[int]) -> list[int]:
        """Fill slots with little room exactly, each by one or two units.

        Args:
            short: short units.

        Returns:
            The units that are not used, in the same order.
        """
        longest = max([self.rows[unit] for unit in short], default=0)
        # The units by their rows; `WaitingDocuments` calls them documents, and finds one or two that sum to a room
        waiting = WaitingDocuments(longest)
        unused = dict.fromkeys(short)
        for unit in short:
            waiting.add(unit, self.rows[unit])
        for slot in [slot for slot, room in enumerate(self.room) if 0 < room <= 2 * longest]:
            for rows in waiting.exact_fill(self.room[slot], longest):
                unit = waiting.pop_oldest(rows)
                unused.pop(unit)
                self.put_unit(unit, slot)
        return list(unused)

    def relieve_slots(self) -> None:
        """Divide units between pairs of slots until no slot is above its capacity, or no division helps.

        A slot above its capacity is relieved by a *partner*, one of the slots with most room.
        """
        with_room = [(-room, slot) for slot, room in enumerate(self.room) if room > 0]
        heapq.heapify(with_room)
        for slot in sorted(range(len(self.room)), key=self.room.__getitem__):
            while self.room[slot] < 0:
                # Try partners until one of them takes rows from this slot.
                partners: list[int] = []
                is_relieved = False
                while not is_relieved:
                    if not with_room or len(partners) == NUM_PARTNERS:
                        return
                    partners.append(heapq.heappop(with_room)[1])
                    is_relieved = self.divide_pair(slot, partners[-1])
                for changed in [*partners, slot]:
                    if self.room[changed] > 0:
                        heapq.heappush(with_room, (-self.room[changed], changed))

    def divide_pair(self, slot: int, partner: int) -> bool:
        """Divide the shortest units of two slots anew.

        Afterwards `slot` has fewer rows above its capacity, or none, and `partner` is within its capacity.

        Returns:
            Whether such a division was found. If not, nothing changes.
        """
        # 1. Find all numbers of rows that `slot` can get if some of these units go to it. First try with few units. The
        # numbers are the bits of one integer: Pisinger 2003, https://doi.org/10.1016/S0305-0548(02)00131-7.
        for num_divided in NUM_DIVIDED_TOGETHER:
            pools = [self.units[either][-num_divided:] for either in (slot, partner)]
            slot_rows, partner_rows = ([self.rows[unit] for unit in pool] for pool in pools)
            # With `low` to `high` rows for `slot`, neither slot is above its capacity. If both together have too many
            # rows, there is no such number (low > high). Then `slot` must at least lose a row.
            low = sum(slot_rows) - self.room[partner]
            high = sum(slot_rows) + self.room[slot]
            if low > high:
                high = sum(slot_rows) - 1
            low = max(low, 0)
            sums = [1]  # after i units, bit n of sums[i] is set if some of them have n rows together
            for rows in slot_rows + partner_rows:
                sums.append(sums[-1] | sums[-1] << rows)
            num_wanted = max(high - low + 1, 0)
            reachable = (sums[-1] >> low) & ((1 << num_wanted) - 1)  # bit n: `slot` can get low + n rows
            if reachable:
                break
        else:
            return False
        # 2. `slot` gets the smallest of these numbers, the lowest bit. Take the divided units from both slots.
        wanted_rows = low + (reachable & -reachable).bit_length() - 1
        for either in (slot, partner):
            self.room[either] += sum([self.rows[unit] for unit in self.units[either][-num_divided:]])
            del self.units[either][-num_divided:]
        # 3. Go back through the units. If the units before this one can have the wanted rows without it, it goes to
        # `partner`. Otherwise it goes to `slot`, and the units before it have to make up the remaining rows.
        for unit, sums_before in zip(reversed(pools[0] + pools[1]), reversed(sums[:-1]), strict=True):
            if sums_before >> wanted_rows & 1:
                self.put_unit(unit, partner)
            else:
                self.put_unit(unit, slot)
                wanted_rows -= self.rows[unit]
        for either in (slot, partner):
            self.units[either].sort(key=self.rows.__getitem__, reverse=True)
        return True
