"""The schedule of every epoch: documents -> plan -> schedule. Schedules of many documents are cached.

The first plan and every schedule are cached beside the documents, for all ranks of a node and for the next start. Each
file name is a hash of everything its content depends on. A process that does not find the file computes the content
itself, so no process waits.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..planning.arrays import Float64Array, Int64Array
from ..planning.costs import LLAMA_7B, CostModel
from ..planning.degrees import (
    FILL,
    SequenceParallel,
    Speeds,
    possible_degrees,
    room_of_families,
    schedule_groups,
    smallest_degree,
)
from ..planning.families import Pieces, SharePrefixes, TokenOrder, make_pieces
from ..planning.packs import PackPlan, plan_blocks, reordered
from ..planning.schedule import Schedule, num_optimizer_steps, schedule_minibatches, schedule_packs, schedule_steps
from ..planning.strategies import STRATEGIES, Strategy, StrategyTraits
from ..planning.units import Balance, Bins, Synchronisation, Units
from .cache_files import CODE, PREFIX, CachedPacks, cache_packs, read_cached_packs
from .documents import Documents

MANY = 50_000  # documents from which on plans are cached: planning takes 0.1 s on one rank and 0.4 s on eight


@dataclass
class EpochPlanner:
    """Documents -> plan -> schedule, for any epoch. All epochs have the number of optimizer steps of the first.

    Args:
        documents: what to pack.
        batch_size, max_length: their product is the capacity of a pack in tokens.
        accumulation, world_size: micro-batches per optimizer step, data-parallel ranks.
        shuffle: False keeps the order of the table (curricula, upsampled mixes).
        synchronisation: when ranks wait for each other, after every micro-batch or after the step.
        cost_model: FLOPs of a document on the model, from its linear layers and its attention.
        tokens_per_rank: with sequence parallelism, most tokens of a pack on one rank; None: one rank holds a pack.
        degrees: with sequence parallelism, how many ranks may share a pack. None: any in the first epoch, and in the
            later ones those of the first, since the model is proved at each of them before the first step.
        speeds: of devices and links, by which degrees are chosen.
        writes_cache: cache plans and schedules of many documents; one rank of a node is enough.
        share_prefixes: "family" plans documents that begin alike as one; they must be sorted by their tokens. Plans are
            the same for "off" and "pack".
    """

    documents: Documents
    strategy: Strategy
    batch_size: int
    max_length: int
    accumulation: int = 1
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True
    balance: Balance = "step"
    drop_last: bool = False
    synchronisation: Synchronisation = "micro"
    cost_model: CostModel = LLAMA_7B
    writes_cache: bool = True
    tokens_per_rank: int | None = None
    degrees: tuple[int, ...] | None = None
    speeds: Speeds = field(default_factory=Speeds)
    share_prefixes: SharePrefixes = "off"
    num_steps: int = field(init=False)
    first_plan: PackPlan | None = field(init=False, default=None, repr=False)
    _latest: tuple[int, Schedule] | None = field(init=False, default=None, repr=False)
    _first_degrees: tuple[int, ...] = field(init=False, default=(), repr=False)

    def __post_init__(self) -> None:
        if self.shares_families:
            assert not self._traits.cuts_blocks, "the config refuses it"
            assert self.documents.tokens is not None, "documents are not sorted by their tokens"
        if self.tokens_per_rank is not None:
            possible = possible_degrees(self.max_length, self.tokens_per_rank, self.world_size, self.cost_model.heads)
            self._first_degrees = possible if self.degrees is None else self.degrees
        if self._traits.keeps_steps:
            self.num_steps = num_optimizer_steps(
                len(self.documents), self.batch_size * self.accumulation, self.world_size, self.drop_last
            )
            unit = f"{len(self.documents)} documents"
        else:
            packs = self._read_or_compute("plan", 0, self._plan)
            self.first_plan = PackPlan(packs.order, packs.offsets, self.units().rows, self.capacity)
            self.num_steps = num_optimizer_steps(
                self.first_plan.num_packs, self.accumulation, self._num_groups, self.drop_last
            )
            unit = f"{self.first_plan.num_packs} packs"
        if self.num_steps == 0:
            raise ValueError(
                f"The epoch has {unit}, and one optimizer step needs more of them ({self.accumulation} accumulation "
                f"steps x {self.world_size} ranks). With `dataloader_drop_last=True` the only step is incomplete and "
                "is dropped, so nothing would be trained. Set `dataloader_drop_last=False`, or lower "
                "`gradient_accumulation_steps` or the batch size."
            )
        if self.tokens_per_rank is not None and self.degrees is None:
            used = self.schedule(0).degrees
            assert used is not None
            self.degrees = tuple(sorted({self._smallest_degree, *used.tolist()}))

    @property
    def _traits(self) -> StrategyTraits:
        traits = STRATEGIES.get(self.strategy)
        assert traits is not None, f"no strategy is named {self.strategy!r}"
        return traits

    @cached_property
    def image_costs(self) -> Float64Array | None:
        """FLOPs of the images of each document, shape (N,); None without images, or if they cannot be counted."""
        values, squares = self.documents.image_values, self.documents.image_squares
        if self.cost_model.tower is None or values is None or squares is None:
            return None
        return self.cost_model.tower(values, squares)

    @property
    def bins(self) -> Bins:
        """The slots of every optimizer step."""
        return Bins(
            capacity=self.capacity,
            accumulation=self.accumulation,
            world_size=self.world_size,
            balance=self.balance,
            synchronisation=self.synchronisation,
            drop_last=self.drop_last,
        )

    @property
    def shares_families(self) -> bool:
        """Whether documents that begin alike are planned as one."""
        return self.share_prefixes == "family"

    @cached_property
    def _documents_alone(self) -> Units:
        return Units(self.documents.lengths, self.cost_model, self.image_costs)

    @cached_property
    def _pieces(self) -> Pieces:
        assert self.documents.tokens is not None
        return self.pieces(self.documents.tokens)

    def units(self, epoch: int = 0) -> Units:
        """What is planned as one: documents, or with `share_prefixes="family"` pieces of families.

        With `minibatch` these are families of the documents of each step, so every epoch has others.
        """
        if not self.shares_families:
            return self._documents_alone
        if not self._traits.keeps_steps:
            return self._pieces
        assert self.documents.tokens is not None
        return self.pieces(self.documents.tokens.within(self._unpacked_steps(epoch)), splits_copies=False)

    @property
    def parallel(self) -> SequenceParallel:
        """The settings of sequence parallelism; only with `tokens_per_rank`."""
        assert self.tokens_per_rank is not None
        return SequenceParallel(
            tokens_per_rank=self.tokens_per_rank,
            smallest=self._smallest_degree,
            degrees=self.degrees or self._first_degrees,
            speeds=self.speeds,
        )

    @property
    def capacity(self) -> int:
        """Largest number of tokens of a pack; with sequence parallelism, of one on the fewest ranks that it needs."""
        if self.tokens_per_rank is not None:
            return self._smallest_degree * self.tokens_per_rank
        return self.batch_size * self.max_length

    @property
    def _planned_capacity(self) -> int:
        """Tokens to which packs are planned. With sequence parallelism, some room is needed to deal them anew."""
        return self.capacity if self.tokens_per_rank is None else max(int(FILL * self.capacity), 1)

    @property
    def _smallest_degree(self) -> int:
        """The smallest number of ranks that hold a document of `max_length`."""
        return 1 if self.tokens_per_rank is None else smallest_degree(self.max_length, self.tokens_per_rank)

    @property
    def _num_groups(self) -> int:
        """Groups of ranks for which packs are planned."""
        return self.world_size // self._smallest_degree

    def schedule(self, epoch: int) -> Schedule:
        """Documents of every step, micro-batch and rank of one epoch."""
        if not self.shuffle:
            epoch = 0  # without shuffling, all epochs are the same
        if self._latest is None or self._latest[0] != epoch:
            order, offsets, num_skipped, degrees = self._read_or_compute("schedule", epoch, self._schedule)
            self._latest = (epoch, Schedule(order, offsets, self.accumulation, self.world_size, num_skipped, degrees))
        return self._latest[1]

    def settings(self) -> dict[str, Any]:
        """All arguments that decide which documents are in which batch, except the documents themselves."""
        names = [each.name for each in fields(self) if each.init and each.name not in ("documents", "writes_cache")]
        if self.tokens_per_rank is None:
            names = [name for name in names if name not in ("tokens_per_rank", "degrees", "speeds")]
        if not self.shares_families:  # "pack" has the plans of "off"
            names.remove("share_prefixes")
        return {name: getattr(self, name) for name in names}

    def file(self, kind: Literal["plan", "schedule"], epoch: int) -> Path | None:
        """The cache file of an epoch's plan or schedule, whether or not it exists; None if it is not cached."""
        if self.documents.file is None or len(self.documents) < MANY:
            return None
        settings: dict[str, Any] = self.settings()
        if kind == "plan":
            decisive = ("strategy", "batch_size", "max_length", "seed", "shuffle", "tokens_per_rank", "share_prefixes")
            settings = {name: settings[name] for name in decisive if name in settings}
        elif epoch == 0 and self.tokens_per_rank is not None:
            settings["degrees"] = self._first_degrees
        key = f"{CODE} {self.documents.file.name} {kind} {epoch} {settings}"
        return self.documents.file.with_name(f"{PREFIX}-packs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy")

    def _read_or_compute(
        self, kind: Literal["plan", "schedule"], epoch: int, make: Callable[[int], PackPlan | Schedule]
    ) -> CachedPacks:
        file = self.file(kind, epoch)
        num_degrees = 0
        if self.tokens_per_rank is not None and kind == "schedule":
            num_degrees = self.num_steps * self.accumulation
        num_packed = len(self.units()) if kind == "plan" else len(self.documents)
        packs = None if file is None else read_cached_packs(file, num_packed, num_degrees)
        if packs is None:
            packs = _packs(make(epoch))
            if file is not None and self.writes_cache:
                cache_packs(file, packs)
        return packs

    def _plan(self, epoch: int) -> PackPlan:
        units = self.units()
        lengths = units.rows
        if self.tokens_per_rank is not None:  # a longer unit is alone in its pack, which may be full
            lengths = np.minimum(lengths, self._planned_capacity)
        rng = np.random.default_rng((self.seed, epoch)) if self.shuffle else None
        if self._traits.plan is None:
            assert self.documents.block is not None  # what keeps steps has no plan
            return plan_blocks(self.documents.block, lengths, self.batch_size, self.capacity, rng)
        order = np.arange(len(lengths))
        if self.shuffle:
            order = units.visited(np.random.default_rng((self.seed, epoch)).permutation(len(lengths)))
        return self._traits.plan(lengths, self._planned_capacity, order, rng)

    def _schedule(self, epoch: int) -> Schedule:
        units = self.units(epoch)
        schedule = self._minibatches(units, epoch) if self._traits.keeps_steps else self._schedule_plan(units, epoch)
        rng = np.random.default_rng((self.seed, epoch, len(units))) if self.shuffle else None
        order, offsets = units.documents(schedule.order, schedule.offsets, rng)
        return replace(schedule, order=order, offsets=offsets, num_skipped=len(self.documents) - len(order))

    def pieces(self, tokens: TokenOrder, splits_copies: bool = True) -> Pieces:
        """Families of these documents as units of this plan."""
        documents = self.documents
        room: int | Int64Array = self.capacity
        if self.tokens_per_rank is not None:
            room = room_of_families(documents.lengths, self.tokens_per_rank, self._smallest_degree)
        return make_pieces(tokens, documents.lengths, documents.trained, self.cost_model, room, splits_copies)

    def _minibatches(self, units: Units, epoch: int) -> Schedule:
        """The schedule of the units of `minibatch`: a step has the documents of the unpacked run."""
        if not isinstance(units, Pieces):
            return schedule_minibatches(units, self._unpacked_order(epoch), self.batch_size, self.bins)
        step = self._unpacked_steps(epoch)[units.order[units.offsets[:-1]]]
        by_step = np.argsort(step, kind="stable")
        bounds = np.searchsorted(step[by_step], np.arange(self.num_steps + 1))
        return schedule_steps(units, by_step, bounds, self.bins)

    def _unpacked_steps(self, epoch: int) -> Int64Array:
        """The optimizer step of each document in the unpacked run, shape (N,); -1 if the epoch does not reach it."""
        per_step = self.batch_size * self.accumulation * self.world_size
        reached = self._unpacked_order(epoch)[: self.num_steps * per_step]
        step = np.full(len(self.documents), -1)
        step[reached] = np.arange(len(reached)) // per_step
        return step

    def _unpacked_order(self, epoch: int) -> np.ndarray:
        num = len(self.documents)
        return unpacked_order(num, self.seed, epoch) if self.shuffle else np.arange(num)

    def _schedule_plan(self, units: Units, epoch: int) -> Schedule:
        """The schedule of the packs of a plan."""
        assert self.first_plan is not None  # every strategy except `minibatch` has one
        plan = self.first_plan if epoch == 0 else self._plan(epoch)
        if plan.num_packs > self.num_steps * self.accumulation * self._num_groups and not self.drop_last:
            # The Trainer computed the number of steps from the first plan. A plan that needs more cannot be used.
            plan = reordered(self.first_plan, np.random.default_rng((self.seed, epoch)))
        if self.tokens_per_rank is None:
            return schedule_packs(plan, units, self.num_steps, self.bins)
        parallel = self.parallel if epoch else replace(self.parallel, degrees=self._first_degrees)
        return schedule_groups(plan, units, self.num_steps, self.bins, parallel)


def unpacked_order(num_documents: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which accelerate's seedable sampler visits the rows of an unpacked run, shape (N,).

    `minibatch` uses it, so that both runs train on the same documents in every optimizer step.
    """
    import torch  # here, so that the other strategies do not load it

    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_documents, generator=generator).numpy()


def _packs(made: PackPlan | Schedule) -> CachedPacks:
    if isinstance(made, PackPlan):
        return CachedPacks(made.order, made.offsets)
    return CachedPacks(made.order, made.offsets, made.num_skipped, made.degrees)
