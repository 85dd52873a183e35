"""The schedule of every epoch: documents -> units -> plan -> schedule -> cache.

The first plan and every schedule are cached beside the documents, for all ranks of a node and for the next start. Each
file name is a hash of everything its content depends on. A process that does not find the file computes the content
itself, so no process waits.
"""

import hashlib
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..planning.arrays import Float64Array, Int64Array
from ..planning.costs import LLAMA_7B, CostModel
from ..planning.degrees import (
    SequenceParallel,
    Speeds,
    possible_degrees,
    room_of_families,
    smallest_degree,
)
from ..planning.families import Pieces, SharePrefixes, TokenOrder, make_pieces
from ..planning.packs import PackPlan
from ..planning.plans import RunPlans
from ..planning.schedule import Schedule
from ..planning.strategies import STRATEGIES, Strategy, StrategyTraits
from ..planning.units import Balance, Bins, Synchronisation, Units
from .cache_files import CODE, PREFIX, CachedPacks, cached_packs
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
            self.num_steps = self._plans.num_kept_steps(len(self.documents))
            unit = f"{len(self.documents)} documents"
        else:
            units = self.units()
            packs = cached_packs(
                self.file("plan", 0), lambda: _packs(self._plans.plan(units, 0)), len(units), writes=self.writes_cache
            )
            self.first_plan = PackPlan(packs.order, packs.offsets, units.rows, self.capacity)
            self.num_steps = self._plans.num_steps(self.first_plan.num_packs)
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
    def _plans(self) -> RunPlans:
        return RunPlans(
            strategy=self._traits,
            bins=self.bins,
            batch_size=self.batch_size,
            seed=self.seed,
            shuffle=self.shuffle,
            parallel=None if self.tokens_per_rank is None else self.parallel,
            block=self.documents.block,
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
        of_steps = self.documents.tokens.within(self._plans.kept_steps(self._unpacked_order(epoch)))
        return self.pieces(of_steps, splits_copies=False)

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
    def _smallest_degree(self) -> int:
        """The smallest number of ranks that hold a document of `max_length`."""
        return 1 if self.tokens_per_rank is None else smallest_degree(self.max_length, self.tokens_per_rank)

    def schedule(self, epoch: int) -> Schedule:
        """Documents of every step, micro-batch and rank of one epoch."""
        if not self.shuffle:
            epoch = 0  # without shuffling, all epochs are the same
        if self._latest is None or self._latest[0] != epoch:
            order, offsets, num_skipped, degrees = cached_packs(
                self.file("schedule", epoch),
                lambda: _packs(self._schedule(epoch)),
                len(self.documents),
                num_degrees=0 if self.tokens_per_rank is None else self.num_steps * self.accumulation,
                writes=self.writes_cache,
            )
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

    def _schedule(self, epoch: int) -> Schedule:
        units, plans = self.units(epoch), self._plans
        if plans.parallel is not None and epoch == 0:
            plans = replace(plans, parallel=replace(plans.parallel, degrees=self._first_degrees))
        if self._traits.keeps_steps:
            schedule = plans.schedule_kept_steps(units, self._unpacked_order(epoch))
        else:
            assert self.first_plan is not None
            schedule = plans.schedule(units, epoch, self.first_plan, self.num_steps)
        order, offsets = units.documents(schedule.order, schedule.offsets, plans.rng(epoch, len(units)))
        return replace(schedule, order=order, offsets=offsets, num_skipped=len(self.documents) - len(order))

    def pieces(self, tokens: TokenOrder, splits_copies: bool = True) -> Pieces:
        """Families of these documents as units of this plan."""
        documents = self.documents
        room: int | Int64Array = self.capacity
        if self.tokens_per_rank is not None:
            room = room_of_families(documents.lengths, self.tokens_per_rank, self._smallest_degree)
        return make_pieces(tokens, documents.lengths, documents.trained, self.cost_model, room, splits_copies)

    def _unpacked_order(self, epoch: int) -> np.ndarray:
        num = len(self.documents)
        return unpacked_order(num, self.seed, epoch) if self.shuffle else np.arange(num)


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
