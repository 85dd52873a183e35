"""Lower bounds of modelled times, for tests and benchmarks of how ranks are balanced.

No schedule with the same documents in every step is below the bound, as long as a document is on one rank and no
micro-batch is above the capacity. Letters: G micro-batches per step, W ranks.
"""

import numpy as np
import numpy.typing as npt

from trl_packfix.planning.arrays import Float64Array, Int64Array
from trl_packfix.planning.degrees import UndividedStep
from trl_packfix.planning.parallel import SequenceParallel, smallest_degree
from trl_packfix.planning.schedule import Schedule
from trl_packfix.planning.units import Bins, Synchronisation, Units

PRICES = 32  # prices of a token that the bound tries
GROUPS = 64  # most documents considered to share a rank; where more do, they are short and even


def imbalance_bound(schedule: Schedule, units: Units, capacity: int, *, synchronisation: Synchronisation) -> float:
    """Return a lower bound of the imbalance of any schedule with these steps; the best schedule may be above it."""
    micro = schedule.accumulation
    ranks = schedule.world_size
    if ranks == 1:
        return 1.0  # no rank waits, and a look at every step takes a second per 50,000 of them
    least = 0.0
    mean = 0.0
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
        self.micro = micro
        self.ranks = ranks
        self.capacity = capacity
        self.lengths = lengths
        self.costs = costs
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
        """Return a lower bound of the cost of this many slots, (n,), with documents of this excess, (prices, n)."""
        other_slots = self.micro * self.ranks - np.asarray(slots)
        must_hold = np.maximum(self.lengths.sum() - other_slots * self.capacity, 0)
        return (self.prices * must_hold + excess + self.cheaper).max(axis=0)

    def longest_rank(self) -> float:
        """Return a lower bound of the largest cost of a rank in the step.

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
        """Return a lower bound of the summed largest costs of the micro-steps.

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
        """Return an upper bound of the cost of this many slots, with documents cut where the tokens end."""
        return self.total - float(np.interp(self.lengths.sum() - slots * self.capacity, *self.cheapest))


def time_bound(schedule: Schedule, units: Units, bins: Bins, *, parallel: SequenceParallel) -> float:
    """Return the seconds below which no schedule with these steps and shared packs is."""
    steps = (
        UndividedStep(schedule.step_documents(i), units, bins, parallel=parallel) for i in range(schedule.num_steps)
    )
    return sum(map(step_bound, steps))


def step_bound(step: UndividedStep) -> float:
    """Return the seconds below which no division of the step is, also none with several degrees in a micro-step.

    All ranks work all the time, units longer than C pay the exchange of their smallest group, and each takes at least
    what it takes alone at its best degree.
    """
    rows = step.units.rows[step.members]
    tokens_per_rank = step.parallel.tokens_per_rank
    ranks_seconds = float(step.times.seconds(step.units.costs()[step.members], rows, 1).sum())
    long = rows[rows > tokens_per_rank]
    ranks_seconds += sum(n * step.times.exchange_seconds(smallest_degree(n, tokens_per_rank))[0] for n in long.tolist())
    seconds_alone = np.full(len(rows), np.inf)
    for degree in {step.parallel.smallest, *step.parallel.degrees}:
        fits = rows <= degree * tokens_per_rank
        seconds = step.times.seconds(step.units.costs(degree)[step.members], rows, degree)
        seconds_alone[fits] = np.minimum(seconds_alone, seconds)[fits]
    return max(ranks_seconds / step.bins.world_size, float(seconds_alone.max()))
