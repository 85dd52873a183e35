"""Compute the schedule of every epoch: documents -> units -> plan -> schedule.

`EpochPlanner` takes the documents of a table (`documents.py`) and the settings of packing (`planning/packing.py`). It
returns the schedule of an epoch to the batch sampler (`loaders.py`), and the numbers of steps to the trainer. Only the
lengths of documents are used here, not their tokens.

Words:
    unit         what planning moves as one. A unit is a document, or several documents that a feature plans as one.
    pack         documents that pass through the model together. Its capacity is the largest number of its tokens.
    plan         which units share a pack, and the order of the packs.
    schedule     which documents belong to each optimizer step, micro-batch and rank.
    slot         a place for a pack in an epoch: one optimizer step, one of its micro-batches, and one rank.
    degree       the number of ranks that share a pack (sequence parallelism); 1 if every rank has its own packs.
    unpacked     A run without packing. With the strategy `minibatch` (`keeps_unpacked_steps`) every optimizer step has
                 the documents that it has in the unpacked run. Then there is no plan, only schedules.

For a large dataset, the first plan and every schedule are cached beside the documents, for all ranks of a node and for
the next start (`cache.py`). The name of each file is a hash of everything that its content depends on. One process of a
node computes a missing file while the other processes wait, and all processes map the file.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Literal

import numpy as np

from ..planning.arrays import BoolArray, Float64Array, Int64Array
from ..planning.packing import Packing
from ..planning.packs import PackPlan, shuffle_packs
from ..planning.schedule import Schedule
from ..planning.units import Units
from ..samples.row import PREPARATION_SOURCE_HASH
from .cache import PACKS_PREFIX, SUFFIX, Arrays, read_or_make
from .documents import Documents

# Plans of fewer documents are not cached: planning 50,000 documents takes 0.1 s on one rank and 0.4 s on eight ranks
MIN_CACHED_DOCUMENTS = 50_000


@dataclass(frozen=True, eq=False)
class ResumePoint:
    """The epoch in which a run resumes, and the documents of this epoch that were trained under an earlier plan."""

    epoch: int = 0  # number of the epoch, from 0
    first_step: int = 0  # number of optimizer steps that the run has trained before this epoch
    # Number of optimizer steps that were trained in this epoch under an earlier plan. 0 if the run that resumes plans
    # the whole epoch
    num_steps: int = 0
    # Whether each document was trained in these `num_steps` steps, shape (N,). None if `num_steps` is 0
    trained: BoolArray | None = None
    # Number of optimizer steps that the run had trained in an epoch when it began the documents of this epoch anew
    # (`ignore_data_skip`). They count as steps of the run, which does not get longer by them
    num_repeated: int = 0


class EpochPlanner:
    """Plans the documents of each epoch. Every epoch has as many optimizer steps as the first.

    A run that resumes with another number of ranks has trained a part of an epoch under another plan. `resume_at` then
    plans the remaining documents of this epoch anew. Only this epoch has another number of steps.

    With sequence parallelism, later epochs use only the degrees that the first epoch uses, because the model is tested
    at each of these degrees before the first step (`isolation`).

    Args:
        documents: the N documents of the table.
        packing: the settings. `EpochPlanner` replaces its degrees by the degrees that the first epoch uses.
        may_be_empty: allow an epoch of zero steps.

    Raises:
        ValueError: the epoch has zero steps, and `may_be_empty` is False.
    """

    num_steps: int  # number of optimizer steps of an epoch that is planned from its beginning
    first_plan: PackPlan | None = None  # None for a strategy that keeps steps
    resume_point = ResumePoint()

    def __init__(self, documents: Documents, packing: Packing, may_be_empty: bool = False) -> None:
        self.documents = documents
        self.packing = packing
        self._first_packing = packing  # the settings for the first epoch, with all degrees
        # Schedules by epoch: the latest one that was asked for, and the schedule of the epoch of `resume_point`, if a
        # part of this epoch was trained under an earlier plan
        self._latest_schedule: dict[int, Schedule] = {}
        self._resumed_schedule: dict[int, Schedule] = {}
        if packing.traits.keeps_unpacked_steps:
            self.num_steps = packing.num_steps(len(documents))  # the steps of the unpacked run
            counted = f"{len(documents)} documents"
        else:
            units = self.units()
            # With `wrapped`, all documents are concatenated and cut into blocks. `block` is then the index of the block
            # that holds each document, (N,). With other strategies it is None
            block = documents.block
            arrays = read_or_make(self.cache_file("plan", 0), lambda: _cached_arrays(packing.plan(units, 0, block)))
            # `units.rows`: the tokens that each unit takes in a pack
            self.first_plan = PackPlan(**arrays, lengths=units.rows, capacity=packing.capacity)
            self.num_steps = packing.num_steps(self.first_plan.num_packs)
            counted = f"{self.first_plan.num_packs} packs"
        if self.num_steps == 0:
            if may_be_empty:
                return
            raise ValueError(
                f"The epoch has {counted}, and one optimizer step needs more of them ({packing.accumulation} "
                f"accumulation steps x {packing.world_size} ranks). With `dataloader_drop_last=True` the only step "
                "is incomplete and is dropped, so nothing would be trained. Set `dataloader_drop_last=False`, or lower "
                "`gradient_accumulation_steps` or the batch size."
            )
        # Keep the degrees that the first epoch uses, and the smallest degree, for which packs are planned
        if len(packing.degrees) > 1:
            degrees = {packing.parallel.smallest, *self.schedule(0).degrees.tolist()}
            self.packing = replace(packing, degrees=tuple(sorted(degrees)))

    @cached_property
    def image_costs(self) -> Float64Array:
        """FLOPs of the vision tower for the images of each document, shape (N,).

        They are 0 for a document without images, and for all documents if the costs of the tower cannot be counted.
        """
        # `values` is the number of pixel values in all images of a document. `squares` is the sum, over its images, of
        # the squared number of pixel values of each image, because attention in the tower costs FLOPs for each pair of
        # values of one image. Both have shape (N,), and are None in a table without images
        values = self.documents.image_values
        squares = self.documents.image_squares
        if values is None or squares is None:
            return np.zeros(len(self.documents))
        return self.packing.cost_model.tower(values, squares)

    def image_costs_behind(self, documents: Int64Array, shared: Int64Array) -> Float64Array:
        """Estimate the FLOPs for those images of documents that lie behind the tokens which a document shares.

        The FLOPs of a document are divided evenly over the tokens from its first image to its last image.

        Args:
            documents: indices of documents, shape (M,).
            shared: number of tokens at the beginning of each document that it shares, shape (M,).

        Returns:
            FLOPs, shape (M,).
        """
        first_image_token = self.documents.image_start
        stop_of_images = self.documents.image_stop
        if first_image_token is None or stop_of_images is None:
            return np.zeros(len(documents))
        first_image_token = first_image_token[documents]
        stop_of_images = stop_of_images[documents]
        num_image_tokens = np.maximum(stop_of_images - first_image_token, 1)
        share_behind = np.clip((stop_of_images - shared) / num_image_tokens, 0, 1)
        return self.image_costs[documents] * share_behind

    @cached_property
    def _units_of_all_epochs(self) -> Units:
        """The units of all epochs, for strategies and features with which they are equal in all epochs."""
        return self._make_units()

    def _make_units(self, step_of_documents: Int64Array | None = None) -> Units:
        """Return the units of all documents, see `Feature.make_units`.

        Args:
            step_of_documents: the optimizer step that each document must keep, shape (N,), or None.
        """
        documents = self.documents
        # `documents.trained`: the number of trained tokens of each document
        units = Units(documents.lengths, self.packing.cost_model, self.image_costs, targets=documents.trained)
        # The feature gets `self`, because it reads the order of documents by tokens and calls `image_costs_behind`
        return self.packing.feature.make_units(units, self, step_of_documents)

    def units(self, epoch: int = 0) -> Units:
        """Return the units of an epoch: documents, or several documents that a feature plans as one.

        With the strategy `minibatch` all documents of a unit belong to one optimizer step. Each epoch deals the
        documents to other steps, so units of several documents are made anew for each epoch.
        """
        # `regroups`: whether the feature plans units of several documents
        if self.packing.feature.regroups and self.packing.traits.keeps_unpacked_steps:
            return self._make_units(self.packing.unpacked_step_of_documents(self._unpacked_order(epoch)))
        return self._units_of_all_epochs

    def resume_at(self, point: ResumePoint) -> None:
        """Continue a run at a resume point.

        If the epoch was begun under an earlier plan, its remaining documents are planned anew. The new schedule of this
        epoch begins with empty steps, one for each step that was trained already.
        """
        self.resume_point = point
        self._resumed_schedule = {}
        if point.trained is None:
            return
        # First plan the remaining documents as epoch 0 of a dataset of their own. The seed depends on `point.epoch`, so
        # that runs that resume in different epochs draw different orders
        is_remaining = ~point.trained
        packing = self.packing
        remaining_packing = replace(packing, seed=packing.seed + point.epoch)
        remaining_planner = EpochPlanner(self.documents.select(is_remaining), remaining_packing, may_be_empty=True)
        if not remaining_planner.num_steps:
            # The remaining documents do not fill a step, so the run continues with the next epoch
            first_step = point.first_step + point.num_steps
            self.resume_point = ResumePoint(point.epoch + 1, first_step, num_repeated=point.num_repeated)
            return
        schedule = remaining_planner.schedule(0)
        # Then number the documents as in the table. Put the trained steps in front, as empty slots. Slot i has the
        # documents from `offsets[i]` up to `offsets[i + 1]`, so offsets of 0 in front make empty slots
        num_trained_micro_steps = point.num_steps * packing.accumulation
        empty_slots = np.zeros(num_trained_micro_steps * packing.world_size, np.int64)
        self._resumed_schedule[point.epoch] = replace(
            schedule,
            order=np.flatnonzero(is_remaining)[schedule.order],
            offsets=np.concatenate([empty_slots, schedule.offsets]),
            degrees=np.concatenate([np.ones(num_trained_micro_steps, np.int64), schedule.degrees]),
        )

    @property
    def has_equal_epochs(self) -> bool:
        """Whether all epochs have the same number of optimizer steps."""
        return (
            self.resume_point.num_steps == 0
            and self.resume_point.first_step == self.resume_point.epoch * self.num_steps
        )

    def steps_of(self, epoch: int) -> int:
        """Return the number of optimizer steps of an epoch, including the steps trained under an earlier plan."""
        resumed_schedule = self._resumed_schedule.get(epoch)
        return self.num_steps if resumed_schedule is None else resumed_schedule.num_steps

    def first_step(self, epoch: int) -> int:
        """Return the number of optimizer steps before an epoch, which is the epoch of `resume_point` or a later one."""
        epochs_before = range(self.resume_point.epoch, epoch)
        return self.resume_point.first_step + sum(map(self.steps_of, epochs_before))

    def position(self, step: int) -> tuple[int, int]:
        """Return where the run is after `step` optimizer steps.

        Returns:
            The epoch, and the number of optimizer steps that are trained in this epoch.
        """
        epoch = self.resume_point.epoch
        step_in_epoch = step - self.resume_point.first_step
        while step_in_epoch >= self.steps_of(epoch):
            step_in_epoch -= self.steps_of(epoch)
            epoch += 1
        return epoch, step_in_epoch

    def total_steps(self, num_epochs: float) -> int:
        """Return the number of optimizer steps of a run of `num_epochs` epochs.

        It is at least 1. If no epoch was begun anew, it is at least the number of steps before the epoch in which the
        run resumes.
        """
        epoch = max(int(num_epochs), self.resume_point.epoch)
        fraction = max(num_epochs - epoch, 0.0)
        num_steps = ceil(self.first_step(epoch) + fraction * self.steps_of(epoch))
        return max(num_steps - self.resume_point.num_repeated, 1)

    def trained_documents(self, epoch: int, num_steps: int) -> BoolArray:
        """Return whether each document is trained in the first `num_steps` steps of an epoch, shape (N,).

        Steps that were trained under an earlier plan count in `num_steps`, and `resume_point` has their documents.
        """
        trained_before = self.resume_point.trained if epoch == self.resume_point.epoch else None
        trained = np.zeros(len(self.documents), dtype=bool) if trained_before is None else trained_before.copy()
        schedule = self.schedule(epoch)
        num_slots = num_steps * self.packing.bins.num_slots  # `bins.num_slots`: slots of one step
        # The documents of these slots come in `order` before the first document of the next slot
        trained[schedule.order[: schedule.offsets[num_slots]]] = True
        return trained

    def schedule(self, epoch: int) -> Schedule:
        """Return the documents of every optimizer step, micro-batch and rank of an epoch, from the cache if possible.

        Steps that were trained under an earlier plan are empty.
        """
        if epoch in self._resumed_schedule:
            return self._resumed_schedule[epoch]
        if not self.packing.shuffle:
            epoch = 0  # without shuffling, all epochs are equal
        if epoch not in self._latest_schedule:
            arrays = read_or_make(
                self.cache_file("schedule", epoch), lambda: _cached_arrays(self._make_schedule(epoch))
            )
            schedule = Schedule(
                **arrays,
                accumulation=self.packing.accumulation,
                world_size=self.packing.world_size,
            )
            self._latest_schedule = {epoch: schedule}
        return self._latest_schedule[epoch]

    def cache_file(self, kind: Literal["plan", "schedule"], epoch: int) -> Path | None:
        """Return the cache file for the plan or the schedule of an epoch.

        Returns:
            A path, whether or not the file exists. None if the documents are not cached or are too few to cache plans.
        """
        if self.documents.file is None or len(self.documents) < MIN_CACHED_DOCUMENTS:
            return None
        packing = self._first_packing if epoch == 0 else self.packing
        settings = packing.fingerprint("packs" if kind == "plan" else "schedule")
        # `PREPARATION_SOURCE_HASH`: a hash of the code of this package and of the versions of its libraries
        key = f"{PREPARATION_SOURCE_HASH} {self.documents.file.name} {kind} {epoch} {settings}"
        return self.documents.file.with_name(f"{PACKS_PREFIX}-{sha256(key.encode()).hexdigest()[:16]}{SUFFIX}")

    def _make_schedule(self, epoch: int) -> Schedule:
        """Compute the schedule of an epoch: plan its units, assign packs to steps and ranks, and list the documents."""
        units = self.units(epoch)
        packing = self._first_packing if epoch == 0 else self.packing
        if packing.traits.keeps_unpacked_steps:
            schedule = packing.schedule_unpacked_steps(units, self._unpacked_order(epoch))
        else:
            assert self.first_plan is not None
            plan = self.first_plan if epoch == 0 else packing.plan(units, epoch, self.documents.block)
            needs_more_steps = plan.num_packs > self.num_steps * packing.packs_per_step
            if needs_more_steps and not packing.drop_last:
                # The Trainer has computed the number of steps from the first plan, so no epoch may have more. Instead
                # of this plan, shuffle the packs of the first plan. (With `drop_last` the last packs are dropped.)
                rng = packing.make_rng(epoch)
                assert rng is not None, "without shuffling, all epochs have the first plan"
                plan = shuffle_packs(self.first_plan, rng)
            schedule = packing.schedule(plan, units, self.num_steps)
        # `make_rng` returns None without shuffling, and then the documents of a unit come in the order of the table
        order, offsets = units.to_documents(schedule.order, schedule.offsets, packing.make_rng(epoch, len(units)))
        return replace(schedule, order=order, offsets=offsets)

    def _unpacked_order(self, epoch: int) -> np.ndarray:
        """Return the order in which an unpacked run with these settings visits the documents, shape (N,)."""
        num_documents = len(self.documents)
        if not self.packing.shuffle:
            return np.arange(num_documents)
        return unpacked_order(num_documents, self.packing.seed, epoch)


def unpacked_order(num_documents: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order in which accelerate's seedable sampler visits the rows of an unpacked run, shape (N,)."""
    import torch  # imported here, so that strategies that do not need this function do not load torch

    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_documents, generator=generator).numpy()


def _cached_arrays(packs: PackPlan | Schedule) -> Arrays:
    """Return the arrays of a plan or a schedule that are not known from the documents and the settings, by field."""
    arrays = {"order": packs.order, "offsets": packs.offsets}
    if isinstance(packs, Schedule):
        arrays["degrees"] = packs.degrees
    return arrays
