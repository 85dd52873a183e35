"""Modelled waiting time of a schedule.

imbalance = sum over micro-steps of the largest rank cost / sum of the mean rank cost; 1.0 is perfect. Where ranks wait
only at the end of a step, the sums are over steps and rank costs are those of whole steps.

Letters: S steps, G micro-batches per step, W ranks.
"""

import numpy as np

from .arrays import Float64Array
from .packing import Synchronisation
from .schedule import Schedule


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
