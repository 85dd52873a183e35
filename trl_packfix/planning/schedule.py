"""Which pack goes to which optimizer step, micro-batch and rank.

A schedule has a fixed number of slots, (steps, accumulation, world_size), and every document is in exactly one of
them. The number of steps is fixed for the whole run: the Trainer asks once. Schedules are pure functions of lengths,
settings, seed and epoch, so all ranks compute the same one without talking to each other; the data-parallel rank and
size are arguments, never read from the environment.

Letters: S steps, G micro-batches per step (gradient accumulation), W ranks, N documents.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .arrays import Int64Array
from .balance import Synchronisation, balanced
from .costs import CostModel
from .packs import PackPlan, plan_bfd

Balance = Literal["step", "none"]

EMPTY = -1
"""Id of the dummy document, two tokens and none trained, of a rank that has no document in a micro-batch."""


@dataclass(frozen=True)
class Schedule:
    """Documents of every slot of one epoch.

    Attributes:
        order: document indices, slot after slot, shape (N,).
        offsets: slot (step * G + micro) * W + rank holds `order[offsets[slot]:offsets[slot + 1]]`, shape (S*G*W + 1,).
        accumulation: G, micro-batches per optimizer step and rank.
        world_size: W, data-parallel ranks.
        num_skipped: documents that the epoch does not reach (`dataloader_drop_last`).
    """

    order: Int64Array
    offsets: Int64Array
    accumulation: int
    world_size: int
    num_skipped: int = 0

    @property
    def num_steps(self) -> int:
        return (len(self.offsets) - 1) // (self.accumulation * self.world_size)

    def micro_batches(self, rank: int) -> Iterator[Int64Array]:
        """Document indices of each micro-batch of one rank, in training order; `[EMPTY]` where it has none."""
        for slot in range(rank, len(self.offsets) - 1, self.world_size):
            documents = self.order[self.offsets[slot] : self.offsets[slot + 1]]
            yield documents if len(documents) else np.array([EMPTY])

    def step_documents(self, step: int) -> Int64Array:
        """Document indices of one optimizer step over all its micro-batches and ranks."""
        slots = self.accumulation * self.world_size
        return self.order[self.offsets[step * slots] : self.offsets[(step + 1) * slots]]


def num_optimizer_steps(num_packs: int, accumulation: int, world_size: int, drop_last: bool) -> int:
    """Optimizer steps of an epoch of `num_packs` packs; with `drop_last` the last incomplete step does not count."""
    slots = accumulation * world_size
    return num_packs // slots if drop_last else -(-num_packs // slots)


def schedule_packs(
    plan: PackPlan,
    lengths: Int64Array,
    num_steps: int,
    accumulation: int,
    world_size: int,
    cost_model: CostModel,
    balance: Balance = "step",
    synchronisation: Synchronisation = "micro",
    drop_last: bool = False,
) -> Schedule:
    """Packs in visiting order -> slots of exactly `num_steps` optimizer steps.

    Where a step has fewer packs than slots its largest packs are split between slots, and where it has fewer documents
    than slots the rest stay empty. Nothing is duplicated and, unless `drop_last` says so, nothing is left out.

    Args:
        plan: the packs; not more than `num_steps * accumulation * world_size` of them unless `drop_last`.
        lengths: tokens of each document, shape (N,).
        balance: "step" deals the documents of a step anew, so that ranks finish together; "none" leaves the packs.
        synchronisation: when ranks wait for each other, see `balancing`.
    """
    slots = accumulation * world_size
    packs = [plan.order[a:b] for a, b in zip(plan.offsets[:-1], plan.offsets[1:], strict=True)]
    skipped = packs[num_steps * slots :]
    assert drop_last or not skipped, "more packs than slots"
    packs = packs[: num_steps * slots]
    if len(packs) <= (num_steps - 1) * slots:
        # Fewer packs than were counted on (another epoch, another plan): spread them, or the last step had none.
        packs = _split_up_to(packs, lengths, num_steps)
        bounds = np.arange(num_steps + 1) * len(packs) // num_steps
    else:
        bounds = np.minimum(np.arange(num_steps + 1) * slots, len(packs))

    filled: list[Int64Array] = []
    for first, last in itertools.pairwise(bounds):
        step = _split_up_to(packs[first:last], lengths, slots)
        if balance == "step":
            step = balanced(step, lengths, cost_model, plan.capacity, accumulation, world_size, synchronisation)
        filled += step + [np.zeros(0, np.int64)] * (slots - len(step))
    return _schedule(filled, accumulation, world_size, sum(len(pack) for pack in skipped))


def schedule_minibatches(
    lengths: Int64Array,
    order: Int64Array,
    batch_size: int,
    capacity: int,
    accumulation: int,
    world_size: int,
    cost_model: CostModel,
    balance: Balance = "step",
    synchronisation: Synchronisation = "micro",
    drop_last: bool = False,
) -> Schedule:
    """The documents of every optimizer step are those of the unpacked run, the next B*G*W of `order`.

    They fill as few micro-batches as the capacity allows, evenly over ranks; the Trainer wants all G micro-batches of
    a step, so each of the others gets one short document. This is the online minibatch packing of arXiv 2407.09105.

    Args:
        lengths: tokens of each document, none above `capacity / batch_size`, shape (N,).
        order: visiting order of the documents, shape (N,).
        batch_size: B, documents per micro-batch of the unpacked run.
        capacity: most tokens of a pack.
    """
    per_step = batch_size * accumulation * world_size
    num_steps = num_optimizer_steps(len(order), batch_size * accumulation, world_size, drop_last)
    filled: list[Int64Array] = []
    for step in range(num_steps):
        documents = order[step * per_step : (step + 1) * per_step]
        if accumulation * world_size == 1:  # there is nothing to choose, and a million steps to choose it for
            filled.append(documents)
            continue
        packs = _few_packs(documents, lengths, capacity, accumulation, world_size)
        if balance == "step":
            num_micro = len(packs) // world_size
            packs = balanced(packs, lengths, cost_model, capacity, num_micro, world_size, synchronisation)
        filled += _spread(packs, lengths, accumulation * world_size)
    return _schedule(filled, accumulation, world_size, max(len(order) - num_steps * per_step, 0))


def _few_packs(
    documents: Int64Array, lengths: Int64Array, capacity: int, accumulation: int, world_size: int
) -> list[Int64Array]:
    """As few packs as best-fit decreasing needs, up to a multiple of the ranks; even tokens where they fit so."""
    longest_first = documents[np.argsort(-lengths[documents], kind="stable")]
    plan = plan_bfd(lengths[longest_first], capacity, None)
    # Every closed pack holds at least B documents, because the next one, at most capacity / B long, did not fit.
    assert plan.num_packs <= accumulation * world_size
    num = -(-plan.num_packs // world_size) * world_size
    packs = _longest_processing_time(longest_first, lengths, num)
    if max(int(lengths[pack].sum()) for pack in packs) > capacity:
        none = longest_first[:0]
        return [*np.split(longest_first[plan.order], plan.offsets[1:-1]), *[none] * (num - plan.num_packs)]
    return [np.array(pack, dtype=np.int64) for pack in packs]


def _spread(packs: list[Int64Array], lengths: Int64Array, num: int) -> list[Int64Array]:
    """`num` packs, for the Trainer runs them all: an empty one gets a short document, where one is to spare."""
    spread = [*(pack.tolist() for pack in packs), *([] for _ in range(num - len(packs)))]
    donors = [(-len(pack), i) for i, pack in enumerate(spread) if len(pack) > 1]
    heapq.heapify(donors)
    for pack in spread:
        if not pack and donors:
            size, i = donors[0]
            pack.append(min(spread[i], key=lengths.__getitem__))
            spread[i].remove(pack[0])
            if size < -2:
                heapq.heapreplace(donors, (size + 1, i))
            else:
                heapq.heappop(donors)
    return [np.array(pack, dtype=np.int64) for pack in spread]


def _longest_processing_time(longest_first: Int64Array, lengths: Int64Array, num_bins: int) -> list[list[int]]:
    """Each document to the bin with the fewest tokens so far (Graham 1969)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, i) for i in range(num_bins)]
    for document in longest_first.tolist():
        tokens, i = heapq.heappop(heap)
        bins[i].append(document)
        heapq.heappush(heap, (tokens + int(lengths[document]), i))
    return bins


