"""Balance one optimizer step: its documents in packs whose modelled cost is even over the ranks.

The documents of the step are given and do not change; only which of them share a pack does. A step has G micro-batches
on every rank. Ranks wait for each other after each of them ("micro": ZeRO-2, ZeRO-3, FSDP) or only after the last one
("step": DDP, ZeRO-1).

Letters: S = G * W slots; slot i is micro-batch i // W of rank i % W.
"""

import heapq

import numpy as np

from .arrays import Float64Array, Int64Array
from .dealing import deal
from .packing import Bins
from .units import Units

FEW = 4  # units per slot; below this they are not dealt again, since they hardly ever fit another way
GOOD_ENOUGH = 1.002  # times the mean: packs with less waiting than this stay as they are


def balanced(packs: list[Int64Array], units: Units, bins: Bins) -> list[Int64Array]:
    """The units of `packs` in S packs with the least modelled waiting time, in slot order.

    If dealing the units again does not help, the packs are returned as they are, in the best order: units that fill
    their packs exactly cannot always be dealt another way, least of all a few long ones.

    Args:
        packs: units, at most S packs of them, none above the capacity.

    >>> from .costs import CostModel
    >>> packs = [np.array([0, 1]), np.array([4]), np.array([2, 3]), np.array([5])]
    >>> units = Units(np.array([60, 40, 50, 50, 100, 100]), CostModel(per_token=1.0, per_pair=1.0))
    >>> bins = Bins(capacity=100, accumulation=2, world_size=2)
    >>> [pack.tolist() for pack in balanced(packs, units, bins)]  # the two dearest packs share a micro-step
    [[4], [5], [0, 1], [2, 3]]
    """
    slots, accumulation, world_size = bins.num_slots, bins.accumulation, bins.world_size
    packs = packs + [np.zeros(0, np.int64)] * (slots - len(packs))
    if world_size == 1:
        return packs
    by_rank = bins.synchronisation == "step" and accumulation > 1
    of_units = units.costs(bins.degree)
    pack_costs = np.array([of_units[pack].sum() for pack in packs])
    placed, waiting = np.arange(slots), _waiting(pack_costs.reshape(accumulation, world_size), by_rank)
    order = _placed(pack_costs, accumulation, world_size, by_rank=by_rank)
    if (better := _waiting(pack_costs[order].reshape(accumulation, world_size), by_rank)) < waiting:
        placed, waiting = order, better
    members = np.concatenate(packs)
    cost = of_units[members]
    if waiting <= GOOD_ENOUGH * cost.sum() / world_size or len(members) < FEW * slots:
        return [packs[i] for i in placed]
    of_step = {"capacity": bins.capacity, "world_size": world_size, "num_slots": slots}
    dealt = deal(units.rows[members], cost, by_rank=by_rank, **of_step)
    if dealt is not None and all(len(pack) for pack in dealt):
        costs = np.array([cost[pack].sum() for pack in dealt])
        order = np.arange(slots) if by_rank else np.argsort(-costs, kind="stable")
        if _waiting(costs[order].reshape(-1, world_size), by_rank) < waiting:
            return [members[dealt[i]] for i in order]
    return [packs[i] for i in placed]


def _waiting(costs: Float64Array, by_rank: bool) -> float:
    """Modelled time of a step, costs of shape (G, W)."""
    return float(costs.sum(axis=0).max() if by_rank else costs.max(axis=1).sum())


def _placed(costs: Float64Array, accumulation: int, world_size: int, *, by_rank: bool) -> Int64Array:
    """Pack of each slot, shape (S,).

    Sorted by cost, each micro-step gets neighbours, which is the best order. Where only the step synchronises, each
    pack goes to the rank with the least so far among those that can take one (Graham 1969).
    """
    order = np.argsort(-costs, kind="stable")
    if not by_rank:
        return order
    heap = [(0.0, rank, 0) for rank in range(world_size)]
    placed = np.empty_like(order)
    for pack in order.tolist():
        load, rank, taken = heapq.heappop(heap)
        placed[taken * world_size + rank] = pack
        if taken + 1 < accumulation:
            heapq.heappush(heap, (load + costs[pack], rank, taken + 1))
    return placed
