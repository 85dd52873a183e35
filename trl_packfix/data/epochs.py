"""The schedule of every epoch: documents -> plan -> schedule; where documents are many, made once.

numpy only (`minibatch` draws its order with torch), so that a process of its own can make the next epoch's schedule
while this one trains: see `ahead.py`. The first plan and every schedule are left beside the documents, for the ranks of
a node and for the next start. They are pure functions of what stands, as a hash, in the name of their file: a process
that does not find one makes it, and nobody waits for anybody.
"""

import hashlib
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..planning.balance import Balance, StepSettings, Synchronisation
from ..planning.costs import LLAMA_7B, CostModel
from ..planning.packs import PackPlan, plan_bfd, plan_blocks, plan_packs, plan_stream, reordered
from ..planning.schedule import Schedule, num_optimizer_steps, schedule_minibatches, schedule_packs
from ..planning.strategies import STRATEGIES, Strategy, StrategyTraits
from .cache_files import PREFIX, Packs, keep_packs, kept_packs, read_arrays
from .documents import Documents

MANY = 50_000  # documents, from which on a plan is worth a file: it takes 0.1 s on one rank and 0.4 s on eight


def _hash_of_code() -> str:
    digest = hashlib.sha256(np.__version__.encode())
    for file in (Path(__file__), *sorted((Path(__file__).parents[1] / "planning").glob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


# What other code planned is not found, for other ranks might plan otherwise. Taken now: files may change while we run.
CODE = _hash_of_code()


@dataclass
class EpochPlanner:
    """Documents -> plan -> schedule, for any epoch, with the number of optimizer steps of the first.

    Args:
        documents: what to pack.
        batch_size, max_length: their product is the capacity of a pack in tokens.
        accumulation, world_size: micro-batches per optimizer step, data-parallel ranks.
        shuffle: False keeps the order of the table (curricula, upsampled mixes).
        synchronisation: when ranks wait for each other, after every micro-batch or after the step.
        cost_model: of the model, for the cost of attention against that of the matrices.
        keeps: leave plans of many documents beside them; one rank of a node is enough.
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
    keeps: bool = True
    num_steps: int = field(init=False)
    first_plan: PackPlan | None = field(init=False, default=None, repr=False)
    _latest: tuple[int, Schedule] | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if self._traits.keeps_steps:
            self.num_steps = num_optimizer_steps(
                len(self.documents), self.batch_size * self.accumulation, self.world_size, self.drop_last
            )
            unit = f"{len(self.documents)} documents"
        else:
            packs = self._found_or_made("plan", 0, self._plan)
            self.first_plan = PackPlan(packs.order, packs.offsets, self.documents.lengths, self.capacity)
            self.num_steps = num_optimizer_steps(
                self.first_plan.num_packs, self.accumulation, self.world_size, self.drop_last
            )
            unit = f"{self.first_plan.num_packs} packs"
        if self.num_steps == 0:
            raise ValueError(
                f"The epoch has {unit}, and one optimizer step needs more of them ({self.accumulation} accumulation "
                f"steps x {self.world_size} ranks). With `dataloader_drop_last=True` the only, incomplete step is "
                "dropped and nothing would be trained. Set `dataloader_drop_last=False`, or lower "
                "`gradient_accumulation_steps` or the batch size."
            )

    @property
    def _traits(self) -> StrategyTraits:
        return STRATEGIES[self.strategy]

    @property
    def _steps(self) -> StepSettings:
        return StepSettings(
            capacity=self.capacity,
            accumulation=self.accumulation,
            world_size=self.world_size,
            cost_model=self.cost_model,
            balance=self.balance,
            synchronisation=self.synchronisation,
            drop_last=self.drop_last,
        )

    @property
    def capacity(self) -> int:
        """Most tokens of a pack."""
        return self.batch_size * self.max_length

    def schedule(self, epoch: int) -> Schedule:
        """Documents of every step, micro-batch and rank of one epoch."""
        if not self.shuffle:
            epoch = 0  # they are all the same
        if self._latest is None or self._latest[0] != epoch:
            order, offsets, num_skipped = self._found_or_made("schedule", epoch, self._schedule)
            self._latest = (epoch, Schedule(order, offsets, self.accumulation, self.world_size, num_skipped))
        return self._latest[1]

    def settings(self) -> dict[str, Any]:
        """All arguments that decide which documents are in which batch, but for the documents."""
        names = (each.name for each in fields(self) if each.init and each.name not in ("documents", "keeps"))
        return {name: getattr(self, name) for name in names}

    def file(self, kind: Literal["plan", "schedule"], epoch: int) -> Path | None:
        """Where the plan or schedule of an epoch is kept, be it there or not; None where none is."""
        if self.documents.file is None or len(self.documents) < MANY:
            return None
        settings: dict[str, Any] = self.settings()
        if kind == "plan":
            settings = {name: settings[name] for name in ("strategy", "batch_size", "max_length", "seed", "shuffle")}
        key = f"{CODE} {self.documents.file.name} {kind} {epoch} {settings}"
        return self.documents.file.with_name(f"{PREFIX}-packs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy")

    def _found_or_made(
        self, kind: Literal["plan", "schedule"], epoch: int, make: Callable[[int], PackPlan | Schedule]
    ) -> Packs:
        file = self.file(kind, epoch)
        packs = None if file is None else kept_packs(file, len(self.documents))
        if packs is None:
            packs = _packs(make(epoch))
            if file is not None and self.keeps:
                keep_packs(file, packs)
        return packs

    def _plan(self, epoch: int) -> PackPlan:
        lengths = self.documents.lengths
        if self._traits.cuts_blocks:
            assert self.documents.block is not None
            rng = np.random.default_rng((self.seed, epoch)) if self.shuffle else None
            return plan_blocks(self.documents.block, lengths, self.batch_size, self.capacity, rng)
        if self.strategy == "stream":
            if not self.shuffle:
                return plan_stream(lengths, np.arange(len(lengths)), self.capacity)
            return plan_packs(lengths, self.capacity, "stream", self.seed, epoch)
        if not self.shuffle:
            return plan_bfd(lengths, self.capacity, None)
        return plan_packs(lengths, self.capacity, "bfd", self.seed, epoch)

    def _schedule(self, epoch: int) -> Schedule:
        lengths = self.documents.lengths
        if self._traits.keeps_steps:
            order = unpacked_order(len(lengths), self.seed, epoch) if self.shuffle else np.arange(len(lengths))
            return schedule_minibatches(lengths, order, self.batch_size, self._steps)
        assert self.first_plan is not None  # of every strategy that does not keep the steps
        plan = self.first_plan if epoch == 0 else self._plan(epoch)
        if plan.num_packs > self.num_steps * self.accumulation * self.world_size and not self.drop_last:
            # The Trainer fixed the number of steps with the first plan; a plan that needs more cannot be used.
            plan = reordered(self.first_plan, np.random.default_rng((self.seed, epoch)))
        return schedule_packs(plan, lengths, self.num_steps, self._steps)


def unpacked_order(num_documents: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which accelerate's seedable sampler visits the rows of an unpacked run, shape (N,).

    `minibatch` follows it, so that both runs see the same documents in every optimizer step.
    """
    import torch  # not for those who need no random order of torch's

    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_documents, generator=generator).numpy()


def _packs(made: PackPlan | Schedule) -> Packs:
    return Packs(made.order, made.offsets, made.num_skipped if isinstance(made, Schedule) else 0)


def make_ahead() -> None:
    """The work of the process that `ahead.py` starts: make the schedule that standard input asks for, and leave it.

    Standard input stays open while whoever asked is alive; when it ends, so does this process.
    """
    os.nice(19)  # the ranks and their loaders come first
    documents, settings, epoch, target, code = pickle.load(sys.stdin.buffer)
    if code != CODE:
        sys.exit("trl_packfix has changed on disk since training began")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    planner = EpochPlanner(Documents.from_arrays(read_arrays(documents), documents), **settings, keeps=False)
    keep_packs(target, _packs(planner.schedule(epoch)))


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