def _split_up_to(packs: list[Int64Array], lengths: Int64Array, num: int) -> list[Int64Array]:
    """Halve the packs with the most tokens until there are `num`, or no pack has two documents."""
    if len(packs) >= num:
        return packs
    heap = [(-int(lengths[pack].sum()), i) for i, pack in enumerate(packs) if len(pack) > 1]
    heapq.heapify(heap)
    packs = list(packs)
    while len(packs) < num and heap:
        _, i = heapq.heappop(heap)
        longest_first = packs[i][np.argsort(-lengths[packs[i]], kind="stable")]
        halves = _longest_processing_time(longest_first, lengths, 2)
        packs[i], other = (np.array(half, dtype=np.int64) for half in halves)
        packs.append(other)
        for half in (i, len(packs) - 1):
            if len(packs[half]) > 1:
                heapq.heappush(heap, (-int(lengths[packs[half]].sum()), half))
    return packs


def _schedule(filled: list[Int64Array], accumulation: int, world_size: int, num_skipped: int) -> Schedule:
    offsets = np.zeros(len(filled) + 1, dtype=np.int64)
    np.cumsum([len(slot) for slot in filled], out=offsets[1:])
    order = np.concatenate(filled) if filled else np.zeros(0, np.int64)
    return Schedule(order, offsets, accumulation, world_size, num_skipped)
