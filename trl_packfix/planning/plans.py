"""Units -> plan -> schedule, of any epoch of a run: pure functions of the units and the settings. numpy only.

`data/epochs.py` makes units of documents, and caches what is planned here.
"""

from dataclasses import dataclass, field

import numpy as np

from .arrays import Int64Array
from .degrees import FILL, SequenceParallel, schedule_groups
from .families import Pieces
from .packs import PackPlan, plan_blocks, reordered
from .schedule import Schedule, num_optimizer_steps, schedule_minibatches, schedule_packs, schedule_steps
from .strategies import STRATEGIES, Strategy, StrategyTraits
from .units import Bins, Units


@dataclass(frozen=True, kw_only=True)
class RunPlans:
    """How the units of every epoch are packed, and scheduled in bins.

    Attributes:
        strategy: its name, a key of `STRATEGIES`.
        bins: the slots of an optimizer step. Their capacity is `batch_size * max_length`; with sequence parallelism
            `parallel.capacity`.
        batch_size: documents per micro-batch of the unpacked run.
        max_length: most tokens of a document.
        seed: draws the order of an epoch.
        shuffle: False keeps the order of the units (curricula, upsampled mixes).
        parallel: sequence parallelism; None: one rank holds a pack.
        block: of each unit, shape (U,), for a strategy that cuts blocks.
    """

    strategy: Strategy
    bins: Bins
    batch_size: int = 1
    max_length: int
    seed: int = 0
    shuffle: bool = True
    parallel: SequenceParallel | None = None
    block: Int64Array | None = field(default=None, repr=False)

    @property
    def traits(self) -> StrategyTraits:
        """The record of the strategy."""
        traits = STRATEGIES.get(self.strategy)
        assert traits is not None, f"no strategy is named {self.strategy!r}"
        return traits

    @property
    def planned_capacity(self) -> int:
        """Rows to which packs are planned. With sequence parallelism, some room is needed to deal them anew."""
        return self.bins.capacity if self.parallel is None else max(int(FILL * self.bins.capacity), 1)

    @property
    def num_bins(self) -> int:
        """Packs of an optimizer step: one for each micro-step and group of the fewest ranks that hold any document."""
        return self.bins.num_slots // (1 if self.parallel is None else self.parallel.smallest)

    def rng(self, *seed: int) -> np.random.Generator | None:
        """Draws what the epoch `seed` draws; None without shuffling."""
        return np.random.default_rng((self.seed, *seed)) if self.shuffle else None

    def plan(self, units: Units, epoch: int) -> PackPlan:
        """The packs of an epoch; not for a strategy that keeps steps."""
        rows = np.minimum(units.rows, self.planned_capacity)  # a longer unit is alone in its pack, which may be full
        if self.traits.plan is None:
            assert self.block is not None, "documents are not cut into blocks"
            return plan_blocks(self.block, rows, self.batch_size, capacity=self.planned_capacity, rng=self.rng(epoch))
        draws_order = self.rng(epoch)
        order = np.arange(len(rows)) if draws_order is None else units.visited(draws_order.permutation(len(rows)))
        return self.traits.plan(rows, self.planned_capacity, order=order, rng=self.rng(epoch))

    def num_steps(self, num_packs: int) -> int:
        """Optimizer steps of an epoch of so many packs."""
        return num_optimizer_steps(num_packs, self.num_bins, 1, drop_last=self.bins.drop_last)

    def schedule(self, units: Units, epoch: int, first: PackPlan, *, num_steps: int) -> Schedule:
        """The packs of an epoch in the bins of exactly `num_steps` optimizer steps.

        Args:
            first: the plan of the first epoch, from which the Trainer has computed the number of steps. Where that of
                this epoch has more packs, those of the first come in another order.
        """
        plan = first if epoch == 0 else self.plan(units, epoch)
        if plan.num_packs > num_steps * self.num_bins and not self.bins.drop_last:
            plan = reordered(first, np.random.default_rng((self.seed, epoch)))
        if self.parallel is None:
            return schedule_packs(plan, units, num_steps, bins=self.bins)
        return schedule_groups(plan, units, num_steps, bins=self.bins, parallel=self.parallel)

    # Strategies that keep the steps of the unpacked run

    @property
    def _per_step(self) -> int:
        return self.batch_size * self.bins.num_slots

    def num_kept_steps(self, num_documents: int) -> int:
        """Optimizer steps of an unpacked epoch of so many documents."""
        return num_optimizer_steps(num_documents, self._per_step, 1, drop_last=self.bins.drop_last)

    def kept_steps(self, order: Int64Array) -> Int64Array:
        """The optimizer step of each document in the unpacked run, shape (N,); -1 if the epoch does not reach it.

        Args:
            order: in which the unpacked run visits the documents, shape (N,).
        """
        reached = order[: self.num_kept_steps(len(order)) * self._per_step]
        step = np.full(len(order), -1)
        step[reached] = np.arange(len(reached)) // self._per_step
        return step

    def schedule_kept_steps(self, units: Units, order: Int64Array) -> Schedule:
        """The schedule in which every step has the documents of the unpacked run.

        Args:
            units: documents, or families of those of each step.
            order: as for `kept_steps`.
        """
        if not isinstance(units, Pieces):
            return schedule_minibatches(units, order, self.batch_size, bins=self.bins)
        step = self.kept_steps(order)[units.order[units.offsets[:-1]]]
        by_step = np.argsort(step, kind="stable")
        bounds = np.searchsorted(step[by_step], np.arange(self.num_kept_steps(len(order)) + 1))
        return schedule_steps(units, by_step, bounds, bins=self.bins)
