"""Modelled waiting time of a schedule, and a lower bound of it.

imbalance = sum over micro-steps of the largest rank cost / sum of the mean rank cost; 1.0 is perfect. Where ranks wait
only at the end of a step, the sums are over steps and rank costs are those of whole steps.

No schedule with the same documents in every step is below the bound, as long as a document is on one rank and no
micro-batch is above the capacity. Letters: S steps, G micro-batches per step, W ranks.
"""

import numpy as np
import numpy.typing as npt

from .arrays import Float64Array, Int64Array
from .schedule import Schedule
from .units import Synchronisation, Units

PRICES = 32  # prices of a token that the bound tries
GROUPS = 64  # most documents considered to share a rank; where more do, they are short and even


def rank_costs(schedule: Schedule, costs: Float64Array) -> Float64Array:
    """Modelled cost of every micro-batch, shape (S, G, W); ranks that share a pack have even shares of its cost.

    Args:
        costs: of each unit that the schedule has, by number.
    """
    packs = schedule.slot_sums(costs)
    if schedule.degrees is not None:
        degrees, ranks = schedule.degrees[:, None], np.arange(schedule.world_size)
        packs = np.take_along_axis(packs, ranks - ranks % degrees, axis=1) / degrees
    return packs.reshape(-1, schedule.accumulation, schedule.world_size)


def imbalance(schedule: Schedule, costs: Float64Array, synchronisation: Synchronisation) -> float:
    """The imbalance as defined above; 1.0 with one rank.

    Args:
        costs: as in `rank_costs`.

    >>> schedule = Schedule(np.arange(4), np.array([0, 1, 2, 3, 4]), accumulation=2, world_size=2)
    >>> imbalance(schedule, np.array([4.0, 2.0, 1.0, 3.0]), "micro")
    1.4
    """
    if schedule.world_size == 1:
        return 1.0
    packs = rank_costs(schedule, costs)
    if synchronisation == "step":
        packs = packs.sum(axis=1)
    return float(packs.max(axis=-1).sum() / packs.mean(axis=-1).sum())


def imbalance_bound(schedule: Schedule, units: Units, capacity: int, *, synchronisation: Synchronisation) -> float:
    """A lower bound of the imbalance of any schedule with these steps; the best schedule may be above it.

    Args:
        schedule: of these units.
        capacity: most rows of a micro-batch.
    """
    micro, ranks = schedule.accumulation, schedule.world_size
    if ranks == 1:
        return 1.0  # no rank waits, and a look at every step takes a second per 50,000 of them
    least, mean = 0.0, 0.0
    for step in range(schedule.num_steps):
        of_step = schedule.step_documents(step)
        documents = _Bounds(units.rows[of_step], units.costs()[of_step], micro, ranks=ranks, capacity=capacity)
        mean += documents.total / ranks
        least += documents.longest_rank() if synchronisation == "step" else documents.longest_micro_steps()
    return least / mean


class _Bounds:
    """Documents of a step, and lower bounds of the cost of slots that hold some of them.

    A Lagrangian bound: for any price p per token, slots with T tokens cost at least p * T, plus the excess cost over p
    of the documents known to be in them, minus what all documents cheaper than p save. The best of several p is taken.
    For each price, the documents are in the order of their excess, since a long one may cost less than a short one: by
    chunks of attention, or by its images.
    """

    def __init__(self, lengths: Int64Array, costs: Float64Array, micro: int, *, ranks: int, capacity: int):
        self.micro, self.ranks, self.capacity = micro, ranks, capacity
        self.lengths, self.costs = lengths, costs
        self.total = float(self.costs.sum())
        price = self.costs / self.lengths
        order = np.argsort(price, kind="stable")
        places = np.linspace(0, len(price) - 1, PRICES).astype(np.int64)
        self.prices = np.append(0.0, price[order[places]])[:, None]
        tokens, costs = (np.cumsum(np.append(0, values[order])) for values in (self.lengths, self.costs))
        self.cheapest = tokens, costs
        self.cheaper = np.append(0.0, costs[places] - price[order[places]] * tokens[places])[:, None]
        dearest = np.argsort(-self.costs, kind="stable")[: max(GROUPS, micro) * ranks]
        excess = np.maximum(self.costs[dearest] - self.prices * lengths[dearest], 0)
        self.excess = -np.sort(-excess, axis=1, kind="stable")
        # Of documents above half the capacity, which never share a slot
        self.apart = -np.sort(-excess[:, 2 * lengths[dearest] > capacity], axis=1, kind="stable")

    def least(self, slots: npt.ArrayLike, excess: Float64Array) -> Float64Array:
        """Lower bound of the cost of this many slots, shape (n,), with documents of this excess, shape (prices, n)."""
        others = self.micro * self.ranks - np.asarray(slots)
        must_hold = np.maximum(self.lengths.sum() - others * self.capacity, 0)
        return (self.prices * must_hold + excess + self.cheaper).max(axis=0)

    def longest_rank(self) -> float:
        """Lower bound of the largest cost of a rank in the step.

        By the pigeonhole principle, k + 1 of the k * W + 1 documents with the most excess are on one rank. And either
        the m with the most are on m ranks, of which one costs at least their mean, or two of them share a rank.
        """
        sums = np.concatenate([0 * self.prices, np.cumsum(self.excess, axis=1)], axis=1)
        k = np.arange(-(-self.excess.shape[1] // self.ranks))
        best = self.least(self.micro, sums[:, k * self.ranks + 1] - sums[:, k * self.ranks - k]).max()
        m = np.arange(2, min(self.ranks, self.excess.shape[1]) + 1)
        if len(m):
            apart = self.least(m * self.micro, sums[:, m]) / m
            best = max(best, np.minimum(apart, self.least(self.micro, sums[:, m] - sums[:, m - 2])).max())
        return max(self.total / self.ranks, float(best))

    def longest_micro_steps(self) -> float:
        """Lower bound of the summed largest costs of the micro-steps.

        Documents above half the capacity never share a slot, so some j micro-steps last at least as long as documents
        0, W, ... (j - 1) * W of them, in the order of their excess. These micro-steps hold at most `most`; the others
        last at least the mean of the rest. One micro-step lasts at least as long as any document.
        """
        best = self.total / self.ranks
        for j in range(1, self.micro + 1):
            ending = np.arange(j) * self.ranks
            if j > 1 and ending[-1] >= self.apart.shape[1]:
                break
            excess = (self.excess if j == 1 else self.apart)[:, ending]
            ends = float(self.least(j, excess.sum(axis=1, keepdims=True))[0])
            held = min(self.most(j * self.ranks), self.ranks * ends)
            best = max(best, ends + (self.total - held) / self.ranks)
        return best

    def most(self, slots: int) -> float:
        """Upper bound of the cost of this many slots, with documents cut where the tokens end."""
        return self.total - float(np.interp(self.lengths.sum() - slots * self.capacity, *self.cheapest))
