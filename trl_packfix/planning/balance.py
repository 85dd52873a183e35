"""The packs of one optimizer step, of even cost over the ranks.

Which documents a step has is decided elsewhere, and they stay; only which of them share a pack may change. A step gives
every rank G micro-batches, and ranks wait for each other after each of them ("micro": ZeRO-2, ZeRO-3, FSDP) or only
after the last ("step": DDP, ZeRO-1).

Letters: S = G * W slots; slot i is micro-batch i // W of rank i % W.
"""

import heapq
from typing import Literal

import numpy as np

from .arrays import Float64Array, Int64Array
from .costs import CostModel
from .dealing import Deal

Synchronisation = Literal["micro", "step"]

FEW = 4  # documents per slot; fewer than these never fit anew
GOOD_ENOUGH = 1.002  # of the mean: packs that wait less than this are left as they are


def balanced(
    packs: list[Int64Array],
    lengths: Int64Array,
    cost_model: CostModel,
    capacity: int,
    accumulation: int,
    world_size: int,
    synchronisation: Synchronisation,
) -> list[Int64Array]:
    """The documents of `packs` in S packs that keep ranks waiting for the least modelled time, in slot order.

    Packs as they are, in the best order, are the fallback: documents that fill their packs exactly cannot always be
    dealt anew, least of all when a pack holds only a few.

    Args:
        packs: at most S, none above `capacity`; indices into `lengths`.
        lengths: tokens of each document of the dataset.
    """
    slots = accumulation * world_size
    packs = packs + [np.zeros(0, np.int64)] * (slots - len(packs))
    if world_size == 1:
        return packs
    by_rank = synchronisation == "step" and accumulation > 1
    documents = np.concatenate(packs)
    cost = cost_model(lengths[documents])
    sizes = np.array([len(pack) for pack in packs])
    pack_costs = _sums(cost, sizes)
    placed, waiting = np.arange(slots), _waiting(pack_costs.reshape(accumulation, world_size), by_rank)
    order = _placed(pack_costs, accumulation, world_size, by_rank)
    if (better := _waiting(pack_costs[order].reshape(accumulation, world_size), by_rank)) < waiting:
        placed, waiting = order, better
    if waiting <= GOOD_ENOUGH * cost.sum() / world_size or len(documents) < FEW * slots:
        return [packs[i] for i in placed]
    deal = Deal(lengths[documents], cost, cost_model.per_token, capacity, world_size, slots)
    dealt = deal.packs(by_rank)
    if dealt is not None:
        costs = np.array([cost[pack].sum() for pack in dealt])
        order = np.arange(slots) if by_rank else np.argsort(-costs, kind="stable")
        if _waiting(costs[order].reshape(-1, world_size), by_rank) < waiting:
            return [documents[dealt[i]] for i in order]
    return [packs[i] for i in placed]


def _sums(values: Float64Array, sizes: Int64Array) -> Float64Array:
    ends = np.cumsum(sizes)
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[ends] - total[ends - sizes]


def _waiting(costs: Float64Array, by_rank: bool) -> float:
    """Modelled time of a step, costs of shape (G, W)."""
    return float(costs.sum(axis=0).max() if by_rank else costs.max(axis=1).sum())


def _placed(costs: Float64Array, accumulation: int, world_size: int, by_rank: bool) -> Int64Array:
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
