"""The schedule of planned packs, or of the steps of the unpacked run, with all that a packing can say. numpy only."""

import numpy as np

from .arrays import Int64Array
from .degrees import schedule_groups
from .families import Pieces
from .packing import Packing
from .packs import PackPlan
from .schedule import Schedule, schedule_packs, schedule_steps
from .units import Units


def schedule_plan(plan: PackPlan, units: Units, num_steps: int, *, packing: Packing) -> Schedule:
    """The packs in the bins of exactly `num_steps` optimizer steps."""
    if packing.tokens_per_rank is None:
        return schedule_packs(plan, units, num_steps, bins=packing.bins)
    return schedule_groups(plan, units, num_steps, bins=packing.bins, parallel=packing.parallel)


def schedule_kept_steps(packing: Packing, units: Units, order: Int64Array) -> Schedule:
    """Every step has the documents of the unpacked run, visited in this order. Units may be families of these."""
    steps = np.arange(packing.num_steps(len(order)) + 1)
    if not isinstance(units, Pieces):
        bounds = np.minimum(steps * packing.documents_per_step, len(order))
        return schedule_steps(units, order, bounds, bins=packing.bins)
    step = packing.kept_steps(order)[units.order[units.offsets[:-1]]]
    by_step = np.argsort(step, kind="stable")
    return schedule_steps(units, by_step, np.searchsorted(step[by_step], steps), bins=packing.bins)
