"""How long ranks wait for each other in a schedule, and how long they must.

imbalance = sum over micro-steps of the largest rank cost / sum of the mean rank cost; 1.0 is perfect. Where ranks wait
only at the end of a step, the sums are over steps, of what each rank does in one.

The bound is what no schedule with the same documents in every step can beat: one document is never shared, and no
micro-batch is above the capacity. Letters: S steps, G micro-batches per step, W ranks.
"""

import numpy as np

from .balancing import Synchronisation
from .costs import CostModel, Float64Array
from .dealing import Int64Array
from .scheduling import Schedule


def rank_costs(schedule: Schedule, lengths: Int64Array, cost_model: CostModel) -> Float64Array:
    """Modelled cost of every micro-batch, shape (S, G, W)."""
    total = np.concatenate([[0.0], np.cumsum(cost_model(lengths[schedule.order]))])
    return np.diff(total[schedule.offsets]).reshape(-1, schedule.accumulation, schedule.world_size)


def imbalance(
    schedule: Schedule, lengths: Int64Array, cost_model: CostModel, synchronisation: Synchronisation
) -> float:
    """See above; 1.0 with one rank."""
    if schedule.world_size == 1:
        return 1.0
    costs = rank_costs(schedule, lengths, cost_model)
    if synchronisation == "step":
        costs = costs.sum(axis=1)
    return float(costs.max(axis=-1).sum() / costs.mean(axis=-1).sum())


def imbalance_bound(
    schedule: Schedule, lengths: Int64Array, cost_model: CostModel, capacity: int, synchronisation: Synchronisation
) -> float:
    """No schedule with these steps has a lower imbalance; it may still be higher than any can reach.

    Args:
        lengths: tokens of each document of the dataset, shape (N,).
        capacity: most tokens of a micro-batch.
    """
    micro, ranks = schedule.accumulation, schedule.world_size
    if ranks == 1:
        return 1.0  # nobody to wait for; looking at every step takes a second per 50,000 of them
    least, mean = 0.0, 0.0
    for step in range(schedule.num_steps):
        documents = _Sorted(lengths[schedule.step_documents(step)], cost_model)
        mean += documents.total / ranks
        if synchronisation == "step":
            least += documents.longest_rank(ranks, micro * capacity)
        else:
            least += documents.longest_micro_steps(micro, ranks, capacity)
    return least / mean


class _Sorted:
    """Documents of a step, longest first."""

    def __init__(self, lengths: Int64Array, cost_model: CostModel):
        self.lengths = -np.sort(-lengths)
        self.costs = cost_model(self.lengths)
        self.total = float(self.costs.sum())
        self.tokens = int(self.lengths.sum())
        self.ends = np.concatenate([[0], np.cumsum(self.lengths)])
        self.cost_to = np.concatenate([[0.0], np.cumsum(self.costs)])

    def dearest(self, tokens: float) -> float:
        """Most that so many tokens can cost, documents cut where the tokens end: the longest cost most per token."""
        return float(np.interp(tokens, self.ends, self.cost_to))

    def cheapest(self, tokens: float) -> float:
        """Least that so many tokens can cost."""
        return self.total - self.dearest(self.tokens - max(tokens, 0))

    def longest_rank(self, ranks: int, capacity: int) -> float:
        """Of the k * W + 1 longest documents, k + 1 are on one rank; and the others cannot hold all other tokens."""
        must_hold = self.tokens - (ranks - 1) * capacity
        best = self.total / ranks
        for k in range(min(-(-len(self.lengths) // ranks), 64)):  # larger groups are of short documents, and even
            together = slice(k * ranks - k, k * ranks + 1)
            rest = self.cheapest(must_hold - self.lengths[together].sum())
            best = max(best, float(self.costs[together].sum()) + rest)
        return best

    def longest_micro_steps(self, micro: int, ranks: int, capacity: int) -> float:
        """Documents above half the capacity never share a slot: the one in place g * W of them ends micro-step g.

        The first j micro-steps hold no more than their slots do of the dearest tokens; the others need the rest's mean.
        """
        best, ends = self.total / ranks, 0.0
        must_hold = self.tokens - (micro * ranks - 1) * capacity
        for g in range(micro):
            place = g * ranks
            if place >= len(self.lengths) or (g and 2 * self.lengths[place] <= capacity):
                break
            ends += float(self.costs[place])
            if g == 0:
                ends += self.cheapest(must_hold - self.lengths[0])
            held = min(self.dearest((g + 1) * ranks * capacity), ranks * ends)
            best = max(best, ends + (self.total - held) / ranks)
        return best
