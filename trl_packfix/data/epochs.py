"""The schedule of every epoch: documents -> units -> plan -> schedule -> cache.

The first plan and every schedule are cached beside the documents, for all ranks of a node and for the next start. Each
file name is a hash of everything its content depends on. One process of a node computes what is not there, the others
wait for it, and all map the file.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Literal

import numpy as np

from ..planning.arrays import BoolArray, Float64Array, Int64Array
from ..planning.degrees import room_of_families
from ..planning.families import Pieces, TokenOrder, make_pieces
from ..planning.packing import Packing
from ..planning.packs import PackPlan, shuffle_packs
from ..planning.schedule import Schedule
from ..planning.units import Units
from ..samples.row import PREPARATION_SOURCE_HASH
from .cache import PACKS_PREFIX, SUFFIX, Arrays, read_or_make
from .documents import Documents

MIN_CACHED_DOCUMENTS = 50_000  # documents from which on plans are cached: planning takes 0.1 s on one rank and 0.4 s on eight


@dataclass(frozen=True, eq=False)
class ResumePoint:
    """The epoch in which a run resumes, and what was trained of it under other plans."""

    epoch: int = 0
    first_step: int = 0  # optimizer steps of the run before this epoch
    num_steps: int = 0  # of this epoch under other plans; 0 if this run plans the whole epoch
    trained: BoolArray | None = None  # whether each document was trained in them, shape (N,); None if there are none


@dataclass
class EpochPlanner:
    """Documents -> plan -> schedule, for any epoch. All epochs have the number of optimizer steps of the first.

    A run that resumes with other ranks has trained a part of an epoch under another plan. `resume_at` plans the rest of
    that epoch anew, and only this epoch has another number of steps.

    With sequence parallelism the later epochs have the degrees of the first, since the model is proved at each of them
    before the first step.
    """

    documents: Documents  # sorted by their tokens if the packing shares families
    packing: Packing  # its degrees become those that the first epoch uses
    may_be_empty: bool = False  # allow an epoch of zero steps
    num_steps: int = field(init=False)  # of each epoch that is planned whole
    start: ResumePoint = field(init=False, default=ResumePoint(), repr=False)
    first_plan: PackPlan | None = field(init=False, default=None, repr=False)  # None for a strategy that keeps steps
    _first_packing: Packing = field(init=False, repr=False)
    _latest: tuple[int, Schedule] | None = field(init=False, default=None, repr=False)
    _rest: Schedule | None = field(init=False, default=None, repr=False)  # of the epoch of `start`

    def __post_init__(self) -> None:
        packing = self._first_packing = self.packing
        if packing.traits.keeps_unpacked_steps:
            self.num_steps = packing.num_steps(len(self.documents))
            unit = f"{len(self.documents)} documents"
        else:
            units = self.units()
            block = self.documents.block
            arrays = read_or_make(self.cache_file("plan", 0), lambda: _cached_arrays(packing.plan(units, 0, block)))
            self.first_plan = PackPlan(arrays["order"], arrays["offsets"], units.rows, packing.capacity)
            self.num_steps = packing.num_steps(self.first_plan.num_packs)
            unit = f"{self.first_plan.num_packs} packs"
        if self.num_steps == 0:
            if self.may_be_empty:
                return
            raise ValueError(
                f"The epoch has {unit}, and one optimizer step needs more of them ({packing.accumulation} "
                f"accumulation steps x {packing.world_size} ranks). With `dataloader_drop_last=True` the only step "
                "is incomplete and is dropped, so nothing would be trained. Set `dataloader_drop_last=False`, or lower "
                "`gradient_accumulation_steps` or the batch size."
            )
        if len(packing.degrees) > 1:
            degrees = {packing.parallel.smallest, *self.schedule(0).degrees.tolist()}
            self.packing = replace(packing, degrees=tuple(sorted(degrees)))

    @cached_property
    def image_costs(self) -> Float64Array:
        """FLOPs of the images of each document, shape (N,); 0 without images, or if they cannot be counted."""
        values = self.documents.image_values
        squares = self.documents.image_squares
        if values is None or squares is None:
            return np.zeros(len(self.documents))
        return self.packing.cost_model.tower(values, squares)

    def image_costs_behind(self, documents: Int64Array, shared: Int64Array) -> Float64Array:
        """FLOPs of the images of these documents that are not in their first `shared` rows, by their tokens, (M,)."""
        start = self.documents.image_start
        stop = self.documents.image_stop
        if start is None or stop is None:
            return np.zeros(len(documents))
        start = start[documents]
        stop = stop[documents]
        return self.image_costs[documents] * np.clip((stop - shared) / np.maximum(stop - start, 1), 0, 1)

    @cached_property
    def _units(self) -> Units:
        if not self.packing.shares_families:
            documents = self.documents
            return Units(documents.lengths, self.packing.cost_model, self.image_costs, targets=documents.trained)
        assert self.documents.tokens is not None, "documents are not sorted by their tokens"
        return self.make_pieces(self.documents.tokens)

    def units(self, epoch: int = 0) -> Units:
        """What is planned as one: documents, or with `share_prefixes="family"` pieces of families.

        With `minibatch` these are families of the documents of each step, so every epoch has others.
        """
        tokens = self.documents.tokens
        if tokens is None or not self.packing.traits.keeps_unpacked_steps or not self.packing.shares_families:
            return self._units
        of_steps = tokens.within(self.packing.unpacked_step_of_documents(self._unpacked_order(epoch)))
        return self.make_pieces(of_steps, splits_copies=False)

    def resume_at(self, start: ResumePoint) -> None:
        """Continue a run: plan anew what `start` has not trained of its epoch."""
        self.start = start
        self._rest = None
        if start.trained is None:
            return
        remaining = np.flatnonzero(~start.trained)
        packing = self.packing
        others = replace(packing, seed=packing.seed + start.epoch)
        rest = EpochPlanner(self.documents.select(~start.trained), others, may_be_empty=True)
        if not rest.num_steps:
            self.start = ResumePoint(start.epoch + 1, start.first_step + start.num_steps)
            return
        schedule = rest.schedule(0)
        micro_steps = start.num_steps * packing.accumulation
        self._rest = replace(
            schedule,
            order=remaining[schedule.order],
            offsets=np.concatenate([np.zeros(micro_steps * packing.world_size, np.int64), schedule.offsets]),
            degrees=np.concatenate([np.ones(micro_steps, np.int64), schedule.degrees]),
        )

    @property
    def is_even(self) -> bool:
        """Whether all epochs have the same number of optimizer steps."""
        return self.start.num_steps == 0 and self.start.first_step == self.start.epoch * self.num_steps

    def steps_of(self, epoch: int) -> int:
        return self.num_steps if self._rest is None or epoch != self.start.epoch else self._rest.num_steps

    def first_step(self, epoch: int) -> int:
        """Optimizer steps of the run before an epoch, which is not before that of `start`."""
        return self.start.first_step + sum(self.steps_of(each) for each in range(self.start.epoch, epoch))

    def position(self, step: int) -> tuple[int, int]:
        """The epoch that the run is in after `step` optimizer steps, and how many of them are of this epoch."""
        epoch = self.start.epoch
        inside = step - self.start.first_step
        while inside >= self.steps_of(epoch):
            epoch, inside = epoch + 1, inside - self.steps_of(epoch)
        return epoch, inside

    def total_steps(self, num_epochs: float) -> int:
        """Optimizer steps of a run of so many epochs, or of the steps that were trained already."""
        epoch = max(int(num_epochs), self.start.epoch)
        part = max(num_epochs - epoch, 0.0)
        return max(ceil(self.first_step(epoch) + part * self.steps_of(epoch)), 1)

    def trained_documents(self, epoch: int, num_steps: int) -> BoolArray:
        """Whether each document is trained in the first `num_steps` steps of an epoch, shape (N,)."""
        before = self.start.trained if epoch == self.start.epoch else None
        trained = np.zeros(len(self.documents), dtype=bool) if before is None else before.copy()
        schedule = self.schedule(epoch)
        trained[schedule.order[: schedule.offsets[num_steps * self.packing.bins.num_slots]]] = True
        return trained

    def schedule(self, epoch: int) -> Schedule:
        """Documents of every step, micro-batch and rank of an epoch; none in the steps trained under other plans."""
        if self._rest is not None and epoch == self.start.epoch:
            return self._rest
        if not self.packing.shuffle:
            epoch = 0  # without shuffling, all epochs are the same
        if self._latest is None or self._latest[0] != epoch:
            arrays = read_or_make(
                self.cache_file("schedule", epoch), lambda: _cached_arrays(self._make_schedule(epoch))
            )
            order = arrays["order"]
            packing = self.packing
            of_run = (packing.accumulation, packing.world_size, len(self.documents) - len(order))
            self._latest = epoch, Schedule(order, arrays["offsets"], *of_run, arrays["degrees"])
        return self._latest[1]

    def cache_file(self, kind: Literal["plan", "schedule"], epoch: int) -> Path | None:
        """The cache file of an epoch's plan or schedule, whether or not it exists; None if it is not cached."""
        if self.documents.file is None or len(self.documents) < MIN_CACHED_DOCUMENTS:
            return None
        packing = self._first_packing if epoch == 0 else self.packing
        settings = packing.fingerprint("packs" if kind == "plan" else "schedule")
        key = f"{PREPARATION_SOURCE_HASH} {self.documents.file.name} {kind} {epoch} {settings}"
        return self.documents.file.with_name(f"{PACKS_PREFIX}-{sha256(key.encode()).hexdigest()[:16]}{SUFFIX}")

    def _make_schedule(self, epoch: int) -> Schedule:
        units = self.units(epoch)
        packing = self._first_packing if epoch == 0 else self.packing
        if packing.traits.keeps_unpacked_steps:
            schedule = packing.schedule_unpacked_steps(units, self._unpacked_order(epoch))
        else:
            assert self.first_plan is not None
            plan = self.first_plan if epoch == 0 else packing.plan(units, epoch, self.documents.block)
            if plan.num_packs > self.num_steps * packing.packs_per_step and not packing.drop_last:
                # The Trainer has computed the number of steps from the first plan
                plan = shuffle_packs(self.first_plan, np.random.default_rng((packing.seed, epoch)))
            schedule = packing.schedule(plan, units, self.num_steps)
        order, offsets = units.documents(schedule.order, schedule.offsets, packing.make_rng(epoch, len(units)))
        return replace(schedule, order=order, offsets=offsets)

    def make_pieces(self, tokens: TokenOrder, splits_copies: bool = True) -> Pieces:
        documents = self.documents
        packing = self.packing
        return make_pieces(
            tokens,
            documents.lengths,
            documents.trained,
            cost_model=packing.cost_model,
            room=room_of_families(documents.lengths, packing.parallel),
            splits_copies=splits_copies,
            image_costs=self.image_costs_behind,
        )

    def _unpacked_order(self, epoch: int) -> np.ndarray:
        num = len(self.documents)
        return unpacked_order(num, self.packing.seed, epoch) if self.packing.shuffle else np.arange(num)


def unpacked_order(num_documents: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which accelerate's seedable sampler visits the rows of an unpacked run, shape (N,)."""
    import torch  # here, so that the other strategies do not load it

    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_documents, generator=generator).numpy()


def _cached_arrays(packs: PackPlan | Schedule) -> Arrays:
    """What a cache file holds of them: what is not in the documents or the settings."""
    arrays = {"order": packs.order, "offsets": packs.offsets}
    return arrays | ({"degrees": packs.degrees} if isinstance(packs, Schedule) else {})
