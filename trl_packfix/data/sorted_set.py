"""Packs of an evaluation set whose documents share prefixes: documents that begin alike meet in one pack.

`eval_loss` does not depend on the order of documents. So the whole set is sorted by its tokens, and cut into packs of
as many rows as the capacity allows. Nothing is drawn, and every evaluation has the same packs.
"""

from dataclasses import dataclass

import numpy as np

from ..planning.arrays import Int64Array
from ..planning.costs import LLAMA_7B
from ..planning.families import KEYS_PER_CAPACITY, shared_by_neighbours
from ..planning.packs import PackPlan
from ..planning.schedule import Schedule, schedule_packs
from ..planning.units import Bins, Units
from .documents import Documents


@dataclass(frozen=True)
class SortedSet:
    """The only schedule of such a set, for a sampler in place of an `EpochPlanner`; a rank has one pack per step."""

    whole: Schedule
    tokens_per_rank: None = None
    degrees: None = None

    @property
    def num_steps(self) -> int:
        return self.whole.num_steps

    @property
    def accumulation(self) -> int:
        return self.whole.accumulation

    def schedule(self, epoch: int) -> Schedule:
        return self.whole


def plan_sorted(documents: Documents, capacity: int, world_size: int) -> SortedSet:
    """Pack documents in the order of their tokens.

    Args:
        documents: sorted by their tokens.
        capacity: most rows of a pack; at least the longest document.
    """
    tokens, lengths = documents.tokens, documents.lengths
    assert tokens is not None, "documents are not sorted by their tokens"
    shared = shared_by_neighbours(tokens.common, lengths[tokens.order])
    plan = pack_sorted(lengths, tokens.order, shared, capacity)
    bins = Bins(capacity=capacity, world_size=world_size, balance="none")
    units = Units(lengths, LLAMA_7B)  # costs do not count
    return SortedSet(schedule_packs(plan, units, -(-plan.num_packs // world_size), bins))


def pack_sorted(lengths: Int64Array, order: Int64Array, shared: Int64Array, capacity: int) -> PackPlan:
    """Neighbours in one pack, until it is full. The first document of a pack shares nothing.

    Args:
        lengths: tokens of each document, shape (N,).
        order, shared: documents sorted by their tokens, and the rows that each shares with the one before, shape (N,).
        capacity: most rows of a pack. Its documents have at most `KEYS_PER_CAPACITY` times as many tokens, because
            their keys need memory, too.

    >>> plan = pack_sorted(np.array([50, 40, 60]), np.array([2, 0, 1]), np.array([0, 45, 20]), capacity=70)
    >>> [pack.tolist() for pack in np.split(plan.order, plan.offsets[1:-1])]
    [[2, 0], [1]]
    """
    offsets, rows, tokens = [0], 0, 0
    sizes = lengths[order]
    for place, (length, common) in enumerate(zip(sizes.tolist(), shared.tolist(), strict=True)):
        rows, tokens = rows + length - common, tokens + length
        if rows > capacity or tokens > KEYS_PER_CAPACITY * capacity:
            offsets.append(place)
            rows = tokens = length
    return PackPlan(order, np.array([*offsets, len(order)]), lengths, capacity)
