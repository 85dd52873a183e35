"""Packs -> the schedule of an epoch: pure functions of the units and the packing. numpy only.

`data/epochs.py` makes units of documents, and caches what is planned here.
"""

import numpy as np

from .arrays import Int64Array
from .degrees import schedule_groups
from .families import Pieces
from .packing import Packing
from .packs import PackPlan, reordered
from .schedule import Schedule, schedule_packs, schedule_steps
from .units import Units


def schedule_plan(plan: PackPlan, units: Units, num_steps: int, *, packing: Packing) -> Schedule:
    """The packs in the bins of exactly `num_steps` optimizer steps."""
    if packing.parallel is None:
        return schedule_packs(plan, units, num_steps, bins=packing.bins)
    return schedule_groups(plan, units, num_steps, bins=packing.bins, parallel=packing.parallel)


def schedule_epoch(
    packing: Packing, units: Units, epoch: int, *, first: PackPlan, num_steps: int, block: Int64Array | None = None
) -> Schedule:
    """The packs of an epoch in the bins of exactly `num_steps` optimizer steps.

    Args:
        first: the plan of the first epoch, from which the Trainer has computed the number of steps. Where that of this
            epoch has more packs, those of the first come in another order.
        block: see `Packing.plan`.
    """
    plan = first if epoch == 0 else packing.plan(units, epoch, block)
    if plan.num_packs > num_steps * packing.num_bins and not packing.drop_last:
        plan = reordered(first, np.random.default_rng((packing.seed, epoch)))
    return schedule_plan(plan, units, num_steps, packing=packing)


def schedule_kept_steps(packing: Packing, units: Units, order: Int64Array) -> Schedule:
    """The schedule in which every step has the documents of the unpacked run.

    Args:
        units: documents, or families of those of each step.
        order: as for `Packing.kept_steps`.
    """
    steps = np.arange(packing.num_kept_steps(len(order)) + 1)
    if not isinstance(units, Pieces):
        bounds = np.minimum(steps * packing.documents_per_step, len(order))
        return schedule_steps(units, order, bounds, bins=packing.bins)
    step = packing.kept_steps(order)[units.order[units.offsets[:-1]]]
    by_step = np.argsort(step, kind="stable")
    return schedule_steps(units, by_step, np.searchsorted(step[by_step], steps), bins=packing.bins)
